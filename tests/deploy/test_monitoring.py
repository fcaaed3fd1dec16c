"""Alert rules and dashboard: read as Prometheus and Grafana read them, about metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from vllm_mamba_retire.cli.processes import prometheus
from vllm_mamba_retire.keep import KeepCounters
from vllm_mamba_retire.processes import Node, Survey
from vllm_mamba_retire.records import Record
from vllm_mamba_retire.retirement import Counters
from vllm_mamba_retire.verdict import Reason, Verdict

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
RULES = DEPLOY / "alerts.yaml"
DASHBOARD = json.loads((DEPLOY / "dashboard.json").read_text())
# What Prometheus and a scrape of vLLM add; tests/server holds vLLM's names against a real server.
VLLM = re.compile(r"vllm:[a-z_]+")
TARGET_LABELS = {"job", "instance"}


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return list(group["rules"])


def panels() -> list[tuple[str, str]]:
    """Title and expression of everything that the dashboard draws, with its variables filled in."""
    return [
        (panel["title"], target["expr"].replace("$__rate_interval", "1m"))
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    ]


def expressions() -> list[str]:
    return [*(rule["expr"] for rule in rules()), *(expression for _, expression in panels())]


def selectors(node: object) -> Iterator[Any]:
    """Every choice of series in a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
        return
    children = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "vector_selector")]
    for child in (*children, *getattr(node, "args", ())):
        if child is not None:
            yield from selectors(child)


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Name -> labels of every metric of this package."""
    record = Record.of(
        Verdict(Reason.PATCHED, "by a test."), None, Counters(), keep_counters=KeepCounters()
    )
    text = prometheus([Node(survey=Survey([record]))])
    found = re.findall(r"^(\w+)(?:\{(.*)\})? ", text, re.MULTILINE)
    return {name: set(re.findall(r'(\w+)="', labels)) for name, labels in found}


@pytest.mark.parametrize("expression", expressions())
def test_expressions_parse_and_use_existing_metrics_and_labels(
    expression: str, exposed: dict[str, set[str]]
) -> None:
    found = list(selectors(promql_parser.parse(expression)))
    assert found
    for selector in found:
        if not VLLM.fullmatch(selector.name):
            labels = {matcher.name for matcher in selector.matchers.matchers}
            assert labels <= exposed[selector.name] | TARGET_LABELS


def test_verdicts_in_doubt_are_those_of_the_package() -> None:
    doubtful = sorted(r.value for r in Reason if Verdict(r, "").in_doubt)
    listed = {
        matcher.value
        for expression in expressions()
        for selector in selectors(promql_parser.parse(expression))
        for matcher in selector.matchers.matchers
        if matcher.name == "verdict"
    }
    assert listed == {"|".join(doubtful)}


def test_rules_say_what_is_so_and_what_to_do() -> None:
    for rule in rules():
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"[1-9]\d*m", rule["for"])
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
        assert "vllm-mamba-retire status" in str(rule["annotations"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_rules_fire_when_they_should_and_only_then() -> None:
    cases = Path(__file__).with_name("alerts_test.yaml")
    for command in (["check", "rules", str(RULES)], ["test", "rules", str(cases)]):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def lost(data: Any, known: Any) -> Iterator[str]:
    """What of a document is not in what was read of it."""
    if isinstance(data, dict) and isinstance(known, dict):
        for key, value in data.items():
            if key in known:
                yield from lost(value, known[key])
            else:
                yield key
    elif isinstance(data, list) and isinstance(known, list) and len(data) == len(known):
        for one, other in zip(data, known, strict=True):
            yield from lost(one, other)
    elif data != known:
        yield str(data)


def as_grafana_reads(document: dict[str, Any]) -> Any:
    """The dashboard in the types that are made from Grafana's schema: unknown fields are gone."""
    plugins.register_default_plugins()
    return json.loads(json.dumps(Dashboard.from_json(document), cls=JSONEncoder))


def test_grafana_knows_every_field_of_the_dashboard() -> None:
    assert list(lost(DASHBOARD, as_grafana_reads(DASHBOARD))) == []


@pytest.mark.parametrize(("right", "wrong"), [("gridPos", "gridpos"), ("expr", "expression")])
def test_grafana_does_not_know_a_misspelt_field(right: str, wrong: str) -> None:
    document = json.loads(json.dumps(DASHBOARD).replace(f'"{right}"', f'"{wrong}"'))
    assert set(lost(document, as_grafana_reads(document))) == {wrong}


def test_panels_are_numbered_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_the_pool_stands_beside_what_is_freed() -> None:
    drawn = " ".join(expression for _, expression in panels())
    for name in ("vllm:kv_cache_usage_perc", "states_stock_would_keep_total", "verdict="):
        assert name in drawn
