"""``replay``: runs a workload on the installed vLLM's own scheduler, once per side.

Reads the options and shows the results; `vllm_mamba_retire.replay` does the work.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .text import safe

if TYPE_CHECKING:
    from vllm_mamba_retire.replay.cases import Case
    from vllm_mamba_retire.replay.runs import Run
    from vllm_mamba_retire.replay.scenario import Scenario
    from vllm_mamba_retire.replay.sides import Comparison, OnProgress, Side

SCHEMA = 1
_PLAIN_WIDTH = 160  # columns where no terminal limits them
_FIGURES = {
    "peak_states": "states",
    "peak_used": "blocks",
    "scheduled_tokens": "tokens",
    "prefill_steps": "steps",
    "rollbacks": "roll-backs",
    "redone_tokens": "redone",
    "hit_tokens": "hits",
}
Replayed = Sequence[tuple["Case", "list[Comparison]"]]


def replay(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[CASES.yaml]...", show_default=False)
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--id", help="Run only this case of the files.")
    ] = None,
    block: Annotated[int | None, typer.Option(help="Mamba block size, in tokens.")] = None,
    budget: Annotated[int, typer.Option(help="Tokens per step: max_num_batched_tokens.")] = 8192,
    prompt: Annotated[int, typer.Option(help="Prompt of each request, in tokens.")] = 100_000,
    output: Annotated[int, typer.Option(help="Tokens that each request generates.")] = 1,
    requests: Annotated[int, typer.Option(help="Number of requests.")] = 1,
    every: Annotated[int, typer.Option(help="Steps between two arrivals.")] = 0,
    spec: Annotated[int, typer.Option(help="Draft tokens per step (speculative blocks).")] = 0,
    drafter: Annotated[str, typer.Option(help="Source of the drafts: mtp or ngram.")] = "mtp",
    lag: Annotated[int, typer.Option(help="Steps in flight; async scheduling has 1.")] = 1,
    groups: Annotated[int, typer.Option(help="Mamba groups beside the attention group.")] = 3,
    pool: Annotated[
        int | None, typer.Option(help="Blocks in the pool (num_gpu_blocks). Default: ample.")
    ] = None,
    retention: Annotated[
        str,
        typer.Option(help="prefix_cache_retention_interval: tokens, dense or default."),
    ] = "default",
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Write every step of every side to this file.")
    ] = None,
    chart: Annotated[
        Path | None,
        typer.Option(help="Draw the first replay with a difference, as .png or .svg."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay requests on the installed vLLM's own scheduler.

    Each replay runs stock, with the fix, and with the newest state kept. Give case files, or one
    geometry with --block and other options. Needs no GPU and no weights.

    Exit 0: fine. Exit 1: a figure of a case differs, or a replay got stuck. Exit 2: bad input, or
    a vLLM that cannot be replayed.
    """
    with usage_errors():
        from vllm_mamba_retire.replay.cases import Case, read_cases
        from vllm_mamba_retire.replay.scenario import Arrival, InputError, Scenario
        from vllm_mamba_retire.replay.sides import SIDES

        release = _release()
        if files:
            cases = _selected([case for file in files for case in read_cases(file)], only)
        elif block is None:
            raise InputError("block: give --block or a case file.")
        else:
            scenario = Scenario(
                id="flags",
                block=block,
                budget=budget,
                arrivals=tuple(
                    Arrival(str(number + 1), prompt, output, at=number * every)
                    for number in range(requests)
                ),
                spec=spec,
                drafter=drafter,  # type: ignore[arg-type]  # checked there
                lag=lag,
                groups=groups,
                pool=pool,
                retention_interval=int(retention) if retention.isdecimal() else retention,  # type: ignore[arg-type]
            )
            cases = [Case("flags", scenarios=(scenario,))]
        replayed = _run(cases, SIDES)
        findings = list(_findings(replayed, release))
        flat = [comparison for _, comparisons in replayed for comparison in comparisons]
        if csv_file is not None:
            _write_csv(csv_file, list(_rows(flat)))
        if chart is not None:
            from vllm_mamba_retire.replay.drawing import draw

            draw(_first_difference(flat), chart)
    if as_json:
        typer.echo(json.dumps(_document(release, replayed, findings), indent=2))
    else:
        _show(flat, findings)
    raise typer.Exit(1 if findings else 0)


@contextmanager
def usage_errors() -> Iterator[None]:
    """End the command with exit 2 on bad input, or if a child process fails."""
    from vllm_mamba_retire.child import ChildError
    from vllm_mamba_retire.replay.scenario import InputError

    try:
        yield
    except (InputError, ChildError) as error:
        typer.echo(f"Error: {safe(str(error))}", err=True)
        raise typer.Exit(2) from None


def _release() -> str:
    """The installed vLLM's version."""
    from vllm_mamba_retire.replay.scenario import InputError
    from vllm_mamba_retire.replay.sides import OLDEST, replayable
    from vllm_mamba_retire.target import find_target

    target = find_target()
    if target is None or target.version is None:
        raise InputError("vllm: not installed here; replay needs it (plan does not).")
    if not replayable(target.version):
        raise InputError(f"vllm: {target.version} cannot be replayed, only {OLDEST} and newer.")
    return target.version


def _selected(cases: Sequence[Case], only: list[str] | None) -> list[Case]:
    from vllm_mamba_retire.replay.scenario import InputError

    known = {case.id for case in cases}
    for name in only or ():
        if name not in known:
            raise InputError(f"id: the files have no case {name}.")
    chosen = [case for case in cases if not only or case.id in only]
    if not any(case.scenarios for case in chosen):
        raise InputError("prompt: no case has a prompt, so there is nothing to replay.")
    return chosen


def _run(cases: Sequence[Case], sides: Sequence[Side]) -> Replayed:
    from vllm_mamba_retire.replay.sides import compare

    scenarios = [scenario for case in cases for scenario in case.scenarios]
    with _progress(scenarios, sides) as on_progress:
        comparisons = iter(compare(scenarios, sides, on_progress))
    return [(case, [next(comparisons) for _ in case.scenarios]) for case in cases]


@contextmanager
def _progress(scenarios: Sequence[Scenario], sides: Sequence[Side]) -> Iterator[OnProgress]:
    """A bar for each side on stderr, on a terminal only."""
    from rich.console import Console
    from rich.progress import Progress

    total = sum(arrival.prompt for scenario in scenarios for arrival in scenario.arrivals)
    before = [
        sum(a.prompt for s in scenarios[:n] for a in s.arrivals) for n in range(len(scenarios))
    ]
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = {side.name: bars.add_task(side.name, total=total) for side in sides}

        def on_progress(side: str, number: int, _steps: int, tokens: int) -> None:
            bars.update(tasks[side], completed=min(total, before[number] + tokens))

        yield on_progress


def _findings(replayed: Replayed, release: str) -> Iterator[str]:
    from vllm_mamba_retire.replay.expectations import differences

    for case, comparisons in replayed:
        for comparison in comparisons:
            if comparison.fixed.stuck:
                yield f"{comparison.scenario.id}: stuck with the fix: {comparison.fixed.stuck}."
        if case.holds_on(release):
            yield from differences(case, comparisons)


def _first_difference(comparisons: Sequence[Comparison]) -> Comparison:
    """The first that shows a difference between sides, else the first."""
    return next((c for c in comparisons if c.stock.steps != c.fixed.steps), comparisons[0])


def _document(release: str, replayed: Replayed, findings: list[str]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "vllm": release,
        "findings": findings,
        "cases": [
            {
                "id": case.id,
                "compared": case.holds_on(release) and bool(case.figures),
                "replays": [
                    {
                        "scenario": asdict(comparison.scenario),
                        **{side: _summary(run) for side, run in comparison.runs.items()},
                    }
                    for comparison in comparisons
                ],
            }
            for case, comparisons in replayed
        ],
    }


def _summary(run: Run) -> dict[str, Any]:
    return {
        "verdict": run.verdict,
        "pool": run.pool,
        **{name: getattr(run, name) for name in _FIGURES},
        "hits": run.hits,
        "stuck": run.stuck,
        "steps": [asdict(step) for step in run.steps],
    }


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    from vllm_mamba_retire.replay.scenario import InputError

    try:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise InputError(f"csv: {path}: {error.strerror}.") from None


def _rows(comparisons: Iterable[Comparison]) -> Iterator[dict[str, Any]]:
    """One row per step."""
    for comparison in comparisons:
        for side, run in comparison.runs.items():
            for number, step in enumerate(run.steps, start=1):
                yield {
                    "case": comparison.scenario.id,
                    "lag": comparison.scenario.lag,
                    "pool": run.pool + 1,
                    "side": side,
                    "step": number,
                    **asdict(step),
                    "states": " ".join(map(str, step.states)),
                }


def _show(comparisons: Sequence[Comparison], findings: Sequence[str]) -> None:
    """One table per replay: with the case's name in a column it would not fit into 80 columns."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    console.print(f"vLLM {comparisons[0].stock.vllm}")
    for comparison in comparisons:
        scenario = comparison.scenario
        title = f"{safe(scenario.id)}: lag {scenario.lag}, pool {scenario.pool or 'ample'}"
        table = Table(
            title=f"\n{title}",
            title_justify="left",
            box=SIMPLE_HEAD,
            show_edge=False,
            collapse_padding=True,
        )
        for name in ("side", *_FIGURES.values()):
            table.add_column(name, justify="right" if name != "side" else "left", no_wrap=True)
        for side, run in comparison.runs.items():
            figures = (f"{getattr(run, name):,}" for name in _FIGURES)
            table.add_row(run_name(side, run) + (" (stuck)" * bool(run.stuck)), *figures)
        console.print(table)
    console.print("\nstates, blocks: peaks; steps: of prefill; redone, hits: tokens")
    for finding in findings:
        typer.echo(f"Finding: {safe(finding)}", err=True)


def run_name(side: str, run: Run) -> str:
    """Name of a side in a table: its own, or the verdict where this package changed nothing."""
    if run.verdict in ("off", "patched"):
        return side
    return f"{run.verdict}, kept" if side == "kept" else run.verdict
