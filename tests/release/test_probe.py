"""The probe of retirement, on a release's own manager: what it sees, and every way to be wrong."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from vllm_mamba_retire.evidence import Outcome
from vllm_mamba_retire.probe import probe
from vllm_mamba_retire.releases import Status

pytestmark = pytest.mark.about(Status.LIVE, Status.NATIVE)

Retire = Callable[[Any, str, int], None]


def retires(manager: Any, request_id: str, last: int, first: int = 0) -> None:
    """Free the states of a request in front of block `last`."""
    table = manager.req_to_blocks[request_id]
    for place in range(first, last):
        if table[place] is not manager._null_block:
            manager.block_pool.free_blocks([table[place]])
            table[place] = manager._null_block


def frees_one_too_many(manager: Any, request_id: str, last: int) -> None:
    retires(manager, request_id, last + 1)


def frees_what_the_table_holds(manager: Any, request_id: str, last: int) -> None:
    manager.block_pool.free_blocks([manager.req_to_blocks[request_id][last]])


def frees_nothing(manager: Any, request_id: str, last: int) -> None:
    table = manager.req_to_blocks[request_id]
    table[:last] = [manager._null_block] * last


def retires_once(manager: Any, request_id: str, last: int) -> None:
    if not hasattr(manager, "retired_once"):
        retires(manager, request_id, last)
        manager.retired_once = True
    elif last == 2:
        retires(manager, request_id, last)


def remembers_ended_requests(manager: Any, request_id: str, last: int) -> None:
    seen = manager.__dict__.setdefault("seen", {})
    retires(manager, request_id, last, seen.get(request_id, 0))
    seen[request_id] = last


def loses_the_last_block(manager: Any, request_id: str, last: int) -> None:
    retires(manager, request_id, last)
    if last == 3:
        manager.req_to_blocks[request_id].pop()


def fails(manager: Any, request_id: str, last: int) -> None:
    raise OSError("torn")


@pytest.mark.parametrize(
    ("retire", "outcome", "detail"),
    [
        (retires, Outcome.RETIRES, "is freed once"),
        (frees_one_too_many, Outcome.WRONG, "still needed left the table"),
        (frees_what_the_table_holds, Outcome.WRONG, "still needed lost its reference"),
        (frees_nothing, Outcome.WRONG, "not freed exactly once"),
        (retires_once, Outcome.WRONG, "not freed when the next one was settled"),
        (loses_the_last_block, Outcome.WRONG, "blocks are missing from the pool"),
        (remembers_ended_requests, Outcome.WRONG, "whose id was used before is not retired"),
        (fails, Outcome.WRONG, "OSError: torn"),
    ],
)
def test_the_probe_tells_right_from_wrong(
    module: ModuleType, retire: Retire, outcome: Outcome, detail: str
) -> None:
    class Manager(module.MambaManager):  # type: ignore[misc, name-defined, unused-ignore]
        def remove_skipped_blocks(self, request_id: str, tokens: int, *_rest: Any) -> None:
            retire(self, request_id, (tokens - 1) // 4)

    seen = probe(module, Manager)
    assert seen.outcome is outcome
    assert detail in seen.detail
