"""Blocks freed while a step in flight still names them: ``python -m tools.proof.in_flight TREE``.

Traffic of `restless` goes through the scheduler of the vLLM in TREE: as published, with the fix,
and with the method of a release that carries it (``--native``). A step names the blocks of a
request's table from the state that it reads on. Counted by cause are the blocks of Mamba groups
that are freed before such a step is settled, and how often one is handed out again before that, to
whom. A later step writes a block after the earlier step has read it, because steps run in order on
a device. An asynchronous load of a connector has no such order.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tools.proof.compare import MANAGER_FILE
from tools.proof.native_method import graft
from tools.proof.restless import RestlessReplay
from vllm_mamba_retire import binding
from vllm_mamba_retire.child import answer, ask
from vllm_mamba_retire.replay.platform import configure_only
from vllm_mamba_retire.replay.sides import STOCK

Counts = dict[str, dict[str, int]]  # without, or with a connector -> what -> how often


def count(tree: Path, side: str, seeds: int, path: Iterable[Path] = ()) -> Counts:
    """Counts of one side, summed over the seeds below `seeds`.

    Args:
        tree: folder that holds a release's vllm package.
        side: ``stock``, ``fixed``, or the folder of a release whose method is put in.
        seeds: scenarios; every second one has a connector.
        path: folders searched first, for example for a mutant of this package.
    """
    module = "tools.proof.in_flight"  # also where this is run as a program
    # The fix is installed by hand: its own probe refuses a mutant.
    counts: Counts = ask(module, [side, seeds], environment=STOCK.environment, path=[*path, tree])
    return counts


class WatchedReplay(RestlessReplay):
    """A replay that counts what is freed under steps in flight."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.named: deque[set[int]] = deque()  # blocks, per step in flight, oldest first
        self.rejected: deque[Counter[str]] = deque()  # drafts of each request, per step in flight
        self.freed: dict[int, str] = {}  # of the blocks named, those freed already, and why
        self.cause, self.writer = "request ended", "step"
        self._watch()
        for owner, name, cause in (
            (self, "abort", "aborted"),
            (self, "reset", "reset"),
            (self.scheduler, "_preempt_request", "preempted"),
            (self.scheduler, "_update_from_kv_xfer_finished", "saved"),
            *((manager, "remove_skipped_blocks", "retired") for manager in self.mamba),
        ):
            self._blame(owner, name, cause)

    def _watch(self) -> None:
        pool, scheduler = self.cache.block_pool, self.scheduler
        free, hand_out, allocate = pool.free_blocks, pool.get_new_blocks, self.cache.allocate_slots
        preempt = scheduler._preempt_request

        def free_blocks(ordered_blocks: Iterable[Any], *args: Any, **named: Any) -> None:
            blocks = list(ordered_blocks)
            free(blocks, *args, **named)
            for block in blocks:
                if block.ref_cnt == 0 and any(block.block_id in step for step in self.named):
                    self.counts[f"freed: {self.cause}"] += 1
                    self.freed[block.block_id] = self.cause

        def get_new_blocks(*args: Any, **named: Any) -> Any:
            blocks = hand_out(*args, **named)
            for block in blocks:
                if (cause := self.freed.pop(block.block_id, None)) is not None:
                    self.counts[f"{self.writer} gets: {cause}"] += 1
            return blocks

        def allocate_slots(*args: Any, **named: Any) -> Any:
            self.writer = "load" if named.get("delay_cache_blocks") else "step"
            return allocate(*args, **named)

        def preempt_request(request: Any, *args: Any, **named: Any) -> None:
            for step in self.rejected:
                del step[request.request_id]  # it starts again: nothing is rolled back any more
            preempt(request, *args, **named)

        pool.free_blocks, pool.get_new_blocks = free_blocks, get_new_blocks
        self.cache.allocate_slots, scheduler._preempt_request = allocate_slots, preempt_request

    def _blame(self, owner: Any, name: str, cause: str) -> None:
        method = getattr(owner, name)

        def blamed(*args: Any, **named: Any) -> Any:
            before = self.cause
            if before != "reset":  # which preempts
                self.cause = cause
            try:
                return method(*args, **named)
            finally:
                self.cause = before

        setattr(owner, name, blamed)

    def _samples(self, output: Any) -> dict[str, int]:
        samples = super()._samples(output)
        named: set[int] = set()
        for name, tokens in output.num_scheduled_tokens.items():
            planned = self.scheduler.requests[name].num_computed_tokens - tokens
            # The plan takes drafts in flight for accepted; the step starts where they are not.
            start = planned - sum(step[name] for step in self.rejected)
            for manager in self.mamba:
                table = manager.req_to_blocks[name]
                source = table[max(0, planned - 1) // self.scenario.block]
                self.counts["reads of a null block"] += planned > 0 and source.is_null
                places = table[max(0, start - 1) // self.scenario.block :]
                named.update(block.block_id for block in places if not block.is_null)
        self.named.append(named)
        drafted = output.scheduled_spec_decode_tokens
        self.rejected.append(
            Counter({name: 1 + len(drafts) - samples[name] for name, drafts in drafted.items()})
        )
        self.counts["steps"] += bool(output.total_num_scheduled_tokens)
        return samples

    def _settle(self, output: Any, samples: dict[str, int]) -> None:
        self.named.popleft()
        self.rejected.popleft()
        still = set().union(*self.named)
        self.freed = {block: cause for block, cause in self.freed.items() if block in still}
        super()._settle(output, samples)


def _answer(payload: Any, _report: Callable[[Any], None]) -> Counts:
    side, seeds = payload
    configure_only()
    from vllm.v1.core import single_type_kv_cache_manager as module

    if side == "fixed":
        binding.install(module.MambaManager)
    elif side != "stock":
        graft(module, Path(side) / MANAGER_FILE)
    total: dict[str, Counter[str]] = {"alone": Counter(), "connected": Counter()}
    for seed in range(seeds):
        replay = WatchedReplay(seed)
        replay.run(lambda _run: None)
        total["connected" if replay.connected else "alone"].update(replay.counts)
    return {traffic: dict(sorted(counts.items())) for traffic, counts in total.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path, help="folder that holds a release's vllm package")
    parser.add_argument("--native", type=Path, help="folder of a release that carries the fix")
    parser.add_argument("--seeds", type=int, default=700)
    options = parser.parse_args()
    sides = ["stock", "fixed", *filter(None, [options.native and str(options.native)])]
    counts = {side: count(options.tree, side, options.seeds) for side in sides}
    print(json.dumps(counts, indent=1))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main()
    else:
        answer(_answer)
