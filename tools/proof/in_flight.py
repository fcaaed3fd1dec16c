"""States freed while a step in flight still reads them: ``python -m tools.proof.in_flight TREE``.

Random traffic of `scenarios` with a lag of 1 to 3 and aborts goes through the scheduler of the vLLM
in TREE, stock and fixed. A step reads the state before its first token; where drafts in flight are
rejected, one before that (``--rejected``, an upper bound). Counted by cause are the states that are
freed before such a step is settled, and how often one is handed out again before that. Steps run in
order on a device, so that a later step's write comes after the read; a writer outside that order,
such as a KV connector's load, could come before.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.proof.scenarios import seeded
from vllm_mamba_retire.child import answer, ask
from vllm_mamba_retire.replay.scheduler import Replay
from vllm_mamba_retire.replay.sides import SIDES

_ABORT_CHANCE = 0.02  # per step


def count(tree: Path, seeds: int, rejected: bool) -> dict[str, dict[str, int]]:
    """Counts by side; `rejected` counts what is read if every draft in flight is rejected."""
    module = "tools.proof.in_flight"  # also where this is run as a program
    return {
        side.name: ask(module, [seeds, rejected], environment=side.environment, path=[tree])
        for side in SIDES
    }


class WatchedReplay(Replay):
    """A replay that counts what is freed under steps in flight."""

    def __init__(self, seed: int, rejected: bool) -> None:
        self.rejected = rejected
        scenario = seeded(seed)
        super().__init__(replace(scenario, lag=max(1, scenario.lag)))
        self.draw = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.reading: deque[set[int]] = deque()  # per step in flight, oldest first
        self.freed: set[int] = set()  # of those, freed already
        self.cause = "request ended"
        pool, scheduler = self.cache.block_pool, self.scheduler
        self._blame(scheduler, "_preempt_request", "preempted")
        for manager in self.mamba:
            self._blame(manager, "remove_skipped_blocks", "retired")
        free, hand_out = pool.free_blocks, pool.get_new_blocks

        def free_blocks(ordered_blocks: Iterable[Any], *args: Any, **named: Any) -> None:
            blocks = list(ordered_blocks)
            free(blocks, *args, **named)
            for block in blocks:
                if block.ref_cnt == 0 and any(block.block_id in step for step in self.reading):
                    self.counts[f"freed: {self.cause}"] += 1
                    self.freed.add(block.block_id)

        def get_new_blocks(*args: Any, **named: Any) -> Any:
            blocks = hand_out(*args, **named)
            for block in blocks:
                if block.block_id in self.freed:
                    self.counts["handed out again"] += 1
            return blocks

        pool.free_blocks, pool.get_new_blocks = free_blocks, get_new_blocks

    def _blame(self, owner: Any, name: str, cause: str) -> None:
        method = getattr(owner, name)

        def blamed(*args: Any, **named: Any) -> Any:
            with self._because(cause):
                return method(*args, **named)

        setattr(owner, name, blamed)

    @contextmanager
    def _because(self, cause: str) -> Iterator[None]:
        before, self.cause = self.cause, cause
        try:
            yield
        finally:
            self.cause = before

    def _admit(self) -> None:
        from vllm.v1.request import RequestStatus

        if self.scheduler.running and self.draw.random() < _ABORT_CHANCE:
            request = self.draw.choice(self.scheduler.running)
            with self._because("aborted"):
                self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
            self.counts["aborts"] += 1
        super()._admit()

    def _samples(self, output: Any) -> dict[str, int]:
        read: set[int] = set()
        for name, tokens in output.num_scheduled_tokens.items():
            start = self.scheduler.requests[name].num_computed_tokens - tokens
            if start > 0:
                # Drafts in flight may be rejected: then the step reads the state before them.
                drafts = sum(
                    len(earlier.scheduled_spec_decode_tokens.get(name, ()))
                    for earlier, _ in self.in_flight
                )
                first = max(0, start - 1 - drafts * self.rejected) // self.scenario.block
                last = (start - 1) // self.scenario.block
                for manager in self.mamba:
                    places = manager.req_to_blocks[name][first : last + 1]
                    self.counts["reads of a null block"] += places[-1].is_null
                    read.update(block.block_id for block in places if not block.is_null)
        self.reading.append(read)
        self.counts["steps"] += bool(output.total_num_scheduled_tokens)
        return super()._samples(output)

    def _settle(self, output: Any, samples: dict[str, int]) -> None:
        self.reading.popleft()
        self.freed &= set().union(*self.reading)
        super()._settle(output, samples)


def _answer(payload: list[int], _report: Callable[[Any], None]) -> Any:
    seeds, rejected = payload
    total: Counter[str] = Counter()
    for seed in range(seeds):
        replay = WatchedReplay(seed, bool(rejected))
        replay.run(lambda _run: None)
        total.update(replay.counts)
    return dict(sorted(total.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path, help="folder that holds a release's vllm package")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument(
        "--rejected",
        action="store_true",
        help="count reads as if all drafts in flight were rejected",
    )
    options = parser.parse_args()
    print(json.dumps(count(options.tree, options.seeds, options.rejected), indent=1))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main()
    else:
        answer(_answer)
