"""``replay`` and ``plan`` as an operator runs them, on the release on the path."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from packaging.version import Version
from typer.testing import CliRunner, Result

from vllm_mamba_retire.cli import app
from vllm_mamba_retire.releases import Status

STAND_IN = Path(__file__).parents[2] / "shim/vllm_mamba_retire/replay/stand_in"
# A 27B hybrid: 48 linear-attention layers and 16 of full attention, which make 3 groups and 1.
LARGE = {
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 262_144,
}
FLAGS = ["--kv-cache-dtype", "fp8", "--mamba-ssm-cache-dtype", "float32", "--enable-prefix-caching"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = json.loads((STAND_IN / "config.json").read_text()) | LARGE
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_plan_gets_the_field_report_out_of_a_model_and_its_flags(
    model: Path, status: Status
) -> None:
    served = ["--max-model-len", "237000", "--max-num-batched-tokens", "4096", *FLAGS]
    chart = model / "growth.png"
    result = _invoke(
        *("plan", "--pool", "325", "--json", "--chart", str(chart), "--"),
        *("vllm", "serve", str(model), *served),
    )
    document = json.loads(result.stdout)
    known = {name: figure["value"] for name, figure in document["deployment"].items()}
    assert (known["block"], known["groups"], known["attention_groups"]) == (1568, 3, 1)
    assert (known["budget"], known["lag"], known["prompt"]) == (4096, 1, 237_000)
    assert known["block_bytes"] == 16 * 1568 * 2 * 4 * 256  # layers, tokens, K and V, heads, dims
    assert document["fixed"]["smallest_pool"] == 162
    live = status is Status.LIVE
    assert document["stock"]["smallest_pool"] == (384 if live else 162)
    assert document["stock"]["measured"] == "replayed"
    assert document["affected"] is live
    assert result.exit_code == (1 if live else 0)
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_plan_shows_the_cost_of_a_roll_back_in_the_servers_pool(
    release: str, status: Status
) -> None:
    """The whole prompt where checkpoints of a running prompt are not kept, else little or none."""
    result = _invoke(
        *("plan", "--json", "--block", "1568", "--budget", "4096", "--prompt", "237000"),
        *("--groups", "3", "--attention-groups", "1", "--pool", "321", "--vllm-version", release),
        *("--mamba-cache-mode", "align"),
    )
    document = json.loads(result.stdout)
    assert document["fixed"]["redone"] == document["fixed"]["rollbacks"] == 0
    live = status is Status.LIVE
    assert document["stock"]["rollbacks"] == (2 if live else 0)
    keeps_checkpoints = Version(release) < Version("0.29")
    assert (document["stock"]["redone"] > 100_000) is (live and not keeps_checkpoints)


def test_plan_replays_as_many_requests_at_once_as_it_is_told(release: str) -> None:
    result = _invoke(
        *("plan", "--json", "--block", "1568", "--budget", "4096", "--prompt", "40000"),
        *("--groups", "3", "--attention-groups", "1", "--pool", "110", "--requests", "2"),
        *("--vllm-version", release, "--mamba-cache-mode", "align"),
    )
    document = json.loads(result.stdout)
    alone = 26 + 3 * document["fixed"]["states"]
    assert document["fixed"]["smallest_pool"] == 2 * alone + 1
    assert document["fixed"]["rollbacks"] == 0


def test_a_server_that_vllm_refuses_to_start_gets_vllms_reason(model: Path) -> None:
    result = _invoke(
        *("plan", "--no-replay", "--model", str(model), "--"),
        *("--max-num-batched-tokens", "512", "--max-num-seqs", "1024", *FLAGS),
    )
    assert result.exit_code == 2
    assert "max_num_batched_tokens (512) must be greater than" in result.stderr
    assert "errors.pydantic.dev" not in result.stderr


def test_a_servers_own_flags_decide_nothing_and_are_skipped(model: Path) -> None:
    served = ["--max-num-batched-tokens", "4096", "--max-model-len", "237000", *FLAGS]
    ignored = ["--host", "0.0.0.0", "--api-key", "x", "--reasoning-parser", "qwen3"]
    ignored += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    result = _invoke(
        "plan", "--json", "--no-replay", "--model", str(model), "--", *served, *ignored
    )
    assert json.loads(result.stdout)["deployment"]["block"] == {"value": 1568, "from": "vLLM"}


def test_a_drafter_makes_states_larger_and_more(model: Path) -> None:
    drafting = json.dumps({"method": "mtp", "num_speculative_tokens": 3})
    result = _invoke(
        *("plan", "--json", "--no-replay", "--model", str(model / "config.json"), "--"),
        *("--max-num-batched-tokens", "6656", *FLAGS, "--speculative-config", drafting),
    )
    document = json.loads(result.stdout)
    assert document["deployment"]["block"]["value"] == 1600
    assert document["deployment"]["spec"]["value"] == 3
    assert document["fixed"]["states"] == 3 + 2 + 1


def test_a_budget_that_depends_on_the_gpu_is_an_assumption(model: Path) -> None:
    result = _invoke("plan", "--json", "--no-replay", "--model", str(model), "--", *FLAGS)
    budget = json.loads(result.stdout)["deployment"]["budget"]
    assert budget["from"] == "vLLM's default without a GPU"


@pytest.mark.parametrize(
    ("change", "flags", "said"),
    [
        (
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "num_attention_heads": 20,
            },
            [],
            "LlamaForCausalLM is not a hybrid Mamba model",
        ),
        ({}, ["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    ],
)
def test_what_vllm_refuses_is_one_sentence(
    model: Path, change: dict[str, object], flags: list[str], said: str
) -> None:
    config = json.loads((model / "config.json").read_text()) | change
    (model / "config.json").write_text(json.dumps(config))
    result = _invoke("plan", "--no-replay", "--model", str(model), "--", *flags)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: model: {model}: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_replay_from_flags_gives_json_steps_and_a_chart(tmp_path: Path, status: Status) -> None:
    steps, chart = tmp_path / "steps.csv", tmp_path / "chart.svg"
    result = _invoke(
        *("replay", "--block", "1568", "--budget", "4096", "--prompt", "40000", "--requests", "2"),
        *("--every", "5", "--json", "--csv", str(steps), "--chart", str(chart)),
    )
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    (replayed,) = document["cases"][0]["replays"]
    assert document["schema"] == 1
    live = status is Status.LIVE
    assert (replayed["stock"]["peak_states"] > replayed["fixed"]["peak_states"]) is live
    rows = list(csv.DictReader(steps.open()))
    assert {row["side"] for row in rows} == {"stock", "fixed", "kept"}
    for side in ("stock", "fixed", "kept"):
        assert sum(int(row["tokens"]) for row in rows if row["side"] == side) == 80_000
    assert "<svg" in chart.read_text()


def test_replay_of_a_case_with_a_wrong_figure_is_a_finding(tmp_path: Path) -> None:
    cases = tmp_path / "cases.yaml"
    cases.write_text(
        "cases: [{id: wrong, block: 1568, budget: 4096, prompt: 9000, expect: {fixed: 99}}]"
    )
    result = _invoke("replay", str(cases))
    assert result.exit_code == 1
    assert "wrong, lag 1, pool ample: fixed peak_states is 3, expected 99." in result.stderr


def test_replay_that_is_stuck_with_the_fix_is_a_finding(stays_stuck: bool) -> None:
    result = _invoke(
        *("replay", "--block", "1568", "--budget", "4096", "--prompt", "9000", "--output", "5"),
        *("--spec", "3", "--pool", "22", "--retention", "0"),
    )
    assert result.exit_code == stays_stuck
    assert ("stuck with the fix" in result.stderr) is stays_stuck


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget", "4096"], "block: give --block or a case file"),
        (["--block", "8192", "--budget", "4096"], "budget: 4096 tokens hold no block"),
        (["--block", "1568", "--prompt", "-5"], "prompt: -5 is less than 1"),
        (["--block", "1568", "--pool", "20"], "pool: 20 blocks are less than the"),
        (["--block", "1568", "--requests", "0"], "requests: there is none"),
        (["--block", "1568", "--retention", "7"], "retention_interval: 7 is not a multiple"),
        (["nowhere.yaml"], "nowhere.yaml: no readable YAML"),
    ],
)
def test_impossible_input_ends_with_exit_2_and_names_the_field(
    arguments: list[str], said: str
) -> None:
    result = _invoke("replay", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
