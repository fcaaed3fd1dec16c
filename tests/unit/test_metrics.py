"""vLLM's own registry carries the processes of this server, and nothing can break it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vllm_mamba_retire import metrics, records
from vllm_mamba_retire.records import Record
from vllm_mamba_retire.retirement import Counters
from vllm_mamba_retire.verdict import Reason, Verdict

STRANGER = """
import sys
from vllm_mamba_retire import records
records.announce()
print("kept", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[CollectorRegistry]:
    """A default registry of its own, with our collector, and a record of this process."""
    monkeypatch.setenv("MAMBA_RETIRE_DIR", str(tmp_path))
    made = CollectorRegistry(auto_describe=True)
    monkeypatch.setattr(metrics, "REGISTRY", made)
    metrics.expose()
    counters = Counters(states_freed=7)
    records.keep(Record.of(Verdict(Reason.PATCHED, "by a test."), None, counters))
    yield made
    records.withdraw()


def scrape(registry: CollectorRegistry) -> list[tuple[str, dict[str, str], float]]:
    text = generate_latest(registry).decode()
    families = text_string_to_metric_families(text)
    return [(s.name, dict(s.labels), s.value) for family in families for s in family.samples]


def test_a_scrape_shows_verdict_and_counters(registry: CollectorRegistry) -> None:
    samples = {name: (labels, value) for name, labels, value in scrape(registry)}
    labels, value = samples["vllm_mamba_retire_info"]
    assert (labels["verdict"], labels["pid"], value) == ("patched", str(os.getpid()), 1)
    assert samples["vllm_mamba_retire_states_freed_total"][1] == 7


def test_exposed_twice_is_scraped_once(registry: CollectorRegistry) -> None:
    once = scrape(registry)
    metrics.expose()
    assert scrape(registry) == once


def test_processes_that_it_started_are_this_servers_and_others_are_not(
    registry: CollectorRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", STRANGER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "kept\n"
        assert _pids(registry) == {os.getpid(), child.pid}
        monkeypatch.setattr(records, "parent", lambda _pid: None)
        assert _pids(registry) == {os.getpid()}
        child.communicate()


def _pids(registry: CollectorRegistry) -> set[int]:
    return {int(labels["pid"]) for name, labels, _ in scrape(registry) if name.endswith("_info")}


def test_a_broken_record_costs_its_own_line_only(
    registry: CollectorRegistry, tmp_path: Path
) -> None:
    before = scrape(registry)
    (tmp_path / "1-0.json").write_text('{"schema": 1, "pid": "x"}')
    assert scrape(registry) == before


def test_an_error_of_ours_leaves_the_other_metrics(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "read", lambda *_: 1 / 0)
    assert scrape(registry) == []
