"""Commands, compose files, manifests and /metrics as people paste them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_mamba_retire.cli import app
from vllm_mamba_retire.plan.command import read_command, read_manifest
from vllm_mamba_retire.plan.deployment import settle
from vllm_mamba_retire.plan.known_bugs import hints
from vllm_mamba_retire.plan.metrics import read_metrics
from vllm_mamba_retire.plan.model import find_model
from vllm_mamba_retire.replay.scenario import InputError

SERVED = "--max-num-batched-tokens 8192 --max-model-len 128k --enable-prefix-caching"
FIGURES = {"budget": 8192, "prompt": 128_000, "prefix_caching": True}
IGNORED = (
    "--host 0.0.0.0 --port 8000 --api-key secret --served-model-name a b --tool-call-parser "
    "qwen3_coder --enable-auto-tool-choice --reasoning-parser qwen3 --chat-template '{{ x }}' "
    "--no-enable-log-requests --gpu-memory-utilization 0.92 -O3"
)


@pytest.mark.parametrize(
    ("command", "more"),
    [
        (f"vllm serve org/model {SERVED}", {}),
        (f"vllm serve org/model {IGNORED} {SERVED} {IGNORED}", {}),
        (f"/opt/venv/bin/vllm serve --model org/model {SERVED}", {}),
        (f"CUDA_VISIBLE_DEVICES=0,1 VLLM_USE_V2_MODEL_RUNNER=1 vllm serve org/model {SERVED}",
         {"runner": "V2"}),
        (f"nohup vllm serve org/model {SERVED} > server.log 2>&1 &", {}),
        (f"cd /models && source env.sh; vllm serve org/model {SERVED} --api-key <key> && echo", {}),
        (f"python3 -m vllm.entrypoints.openai.api_server --model=org/model {SERVED}", {}),
        (f"docker run --gpus all -e HF_TOKEN=x -v /m:/m -p 8000:8000 --ipc=host "
         f"vllm/vllm-openai:v0.28.0-cu129 --model org/model {SERVED}", {"version": "0.28.0"}),
        (f"docker run --rm vllm/vllm-openai:v0.29.0 vllm serve org/model {SERVED} | tee log",
         {"version": "0.29.0"}),
        (f"podman run --env VLLM_USE_V2_MODEL_RUNNER=0 docker.io/vllm/vllm-openai:latest "
         f"org/model {SERVED}", {"runner": "V1"}),
        (f"docker run --entrypoint sh vllm/vllm-openai:v0.29.0 -c 'vllm serve org/model {SERVED}'",
         {"version": "0.29.0"}),
        (f"vllm serve org/model \\\n  {SERVED} \\\n  --no-async-scheduling",
         {"asynchronous": False}),
        (f"vllm serve org/model {SERVED} --max_num_scheduled_tokens=4096 -pp 2",
         {"scheduled": 4096, "pipeline": 2}),
        (f"vllm serve org/model {SERVED} --speculative-config "
         '\'{"method": "mtp", "num_speculative_tokens": 3}\'', {"spec": 3, "drafter": "mtp"}),
        (f"vllm serve org/model {SERVED} --speculative-config.method mtp "
         "--speculative-config.num_speculative_tokens 3", {"spec": 3, "drafter": "mtp"}),
        (f"vllm serve org/model {SERVED} --kv-transfer-config "
         '\'{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}\'',
         {"connector": "LMCacheConnectorV1"}),
        (f"vllm serve org/model {SERVED} --kv-cache-memory-bytes 4G --num-gpu-blocks-override 99",
         {"kv_memory_bytes": 4 * 2**30, "pool": 99}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("split", [True, False], ids=["words", "one word"])
def test_of_a_pasted_command_what_decides_is_used(
    command: str, more: dict[str, Any], split: bool
) -> None:
    import shlex

    words = shlex.split(command.replace("\\\n", "")) if split else [command]
    found = read_command(words)
    assert found.model == "org/model"
    assert found.settings == FIGURES | more


def test_flags_alone_are_a_command() -> None:
    found = read_command(SERVED.split())
    assert (found.model, found.settings) == (None, FIGURES)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["vllm serve 'org/model"], "cannot be read"),
        (["--max-num-batched-tokens", "many"], "'many' is not a whole number"),
        (["--enable-prefix-caching=perhaps"], "neither True nor False"),
    ],
)
def test_a_command_that_cannot_be_read_is_an_error(words: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_command(words).settings  # noqa: B018


COMPOSE = """\
services:
  cache: {image: redis}
  server:
    image: vllm/vllm-openai:v0.27.1
    environment: [VLLM_USE_V2_MODEL_RUNNER=1]
    command: >-
      --model org/model --host 0.0.0.0
      --max-num-batched-tokens 8192 --max-model-len 128k --enable-prefix-caching
"""
KUBERNETES = """\
kind: Service
---
kind: Deployment
spec:
  template:
    spec:
      containers:
        - name: server
          image: registry.example/vllm/vllm-openai:v0.27.1
          command: [vllm, serve]
          args:
            - org/model
            - --max-num-batched-tokens=8192
            - --max-model-len
            - "128k"
            - --enable-prefix-caching
          env:
            - {name: VLLM_USE_V2_MODEL_RUNNER, value: "1"}
            - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: x, key: y}}}
"""
SHELL = """\
containers:
  - image: vllm/vllm-openai:v0.27.1
    command: ["/bin/sh", "-c"]
    args: ["VLLM_USE_V2_MODEL_RUNNER=1 vllm serve org/model --max-num-batched-tokens 8192
      --max-model-len 128k --enable-prefix-caching"]
"""


@pytest.mark.parametrize("text", [COMPOSE, KUBERNETES, SHELL], ids=["compose", "pod", "shell"])
def test_a_manifest_is_read_like_the_command_in_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    found = read_manifest(path)
    assert found.model == "org/model"
    assert found.settings == FIGURES | {"version": "0.27.1", "runner": "V2"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("services: {a: {image: redis}}", "has no containers that serve vLLM"),
        ("a: [", "is not YAML"),
        (COMPOSE + "  other: {image: 'vllm/vllm-openai:v0.29.0'}\n", "has 2 containers"),
    ],
)
def test_a_manifest_without_one_server_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        read_manifest(path)


def test_a_hub_model_is_looked_for_in_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert find_model("org/model") is None
    folder = tmp_path / "models--org--model" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert find_model("org/model") == folder
    assert find_model(str(folder)) == folder


METRICS = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="1568",enable_prefix_caching="True",mamba_cache_mode="align",\
num_gpu_blocks="325",kv_cache_memory_bytes="None",engine="0"} 1.0
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0"} 4.0
vllm:num_preemptions_total{engine="1"} 3.0
"""


def test_metrics_tell_pool_block_mode_and_preemptions(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    path.write_text(METRICS)
    assert read_metrics(path) == (
        {"pool": 325, "block": 1568, "mode": "align", "prefix_caching": True},
        7,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [("up 1\n", "it is not vLLM's"), ("a{b 1\n", "not in Prometheus' text format")],
)
def test_metrics_of_something_else_are_an_error(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "metrics"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        read_metrics(path)


@pytest.mark.parametrize(
    ("settings", "affected", "preemptions", "said"),
    [
        ({"connector": "LMCacheConnectorV1", "version": "0.28.0"}, True, None, "vllm#51358"),
        ({"connector": "LMCacheConnectorV1", "version": "0.29.0"}, True, None, "compare its hits"),
        ({"drafter": "mtp", "version": "0.29.0"}, True, None, "vllm#53919"),
        ({"drafter": "dflash", "version": "0.29.0"}, True, None, "vllm#53505"),
        ({"version": "0.29.0"}, False, 7, "7 preemptions since the start"),
        ({"version": "0.30.0"}, False, 7, "vllm#57050"),
    ],
)
def test_what_looks_like_another_bug_is_named_by_its_number(
    settings: dict[str, Any], affected: bool, preemptions: int | None, said: str
) -> None:
    (hint,) = hints(settle({"given": settings}), affected, preemptions)
    assert said in hint


def test_nothing_is_hinted_at_without_a_sign() -> None:
    assert not list(hints(settle({"given": {"version": "0.29.0"}}), True, 7))
    assert not list(hints(settle({"given": {"version": "0.33.0", "drafter": "dflash"}}), False, 0))


def test_the_command_puts_metrics_and_a_pasted_command_together(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    path.write_text(METRICS)
    result = CliRunner().invoke(
        app,
        [
            *("plan", "--no-replay", "--json", "--metrics", str(path), "--groups", "3"),
            *("--attention-groups", "1", "--", "docker", "run", "vllm/vllm-openai:v0.29.0"),
            *("--model", "org/model", "--max-num-batched-tokens", "4096"),
            *("--max-model-len", "237000"),
        ],
    )
    assert result.exit_code == 1, result.stderr
    document = json.loads(result.stdout)
    assert document["stock"]["smallest_pool"] == 384
    assert document["deployment"]["pool"] == {"value": 325, "from": "metrics"}
    assert document["deployment"]["version"] == {"value": "0.29.0", "from": "command"}
