"""The probe of keeping, on a release's own manager: what it sees, and every way to be wrong."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from vllm_mamba_retire import binding
from vllm_mamba_retire.keep_binding import NEWEST
from vllm_mamba_retire.keep_probe import KeepOutcome, probe_keep
from vllm_mamba_retire.releases import Status

pytestmark = pytest.mark.about(Status.LIVE, Status.NATIVE)

Change = Callable[[Any], None]


def last_in_queue(manager: Any, block: Any) -> None:
    manager.block_pool.free_block_queue.remove(block)
    manager.block_pool.free_block_queue.append(block)


def probed(module: ModuleType, scheduled: Change, ended: Change) -> tuple[KeepOutcome, str]:
    """The answer for a class that does something of its own after each call."""

    class Manager(module.MambaManager):  # type: ignore[misc, name-defined, unused-ignore]
        def remove_skipped_blocks(self, request_id: str, *tokens: Any) -> None:
            if not hasattr(self, "first"):
                self.first = self.req_to_blocks[request_id][0]
                self.hash = self.first.block_hash
            super().remove_skipped_blocks(request_id, *tokens)
            scheduled(self)

        def free(self, request_id: str) -> None:
            super().free(request_id)
            ended(self)

    return probe_keep(module, Manager)


def nothing(_manager: Any) -> None: ...


def moves(manager: Any) -> None:
    if manager.first.block_hash == manager.hash:
        last_in_queue(manager, manager.first)


def moves_any_state(manager: Any) -> None:
    if manager.first.block_hash is not None:
        last_in_queue(manager, manager.first)


def moves_whatever_it_holds(manager: Any) -> None:
    last_in_queue(manager, manager.first)


def loses(manager: Any) -> None:
    manager.block_pool.free_block_queue.remove(manager.first)


def hides(manager: Any) -> None:
    queue = manager.block_pool.free_block_queue
    queue.remove(manager.first)
    queue.num_free_blocks += 1


def miscounts(manager: Any) -> None:
    manager.block_pool.free_block_queue.num_free_blocks += 1


def refers(manager: Any) -> None:
    manager.first.ref_cnt = 1


def refers_late(manager: Any) -> None:
    manager.calls = getattr(manager, "calls", 0) + 1
    if manager.calls == 2 and manager.first.block_hash == manager.hash:
        manager.first.ref_cnt = 1


def takes_the_needed_one(manager: Any) -> None:
    for table in manager.req_to_blocks.values():
        table[-1].ref_cnt = 2


def fails(manager: Any) -> None:
    raise OSError("torn")


def test_stock_is_plain_and_the_patch_keeps(module: ModuleType) -> None:
    own = module.MambaManager
    assert probe_keep(module, own)[0] is KeepOutcome.PLAIN
    binding.install(own, NEWEST)
    try:
        assert probe_keep(module, own) == (
            KeepOutcome.KEEPS,
            "the newest state is evicted after the others",
        )
    finally:
        binding.uninstall(own, NEWEST)
    assert probe_keep(module, own) == (
        KeepOutcome.PLAIN,
        "the newest state is evicted in the order of retirement",
    )


@pytest.mark.about(Status.LIVE)
def test_a_probe_is_no_traffic(module: ModuleType) -> None:
    done = binding.install(module.MambaManager)
    try:
        assert probe_keep(module, module.MambaManager)[0] is KeepOutcome.PLAIN
        assert done.counters.calls == 0
    finally:
        binding.uninstall(module.MambaManager)


@pytest.mark.parametrize(
    ("scheduled", "ended", "outcome", "told"),
    [
        (nothing, nothing, KeepOutcome.PLAIN, "in the order of retirement"),
        (moves, moves, KeepOutcome.KEEPS, "after the others"),
        (moves, nothing, KeepOutcome.WRONG, "queue is not consistent"),
        (nothing, moves, KeepOutcome.WRONG, "queue is not consistent"),
        (moves_any_state, moves_any_state, KeepOutcome.WRONG, "holds another state"),
        (refers_late, refers, KeepOutcome.WRONG, "queue is not consistent"),
        (nothing, miscounts, KeepOutcome.WRONG, "queue is not consistent"),
        (moves_whatever_it_holds, moves, KeepOutcome.WRONG, "holds another state"),
        (nothing, loses, KeepOutcome.WRONG, "queue is not consistent"),
        (nothing, hides, KeepOutcome.WRONG, "queue is not consistent"),
        (nothing, refers, KeepOutcome.WRONG, "queue is not consistent"),
        (takes_the_needed_one, nothing, KeepOutcome.WRONG, "another state"),
        (fails, nothing, KeepOutcome.WRONG, "OSError: torn"),
    ],
)
def test_what_is_neither_is_wrong(
    module: ModuleType, scheduled: Change, ended: Change, outcome: KeepOutcome, told: str
) -> None:
    found, sentence = probed(module, scheduled, ended)
    assert found is outcome
    assert told in sentence
