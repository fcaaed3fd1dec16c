"""A real server and a real client, with the package installed and nothing else done."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.server.servers import BLOCKS, BUDGET, PATIENCE, Server, eventually, prompt
from vllm_mamba_retire.releases import Status
from vllm_mamba_retire.verdict import Reason

LONG = prompt(1)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The control: the same installation, told to do nothing."""
    with Server(tmp_path_factory.mktemp("stock"), MAMBA_RETIRE="off") as server:
        yield server.wait()


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("patched")) as server:
        yield server.wait()


@dataclass
class PromptMetrics:
    """One cold prompt as the client and ``/metrics`` see it.

    `usage` is the most of the pool that was in use, as a fraction.
    """

    tokens: list[int]
    usage: float
    preemptions: float
    prompt_tokens: float


@pytest.fixture(scope="module")
def seen(stock: Server, patched: Server) -> dict[str, PromptMetrics]:
    """The same cold prompt, streamed from both."""
    return {"stock": _watch(stock), "patched": _watch(patched)}


def _watch(server: Server) -> PromptMetrics:
    with server.sampled("kv_cache_usage_perc") as usage:
        tokens = [token for piece in server.stream(LONG) for token in piece]
    return PromptMetrics(
        tokens,
        max(usage),
        server.metric("num_preemptions_total"),
        server.metric("prompt_tokens_total"),
    )


@pytest.fixture
def leaks(status: Status) -> bool:
    """Whether stock vLLM of this release does."""
    return status is Status.LIVE


def test_both_generate_the_same_tokens(seen: dict[str, PromptMetrics]) -> None:
    assert len(seen["patched"].tokens) == 8
    assert seen["patched"].tokens == seen["stock"].tokens


def test_the_output_depends_on_what_earlier_chunks_computed(
    seen: dict[str, PromptMetrics], patched: Server
) -> None:
    """Without this, "the same tokens" would say nothing about states."""
    last_chunk = len(LONG) % BUDGET
    other = [*prompt(2)[:-last_chunk], *LONG[-last_chunk:]]
    assert patched.complete(other) != seen["patched"].tokens


def test_the_same_prompt_again_is_a_prefix_hit(
    seen: dict[str, PromptMetrics], patched: Server
) -> None:
    """Its answer is compared in the engine lane. Not here: behind a server on a CPU, stock vLLM and
    0.30.0 alike, with scheduling ahead or without, answer a hit differently from a cold prompt."""
    patched.complete(LONG)
    hits = patched.metric("prefix_cache_hits_total")
    patched.complete(LONG)
    assert patched.metric("prefix_cache_hits_total") > hits


def test_metrics_show_roll_backs_on_stock_and_none_when_patched(
    seen: dict[str, PromptMetrics], leaks: bool
) -> None:
    assert (seen["stock"].preemptions > 0) == leaks
    assert seen["patched"].preemptions == 0


def test_metrics_show_a_full_pool_on_stock_and_room_when_patched(
    seen: dict[str, PromptMetrics], leaks: bool
) -> None:
    # 35 attention blocks of the prompt, and per Mamba group two states and one for the lag.
    needed = (35 + 3 * 3) / (BLOCKS - 1)
    assert seen["patched"].usage <= needed + 0.01
    assert (seen["stock"].usage > 0.9) == leaks


def test_the_client_is_told_the_same_prompt_tokens(seen: dict[str, PromptMetrics]) -> None:
    assert seen["stock"].prompt_tokens == seen["patched"].prompt_tokens == len(LONG)


def test_every_process_has_a_record_and_the_engine_core_counts(
    seen: dict[str, PromptMetrics], patched: Server, leaks: bool
) -> None:
    verdict = Reason.PATCHED if leaks else Reason.NATIVE
    by_role = {entry.role: entry for entry in patched.entries()}
    assert sorted(by_role) == ["API server", "engine core", "worker"]
    for role in ("API server", "engine core"):
        assert by_role[role].verdict is not None
        assert by_role[role].verdict.reason is verdict
    assert by_role["worker"].verdict is None, "a worker has no manager to patch"
    if leaks:
        assert by_role["API server"].counters.states_freed == 0
        eventually(
            lambda: any(
                e.counters and e.counters.states_stock_would_keep for e in patched.entries()
            ),
            "the engine core's counters are written",
        )


def test_metrics_have_each_process_once_and_the_states_freed(
    seen: dict[str, PromptMetrics], patched: Server, leaks: bool
) -> None:
    verdict = "patched" if leaks else "native"
    counted = {s.labels["role"]: s for s in patched.own_metrics() if s.name.endswith("_info")}
    assert {role: s.labels["verdict"] for role, s in counted.items()} == {
        "API server": verdict,
        "engine core": verdict,
        "worker": "armed",
    }
    assert {s.labels["pid"] for s in counted.values()} == {str(e.pid) for e in patched.entries()}
    assert {s.value for s in counted.values()} == {1}
    if leaks:
        eventually(lambda: _freed(patched) > 0, "what the engine core freed is in the metrics")


def _freed(server: Server) -> float:
    name = "vllm_mamba_retire_states_stock_would_keep_total"
    found = [s for s in server.own_metrics() if s.name == name]
    assert sorted(s.labels["role"] for s in found) == ["API server", "engine core"]
    return sum(s.value for s in found)


def test_metrics_carry_nothing_where_the_package_is_off(stock: Server) -> None:
    assert stock.own_metrics() == []
    assert stock.metric("prompt_tokens_total") > 0  # control: the others are there


def test_vllm_exposes_its_metrics_that_alerts_and_dashboard_use(patched: Server) -> None:
    deploy = Path(__file__).parents[2] / "docs" / "deploy"
    texts = [(deploy / name).read_text() for name in ("alerts.yaml", "dashboard.json")]
    named = {name for text in texts for name in re.findall(r"vllm:[a-z_]+", text)}
    assert len(named) >= 4
    assert named <= {sample.name for sample in patched.scrape()}


def test_a_broken_record_costs_its_own_metrics_only(
    seen: dict[str, PromptMetrics], patched: Server
) -> None:
    before = {s.labels["pid"] for s in patched.own_metrics()}
    worker = next(entry for entry in patched.entries() if entry.role == "worker")
    (path,) = patched.records.glob(f"{worker.pid}-*.json")
    text = path.read_text()
    path.write_text('{"schema": 1')
    try:
        assert {s.labels["pid"] for s in patched.own_metrics()} == before - {str(worker.pid)}
        assert patched.metric("prompt_tokens_total") > 0
    finally:
        path.write_text(text)


def test_nothing_runs_unpatched_beside_a_patched_server(patched: Server) -> None:
    assert not patched.survey().finding


def test_an_engine_core_that_is_off_is_reported_but_no_finding(stock: Server, leaks: bool) -> None:
    seen = stock.survey()
    assert [entry.role for entry in seen.processes] == []
    (core,) = seen.without_record
    assert ("MAMBA_RETIRE=off" in core.sentence) == leaks
    assert not seen.finding


def test_clients_lost_during_a_prefill_leave_nothing_behind(stock: Server, patched: Server) -> None:
    answers = []
    for server in (stock, patched):
        for seed in (11, 12):
            server.hang_up(prompt(seed), server.computing)
            eventually(server.idle, "the blocks of the client that vanished are free")
        answers.append(server.complete(prompt(14)))
    assert answers[0] == answers[1]


def test_a_stream_left_half_read_leaves_nothing_behind(patched: Server) -> None:
    stream = patched.stream(prompt(13), output=2000)
    next(stream)
    stream.close()  # type: ignore[attr-defined]  # it is a generator
    eventually(patched.idle, "the blocks are free")


@pytest.mark.parametrize("grace", [0, 60])
def test_a_server_stopped_during_a_prefill_removes_its_records(tmp_path: Path, grace: int) -> None:
    with Server(tmp_path, f"--shutdown-timeout={grace}") as server:
        server.wait()
        family = server.family()
        before = {entry.pid for entry in server.entries()}
        assert len(before) == 3
        # The client goes too: the HTTP server of vLLM waits for open connections.
        server.hang_up(prompt(21), lambda: server.computing() and server.terminate())
        assert server.process.wait(PATIENCE) == 0
        psutil.wait_procs(family, timeout=PATIENCE)
        assert server.entries() == []
        assert list(server.records.glob("*.json")) == []
