"""What `status` says of processes, to people, to programs and to Prometheus."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from vllm_mamba_retire.cli import processes
from vllm_mamba_retire.keep import KeepCounters
from vllm_mamba_retire.keep_verdict import kept, unavailable
from vllm_mamba_retire.processes import Node, Survey, UnrecordedEngine
from vllm_mamba_retire.records import Record
from vllm_mamba_retire.retirement import Counters
from vllm_mamba_retire.verdict import Reason, Verdict

CORE = Record(
    pid=71,
    started=1,
    place="host pid:[1]",
    role="engine core",
    verdict=Verdict(Reason.PATCHED, "vLLM 0.29.0 retires across null gaps."),
    version="0.1.0",
    vllm="0.29.0",
    manager_file="/site/vllm/v1/core/single_type_kv_cache_manager.py",
    sha256="ab",
    decided_at=1.0,
    counters=Counters(calls=9, states_freed=47, states_stock_would_keep=43),
)
WORKER = replace(CORE, pid=72, role="worker", verdict=None, counters=None, decided_at=None)
DRIFTED = replace(CORE, pid=73, verdict=Verdict(Reason.DRIFTED, "other code."), counters=None)
KEEPING = replace(CORE, pid=76, keep=kept("newest"), keep_counters=KeepCounters(40, 12))
NOT_KEPT = replace(CORE, pid=77, keep=unavailable("the methods are those of no known release"))
LEFT_OUT = UnrecordedEngine(
    74, "0.29.0", "/site/vllm", "was left out by VLLM_PLUGINS.", finding=True
)
OFF = UnrecordedEngine(
    75, "0.29.0", "/site/vllm", "MAMBA_RETIRE=off; vLLM is left as it is.", finding=False
)


def shown(*nodes: Node) -> str:
    out = io.StringIO()
    processes.show(Console(file=out, width=160), nodes)
    return out.getvalue()


def samples(*nodes: Node) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(processes.prometheus(nodes)):
        for sample in family.samples:
            name = sample.name.removeprefix("vllm_mamba_retire_")
            found.setdefault(name, []).append((dict(sample.labels), sample.value))
    return found


@pytest.mark.parametrize(
    ("survey", "finding"),
    [
        (Survey(), False),
        (Survey([CORE, WORKER]), False),
        (Survey([CORE, DRIFTED]), True),
        (Survey([], [OFF]), False),
        (Survey([CORE], [OFF, LEFT_OUT]), True),
    ],
)
def test_which_processes_are_a_finding(survey: Survey, finding: bool) -> None:
    assert Node(survey=survey).finding is finding


def test_a_node_that_cannot_be_asked_is_a_finding() -> None:
    assert Node("far", problem="did not answer in time.").finding


def test_text_names_each_process_with_its_verdict_and_counters() -> None:
    lines = [line.split() for line in shown(Node(survey=Survey([CORE, WORKER]))).splitlines()]
    assert ["71", "engine", "core", "0.29.0", "patched", "47", "43"] in lines
    assert ["72", "worker", "0.29.0", "armed"] in lines


def test_text_shows_keeping_only_where_it_was_requested() -> None:
    assert "keep" not in shown(Node(survey=Survey([CORE]))).replace("stock keeps", "")
    lines = [line.split() for line in shown(Node(survey=Survey([KEEPING, CORE]))).splitlines()]
    assert ["76", "engine", "core", "0.29.0", "patched", "47", "43", "on", "12"] in lines
    assert ["71", "engine", "core", "0.29.0", "patched", "47", "43", "off"] in lines


def test_the_table_fits_into_80_columns() -> None:
    text = shown(Node(survey=Survey([CORE, WORKER, KEEPING])))
    assert max(map(len, text.splitlines())) <= 80
    assert "engine core" in text


def test_keeping_that_is_not_possible_is_said_and_is_no_finding() -> None:
    node = Node(survey=Survey([NOT_KEPT]))
    assert "pid 77 (engine core): keep unavailable: the methods" in shown(node)
    assert not node.finding


def test_text_says_that_nothing_runs() -> None:
    assert "No running vLLM process keeps a record." in shown(Node())


def test_text_marks_findings_and_only_those() -> None:
    text = shown(Node(survey=Survey([CORE, DRIFTED], [LEFT_OUT, OFF])))
    marked = [line for line in text.splitlines() if line.startswith("!")]
    assert len(marked) == 2
    assert "pid 73" in marked[0]
    assert "other code." in marked[0]
    assert "pid 74" in marked[1]
    assert "MAMBA_RETIRE=off" in text


def test_text_names_the_node_where_there_are_several() -> None:
    far = Node("far", problem="did not answer in time.")
    text = shown(Node("near", Survey([CORE])), far)
    assert "near" in text
    assert "! far: did not answer in time." in text


def test_text_from_a_record_is_no_new_line_and_no_terminal_code() -> None:
    hostile = "x\n! pid 1 (engine core) is fine\x1b[2J"
    record = replace(DRIFTED, role=hostile, vllm=hostile, verdict=Verdict(Reason.DRIFTED, hostile))
    core = UnrecordedEngine(78, hostile, hostile, hostile, finding=True)
    node = Node(survey=Survey([record], [core], [hostile]))
    assert [labels["role"] for labels, _ in samples(node)["info"]] == [hostile]
    text = shown(node)
    assert "\x1b" not in text
    assert [line for line in text.splitlines() if line.startswith("! pid 1 ")] == []


def test_json_carries_everything_there_and_back() -> None:
    survey = Survey([CORE, WORKER, DRIFTED, KEEPING], [LEFT_OUT, OFF])
    (data,) = json.loads(json.dumps(processes.as_data([Node("near", survey)])))
    assert (data["node"], data["problem"]) == ("near", None)
    assert Survey.from_data(data) == survey
    keeping = data["processes"][3]
    assert keeping["keep"]["state"] == "on"
    assert keeping["keep_counters"] == {"states_refreshed": 40, "states_still_there": 12}


def test_every_key_of_a_process_is_on_the_page_about_json() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "json.md").read_text()
    (data,) = processes.as_data([Node(survey=Survey([KEEPING]))])
    (process,) = data["processes"]
    keys = {*data, *process, *process["verdict"], *process["counters"]}
    keys |= {*process["keep"], *process["keep_counters"]}
    assert [key for key in sorted(keys) if f"`{key}`" not in text] == []


def test_prometheus_counts_what_was_freed_per_process() -> None:
    found = samples(Node(survey=Survey([CORE, WORKER])))
    labels = {"pid": "71", "role": "engine core"}
    assert found["states_freed_total"] == [(labels, 47)]
    assert found["states_stock_would_keep_total"] == [(labels, 43)]
    assert [labels["verdict"] for labels, _ in found["info"]] == ["patched", "armed"]


def test_prometheus_counts_what_was_kept() -> None:
    found = samples(Node(survey=Survey([KEEPING, CORE])))
    labels = {"pid": "76", "role": "engine core"}
    assert found["states_refreshed_total"] == [(labels, 40)]
    assert found["states_still_there_total"] == [(labels, 12)]
    assert [labels["keep"] for labels, _ in found["info"]] == ["on", "off"]


def test_prometheus_has_the_alert_metric_when_nothing_runs() -> None:
    assert samples(Node())["engine_cores_unpatched"] == [({}, 0)]
    found = samples(Node(survey=Survey([DRIFTED], [LEFT_OUT, OFF])))
    assert found["engine_cores_unpatched"] == [({}, 2)]


def test_prometheus_escapes_what_a_label_cannot_hold() -> None:
    name = 'a "quoted" \\ name'
    assert samples(Node(name))["engine_cores_unpatched"] == [({"node": name}, 0)]
