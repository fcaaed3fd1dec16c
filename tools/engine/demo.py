"""Shows the defect and the fix on a real engine: one 40,000-token prompt, stock and patched vLLM.

Every row of the table is a process of its own with the vLLM on the path, a tiny hybrid model with
random weights, and a scheduler that works ahead of the model as it does on a GPU. Exits 1 if the
patched runs break a bound, or if the stock runs do not show the defect.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tools.engine.harness import Action, EngineRun, Workload, run
from vllm_mamba_retire.child import ChildError
from vllm_mamba_retire.replay.sides import FIXED, STOCK

PROMPT = 40_000  # tokens
OUTPUT = 8  # tokens
TIGHT = 80  # blocks: room for the prompt, not for the states that stock vLLM keeps
REQUEST = "long"
DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True)
class DemoRow:
    """One row: lag in steps, blocks in the pool, with the fix or without."""

    lag: int
    pool: int | None
    patched: bool

    @property
    def name(self) -> str:
        """Name in the table and the data file."""
        return ", ".join(self.labels)

    @property
    def labels(self) -> tuple[str, str, str]:
        """Pool, lag and vLLM as shown in the table."""
        pool = f"{self.pool} blocks" if self.pool else "ample"
        return pool, f"lag {self.lag}", "patched" if self.patched else "stock"

    @property
    def bound(self) -> int:
        """Most live states that one request needs per Mamba group, without speculation."""
        return 2 + self.lag


CASES = [
    DemoRow(lag, pool, patched)
    for lag, pool in ((1, None), (2, None), (1, TIGHT))
    for patched in (False, True)
]


def main() -> int:
    """Run, print, draw, judge."""
    parser = argparse.ArgumentParser(prog="nox -s demo --", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for demo.png")
    parser.add_argument(
        "--save", action="store_true", help="renew the chart in docs/images instead"
    )
    options = parser.parse_args()
    console = Console()
    try:
        runs = measure(console)
    except ChildError as error:
        console.print(str(error), style="red", markup=False)
        return 1
    console.print(table(runs))
    tight = {patched: runs[DemoRow(1, TIGHT, patched)] for patched in (False, True)}
    stock, patched = (tight[key].answers[REQUEST].first_token or 0.0 for key in (False, True))
    console.print(f"time to first token, tight pool, stock / patched: {stock / patched:.2f}")
    problems = list(judge(runs))
    for problem in problems:
        console.print(f"WRONG {problem}", style="red", markup=False)
    # What is wrong may be looked at, but not published.
    if folder := write(runs, options.out, save=options.save and not problems):
        console.print(f"chart: {folder / 'demo.png'}", soft_wrap=True)
    return 1 if problems else 0


def measure(console: Console) -> dict[DemoRow, EngineRun]:
    """Run all cases, one after the other."""
    columns = (TextColumn("{task.description:28}"), BarColumn(), TextColumn("{task.fields[note]}"))
    runs = {}
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for case in CASES:
            work = Workload(
                (Action("add", REQUEST, prompt=((0, PROMPT),), output=OUTPUT),),
                lag=case.lag,
                pool=case.pool,
            )
            bar = progress.add_task(case.name, total=PROMPT + OUTPUT, note="starting vLLM")
            done = 0

            def advance(tokens: int, bar: object = bar) -> None:
                nonlocal done
                done += tokens
                note = f"{done:,} tokens scheduled"
                progress.update(bar, completed=done, note=note)  # type: ignore[arg-type]

            runs[case] = run(work, side=FIXED if case.patched else STOCK, on_step=advance)
            progress.update(bar, completed=PROMPT + OUTPUT)
    return runs


def table(runs: dict[DemoRow, EngineRun]) -> Table:
    """The measured figures."""
    any_run = next(iter(runs.values()))
    title = f"vLLM {any_run.vllm}: one prompt of {PROMPT:,} tokens, block {any_run.block} tokens"
    result = Table(
        "pool",
        "lag",
        "vLLM",
        title=title,
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
    )
    for heading in ("states", "tokens", "steps", "roll-backs", "seconds"):
        result.add_column(heading, justify="right")
    result.add_column("output")
    result.caption = "states: most per Mamba group; tokens: scheduled; output: sha256"
    for case, measured in runs.items():
        result.add_row(
            *case.labels,
            str(measured.peak),
            f"{measured.scheduled:,}",
            str(len(measured.steps)),
            str(measured.preemptions),
            f"{measured.steps[-1].seconds:.1f}",
            measured.answers[REQUEST].sha[:8],
            end_section=case.patched,
        )
    return result


def judge(runs: dict[DemoRow, EngineRun]) -> Iterator[str]:
    """Return what is wrong, a sentence each."""
    ample = runs[DemoRow(1, None, patched=False)]
    for case, measured in runs.items():
        if measured.answers[REQUEST].tokens != ample.answers[REQUEST].tokens:
            yield f"{case.name}: the output differs from that of stock vLLM with an ample pool"
        if not measured.nothing_left:
            yield f"{case.name}: blocks or watermarks are left when everything has ended"
        for problem in (_patched if case.patched else _stock)(case, measured):
            yield f"{case.name}: {problem}"


def _stock(case: DemoRow, measured: EngineRun) -> Iterator[str]:
    if measured.verdict != "off":
        yield f"this is not stock vLLM ({measured.verdict})"
    if measured.peak <= case.bound:
        yield f"stock vLLM does not show the defect ({measured.peak} states)"
    if case.pool and not measured.preemptions:
        yield "stock vLLM was not rolled back, so the pool is not tight"


def _patched(case: DemoRow, measured: EngineRun) -> Iterator[str]:
    if measured.verdict != "patched":
        yield f"the package did not patch ({measured.verdict})"
    if measured.peak > case.bound:
        yield f"{measured.peak} states, more than {case.bound}"
    if measured.preemptions:
        yield f"rolled back {measured.preemptions} times"


def write(runs: dict[DemoRow, EngineRun], out: Path | None, *, save: bool) -> Path | None:
    """Write ``demo.png``; returns the folder written to."""
    folder = DOCS / "images" if save else out
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        draw(runs, folder / "demo.png")
    return folder


def draw(runs: dict[DemoRow, EngineRun], path: Path) -> None:
    """Draw two panels: live states with an ample pool, blocks in use with a tight one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    any_run = next(iter(runs.values()))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for patched, colour in ((False, "#c1442e"), (True, "#20639b")):
        label = "with vllm-mamba-retire" if patched else "stock"
        ample, tight = runs[DemoRow(1, None, patched)], runs[DemoRow(1, TIGHT, patched)]
        for axes, values in (
            (left, [step.live for step in ample.steps]),
            (right, [step.used for step in tight.steps]),
        ):
            axes.step(range(1, len(values) + 1), values, colour, where="mid", label=label, lw=2)
    left.set(title="Roomy pool", xlabel="engine step", ylabel="live states per Mamba group")
    right.set(title=f"Pool of {TIGHT} blocks", xlabel="engine step", ylabel="blocks in use")
    right.axhline(runs[DemoRow(1, TIGHT, patched=True)].pool, color="0.6", ls=":", lw=1)
    for step, each in enumerate(runs[DemoRow(1, TIGHT, patched=False)].steps, start=1):
        if each.preempted:
            right.axvline(step - 0.5, color="#c1442e", ls=":", lw=1)
            right.annotate("rolled back", (step - 0.3, 3), color="#c1442e", fontsize=8)
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.yaxis.get_major_locator().set_params(integer=True)
    left.legend(frameon=False, loc="upper left")
    figure.suptitle(
        f"vLLM {any_run.vllm}, one prompt of {PROMPT:,} tokens, "
        f"{any_run.groups} Mamba groups, block {any_run.block}",
        fontsize=11,
    )
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
