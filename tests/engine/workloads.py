"""Workloads that several tests of the engine run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tools.engine.harness import Action, EngineRun, Workload

Measure = Callable[[Workload], EngineRun]

PROMPT, OUTPUT = 40_000, 8  # tokens; the budget holds two blocks, so every chunk leaves a gap
LONG = Workload((Action("add", "long", prompt=((0, PROMPT),), output=OUTPUT),))
LONG_TIGHT = replace(LONG, pool=80)

SHARED = (7, 9_216)  # eight blocks
BUSY = Workload(
    (
        Action("add", "first", at=0, prompt=(SHARED, (1, 3_000))),
        Action("add", "leaves", at=1, prompt=((2, 15_000),)),
        Action("add", "second", at=2, prompt=((3, 12_000),), output=24),
        Action("abort", "leaves", at=8),
        Action("add", "late", at=9, prompt=(SHARED, (4, 2_500)), output=16),
        Action("add", "short", at=10, prompt=((5, 700),)),
    ),
    max_tokens=20_000,  # vLLM refuses a pool that could not hold the longest request
)
FINISHED = ("first", "second", "late", "short")
BUSY_TIGHT = replace(BUSY, pool=32)  # none of the prompts alone fills it, two at a time do
