"""Runs mixed traffic on a real engine: ``python -m tools.engine.soak RESULTS --minutes 30``.

Rounds of prompts that share prefixes, are aborted, preempt each other and reuse ids, without a
pause between them. Afterwards all blocks must be free, no watermark of a request may be left, and
the memory of the process may not have grown in the second half. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.engine.harness import Action, Workload
from vllm_mamba_retire import __version__

_POOL = 40  # blocks: two of the longer prompts at a time do not fit
_LONGEST = 32_000  # tokens
_GROWTH = 16  # MiB in the second half that are still called flat: allocators meet a new shape
_TEXTS = 4


def traffic(seed: int) -> list[Action]:
    """Return one round: six requests, one of them aborted, with ids that later rounds reuse."""
    draw = random.Random(seed)
    actions = []
    for number in range(6):
        shared = (draw.randrange(_TEXTS), draw.choice((1_152, 4_608, 9_216)))
        own = (1_000 + seed * 10 + number, draw.randrange(200, 9_000))
        prompt, output = (shared, own), draw.randrange(1, 24)
        actions.append(Action("add", f"r{number}", number, prompt=prompt, output=output))
    actions.insert(4, Action("abort", f"r{draw.randrange(3)}", 5))
    return actions


def _workload(actions: tuple[Action, ...]) -> Workload:
    return Workload(actions, lag=2, pool=_POOL, max_tokens=_LONGEST)


def soak(minutes: float) -> dict[str, Any]:
    """Run rounds until the time is up, as plain data for the report."""
    from tools.engine import worker

    os.environ.update(worker.ENVIRONMENT)
    engine = worker.EngineProcess(_workload(()), lambda _tokens: None)
    rounds, memory, steps, tokens, preempted, peak = 0, [], 0, 0, 0, 0
    until = time.monotonic() + 60 * minutes
    while time.monotonic() < until or not rounds:
        engine.workload = _workload(tuple(traffic(rounds)))
        engine.steps, engine.answers = [], {}
        run = engine.run()
        rounds += 1
        steps += len(run.steps)
        tokens += run.scheduled
        preempted += run.preemptions
        peak = max(peak, run.peak)
        if not run.nothing_left:
            raise SystemExit(f"round {rounds}: the pool is not whole: {run.free_after} free")
        gc.collect()
        memory.append(_resident())
        print(f"round {rounds}: {tokens} tokens, {memory[-1]:.0f} MiB", file=sys.stderr, flush=True)
    last = asdict(run)
    kept = ("vllm", "verdict", "freed_beyond_stock", "pool", "free_after", "referenced_after")
    return {
        "version": __version__,
        "minutes": minutes,
        "rounds": rounds,
        "steps": steps,
        "tokens": tokens,
        "preemptions": preempted,
        "peak states": peak,
        "MiB after each tenth": [round(memory[rounds * tenth // 10 - 1]) for tenth in range(1, 11)],
        "MiB at half time": round(memory[rounds // 2]),
        "MiB at the end": round(memory[-1]),
        **{name: last[name] for name in (*kept, "watermarks_after")},
    }


def _resident() -> float:
    """Memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--minutes", type=float, default=30)
    asked = parser.parse_args()
    done = soak(asked.minutes)
    asked.results.mkdir(parents=True, exist_ok=True)
    (asked.results / "soak.json").write_text(json.dumps(done, indent=1))
    print(json.dumps(done, indent=1))
    sys.stdout.flush()
    grew = done["MiB at the end"] - done["MiB at half time"] > _GROWTH
    # vLLM's native libraries report thousands of leaks while the interpreter shuts down.
    os._exit(int(grew or done["verdict"] != "patched" or not done["freed_beyond_stock"]))


if __name__ == "__main__":
    main()
