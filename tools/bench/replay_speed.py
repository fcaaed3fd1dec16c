"""Measures how fast a replay is, and whether its cost grows linearly with the steps.

Replays 16 requests through the scheduler of the vLLM that this interpreter imports: a million
tokens together, then half a million and a million each. Prints CPU seconds (median of three), and
the cost of a step in the longest replay over that in the one half as long, which is 1 if the cost
is linear. Nothing is asserted.
"""

from __future__ import annotations

import os
import statistics
import time

from vllm_mamba_retire.replay.scenario import Arrival, Scenario
from vllm_mamba_retire.replay.scheduler import replay

REQUESTS = 16
PROMPTS = (62_500, 500_000, 1_000_000)  # tokens per request
AIM = 60  # CPU seconds
TIMES = 3


def scenario(prompt: int) -> Scenario:
    """Return requests of `prompt` tokens that arrive eight steps apart, in a pool for all."""
    arrivals = tuple(Arrival(str(n), prompt, output=64, at=8 * n) for n in range(REQUESTS))
    return Scenario("speed", block=1568, budget=4096, arrivals=arrivals, groups=3)


def measure(prompt: int) -> tuple[float, int]:
    """Return CPU seconds of a replay (median of `TIMES`) and its number of steps."""
    seconds = []
    for _ in range(TIMES):
        started = time.process_time()
        run = replay(scenario(prompt))
        seconds.append(time.process_time() - started)
    return statistics.median(seconds), len(run.steps)


def main() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    measure(1_000)  # imports vLLM and reads the stand-in model
    print(f"start (vLLM's imports and configuration): {time.process_time():.1f} s")
    per_step = []
    for prompt in PROMPTS:
        seconds, steps = measure(prompt)
        per_step.append(seconds / steps)
        total = REQUESTS * prompt
        print(f"{total:>10,} tokens, {steps:>5} steps: {seconds:.1f} s (aim: below {AIM})")
    print(f"cost of a step, twice the length over once: {per_step[-1] / per_step[-2]:.2f}")


if __name__ == "__main__":
    main()
