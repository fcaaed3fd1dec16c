"""Plans without vLLM: judgement, remedies, a server's log, and the command around them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from vllm_mamba_retire.cli import app
from vllm_mamba_retire.plan.deployment import Deployment, settle
from vllm_mamba_retire.plan.planner import judge, plan
from vllm_mamba_retire.plan.serverlog import estimate_pool, read_log
from vllm_mamba_retire.releases import Status
from vllm_mamba_retire.replay.scenario import InputError

FIELD = {"block": 1568, "budget": 4096, "prompt": 237_000, "pool": 325, "block_bytes": 51_380_224}
LOG = """\
(APIServer pid=1) INFO 09-02 13:09:06 [api_utils.py:273] non-default args: {'model_tag': 'm', \
'max_model_len': 262144, 'max_num_batched_tokens': 8192, 'speculative_config': \
{'method': 'mtp', 'num_speculative_tokens': 3}, 'long_prefill_token_threshold': 4096}
(APIServer pid=1) INFO 09-02 13:09:07 [scheduler.py:252] Chunked prefill is enabled with \
max_num_batched_tokens=8192.
(APIServer pid=1) INFO 09-02 13:09:07 [vllm.py:1109] Asynchronous scheduling is enabled.
(EngineCore pid=9) INFO 09-02 13:09:39 [core.py:121] Initializing a V1 LLM engine (v0.27.1) with \
config: model='m', max_seq_len=262144, pipeline_parallel_size=1, enable_prefix_caching=True
(EngineCore pid=9) INFO 09-02 13:09:40 [interface.py:906] Setting attention block size to 1600 \
tokens to ensure that attention page size is >= mamba page size.
(EngineCore pid=9) INFO 09-02 13:10:02 [gpu_worker.py:561] Available KV cache memory: 9.17 GiB
(EngineCore pid=9) INFO 09-02 13:10:03 [kv_cache_utils.py:2179] Maximum concurrency for 262,144 \
tokens per request: 1.00x
"""


def _deployment(**changes: Any) -> Deployment:
    return settle({"given": FIELD}).but(**changes)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    path.write_text(LOG)
    return path


@pytest.mark.parametrize(
    ("changes", "status", "why"),
    [
        ({"version": "0.30.0"}, Status.NATIVE, "carries the fix itself"),
        ({"version": "0.25.1"}, Status.LATENT, "does not reach the defect"),
        ({"align": False}, Status.LIVE, "is not align"),
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


@pytest.mark.parametrize("status", [Status.LIVE, None])
def test_the_field_report_is_affected_and_gets_its_figures(status: Status | None) -> None:
    answer = plan(_deployment(), status)
    assert answer.affected
    assert (answer.stock.states, answer.fixed.states) == (77, 3)
    assert (answer.stock.smallest_pool, answer.fixed.smallest_pool) == (384, 162)
    assert (answer.stock.mib, answer.fixed.mib) == (77 * 3 * 49.0, 3 * 3 * 49.0)
    assert answer.stock.longest_prompt is not None
    assert answer.fixed.longest_prompt is not None
    assert answer.stock.longest_prompt < 237_000 <= answer.fixed.longest_prompt
    assert (answer.stock.concurrency, answer.fixed.concurrency) == (0, 2)


def test_replayed_peaks_take_the_place_of_the_closed_form() -> None:
    answer = plan(_deployment(), Status.LIVE, replayed=(76, 3))
    assert (answer.stock.states, answer.stock.measured) == (76, "replayed")
    assert answer.stock.smallest_pool == 381


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


def test_more_in_flight_than_asynchronous_scheduling_is_not_cured_by_turning_it_off() -> None:
    remedies = plan(_deployment(lag=2), Status.LIVE).remedies
    assert "--no-async-scheduling" not in {remedy.setting for remedy in remedies}


def test_of_two_sources_the_first_is_believed_and_named() -> None:
    deployment = settle({"given": {"block": 1568, "lag": None}, "log": {**FIELD, "block": 16}})
    assert (deployment.block, deployment.origins["block"]) == (1568, "given")
    assert (deployment.budget, deployment.origins["budget"]) == (4096, "log")
    assert (deployment.lag, deployment.origins["lag"]) == (1, "assumed")


def test_a_log_gives_the_figures_it_prints(log: Path) -> None:
    assert read_log(log) == {
        "version": "0.27.1",
        "block": 1600,
        "budget": 8192,
        "prompt": 262_144,
        "spec": 3,
        "lag": 1,
        "chunk_limit": 4096,
    }


def test_pool_and_bytes_are_worked_out_of_the_rounded_figures_of_a_log(log: Path) -> None:
    known = {"block": 1600, "spec": 3, "groups": 3, "attention_groups": 1}
    blocks = 164 + 3 * (2 + 3)
    estimate = estimate_pool(log, known)
    assert estimate["pool"] == blocks
    assert estimate["block_bytes"] == pytest.approx(9.17 * 2**30 / blocks, abs=1)


@pytest.mark.parametrize(
    ("line", "lag"),
    [("Asynchronous scheduling is disabled.", 0), ("", None)],
)
def test_the_lag_is_what_the_log_says_or_unknown(log: Path, line: str, lag: int | None) -> None:
    log.write_text(LOG.replace("Asynchronous scheduling is enabled.", line))
    assert read_log(log)["lag"] == lag


@pytest.mark.parametrize(
    ("line", "field"),
    [("Setting attention block size to", "block"), ("max_num_batched_tokens", "budget")],
)
def test_a_log_without_a_needed_line_is_refused_with_the_line(
    log: Path, line: str, field: str
) -> None:
    log.write_text(LOG.replace(line, "something else"))
    with pytest.raises(InputError, match=f"no line '.*', which tells the {field}"):
        read_log(log)


def _plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", "--no-replay", *arguments])


def test_the_command_plans_from_given_figures_and_tells_where_they_come_from() -> None:
    flags = [
        text
        for name, value in FIELD.items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    result = _plan(*flags, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 1
    assert document["schema"] == 1
    assert document["affected"] is True
    assert document["stock"]["measured"] == "closed form"
    assert document["deployment"]["block"] == {"value": 1568, "from": "given"}
    assert document["deployment"]["groups"] == {"value": 3, "from": "assumed"}


def test_the_command_plans_from_a_log_and_says_what_is_an_estimate(log: Path) -> None:
    result = _plan("--log", str(log))
    assert result.exit_code == 1
    assert "pool 179 (estimate from the log)" in result.stdout
    assert "by closed form" in result.stdout


def test_memory_is_turned_into_blocks() -> None:
    result = _plan(
        *("--block", "1568", "--budget", "4096", "--prompt", "100000", "--json"),
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
        ([], "block: not known; give --block"),
        (["--block", "1568"], "budget: not known"),
        (["--block", "1568", "--budget", "1024", "--prompt", "9"], "budget: 1024 tokens hold no"),
        (["--block", "-3", "--budget", "1024", "--prompt", "9"], "block: -3 is less than 1"),
        (["--block", "1568", "--budget", "4096", "--prompt", "9000", "--pool", "4"], "pool: 4"),
        (["--model", "nowhere"], "model: nowhere: No such file or directory"),
        (["--log", "nowhere"], "log: nowhere: No such file or directory"),
        (["--", "--max-model-len", "3"], "model: serving flags need a model"),
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
def test_bad_input_ends_with_exit_2_and_a_sentence_that_names_the_field(
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
