"""How fast a replay is, and whether its cost grows linearly in the steps.

Replays 16 requests of 62,500 tokens, a million together, on the vLLM that this interpreter
imports, and a second time with requests twice as long. Prints CPU seconds against a minute on one
core, and the cost of a step in the longer replay over that in the shorter one, which is 1 where
the cost is linear. Nothing is asserted.
"""

from __future__ import annotations

import os
import time

from vllm_mamba_retire.replay.scenario import Arrival, Scenario
from vllm_mamba_retire.replay.scheduler import replay

REQUESTS = 16
PROMPT = 62_500  # tokens
AIM = 60  # CPU seconds


def scenario(prompt: int) -> Scenario:
    """Requests of `prompt` tokens that arrive eight steps apart, in a pool that holds them all."""
    arrivals = tuple(Arrival(str(n), prompt, output=64, at=8 * n) for n in range(REQUESTS))
    return Scenario("speed", block=1568, budget=4096, arrivals=arrivals, groups=3)


def measure(prompt: int) -> tuple[float, int]:
    """CPU seconds and steps of one replay."""
    started = time.process_time()
    run = replay(scenario(prompt))
    return time.process_time() - started, len(run.steps)


def main() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    measure(PROMPT // 100)  # imports vLLM and reads the stand-in model
    started = time.process_time()
    seconds, steps = measure(PROMPT)
    longer_seconds, longer_steps = measure(2 * PROMPT)
    ratio = longer_seconds / longer_steps / (seconds / steps)
    print(f"start (vLLM's imports and configuration): {started:.1f} s")
    print(f"{REQUESTS * PROMPT:,} tokens, {steps} steps: {seconds:.1f} s (aim: below {AIM})")
    print(f"{2 * REQUESTS * PROMPT:,} tokens, {longer_steps} steps: {longer_seconds:.1f} s")
    print(f"cost of a step, twice the length over once: {ratio:.2f} (linear: 1)")


if __name__ == "__main__":
    main()
