"""Measures what one retirement costs late in a long prefill: stock, patched and native vLLM.

Every variant runs in a process of its own, on its release's real manager. They take turns, a few
calls each, so that other load on the machine affects all of them alike. Figures are printed beside
the aims; nothing is asserted. ``rescan`` is the patched variant whose watermark is removed before
each call: it shows what the watermark saves, and that the benchmark can detect a difference.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

BLOCK, BUDGET = 1568, 4096  # tokens; a chunk is two blocks
DEPTHS = (100_000, 1_000_000, 8_000_000)  # tokens prefilled when the measured calls begin
ROUNDS, CALLS = 12, 20
STARTS = 5  # processes started for each start-up figure
REQUEST = "long"


def main() -> None:
    """Measure all variants and print the figures beside the aims."""
    parser = argparse.ArgumentParser(prog="nox -s bench --", description=__doc__)
    parser.add_argument("--stock", type=Path, required=True, help="tree of a release that leaks")
    parser.add_argument("--native", type=Path, required=True, help="tree of a fixed release")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    console = Console()
    costs = measure_calls(options.stock, options.native)
    starts = {
        "import of the package alone": start_time(None, IMPORT_ALONE),
        "activation where vLLM is imported": start_time(options.stock, ACTIVATION),
        "vllm-mamba-retire status, in all": start_time(options.stock, STATUS),
    }
    report(console, costs, starts)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        figures = {"unit": "microseconds per call", "calls": costs, "start_ms": starts}
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
        console.print(f"figures: {options.out}", soft_wrap=True)


def measure_calls(stock: Path, native: Path) -> dict[str, dict[int, float]]:
    """Return the median cost of one call in microseconds, by variant and depth."""
    builds = {
        "stock": BenchProcess(stock, "off"),
        "patched": BenchProcess(stock, "require"),
        "native": BenchProcess(native, "off"),
        "rescan": BenchProcess(stock, "require", "--rescan"),
    }
    taken: dict[tuple[str, int], list[int]] = {}
    try:
        for _ in track(range(ROUNDS), "rounds"):
            for depth in DEPTHS:
                for name, build in builds.items():
                    taken.setdefault((name, depth), []).extend(build.calls(depth))
    finally:
        for build in builds.values():
            build.close()
    return {
        name: {depth: statistics.median(taken[name, depth]) / 1000 for depth in DEPTHS}
        for name in builds
    }


class BenchProcess:
    """A process that makes calls on one variant on request."""

    def __init__(self, tree: Path, mode: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(tree, mode),
        )

    def calls(self, depth: int) -> list[int]:
        """Return nanoseconds of each of the first calls after `depth` tokens of a prefill."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(depth, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args!r} ended; its messages are above")
        result: list[int] = json.loads(line)
        return result

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve(rescan: bool) -> None:
    """In the variant's process: read a depth per line, write nanoseconds per call."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout
    import vllm_mamba_retire  # noqa: F401 -- arms the patch, where the mode says so

    gc.disable()
    for line in sys.stdin:
        print(json.dumps(list(prefill(int(line), rescan))), file=out, flush=True)
        gc.collect()


def prefill(depth: int, rescan: bool) -> Iterator[int]:
    """Prefill one prompt with one chunk in flight; time the retirements after `depth` tokens."""
    from vllm.v1.core import single_type_kv_cache_manager as managers

    from vllm_mamba_retire.probe import build_manager, call_known

    stride = BUDGET // BLOCK * BLOCK
    first = depth // stride * stride + stride
    prompt = first + CALLS * stride
    manager: Any = build_manager(managers, BLOCK, pool=prompt // BLOCK + 8)
    for end in range(stride, prompt, stride):
        started = time.perf_counter_ns()
        manager.remove_skipped_blocks(REQUEST, max(0, end - 2 * stride))
        taken = time.perf_counter_ns() - started
        if rescan:
            getattr(manager, "_num_retired_blocks", {}).clear()  # there from the first call on
        call_known(
            manager.get_num_blocks_to_allocate,
            request_id=REQUEST,
            num_tokens=end,
            new_computed_blocks=[],
            total_computed_tokens=end - stride,
            num_local_computed_tokens=0,
            num_tokens_main_model=end,
            prefill_end=prompt,
        )
        manager.allocate_new_blocks(REQUEST, end, end)
        if end >= first:
            yield taken


IMPORT_ALONE = ("", "import vllm_mamba_retire")
ACTIVATION = ("import vllm.v1.core.single_type_kv_cache_manager", "import vllm_mamba_retire")
STATUS = ("", "import subprocess, sys; subprocess.run([sys.executable, '-c', COMMAND])")
COMMAND = "import sys; sys.argv[1:] = ['status']; from vllm_mamba_retire.cli import main; main()"
AIMS = (15, 60, 300)  # milliseconds


def start_time(tree: Path | None, code: tuple[str, str]) -> float:
    """Return the median milliseconds of the second line after the first, each in a new process."""
    before, timed = code
    script = f"COMMAND = {COMMAND!r}\n{before}\nimport time\nt = time.perf_counter()\n{timed}\n"
    script += "import sys\nprint((time.perf_counter() - t) * 1e3, file=sys.stderr)"
    took = []
    for _ in range(STARTS):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment(tree, "require" if tree else "auto"),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        took.append(float(done.stderr.splitlines()[-1]))
    return statistics.median(took)


def environment(tree: Path | None, mode: str) -> dict[str, str]:
    """Return the caller's environment with this vLLM after the package on the path."""
    path = [os.environ.get("PYTHONPATH", ""), str(tree or "")]
    changed = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "MAMBA_RETIRE": mode}
    return os.environ | changed | {"VLLM_LOGGING_LEVEL": "ERROR"}


def report(console: Console, costs: dict[str, dict[int, float]], starts: dict[str, float]) -> None:
    """Print the figures, the ratios and the aims."""
    table = Table("tokens prefilled", title="one retirement, median microseconds", box=SIMPLE_HEAD)
    for name in costs:
        table.add_column(name, justify="right")
    table.add_column("patched / native", justify="right")
    for depth in DEPTHS:
        ratio = costs["patched"][depth] / costs["native"][depth]
        cells = [f"{cost[depth]:.1f}" for cost in costs.values()]
        table.add_row(f"{depth:,}", *cells, f"{ratio:.2f}")
    console.print(table)
    patched = costs["patched"]
    growth = patched[DEPTHS[-1]] / patched[DEPTHS[0]]
    console.print("aim for patched / native: 1.0, at most 1.1")
    console.print(f"8M / 100k, patched: {growth:.2f}, aim at most 1.2")
    for (what, took), aim in zip(starts.items(), AIMS, strict=True):
        console.print(f"{what}: {took:.1f} ms, aim at most {aim} ms")


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve(rescan="--rescan" in sys.argv)
    else:
        main()
