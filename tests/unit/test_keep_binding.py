"""The second patch on a stand-in class: beside the retirement, alone, off again, and its limits."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_mamba_retire import binding
from vllm_mamba_retire.binding import RETIREMENT, Patch
from vllm_mamba_retire.evidence import Evidence
from vllm_mamba_retire.keep import KeepCounters
from vllm_mamba_retire.keep_binding import NEWEST, PATCHES, PROMPT
from vllm_mamba_retire.keep_verdict import KeepState, decide_keep
from vllm_mamba_retire.names import read_keep
from vllm_mamba_retire.releases import Row, Status
from vllm_mamba_retire.verdict import Reason, Verdict


class Block:
    def __init__(self, name: str, block_hash: str | None = None) -> None:
        self.name, self.block_hash = name, block_hash
        self.is_null = name == "-"
        self.ref_cnt = 1


class Queue:
    __module__ = "vllm.v1.core.kv_cache_utils"  # as vLLM's own; other queues are left alone

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def remove(self, block: Block) -> None:
        self.blocks.remove(block)

    def append(self, block: Block) -> None:
        self.blocks.append(block)

    @property
    def fake_free_list_tail(self) -> Any:
        return SimpleNamespace(prev_free_block=self.blocks[-1] if self.blocks else None)


class Pool:
    def __init__(self) -> None:
        self.free_block_queue: Any = Queue()

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            if not block.is_null:
                self.free_block_queue.append(block)


class Base:
    mamba_cache_mode = "align"
    block_size = 1

    def __init__(self) -> None:
        self._null_block = Block("-")
        self.block_pool = Pool()
        self.req_to_blocks: dict[str, list[Block]] = {}
        self.last_state_block_idx: dict[str, int] = {}

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: Any = None
    ) -> None:
        self._remove_blocks_in_range(request_id, 0, processed_computed_tokens - 1)

    def _remove_blocks_in_range(self, request_id: str, first_block: int, last_block: int) -> None:
        for index in range(last_block - 1, first_block - 1, -1):
            block = self.req_to_blocks[request_id][index]
            if block.is_null:
                break
            self.req_to_blocks[request_id][index] = self._null_block
            self.block_pool.free_blocks([block])

    def pop_blocks_for_free(self, request_id: str) -> list[Block]:
        return self.req_to_blocks.pop(request_id, [])

    def free(self, request_id: str) -> None:
        self.block_pool.free_blocks(reversed(self.pop_blocks_for_free(request_id)))


@pytest.fixture
def manager_class() -> Any:
    return type("MambaManager", (Base,), {})


def queue(manager: Any) -> str:
    return "".join(block.name for block in manager.block_pool.free_block_queue.blocks)


def two_states(manager: Any) -> None:
    """A retired state with a hash, and another prompt's block that was freed after it."""
    manager.req_to_blocks["r"] = [Block("A", "hash"), Block("b")]
    manager.remove_skipped_blocks("r", 2, 1)
    manager.block_pool.free_blocks([Block("X", "other")])


@pytest.mark.parametrize("order", [(RETIREMENT, NEWEST), (NEWEST, RETIREMENT), (NEWEST,)])
def test_the_newest_state_is_evicted_last_freed_with_its_request(
    manager_class: Any, order: tuple[Patch, ...]
) -> None:
    for patch in order:
        binding.install(manager_class, patch)
    manager = manager_class()
    two_states(manager)
    manager.remove_skipped_blocks("r", 2, 1)
    assert queue(manager) == "XA"
    manager.block_pool.free_blocks([Block("Y", "other")])
    manager.free("r")
    assert queue(manager) == "XYbA"
    assert not manager._mamba_keeping.newest
    done = binding.installation(manager_class, NEWEST)
    assert done is not None
    assert done.counters == KeepCounters(states_refreshed=2, states_still_there=1)


def test_without_it_states_are_evicted_in_order_of_retirement(manager_class: Any) -> None:
    binding.install(manager_class, RETIREMENT)
    manager = manager_class()
    two_states(manager)
    manager.remove_skipped_blocks("r", 2, 1)
    manager.free("r")
    assert queue(manager) == "AXb"


def test_states_of_the_answer_are_left_out_by_the_other_rule(manager_class: Any) -> None:
    binding.install(manager_class, PROMPT)
    manager = manager_class()
    manager.req_to_blocks["r"] = [Block("A", "hash A"), Block("B", "hash B"), Block("c")]
    manager.remove_skipped_blocks("r", 3, 1)
    assert queue(manager) == "BA"


@pytest.mark.parametrize("order", list(itertools.permutations([RETIREMENT, NEWEST])))
@pytest.mark.parametrize("off_first", [RETIREMENT, NEWEST])
def test_either_patch_can_be_removed_alone(
    manager_class: Any, order: tuple[Patch, ...], off_first: Patch
) -> None:
    before = dict(vars(manager_class))
    for patch in order:
        binding.install(manager_class, patch)
    manager = manager_class()
    two_states(manager)
    (stays,) = (patch for patch in order if patch is not off_first)
    counters = binding.installation(manager_class, stays).counters
    assert binding.uninstall(manager_class, off_first)
    assert not binding.uninstall(manager_class, off_first)
    assert [done.patch for done in binding.installations(manager_class)] == [stays]
    assert not {*off_first.attributes} & vars(manager).keys()
    manager.remove_skipped_blocks("r", 2, 1)
    assert queue(manager) == ("XA" if stays is NEWEST else "AX")
    assert binding.installation(manager_class, stays).counters is counters
    assert binding.uninstall(manager_class, stays)
    assert dict(vars(manager_class)) == before


@pytest.mark.parametrize("off", [RETIREMENT, NEWEST])
def test_under_another_wrapper_neither_is_removed(manager_class: Any, off: Patch) -> None:
    for patch in (RETIREMENT, NEWEST):
        binding.install(manager_class, patch)
    manager_class.remove_skipped_blocks = lambda *_args: None
    before = dict(vars(manager_class))
    with pytest.raises(binding.BindingError, match="remove_skipped_blocks was replaced"):
        binding.uninstall(manager_class, off)
    assert dict(vars(manager_class)) == before


def test_groups_on_one_pool_know_of_each_others_states(manager_class: Any) -> None:
    binding.install(manager_class, NEWEST)
    one, other, elsewhere = (manager_class() for _ in range(3))
    other.block_pool = one.block_pool
    for manager in (one, other, elsewhere):
        two_states(manager)
    assert one._mamba_keeping.order is other._mamba_keeping.order
    assert one._mamba_keeping.order is not elsewhere._mamba_keeping.order
    pool = elsewhere.block_pool
    del elsewhere, manager
    after = manager_class()
    after.block_pool = pool
    two_states(after)
    assert queue(after) == "AXAX"


def test_a_request_without_a_state_ends_as_without(manager_class: Any) -> None:
    binding.install(manager_class, NEWEST)
    manager = manager_class()
    manager.req_to_blocks["r"] = [Block("a"), Block("b")]
    manager.remove_skipped_blocks("r", 2, 1)
    manager.free("r")
    assert queue(manager) == "ab"


def test_other_cache_modes_keep_nothing(manager_class: Any) -> None:
    binding.install(manager_class, NEWEST)
    manager = manager_class()
    manager.mamba_cache_mode = "all"
    two_states(manager)
    manager.remove_skipped_blocks("r", 2, 1)
    manager.free("r")
    assert queue(manager) == "AXb"


def test_a_pool_that_is_not_vllms_is_left_alone_and_named_once(
    manager_class: Any, caplog: pytest.LogCaptureFixture
) -> None:
    binding.install(manager_class, NEWEST)
    manager = manager_class()
    manager.block_pool.free_block_queue = SimpleNamespace(append=lambda _block: None)
    two_states(manager)
    manager.remove_skipped_blocks("r", 2, 1)
    assert [record.message for record in caplog.records] == [
        "vllm-mamba-retire: the free blocks of this pool are in a types.SimpleNamespace, not in a "
        "queue of vLLM's; no state is kept."
    ]


@pytest.mark.parametrize("method", ["note", "refresh", "take"])
def test_an_error_of_ours_ends_the_keeping_and_not_the_scheduler(
    manager_class: Any,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_args: Any) -> None:
        raise KeyError("broken")

    binding.install(manager_class, NEWEST)
    monkeypatch.setattr(f"vllm_mamba_retire.keep.Keeping.{method}", fail)
    manager = manager_class()
    two_states(manager)
    manager.free("r")
    manager.req_to_blocks["s"] = [Block("C", "hash"), Block("d")]
    manager.remove_skipped_blocks("s", 2, 1)
    manager.free("s")
    assert sorted(queue(manager)) == sorted("AXbCd")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "is off from here on (KeyError: 'broken')" in record.message
    assert manager._mamba_keeping is None


def test_a_request_that_no_table_is_known_of_goes_on_to_vllm(
    manager_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []
    monkeypatch.setattr(Base, "_remove_blocks_in_range", lambda _self, *args: called.append(args))
    binding.install(manager_class, NEWEST)
    manager_class().remove_skipped_blocks("unknown", 2)
    assert called == [("unknown", 0, 1)]


ROW = Row("0.29.0", Status.LIVE, {}, "0" * 64)
SEEN = Evidence(None, row=ROW)
PATCHED = Verdict(Reason.PATCHED, "")


@pytest.mark.parametrize(
    ("rule", "reason", "seen", "subclass", "state", "said"),
    [
        ("newest", Reason.PATCHED, SEEN, None, KeepState.ON, "newest cached state of a running"),
        ("prompt", Reason.NATIVE, SEEN, None, KeepState.ON, "newest cached state of the prompt of"),
        (
            "newest",
            Reason.FIXED_ELSEWHERE,
            Evidence(None, series="v0.29.0"),
            None,
            KeepState.ON,
            "evicted last",
        ),
        ("none", Reason.PATCHED, SEEN, None, KeepState.OFF, "not set"),
        ("none", Reason.OFF, SEEN, None, KeepState.OFF, "MAMBA_RETIRE_KEEP is not set"),
        ("newest", Reason.OFF, SEEN, None, KeepState.OFF, "MAMBA_RETIRE=off"),
        (None, Reason.OFF, SEEN, None, KeepState.OFF, "MAMBA_RETIRE=off"),
        (None, Reason.PATCHED, SEEN, None, KeepState.UNAVAILABLE, "KEEP=all is not none"),
        ("newest", Reason.LATENT, SEEN, None, KeepState.UNAVAILABLE, "(latent here)"),
        ("newest", Reason.DRIFTED, SEEN, None, KeepState.UNAVAILABLE, "(drifted here)"),
        (
            "newest",
            Reason.FIXED_ELSEWHERE,
            Evidence(None),
            None,
            KeepState.UNAVAILABLE,
            "no known release",
        ),
        (
            "newest",
            Reason.NATIVE,
            Evidence(None, row=ROW, foreign="free (theirs)"),
            None,
            KeepState.UNAVAILABLE,
            "free (theirs) was replaced",
        ),
        ("newest", Reason.PATCHED, SEEN, "a.B.c", KeepState.UNAVAILABLE, "a.B.c overrides"),
    ],
)
def test_when_states_are_kept(
    rule: str | None,
    reason: Reason,
    seen: Evidence,
    subclass: str | None,
    state: KeepState,
    said: str,
) -> None:
    decided = decide_keep(rule, "all", Verdict(reason, ""), seen, subclass)
    assert decided.state is state
    assert said in decided.sentence
    assert decided.warns is (state is KeepState.UNAVAILABLE)
    assert str(decided).startswith(f"keep {state.value}: ")


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        (None, "none"),
        ("", "none"),
        (" None", "none"),
        ("off", "none"),
        ("0", "none"),
        ("NEWEST ", "newest"),
        ("prompt", "prompt"),
        ("all", None),
        ("on", None),
    ],
)
def test_spellings(value: str | None, meant: str | None) -> None:
    assert read_keep(value) == meant


def test_only_subclasses_that_override_these_methods_conflict(manager_class: Any) -> None:
    type("Sub", (manager_class,), {"_remove_blocks_in_range": None})
    assert not list(binding.overriding_subclasses(manager_class, PATCHES[0]))
    type("Sub", (manager_class,), {"remove_skipped_blocks": None})
    assert list(binding.overriding_subclasses(manager_class, PATCHES[0]))
