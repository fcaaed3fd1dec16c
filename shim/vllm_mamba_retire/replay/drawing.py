"""Draws states and pool use of a replay by step, all sides together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .runs import Run, Step
from .scenario import InputError
from .sides import Comparison

LOOK: dict[str, dict[str, Any]] = {
    "stock": {"color": "tab:red", "linestyle": "-"},
    "fixed": {"color": "tab:blue", "linestyle": "--"},
    "kept": {"color": "tab:green", "linestyle": ":"},
}


def draw(comparison: Comparison, path: Path) -> None:
    """Write the chart of one scenario; the suffix of `path` chooses the format (.png, .svg).

    Raises:
        InputError: matplotlib is not installed, or cannot write that format.
    """
    figure, (states, pool) = subplots()
    for side, run in comparison.runs.items():
        _plot(states, side, run, lambda step: step.deepest)
        _plot(pool, side, run, lambda step: step.used)
        for number, step in enumerate(run.steps, start=1):
            if step.preempted:
                pool.axvline(number, linewidth=0.8, alpha=0.5, **LOOK[side])
    pool.axhline(comparison.stock.pool, color="black", linewidth=0.8, label="pool")
    states.set_ylabel("live states of one request,\nper Mamba group")
    states.set_title(f"{comparison.scenario.id}, vLLM {comparison.stock.vllm}")
    pool.set_ylabel("blocks in use\n(vertical: roll-back)")
    pool.set_xlabel("step")
    finish(figure, path)


def subplots() -> tuple[Any, Any]:
    """A figure with two charts, one above the other.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "chart: matplotlib is not installed; pip install 'vllm-mamba-retire[charts]'."
        ) from None
    figure = Figure(figsize=(9, 6), layout="constrained")
    return figure, figure.subplots(2, sharex=True)


def _plot(axes: Any, side: str, run: Run, value: Callable[[Step], int]) -> None:
    numbers = range(1, len(run.steps) + 1)
    axes.plot(numbers, [value(step) for step in run.steps], label=side, **LOOK[side])


def finish(figure: Any, path: Path) -> None:
    """Add legends and write the figure.

    Raises:
        InputError: matplotlib cannot write that file.
    """
    for axes in figure.axes:
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write the figure; the same figures give the same file, byte for byte.

    Raises:
        InputError: matplotlib cannot write that file.
    """
    from matplotlib import rc_context

    try:
        # Text stays text, which keeps the file small.
        with rc_context({"svg.hashsalt": path.name, "svg.fonttype": "none"}):
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise InputError(f"chart: {path}: {error}.") from None
