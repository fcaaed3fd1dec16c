"""``replay``: a workload through the installed vLLM's own scheduler, stock and fixed.

Reads the wishes and shows the outcome; what a replay is, is in `vllm_mamba_retire.replay`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

if TYPE_CHECKING:
    from vllm_mamba_retire.replay.cases import Case
    from vllm_mamba_retire.replay.compare import OnProgress, Pair, Side
    from vllm_mamba_retire.replay.runs import Run
    from vllm_mamba_retire.replay.scenario import Scenario

SCHEMA = 1
_PLAIN_WIDTH = 160  # columns where no terminal limits them
_FIGURES = {
    "peak_states": "peak states",
    "peak_used": "peak blocks",
    "scheduled_tokens": "tokens",
    "prefill_steps": "prefill steps",
    "rollbacks": "roll-backs",
    "redone_tokens": "redone tokens",
    "hit_tokens": "hit tokens",
}


def replay(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[CASES.yaml]...", show_default=False)
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--id", help="Only this case of the files.")
    ] = None,
    block: Annotated[int | None, typer.Option(help="Mamba block size, in tokens.")] = None,
    budget: Annotated[int, typer.Option(help="max_num_batched_tokens.")] = 8192,
    prompt: Annotated[int, typer.Option(help="Prompt of each request, in tokens.")] = 100_000,
    output: Annotated[int, typer.Option(help="Tokens each request generates.")] = 1,
    requests: Annotated[int, typer.Option(help="Requests.")] = 1,
    every: Annotated[int, typer.Option(help="Steps between two arrivals.")] = 0,
    spec: Annotated[int, typer.Option(help="Draft tokens = speculative blocks.")] = 0,
    drafter: Annotated[str, typer.Option(help="Who drafts: mtp or ngram.")] = "mtp",
    lag: Annotated[int, typer.Option(help="Steps in flight; async scheduling has 1.")] = 1,
    groups: Annotated[int, typer.Option(help="Mamba groups beside the attention group.")] = 3,
    pool: Annotated[
        int | None, typer.Option(help="num_gpu_blocks; by default more than needed.")
    ] = None,
    retention: Annotated[
        str, typer.Option(help="prefix_cache_retention_interval: tokens, dense or default.")
    ] = "default",
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Write every step of both sides here.")
    ] = None,
    chart: Annotated[
        Path | None,
        typer.Option(help="Draw the first replay that shows a difference here, .png or .svg."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine output on stdout.")] = False,
) -> None:
    """Replay requests through the installed vLLM's own scheduler, without and with the fix.

    Takes case files, or one geometry from the flags (--block). Needs no GPU and no weights.

    Exit 0: fine. Exit 1: a figure of a case differs, or a replay got stuck. Exit 2: bad input.
    """
    with usage_errors():
        from vllm_mamba_retire.replay.cases import Case, read_cases

        release = _release()
        if files:
            cases = _selected([case for file in files for case in read_cases(file)], only)
        else:
            scenario = _from_flags(
                block, budget, prompt, output, requests, every, spec, drafter, lag, groups, pool,
                retention,
            )  # fmt: skip
            cases = [Case("flags", scenarios=(scenario,))]
        pairs = _run(cases)
        findings = _findings(cases, pairs, release)
        flat = [pair for case in cases for pair in pairs[case.id]]
        if csv_file is not None:
            _write_csv(csv_file, flat)
        if chart is not None:
            from vllm_mamba_retire.replay.charts import draw

            draw(_telling(flat), chart)
    if as_json:
        typer.echo(json.dumps(_document(release, cases, pairs, findings), indent=2))
    else:
        _show(flat, findings)
    raise typer.Exit(1 if findings else 0)


@contextmanager
def usage_errors() -> Iterator[None]:
    """Bad input ends the command with exit 2 and its one sentence, a failed replay likewise."""
    from vllm_mamba_retire.replay.compare import ReplayError
    from vllm_mamba_retire.replay.scenario import InputError

    try:
        yield
    except (InputError, ReplayError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None


def _release() -> str:
    """The installed vLLM's version."""
    from vllm_mamba_retire.replay.compare import OLDEST, replayable
    from vllm_mamba_retire.replay.scenario import InputError
    from vllm_mamba_retire.target import find_target

    target = find_target()
    if target is None or target.version is None:
        raise InputError("vllm: none is installed here; replay needs it (plan does not).")
    if not replayable(target.version):
        raise InputError(f"vllm: {target.version} cannot be replayed, only {OLDEST} and newer.")
    return target.version


def _selected(cases: Sequence[Case], only: list[str] | None) -> list[Case]:
    from vllm_mamba_retire.replay.scenario import InputError

    known = {case.id for case in cases}
    for name in only or ():
        if name not in known:
            raise InputError(f"id: there is no case {name}.")
    chosen = [case for case in cases if not only or case.id in only]
    if not any(case.scenarios for case in chosen):
        raise InputError("prompt: none of the cases has one, there is nothing to replay.")
    return chosen


def _from_flags(
    block: int | None,
    budget: int,
    prompt: int,
    output: int,
    requests: int,
    every: int,
    spec: int,
    drafter: Any,
    lag: int,
    groups: int,
    pool: int | None,
    retention: Any,
) -> Scenario:
    from vllm_mamba_retire.replay.scenario import Arrival, InputError, Scenario

    if block is None:
        raise InputError("block: give --block or a case file.")
    return Scenario(
        id="flags",
        block=block,
        budget=budget,
        arrivals=tuple(
            Arrival(str(number + 1), prompt, output, at=number * every)
            for number in range(requests)
        ),
        spec=spec,
        drafter=drafter,
        lag=lag,
        groups=groups,
        pool=pool,
        retention_interval=int(retention) if retention.isdecimal() else retention,
    )


def _run(cases: Sequence[Case]) -> dict[str, list[Pair]]:
    from vllm_mamba_retire.replay.compare import compare

    scenarios = [scenario for case in cases for scenario in case.scenarios]
    with _progress(scenarios) as on_progress:
        pairs = iter(compare(scenarios, on_progress))
    return {case.id: [next(pairs) for _ in case.scenarios] for case in cases}


@contextmanager
def _progress(scenarios: Sequence[Scenario]) -> Iterator[OnProgress]:
    """A bar on stderr, on a terminal only."""
    from rich.console import Console
    from rich.progress import Progress

    total = sum(arrival.prompt for scenario in scenarios for arrival in scenario.arrivals)
    before = [
        sum(a.prompt for s in scenarios[:n] for a in s.arrivals) for n in range(len(scenarios))
    ]
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = {side: bars.add_task(side, total=total) for side in ("stock", "fixed")}

        def on_progress(side: Side, number: int, _steps: int, tokens: int) -> None:
            bars.update(tasks[side], completed=min(total, before[number] + tokens))

        yield on_progress


def _findings(cases: Sequence[Case], pairs: dict[str, list[Pair]], release: str) -> list[str]:
    from vllm_mamba_retire.replay.expectations import differences

    found = [
        f"{pair.scenario.id}: stuck with the fix: {pair.fixed.stuck}."
        for replayed in pairs.values()
        for pair in replayed
        if pair.fixed.stuck
    ]
    for case in cases:
        if case.holds_on(release):
            found += differences(case, pairs[case.id])
    return found


def _telling(pairs: Sequence[Pair]) -> Pair:
    """The first pair that shows a difference, else the first."""
    return next((pair for pair in pairs if pair.stock.steps != pair.fixed.steps), pairs[0])


def _document(
    release: str, cases: Sequence[Case], pairs: dict[str, list[Pair]], findings: list[str]
) -> dict[str, Any]:
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
                        "scenario": asdict(pair.scenario),
                        "stock": _summary(pair.stock),
                        "fixed": _summary(pair.fixed),
                    }
                    for pair in pairs[case.id]
                ],
            }
            for case in cases
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


def _write_csv(path: Path, pairs: Sequence[Pair]) -> None:
    from vllm_mamba_retire.replay.scenario import InputError

    try:
        with path.open("w", newline="") as file:
            _write_steps(file, pairs)
    except OSError as error:
        raise InputError(f"csv: {path}: {error.strerror}.") from None


def _write_steps(file: TextIO, pairs: Sequence[Pair]) -> None:
    rows = [
        {
            "case": pair.scenario.id,
            "lag": pair.scenario.lag,
            "pool": run.pool + 1,
            "side": side,
            "step": number,
            **asdict(step),
            "states": " ".join(map(str, step.states)),
        }
        for pair in pairs
        for side, run in (("stock", pair.stock), ("fixed", pair.fixed))
        for number, step in enumerate(run.steps, start=1)
    ]
    writer = csv.DictWriter(file, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)


def _show(pairs: Sequence[Pair], findings: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"vLLM {pairs[0].stock.vllm}", title_justify="left")
    table.add_column("case", no_wrap=True)
    for name in ("lag", "pool", "side", *_FIGURES.values()):
        table.add_column(name, justify="right")
    for pair in pairs:
        first = (pair.scenario.id, str(pair.scenario.lag), str(pair.scenario.pool or "roomy"))
        for head, side, run in (
            (first, "stock", pair.stock),
            (("", "", ""), run_name(pair.fixed), pair.fixed),
        ):
            figures = (f"{getattr(run, name):,}" for name in _FIGURES)
            table.add_row(*head, side + (" (stuck)" if run.stuck else ""), *figures)
    console = Console()
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    console.print(table)
    for finding in findings:
        typer.echo(f"Finding: {finding}", err=True)


def run_name(run: Run) -> str:
    """What the side with this package is called: fixed, or the verdict where it did nothing."""
    return "fixed" if run.verdict == "patched" else run.verdict
