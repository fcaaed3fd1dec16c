"""Plans without vLLM: judgement, remedies, a server's log, and the command around them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from vllm_mamba_retire.cli import app
from vllm_mamba_retire.plan.deployment import Deployment, merge_sources
from vllm_mamba_retire.plan.planner import Replayed, judge, keep_advice, plan, status_of
from vllm_mamba_retire.releases import Status, load_matrix

FIELD = {
    "version": "0.29.0",
    "block": 1568,
    "budget": 4096,
    "prompt": 237_000,
    "groups": 3,
    "attention_groups": 1,
    "pool": 325,
    "block_bytes": 51_380_224,
}
ALIGN_026 = ["--vllm-version", "0.26.0", "--mamba-cache-mode", "align"]
QWEN, NEMOTRON = "Qwen3NextForCausalLM", "NemotronHForCausalLM"
OPTIONS = {"version": "--vllm-version"}
FIGURES = ["--block", "1568", "--budget", "4096", "--prompt", "237000"]
LOGS = Path(__file__).parents[1] / "cases" / "logs"


def _deployment(**changes: Any) -> Deployment:
    return merge_sources({"given": FIELD | changes})


@pytest.mark.parametrize(
    ("changes", "status", "why"),
    [
        ({"version": "0.30.0"}, Status.NATIVE, "carries the fix itself"),
        ({"version": "0.25.1"}, Status.LATENT, "does not reach the defect"),
        ({"mode": "all"}, Status.LIVE, "a state for every block"),
        ({"mode": "none"}, Status.LIVE, "one state a request"),
        ({"prefix_caching": False}, Status.LIVE, "prefix caching is off"),
        ({"asynchronous": False}, Status.LIVE, "no chunk is in flight"),
        ({"drafter": "ngram"}, Status.LIVE, "no chunk is in flight"),
        ({"block": 8192}, Status.LIVE, "takes more than one prefill chunk"),
        ({"scheduled": 3135}, Status.LIVE, "spans one block"),
        ({"lag": 0}, Status.LIVE, "no chunk is in flight"),
        ({"budget": 3135}, Status.LIVE, "spans one block"),
        ({"chunk_limit": 3135}, Status.LIVE, "spans one block"),
        ({"prompt": 2_000}, Status.LIVE, "too short to leak"),
    ],
)
def test_each_way_not_to_be_affected_is_told(
    changes: dict[str, Any], status: Status, why: str
) -> None:
    affected, reason = judge(_deployment(**changes), status)
    assert not affected
    assert why in reason


def test_the_field_report_is_affected_and_gets_its_figures() -> None:
    answer = plan(_deployment(), Status.LIVE)
    assert answer.affected
    assert (answer.stock.states, answer.fixed.states) == (77, 3)
    assert (answer.stock.smallest_pool, answer.fixed.smallest_pool) == (384, 162)
    assert (answer.stock.mib, answer.fixed.mib) == (77 * 3 * 49.0, 3 * 3 * 49.0)
    assert answer.stock.longest_prompt is not None
    assert answer.fixed.longest_prompt is not None
    assert answer.stock.longest_prompt < 237_000 <= answer.fixed.longest_prompt
    assert (answer.stock.concurrency, answer.fixed.concurrency) == (0, 2)


def test_replayed_peaks_take_the_place_of_the_closed_form() -> None:
    answer = plan(
        _deployment(), Status.LIVE, replayed=(Replayed(76, 2, 200_704), Replayed(3, 0, 0))
    )
    assert (answer.stock.states, answer.stock.measured) == (76, "replayed")
    assert answer.stock.smallest_pool == 381
    assert (answer.stock.rollbacks, answer.stock.redone) == (2, 200_704)


def test_a_server_that_is_not_affected_is_the_same_on_both_sides() -> None:
    answer = plan(_deployment(version="0.30.0"), Status.NATIVE)
    assert answer.stock == answer.fixed
    assert answer.remedies == ()


def test_each_setting_named_as_a_remedy_removes_the_leak() -> None:
    settings = {remedy.setting for remedy in plan(_deployment(), Status.LIVE).remedies}
    assert {"--max-num-batched-tokens 3135", "--long-prefill-token-threshold 3135"} <= settings
    assert "--no-async-scheduling" in settings
    assert not _deployment(budget=3135).geometry.leaks
    assert not _deployment(chunk_limit=3135).geometry.leaks
    assert not _deployment(lag=0).geometry.leaks
    (block,) = (s.removeprefix("--block-size ") for s in settings if s.startswith("--block-size"))
    assert not _deployment(block=int(block)).geometry.leaks
    assert "a pool of 384 blocks" in settings


def test_no_advice_to_turn_async_off_if_the_lag_is_larger() -> None:
    remedies = plan(_deployment(lag=2), Status.LIVE).remedies
    assert "--no-async-scheduling" not in {remedy.setting for remedy in remedies}


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("0.34.0", Status.NATIVE),
        ("0.99.0", Status.NATIVE),
        ("0.30.1.dev7", Status.NATIVE),
        ("0.29.0+cu129", Status.LIVE),
        ("0.29.1.dev123", None),
        ("0.28.1.dev280+gabc", None),
        ("0.28.0rc1", None),
        ("0.29.1rc1", None),
        ("0.30.0rc1", None),
        ("0.25.2.dev1", None),
        ("0.11.2.dev280", None),
        ("0.1.dev14845+g57a314d15.d20260316", None),
        ("0.9.0", Status.ABSENT),
        (None, None),
    ],
)
def test_a_version_counts_as_its_row_or_as_both_rows_around_it(
    version: str | None, status: Status | None
) -> None:
    assert status_of(version, load_matrix()) is status


@pytest.mark.parametrize(
    ("unknown", "status", "option"),
    [
        ({"version": None, "lag": 1, "mode": "align"}, None, "--vllm-version"),
        ({"version": None, "mode": "align"}, Status.LIVE, "--lag"),
        ({"version": "0.27.1", "prefix_caching": True}, Status.LIVE, "--mamba-cache-mode"),
        ({"drafter": "unknown"}, Status.LIVE, "--lag"),
        ({"executor": "org.executor.Own"}, Status.LIVE, "--lag"),
    ],
)
def test_what_is_only_assumed_and_could_turn_the_answer_is_named(
    unknown: dict[str, Any], status: Status | None, option: str
) -> None:
    answer = plan(_deployment(**unknown), status)
    assert answer.affected is None
    assert answer.reason.startswith("Affected if ")
    assert option in answer.reason
    assert answer.stock.states == 77


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({"version": "0.27.1"}, "none"),
        ({"version": "0.28.0"}, "align"),
        ({"version": "0.27.1", "prefix_caching": True, "architecture": QWEN}, "align"),
        ({"version": "0.27.1", "prefix_caching": True, "architecture": NEMOTRON}, "all"),
        ({"version": "0.28.0", "prefix_caching": True, "architecture": NEMOTRON}, "align"),
        ({"version": "0.28.0", "prefix_caching": False, "architecture": QWEN}, "none"),
    ],
)  # fmt: skip
def test_the_mode_is_the_releases_default_for_the_model(changes: dict[str, Any], mode: str) -> None:
    assert _deployment(**changes).mode == mode


@pytest.mark.parametrize(
    ("changes", "lag"),
    [
        ({}, 1),
        ({"asynchronous": False}, 0),
        ({"pipeline": 4, "asynchronous": False}, 3),
        ({"pipeline": 4}, 4),
        ({"pipeline": 4, "runner": "V1"}, 3),
        ({"pipeline": 4, "version": "0.28.0"}, 3),
        ({"pipeline": 2, "version": None}, 1),
        ({"lag": 2, "asynchronous": False}, 2),
        ({"padded_drafts": False}, 0),
        ({"executor": "ray"}, 1),
        ({"executor": "ray", "ray_v2": False}, 0),
        ({"executor": "mp", "ray_v2": False}, 1),
        ({"drafter": "draft_model"}, 1),
        ({"drafter": "draft_model", "version": "0.27.1", "mode": "align"}, 0),
        ({"drafter": "mtp", "version": "0.27.1", "mode": "align"}, 1),
    ],
)
def test_the_lag_follows_from_scheduling_pipeline_and_runner(
    changes: dict[str, Any], lag: int
) -> None:
    assert _deployment(**changes).lag == lag


def test_every_row_follows_the_mode() -> None:
    answer = plan(_deployment(mode="none", spec=2), Status.LIVE)
    assert answer.stock == answer.fixed
    assert answer.stock.states == 3
    assert answer.stock.mib == 3 * 3 * 49.0
    assert answer.stock.smallest_pool == 152 + 3 * 3 + 1
    assert plan(_deployment(mode="all"), Status.LIVE).stock.states == 152


def test_the_version_may_come_with_what_stood_around_it() -> None:
    assert merge_sources({"given": FIELD | {"version": "v0.27.1,"}}).version == "0.27.1"


def test_more_scheduled_tokens_than_the_limit_are_not_counted() -> None:
    states = plan(_deployment(budget=32_768, scheduled=32_000), Status.LIVE).stock.states
    assert states == _deployment(budget=32_000).geometry.stock_states(237_000)


def test_of_two_sources_the_first_is_believed_and_named() -> None:
    deployment = merge_sources(
        {"given": {"block": 1568, "lag": None}, "log": {**FIELD, "block": 16}}
    )
    assert (deployment.block, deployment.origins["block"]) == (1568, "given")
    assert (deployment.budget, deployment.origins["budget"]) == (4096, "log")
    assert (deployment.lag, deployment.origins["lag"]) == (1, "default of vLLM 0.29.0")
    assert (deployment.spec, deployment.origins["spec"]) == (0, "assumed")


def _plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", "--no-replay", *arguments])


def test_plan_from_given_figures_names_their_sources() -> None:
    flags = [
        text
        for name, value in FIELD.items()
        for text in (OPTIONS.get(name, f"--{name.replace('_', '-')}"), str(value))
    ]
    result = _plan(*flags, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 1
    assert document["schema"] == 1
    assert document["affected"] is True
    assert document["stock"]["measured"] == "closed form"
    assert document["deployment"]["block"] == {"value": 1568, "from": "given"}
    assert document["deployment"]["groups"] == {"value": 3, "from": "given"}
    assert document["deployment"]["align"] == {"value": True, "from": "default of vLLM 0.29.0"}


def test_a_log_and_the_figures_it_lacks_make_a_plan() -> None:
    result = _plan("--log", str(LOGS / "two-boots.log"), "--groups", "3", "--attention-groups", "1")
    assert result.exit_code == 1
    assert "pool 241 (estimate from the log)" in result.stdout
    assert "by closed form" in result.stdout


def test_a_log_without_groups_counts_no_pool_and_asks_for_them() -> None:
    result = _plan("--log", str(LOGS / "two-boots.log"))
    assert result.exit_code == 1
    assert "peak states" in result.stdout
    assert "smallest pool" not in result.stdout
    assert "give --groups and --attention-groups, or --model" in result.stdout


def test_a_fixed_server_is_not_affected_if_its_log_lacks_values() -> None:
    assert _plan("--log", str(LOGS / "native-with-nccl.log")).exit_code == 0


def test_a_pasted_excerpt_is_decided_when_its_mode_is_given() -> None:
    pasted = ("--log", str(LOGS / "pasted.md"), "--budget", "8192")
    assert _plan(*pasted).exit_code == 2
    assert "Affected if mamba_cache_mode is align (--mamba-cache-mode)" in _plan(*pasted).stdout
    assert _plan(*pasted, "--mamba-cache-mode", "align").exit_code == 1
    assert _plan(*pasted, "--mamba-cache-mode", "all").exit_code == 0


def test_memory_is_turned_into_blocks() -> None:
    result = _plan(
        *("--block", "1568", "--budget", "4096", "--prompt", "100000", "--json"),
        *("--groups", "3", "--attention-groups", "1"),
        *("--block-bytes", str(49 * 2**20), "--kv-memory", "9.8"),
    )
    assert json.loads(result.stdout)["deployment"]["pool"]["value"] == 204


def test_a_server_on_a_fixed_release_is_fine() -> None:
    result = _plan(
        *("--block", "1568", "--budget", "4096", "--prompt", "237000"), "--vllm-version", "0.30.0"
    )
    assert result.exit_code == 0
    assert "carries the fix itself" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "not known: give --block (vLLM prints"),
        ([], "--budget (vLLM's max_num_batched_tokens), --prompt (tokens"),
        (["--block", "1568", "--prompt", "9"], "not known: give --budget"),
        (
            [
                *FIGURES,
                "--block",
                "8192",
                "--vllm-version",
                "0.26.0",
                "--mamba-cache-mode",
                "align",
            ],
            "must be <= max_num_batched_tokens",
        ),
        ([*FIGURES, "--vllm-version", "2.28.9"], "2.28.9 is no vLLM release"),
        ([*FIGURES, "--vllm-version", "0.28.1"], "0.28.1 is no vLLM release"),
        ([*FIGURES, "--mamba-cache-mode", "some"], "'some' is neither align, all nor none"),
        (["--block", "-3", "--budget", "1024", "--prompt", "9"], "block: -3 is less than 1"),
        ([*FIGURES, "--groups", "3", "--attention-groups", "1", "--pool", "4"], "pool: 4"),
        (["--model", "nowhere"], "model: nowhere: No such file or directory"),
        (["--log", "nowhere"], "log: nowhere: No such file or directory"),
        (["--", "--max-num-batched-tokens", "many"], "'many' is not a whole number"),
        (["compose.yaml"], "file: compose.yaml: No such file"),
        (
            ["--block", "1568", "--budget", "4096", "--prompt", "9", "--vllm-version", "new"],
            "vllm_version: 'new' is no version",
        ),
        (
            ["--block", "1568", "--budget", "4096", "--prompt", "9", "--kv-memory", "8"],
            "kv_memory: blocks cannot be counted",
        ),
    ],
)
def test_bad_input_exits_2_with_an_error_that_names_the_field(
    arguments: list[str], said: str
) -> None:
    result = _plan(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_chart_without_matplotlib_tells_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    given = ["--block", "1568", "--budget", "4096", "--prompt", "237000"]
    result = _plan(*given, "--chart", str(tmp_path / "a.svg"))
    assert result.exit_code == 2
    assert "pip install 'vllm-mamba-retire[charts]'" in result.stderr


def test_the_same_plan_draws_the_same_file(tmp_path: Path) -> None:
    drawn = []
    for folder in ("one", "two"):
        chart = tmp_path / folder / "a.svg"
        chart.parent.mkdir()
        given = ["--block", "1568", "--budget", "4096", "--prompt", "237000"]
        _plan(*given, "--chart", str(chart))
        drawn.append(chart.read_bytes())
    assert drawn[0] == drawn[1]


def test_when_keep_newest_helps_is_computed_from_the_pool() -> None:
    """65 + 3 x 3 blocks are held, 165 of 239 are free, a prompt takes 65 + 3 x 33 of them."""
    server = _deployment(pool=240, prompt=100_400)
    for status in (Status.LIVE, Status.NATIVE):
        advice = keep_advice(server, status)
        assert advice is not None
        assert "2 other prompts of 100,400 tokens" in advice
        assert "MAMBA_RETIRE_KEEP=newest" in advice
    assert "1 other prompt of" in (keep_advice(server.replace(pool=200), Status.LIVE) or "")


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, Status.LATENT),
        ({}, None),
        ({"mode": "none"}, Status.LIVE),
        ({"pool": None}, Status.LIVE),
        ({"groups": None}, Status.LIVE),
        ({"block": None}, Status.LIVE),
        ({"prompt": 1568}, Status.LIVE),
        ({"pool": 75}, Status.LIVE),
    ],
)
def test_where_nothing_is_kept_or_counted_there_is_no_advice(
    changes: dict[str, Any], status: Status | None
) -> None:
    server = _deployment(**{"pool": 240, "prompt": 100_400, **changes})
    assert keep_advice(server, status) is None
