"""What activation does to each release: live is patched, every other keeps its own objects."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from types import ModuleType

import pytest

from vllm_mamba_retire import activation, binding, records
from vllm_mamba_retire.evidence import Outcome
from vllm_mamba_retire.probe import probe
from vllm_mamba_retire.releases import Status
from vllm_mamba_retire.verdict import Reason, Verdict

REASONS = {
    Status.LIVE: Reason.PATCHED,
    Status.NATIVE: Reason.NATIVE,
    Status.LATENT: Reason.LATENT,
    Status.ABSENT: Reason.ABSENT,
}


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What this package logs; vLLM's logger does not hand records on to pytest."""
    kept: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record.getMessage())

    logger, handler = logging.getLogger("vllm.mamba_retire"), Keep()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)  # a serving vLLM has set its logging up
    yield kept
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)


@pytest.fixture
def verdict(
    monkeypatch: pytest.MonkeyPatch, lines: list[str], module: ModuleType
) -> Iterator[Verdict]:
    monkeypatch.setenv("MAMBA_RETIRE", "auto")
    # Its thread checks the patch every few seconds, and would come in between.
    monkeypatch.setattr(records, "keep", lambda record, recheck: None)
    yield activation.activate()
    activation.deactivate()


def test_verdict_is_that_of_the_table(verdict: Verdict, status: Status) -> None:
    assert verdict.reason is REASONS[status]
    assert not verdict.in_doubt


def test_one_line_names_verdict_version_and_file(
    verdict: Verdict, lines: list[str], release: str, module: ModuleType
) -> None:
    activation.activate()
    (line,) = lines
    for expected in (verdict.reason.value, f"vLLM {release}", str(module.__file__)):
        assert expected in line


def test_line_waits_until_logging_is_set_up(
    lines: list[str], status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAMBA_RETIRE", "auto")
    logger = logging.getLogger("vllm.mamba_retire")
    logger.setLevel(logging.WARNING)
    activation.activate()
    assert lines == []
    logger.setLevel(logging.INFO)
    activation.activate()
    activation.activate()
    activation.deactivate()
    assert len(lines) == 1
    assert REASONS[status].value in lines[0]


@pytest.mark.about(Status.LIVE)
def test_live_release_is_seen_to_leak_before_and_to_retire_after(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType
) -> None:
    monkeypatch.setenv("MAMBA_RETIRE", "auto")
    assert probe(module).outcome is Outcome.STOPS_AT_GAP
    activation.activate()
    assert probe(module).outcome is Outcome.RETIRES
    activation.deactivate()
    assert probe(module).outcome is Outcome.STOPS_AT_GAP


@pytest.mark.about(Status.LIVE)
def test_the_probe_leaves_no_traffic_in_the_counters(verdict: Verdict, module: ModuleType) -> None:
    done = binding.installation(module.MambaManager)
    assert done is not None
    assert (done.counters.calls, done.counters.states_freed) == (0, 0)


@pytest.mark.about(Status.ABSENT, Status.LATENT, Status.NATIVE)
def test_other_releases_keep_every_object(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType
) -> None:
    own = dict(vars(module.MambaManager))
    base = dict(vars(module.SingleTypeKVCacheManager))
    monkeypatch.setenv("MAMBA_RETIRE", "auto")
    activation.activate()
    assert dict(vars(module.MambaManager)) == own
    assert dict(vars(module.SingleTypeKVCacheManager)) == base


DISPLACED = {
    "deleted": lambda m: delattr(m.MambaManager, binding.REMOVE_RANGE),
    "overwritten": lambda m: setattr(m.MambaManager, binding.POP_BLOCKS, lambda self, r: []),
    "overridden below": lambda m: type("Sub", (m.MambaManager,), {binding.POP_BLOCKS: None}),
    "loaded again": lambda m: setattr(m, "MambaManager", type("MambaManager", (), {})),
}


@pytest.mark.about(Status.LIVE)
@pytest.mark.parametrize("how", DISPLACED)
def test_a_patch_that_is_no_longer_in_force_is_reported_once(
    how: str, verdict: Verdict, lines: list[str], module: ModuleType
) -> None:
    record = activation.current()
    assert record is not None
    assert activation.recheck(record) is record
    patched = module.MambaManager
    ours = {name: vars(patched)[name] for name in binding.RETIREMENT.methods}
    kept = DISPLACED[how](module)
    try:
        found = activation.recheck(record)
        assert found.verdict.reason is Reason.CONFLICT
        assert activation.recheck(found) is found
        assert activation.current() is found
        assert [line for line in lines if "conflict" in line] == lines[1:]
        assert len(lines) == 2
    finally:
        module.MambaManager = patched  # type: ignore[attr-defined]
        for name, function in ours.items():
            setattr(patched, name, function)
        del kept
        gc.collect()
    assert activation.recheck(found).verdict.reason is Reason.PATCHED


@pytest.mark.about(Status.LIVE)
def test_a_wrapper_that_calls_ours_is_no_finding(
    verdict: Verdict, lines: list[str], module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = activation.current()
    assert record is not None
    ours = vars(module.MambaManager)[binding.REMOVE_RANGE]
    monkeypatch.setattr(module.MambaManager, binding.REMOVE_RANGE, lambda *a: ours(*a))
    found = activation.recheck(record)
    assert found.verdict.reason is Reason.PATCHED
    assert len(lines) == 1
    assert record.counters is not None
    assert record.counters.calls == 0, "the probe is no traffic"
    monkeypatch.undo()
