"""Case files: what a case becomes, and complaints that name file, case and field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_mamba_retire.replay.cases import Case, read_cases
from vllm_mamba_retire.replay.expectations import differences
from vllm_mamba_retire.replay.runs import Run, Step
from vllm_mamba_retire.replay.scenario import Arrival, InputError, Scenario
from vllm_mamba_retire.replay.sides import Comparison

PLAIN = {"id": "a", "block": 1568, "budget": 4096, "prompt": 10_000}


def _read(tmp_path: Path, *entries: Any) -> tuple[Case, ...]:
    path = tmp_path / "cases.yaml"
    path.write_text(yaml.safe_dump({"cases": list(entries)}))
    return read_cases(path)


def test_a_case_has_a_scenario_for_each_of_its_lags_and_pools(tmp_path: Path) -> None:
    (case,) = _read(
        tmp_path, PLAIN | {"pool": [40, 42], "expect": {"lag0": {"fixed": 2}, "lag2": {}}}
    )
    assert [(s.lag, s.pool) for s in case.scenarios] == [
        (lag, pool) for lag in (0, 2) for pool in (40, 41, 42)
    ]


def test_an_entry_without_a_prompt_is_kept_and_not_replayed(tmp_path: Path) -> None:
    (case,) = _read(tmp_path, {name: PLAIN[name] for name in ("id", "block", "budget")})
    assert case.scenarios == ()


def test_a_case_says_on_which_releases_its_figures_hold(tmp_path: Path) -> None:
    (case,) = _read(tmp_path, PLAIN | {"releases": ">=0.26,<0.30"})
    assert [case.holds_on(r) for r in ("0.25.1", "0.26.0", "0.29.0", "0.30.0")] == [
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": 8192}, "budget: 4096 tokens hold no block of 8192 tokens"),
        ({"block": -1}, "block: -1 is less than 1"),
        ({"block": "big"}, "block: 'big' is not a whole number"),
        ({"block": True}, "block: True is not a whole number"),
        ({"lag": -1}, "lag: -1 is less than 0"),
        ({"prompt": 0}, "prompt: 0 is less than 1"),
        ({"pool": 8}, "pool: 8 blocks are less than the 10 that the longest request needs alone"),
        ({"pool": [9, 3]}, "pool: [9, 3] is neither a number of blocks nor [least, most]"),
        ({"retention_interval": 100}, "retention_interval: 100 is not a multiple of the block"),
        ({"drafter": "oracle"}, "drafter: oracle is neither mtp nor ngram"),
        ({"accepted": 2}, "accepted: 2 of 0 draft tokens"),
        ({"blocks": 3}, "blocks: unknown field"),
        ({"releases": "new"}, "releases: 'new' is no version specifier"),
        ({"layout": [{"layers": 3}]}, "layout: not a list of {layers, bytes_per_token}"),
        ({"expect": 3}, "expect: 3 is not a mapping"),
        ({"requests": [{"prompt": 5}]}, "requests: give prompt and output with each request"),
    ],
)
def test_bad_input_is_one_sentence_with_file_case_and_field(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        _read(tmp_path, PLAIN | change)
    assert str(caught.value).startswith(f"{tmp_path / 'cases.yaml'}: case a: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([], "requests: there is no list"),
        ([{"output": 3}], "requests: 1 has no prompt"),
        ([{"prompt": 5, "colour": 1}], "colour: unknown field"),
        ([{"id": "x", "prompt": 5}, {"id": "x", "prompt": 5}], "requests: id x is used twice"),
        ([{"prompt": 5, "after": "y"}], "requests: 1 waits for y, which is not above it"),
    ],
)
def test_bad_requests_are_named(tmp_path: Path, requests: Any, message: str) -> None:
    entry = {name: PLAIN[name] for name in ("id", "block", "budget")} | {"requests": requests}
    with pytest.raises(InputError, match=message):
        _read(tmp_path, entry)


@pytest.mark.parametrize("text", ["cases: {", "[]", "cases: 3", "other: []"])
def test_a_file_that_is_no_case_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cases.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=str(path)):
        read_cases(path)


def test_a_missing_field_and_a_repeated_id_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="case a: block: missing"):
        _read(tmp_path, {"id": "a", "budget": 4096})
    with pytest.raises(InputError, match="id: a is used twice"):
        _read(tmp_path, PLAIN, PLAIN)


def _run(deepest: int, **more: Any) -> Run:
    step = Step(3136, 1, 1, 0, (deepest,), deepest, used=9, preempted=2, redone=7, hit=0)
    return Run("0.29.0", pool=99, steps=[step], **more)


def _case(**figures: Any) -> tuple[Case, list[Comparison]]:
    scenario = Scenario("a", 1568, 4096, (Arrival("request", 10_000),))
    case = Case("a", scenarios=(scenario,), figures=figures, block_bytes=2**20)
    return case, [Comparison(scenario, {"stock": _run(64), "fixed": _run(3)})]


@pytest.mark.parametrize(
    "figures",
    [
        {"expect": {"stock": 64, "fixed": 3}},
        {"expect": {"lag1": {"stock": 64}, "lag2": {"stock": 1}}},
        {"expect": {"fixed_at_most": 3, "stock_at_least": 64}},
        {"expect": {"stock": {"rollbacks": 2, "redone_tokens": 7, "scheduled_tokens": 3136}}},
        {"expect": {"same_with_and_without": False}},
        {"at_3136_tokens": {"stock": 64, "fixed": 3}},
        {"mib_per_group": {"stock": 64.0, "fixed": 3.0}},
    ],
)
def test_right_figures_pass(figures: dict[str, Any]) -> None:
    assert differences(*_case(**figures)) == []


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"expect": {"stock": 63}}, "stock peak_states is 64, expected 63"),
        ({"expect": {"lag1": {"fixed": 4}}}, "fixed peak_states is 3, expected 4"),
        ({"expect": {"fixed_at_most": 2}}, "fixed peak_states is 3, expected at most 2"),
        ({"expect": {"stock": {"rollbacks_at_least": 3}}}, "rollbacks is 2, expected at least 3"),
        ({"expect": {"same_with_and_without": True}}, "is False, expected True"),
        ({"at_3136_tokens": {"stock": 63}}, "stock states at 3136 tokens is 64, expected 63"),
        ({"at_100_tokens": {"stock": 63}}, "stock states at 100 tokens is None, expected 63"),
        ({"mib_per_group": {"fixed": 3.01}}, "fixed MiB per group is 3.0, expected 3.01"),
    ],
)
def test_a_wrong_figure_is_told_with_both_values(figures: dict[str, Any], said: str) -> None:
    (sentence,) = differences(*_case(**figures))
    assert said in sentence


def test_a_side_left_out_is_not_compared_and_a_stuck_one_is_told() -> None:
    case, (pair,) = _case(expect={"stock": 1, "fixed": 3})
    assert differences(case, [pair], sides=["fixed"]) == []
    stuck = Comparison(pair.scenario, {"fixed": _run(3, stuck="no room (after step 1)")})
    assert "no room" in differences(case, [stuck], sides=["fixed"])[0]


@pytest.mark.parametrize("figures", [{"expect": {"sotck": 1}}, {"expect": {"stock": {"speed": 1}}}])
def test_unknown_figures_are_refused(figures: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"sotck|speed"):
        differences(*_case(**figures))
