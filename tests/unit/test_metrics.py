"""vLLM's own registry carries the processes of this server, and nothing can break it."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.children import eventually
from vllm_mamba_retire import identity, prometheus, records
from vllm_mamba_retire.keep import KeepCounters
from vllm_mamba_retire.keep_verdict import kept
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

# One of several API servers: it has a sibling that keeps a record, and the folder for metrics.
API_SERVER = """
import multiprocessing, os, struct, sys
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from vllm_mamba_retire import prometheus, records

multiprocessing.current_process().name = sys.argv[1]
records.REFRESH_SECONDS = 0.05
prometheus.expose()
prometheus.expose()
for line in sys.stdin:
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    try:
        text = generate_latest(registry).decode()
    except struct.error:  # prometheus-client read a file that another process is just making
        text = ""
    print(text.replace("\\n", "\\x1f"), flush=True)
"""


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[CollectorRegistry]:
    """A default registry of its own, with our collector, and a record of this process."""
    monkeypatch.setenv("MAMBA_RETIRE_DIR", str(tmp_path))
    made = CollectorRegistry(auto_describe=True)
    monkeypatch.setattr(prometheus, "REGISTRY", made)
    prometheus.expose()
    records.keep(patched())
    yield made
    records.withdraw()


def patched(reason: Reason = Reason.PATCHED, freed: int = 7) -> Record:
    return Record.of(
        Verdict(reason, "by a test."),
        None,
        Counters(states_freed=freed),
        keep=kept("newest"),
        keep_counters=KeepCounters(states_refreshed=5, states_still_there=3),
    )


Samples = list[tuple[str, dict[str, str], float]]


def scrape(registry: CollectorRegistry) -> Samples:
    return parsed(generate_latest(registry).decode())


def parsed(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return [(s.name, dict(s.labels), s.value) for family in families for s in family.samples]


def test_a_scrape_shows_verdict_and_counters(registry: CollectorRegistry) -> None:
    samples = {name: (labels, value) for name, labels, value in scrape(registry)}
    labels, value = samples["vllm_mamba_retire_info"]
    assert (labels["verdict"], labels["pid"], value) == ("patched", str(os.getpid()), 1)
    assert labels["keep"] == "on"
    assert samples["vllm_mamba_retire_states_freed_total"][1] == 7
    assert samples["vllm_mamba_retire_states_refreshed_total"][1] == 5
    assert samples["vllm_mamba_retire_states_still_there_total"][1] == 3


def test_exposed_twice_is_scraped_once(registry: CollectorRegistry) -> None:
    once = scrape(registry)
    prometheus.expose()
    assert scrape(registry) == once


def test_only_processes_started_by_this_server_are_its_own(
    registry: CollectorRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", STRANGER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "kept\n"
        assert _pids(registry) == {os.getpid(), child.pid}
        monkeypatch.setattr(identity, "parent", lambda _pid: None)
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


def test_the_metrics_page_names_each_metric_and_its_labels() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `vllm_mamba")]
    listed = {row[1].strip(" `"): set(re.findall(r"`(\w+)`", row[3])) for row in rows}
    for family in prometheus.families([]):
        name = family.name + ("_total" if family.type == "counter" else "")
        assert listed[name] == set(vars(family)["_labelnames"])


class ApiServer:
    """One of several API servers that were started by this process."""

    def __init__(self, name: str, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", API_SERVER, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)},
        )

    def scrape(self) -> Samples:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return parsed(self.process.stdout.readline().replace("\x1f", "\n"))

    def value(self, name: str, **labels: str) -> float | None:
        found = [v for n, own, v in self.scrape() if n == name and labels.items() <= own.items()]
        assert len(found) < 2, found
        return found[0] if found else None


@pytest.fixture
def servers(registry: CollectorRegistry, tmp_path: Path) -> Iterator[list[ApiServer]]:
    """Two API servers beside this process, which has a record."""
    folder = tmp_path / "metrics"
    folder.mkdir()
    started = [ApiServer(name, folder) for name in ("ApiServer_0", "ApiServer_1")]
    yield started
    for one in started:
        one.process.kill()
        one.process.communicate()


def test_several_api_servers_show_each_process_once(
    servers: list[ApiServer],
) -> None:
    freed = "vllm_mamba_retire_states_freed_total"
    for server in servers:
        eventually(functools.partial(server.value, freed, pid=str(os.getpid())))
        assert server.value(freed) == 7
        assert server.value("vllm_mamba_retire_info", verdict="patched", keep="on") == 1
    records.keep(patched(freed=9))
    eventually(lambda: servers[1].value(freed) == 9)


def test_several_api_servers_show_zero_for_a_former_verdict(
    servers: list[ApiServer],
) -> None:
    info = "vllm_mamba_retire_info"
    eventually(lambda: servers[1].value(info, verdict="patched") == 1)
    records.keep(patched(Reason.CONFLICT))
    eventually(lambda: servers[1].value(info, verdict="conflict") == 1)
    assert servers[1].value(info, verdict="patched") == 0


def test_several_api_servers_count_a_returning_record_once(
    servers: list[ApiServer],
) -> None:
    info, freed = "vllm_mamba_retire_info", "vllm_mamba_retire_states_freed_total"
    eventually(lambda: servers[1].value(info) == 1)
    records.withdraw()
    eventually(lambda: servers[1].value(info) == 0)
    records.keep(patched(freed=8))
    eventually(lambda: servers[1].value(info) == 1)
    eventually(lambda: servers[1].value(freed) == 8)
