"""Measures what keeping the newest states costs a scheduled step, with 16 requests running.

One scheduler of the vLLM that this interpreter imports decodes 16 requests while the patch is
installed and removed every few steps, so that other load on the machine affects both alike. Each
figure is a median of ratios: steps with the patch over the steps without it before and after them.
The aim is printed beside it; nothing is asserted.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from typing import Any

from vllm_mamba_retire.names import KEEP_VARIABLE
from vllm_mamba_retire.replay.scenario import Arrival, Scenario

REQUESTS, PROMPT, OUTPUT = 16, 20_000, 1_250  # tokens
BLOCK, BUDGET, GROUPS = 1568, 4096, 3
STEPS = 25  # between two changes
RUNS = 5
AIM = 1.1


def main() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ[KEEP_VARIABLE] = "none"
    gc.disable()
    runs = [measure() for _ in range(RUNS)]
    ratios = [statistics.median(ratio) for ratio, _ in runs]
    microseconds = statistics.median(statistics.median(without) for _, without in runs)
    print(
        f"schedule() of a step, {REQUESTS} requests running: {microseconds:.0f} us; with the "
        f"newest states kept {statistics.median(ratios):.3f} times that "
        f"({min(ratios):.3f}-{max(ratios):.3f} in {RUNS} runs), aim at most {AIM}"
    )


def measure() -> tuple[list[float], list[float]]:
    """Return ratios of neighbouring medians, and the medians without it in microseconds."""
    from vllm_mamba_retire.replay.scheduler import Replay

    gc.collect()
    arrivals = tuple(Arrival(str(number), PROMPT, OUTPUT) for number in range(REQUESTS))
    replay = Replay(Scenario("cost", BLOCK, BUDGET, arrivals, groups=GROUPS))
    timed = _Timed(replay.scheduler.schedule)
    replay.scheduler.schedule = timed
    replay.run(lambda _run: None)
    timed.keep(False)
    medians = [statistics.median(block) / 1000 for block in timed.blocks if block]
    triples = zip(medians[::2], medians[1::2], medians[2::2], strict=False)
    return [2 * kept / (before + after) for before, kept, after in triples], medians[::2]


class _Timed:
    """Times the steps in which every request decodes; every second group of steps is patched."""

    def __init__(self, schedule: Any) -> None:
        from vllm.v1.core.single_type_kv_cache_manager import MambaManager

        self.manager_class = MambaManager
        self.schedule = schedule
        self.blocks: list[list[int]] = [[]]
        self.steps = 0

    def __call__(self) -> Any:
        started = time.perf_counter_ns()
        output = self.schedule()
        taken = time.perf_counter_ns() - started
        if output.total_num_scheduled_tokens != REQUESTS:
            return output
        self.steps += 1
        if self.steps > 1:  # in the first, the patch makes its notes of every request
            self.blocks[-1].append(taken)
        if self.steps == STEPS:
            self.keep(len(self.blocks) % 2 == 1)
            self.blocks.append([])
            self.steps = 0
        return output

    def keep(self, wanted: bool) -> None:
        """Install the patch, or remove it."""
        from vllm_mamba_retire import binding
        from vllm_mamba_retire.keep_binding import NEWEST

        change = binding.install if wanted else binding.uninstall
        change(self.manager_class, NEWEST)


if __name__ == "__main__":
    main()
