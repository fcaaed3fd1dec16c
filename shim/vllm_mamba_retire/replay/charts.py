"""Draws states and pool use, stock and fixed together: a replay by step, a plan by prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .compare import Pair
from .deployment import Deployment
from .runs import Run, Step
from .scenario import InputError

_LOOK: dict[str, dict[str, Any]] = {
    "stock": {"color": "tab:red", "linestyle": "-"},
    "fixed": {"color": "tab:blue", "linestyle": "--"},
}
_POINTS = 400


def draw(pair: Pair, path: Path) -> None:
    """Write the chart of one pair; the suffix of `path` chooses the format (.png, .svg).

    Raises:
        InputError: matplotlib is not installed, or cannot write that format.
    """
    figure, (states, pool) = _subplots()
    sides = {"stock": pair.stock, "fixed": pair.fixed}
    for side, run in sides.items():
        _plot(states, side, run, lambda step: step.deepest)
        _plot(pool, side, run, lambda step: step.used)
        for number, step in enumerate(run.steps, start=1):
            if step.preempted:
                pool.axvline(number, linewidth=0.8, alpha=0.5, **_LOOK[side])
    pool.axhline(pair.stock.pool, color="black", linewidth=0.8, label="pool")
    states.set_ylabel("live states of one request,\nper Mamba group")
    states.set_title(f"{pair.scenario.id}, vLLM {pair.stock.vllm}")
    pool.set_ylabel("blocks in use\n(vertical: roll-back)")
    pool.set_xlabel("step")
    _finish(figure, path)


def _subplots() -> tuple[Any, Any]:
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
    axes.plot(numbers, [value(step) for step in run.steps], label=side, **_LOOK[side])


def _finish(figure: Any, path: Path) -> None:
    from matplotlib import rc_context

    for axes in figure.axes:
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left")
    try:
        # The same figures give the same file, byte for byte.
        with rc_context({"svg.hashsalt": path.name}):
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise InputError(f"chart: {path}: {error}.") from None


def draw_growth(deployment: Deployment, path: Path) -> None:
    """Write the closed-form chart of a deployment: states and blocks over the prompt length.

    Raises:
        InputError: matplotlib is not installed, or cannot write that format.
    """
    figure, (states, blocks) = _subplots()
    geometry = deployment.geometry
    prompts = range(0, deployment.prompt + 1, max(deployment.prompt // _POINTS, 1))
    for side, held in (("stock", geometry.stock_states), ("fixed", geometry.fixed_states)):
        states.plot(prompts, [held(prompt) for prompt in prompts], label=side, **_LOOK[side])
        needed = [geometry.pool(prompt, held(prompt)) for prompt in prompts]
        blocks.plot(prompts, needed, label=side, **_LOOK[side])
    if deployment.pool is not None:
        blocks.axhline(deployment.pool, color="black", linewidth=0.8, label="pool")
    states.set_ylabel("live states of one request,\nper Mamba group (bound)")
    states.set_title(f"block {deployment.block}, budget {deployment.budget}, lag {deployment.lag}")
    blocks.set_ylabel("blocks needed")
    blocks.set_xlabel("prompt (tokens)")
    _finish(figure, path)
