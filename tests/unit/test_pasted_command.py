"""Commands, compose files, manifests and /metrics as people paste them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.field_inputs import COMPOSE_SCRIPT, DOCKERFILE, METRICS, SCRIPT
from vllm_mamba_retire.cli import app
from vllm_mamba_retire.plan.command import read_command, read_file
from vllm_mamba_retire.plan.deployment import merge_sources
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
        (f"docker run --gpus all -v vllm-cache:/root/.cache --ipc=host vllm/vllm-openai org/model "
         f"--kv-events-config '{{\"endpoint\": \"tcp://vllm:5557\"}}' {SERVED}", {}),
        (f"kubectl run server --image=vllm/vllm-openai:v0.28.0 --env=VLLM_USE_V2_MODEL_RUNNER=1 "
         f"--port=8000 -- org/model {SERVED}", {"version": "0.28.0", "runner": "V2"}),
        (f"docker run -e VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 vllm/vllm-openai:v0.29.0 --model "
         f"org/model --distributed-executor-backend ray {SERVED}",
         {"version": "0.29.0", "executor": "ray", "ray_v2": False}),
        (f"vllm serve org/model {SERVED} --block-size 64", {}),
        (f"vllm serve org/model {SERVED} --runner pooling", {"asynchronous": False}),
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


@pytest.mark.parametrize(
    "text", [SERVED, SERVED.replace(" --", "\n--"), "- " + "\n- ".join(SERVED.split())]
)
def test_flags_alone_are_a_command(text: str) -> None:
    for words in (text.split(), [text]):
        found = read_command(words)
        assert (found.model, found.settings) == (None, FIGURES)


def test_a_model_may_stand_behind_the_flags() -> None:
    found = read_command(["vllm serve --port 8000 --enable-prefix-caching org/model"])
    assert found.model == "org/model"
    assert found.flags == ("--port", "8000", "--enable-prefix-caching")


@pytest.mark.parametrize(
    "image",
    [
        "nvcr.io/nvidia/vllm:25.11.1-py3",
        "nvcr.io/nvidia/ai-dynamo/vllm-runtime:0.9.0",
        "lmcache/vllm-openai:v0.3.9",
        "vllm/vllm-omni:v0.18.0",
        "vllm/vllm-openai:nightly",
    ],
)
def test_the_tag_of_another_image_is_no_version_of_vllm(image: str) -> None:
    found = read_command([f"docker run {image} vllm serve org/model"])
    assert (found.model, found.version) == ("org/model", None)
    assert read_command([f"docker run {image} --model org/model"]) == found


@pytest.mark.parametrize(
    ("config", "drafter"),
    [
        ({"method": "qwen3_next_mtp"}, "mtp"),
        ({"method": "[ngram]"}, "ngram"),
        ({"method": "draft_model", "model": "org/draft-0.6b"}, "draft_model"),
        ({"model": "ngram"}, "ngram"),
        ({"model": "org/Model_EAGLE3"}, "eagle3"),
        ({"model": "org/model-DFlash"}, "dflash"),
        ({"model": "org/draft-0.6b"}, "unknown"),
        ({}, None),
    ],
)
def test_the_method_of_drafting_is_the_one_that_vllm_settles(
    config: dict[str, str], drafter: str | None
) -> None:
    words = ["vllm", "serve", "org/model", "--speculative-config", json.dumps(config)]
    assert read_command(words).settings.get("drafter") == drafter


def test_drafts_without_padding_are_told() -> None:
    config = json.dumps({"method": "mtp", "disable_padded_drafter_batch": True})
    assert read_command([f"-sc '{config}'"]).settings == {"drafter": "mtp", "padded_drafts": False}


@pytest.mark.parametrize("model", ["", "org/model"])
def test_a_configuration_file_is_read_as_vllm_reads_it(tmp_path: Path, model: str) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(
        "model: org/model\nmax-num-batched-tokens: 4096\nmax_model_len: 128k\nseed: 1\n"
        "enable-prefix-caching: true\nasync-scheduling: false\nserved-model-name: [a, b]\n"
        "speculative-config: {method: mtp, num_speculative_tokens: 3}\n"
    )
    found = read_command(
        [f"vllm serve {model} --config {path} --max-num-batched-tokens 8192 --port 8000"]
    )
    assert found.model == "org/model"
    drafting = {"spec": 3, "drafter": "mtp"}
    assert found.settings == FIGURES | drafting | {"asynchronous": False}
    assert "--config" not in found.flags
    assert str(path) not in found.flags


@pytest.mark.parametrize(("version", "told"), [("0.27.1", False), ("0.28.0", True)])
def test_false_in_a_configuration_file_counts_since_0_28(
    tmp_path: Path, version: str, told: bool
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("async-scheduling: false\n")
    found = read_command([f"docker run vllm/vllm-openai:v{version} org/model --config {path}"])
    assert ("asynchronous" in found.settings) is told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["vllm serve 'org/model"], "cannot be read"),
        (["--max-num-batched-tokens", "many"], "'many' is not a whole number"),
        (["--enable-prefix-caching=perhaps"], "neither True nor False"),
        (['vllm serve org/model "$@"'], r"command: \$@ is not set here; put its flags"),
        (["set -e\nvllm ${ARGS[@]}\nsleep 1"], "no 'vllm serve' in it"),
        (["vllm serve m --config /config/x.yaml"], "config: /config/x.yaml is no readable YAML"),
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


COMPOSE_BLOCK = """\
services:
  server:
    image: vllm/vllm-openai:v0.27.1
    environment: {VLLM_USE_V2_MODEL_RUNNER: 1}
    command: |
      --model org/model
      --max-num-batched-tokens ${BUDGET:-8192}
      --max-model-len 128k
      --enable-prefix-caching
      --structured-outputs-config '{"module": "vllm.entrypoints.x y"}'
"""
KSERVE = """\
kind: InferenceService
spec:
  predictor:
    model:
      modelFormat: {name: vLLM}
      runtime: vllm-runtime
      storageUri: hf://org/model
      args:
        - --model=org/model
        - --max-num-batched-tokens=8192
        - --max-model-len=128k
        - --enable-prefix-caching
      env: [{name: VLLM_USE_V2_MODEL_RUNNER, value: "1"}]
"""
DOCKERFILE_SHELL = """\
FROM --platform=linux/amd64 vllm/vllm-openai:v0.27.1
ENV VLLM_USE_V2_MODEL_RUNNER=1
ENTRYPOINT VLLM_LOGGING_LEVEL=INFO vllm serve org/model --max-num-batched-tokens 8192 \\
    --max-model-len 128k --enable-prefix-caching
"""
COMPOSE_VARIABLES = """\
services:
  server:
    image: ${REGISTRY:-docker.io}/vllm/vllm-openai:${VLLM_TAG:-v0.27.1}
    environment:
      - VLLM_USE_V2_MODEL_RUNNER=${RUNNER:-1}
    command: ["--model", "org/model", "--max-num-batched-tokens", "${BUDGET:-8192}",
              "--max-model-len", "128k", "--enable-prefix-caching"]
"""
LEADER_AND_WORKER = """\
kind: LeaderWorkerSet
spec:
  leaderWorkerTemplate:
    leaderTemplate:
      spec:
        containers:
          - name: leader
            image: vllm/vllm-openai:v0.27.1
            env: [{name: VLLM_USE_V2_MODEL_RUNNER, value: "1"}, {name: BUDGET, value: "8192"}]
            command:
              - sh
              - -c
              - "bash multi-node-serving.sh leader --ray_cluster_size=$(LWS_GROUP_SIZE);
                vllm serve org/model --max-num-batched-tokens $(BUDGET) --max-model-len 128k
                --enable-prefix-caching"
    workerTemplate:
      spec:
        containers:
          - name: worker
            image: vllm/vllm-openai:v0.27.1
            command: [sh, -c, "bash multi-node-serving.sh worker --ray_address=$(LWS_LEADER)"]
"""
PROXY_AND_SERVER = """\
kind: Deployment
spec:
  template:
    spec:
      initContainers:
        - image: ghcr.io/llm-d/llm-d-routing-sidecar:v0.3.0
          args: [--port=8000, --vllm-port=8200, --connector=nixlv2]
      containers:
        - image: ghcr.io/llm-d/llm-d-cuda:v0.3.0
          command: [vllm, serve]
          args: [org/model, --port, "8200", --max-num-batched-tokens=8192, --max-model-len=128k,
                 --enable-prefix-caching]
          env: [{name: VLLM_USE_V2_MODEL_RUNNER, value: "1"}]
"""
JOB_SCRIPT = """\
VLLM_TAG=${VLLM_TAG:-v0.27.1}
uvx hf jobs run --flavor h200 --detach -e VLLM_USE_V2_MODEL_RUNNER=1 -e "MODEL=org/model" \\
    -- "vllm/vllm-openai:${VLLM_TAG}" bash -c '
set -euo pipefail
exec vllm serve "$MODEL" --tensor-parallel-size "$(nvidia-smi -L | wc -l)" \\
    --max-model-len 128k --weight-transfer-config "{\\"backend\\":\\"nccl\\"}" \\
    --max-num-batched-tokens 8192 --enable-prefix-caching
' 2>&1 | head -1
"""
UNIT_CONTAINER = """\
[Service]
Environment="HF_TOKEN=x" "VLLM_USE_V2_MODEL_RUNNER=1"
ExecStartPre=-/usr/bin/docker rm -f vllm
ExecStart=/usr/bin/docker run --rm --name vllm --gpus all -v /srv:/models \\
  vllm/vllm-openai:v0.27.1 --model org/model --max-model-len 128k \\
  --max-num-batched-tokens 8192 --enable-prefix-caching
ExecStop=/usr/bin/docker stop vllm
"""
ARRAY_SCRIPT = """\
#!/usr/bin/env bash
export VLLM_USE_V2_MODEL_RUNNER=1
BUDGET="${BUDGET:-8192}"
VLLM_ARGS=(
    serve org/model  # as downloaded
    --max-num-batched-tokens "$BUDGET"
    --max-model-len 128k
    --enable-prefix-caching
)
vllm "${VLLM_ARGS[@]}" &
wait
"""
IMAGE_SCRIPT = """\
IMAGE="${IMAGE:-vllm/vllm-openai:v0.27.1-cu129}"
docker run --gpus all --env VLLM_USE_V2_MODEL_RUNNER=1 --name vllm -p 8000:8000 "$IMAGE" \\
  --model org/model --max-num-batched-tokens 8192 --max-model-len 128k --enable-prefix-caching
"""
DOCKERFILE_ARGUMENT = """\
ARG VLLM_VERSION=v0.27.1-cu129
FROM vllm/vllm-openai:${VLLM_VERSION}
ENV VLLM_USE_V2_MODEL_RUNNER=1
CMD ["--model", "org/model", "--max-num-batched-tokens", "8192", "--max-model-len", "128k", \
     "--enable-prefix-caching"]
"""
UNIT = """\
[Unit]
Description=vLLM server
[Service]
Environment=VLLM_USE_V2_MODEL_RUNNER=1
ExecStart=/opt/vllm/bin/vllm serve org/model --max-num-batched-tokens 8192 \\
    --max-model-len 128k --enable-prefix-caching
Restart=always
"""


@pytest.mark.parametrize(
    ("name", "text", "version"),
    [
        ("compose.yaml", COMPOSE, "0.27.1"),
        ("block.yml", COMPOSE_BLOCK, "0.27.1"),
        ("script.yaml", COMPOSE_SCRIPT, "0.27.1"),
        ("pod.yaml", KUBERNETES, "0.27.1"),
        ("shell.yaml", SHELL, "0.27.1"),
        ("kserve.yaml", KSERVE, None),
        ("Dockerfile", DOCKERFILE, "0.27.1"),
        ("server.Dockerfile", DOCKERFILE_SHELL, "0.27.1"),
        ("variables.yaml", COMPOSE_VARIABLES, "0.27.1"),
        ("lws.yaml", LEADER_AND_WORKER, "0.27.1"),
        ("proxy.yaml", PROXY_AND_SERVER, None),
        ("job.sh", JOB_SCRIPT, "0.27.1"),
        ("container.service", UNIT_CONTAINER, "0.27.1"),
        ("arrays.sh", ARRAY_SCRIPT, None),
        ("image.sh", IMAGE_SCRIPT, "0.27.1"),
        ("argument.Dockerfile", DOCKERFILE_ARGUMENT, "0.27.1"),
        ("vllm.service", UNIT, None),
        ("start.sh", SCRIPT, None),
    ],
)
def test_a_file_is_read_like_the_command_in_it(
    tmp_path: Path, name: str, text: str, version: str | None
) -> None:
    path = tmp_path / name
    path.write_text(text)
    found = read_file(path)
    assert found.model == "org/model"
    told = {"version": version} if version else {}
    assert found.settings == FIGURES | told | {"runner": "V2"}


def test_a_compose_file_takes_variables_from_its_env_file(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("# local\nVLLM_TAG=v0.28.0\nBUDGET='4096'\n")
    path = tmp_path / "compose.yaml"
    path.write_text(COMPOSE_VARIABLES)
    found = read_file(path)
    assert (found.version, found.settings["budget"]) == ("0.28.0", 4096)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("services: {a: {image: redis}}", "has no containers that serve vLLM"),
        (
            "services: {proxy: {image: nginx, environment: [BACKEND=http://vllm:8000]}}",
            "has no containers that serve vLLM",
        ),
        ("a: [", "is not YAML; render a Helm chart first"),
        (COMPOSE + "  other: {image: 'vllm/vllm-openai:v0.29.0'}\n", "has 2 containers"),
    ],
)
def test_a_file_without_one_server_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        read_file(path)


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


def test_metrics_tell_pool_block_mode_and_preemptions(tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    path.write_text(METRICS)
    assert read_metrics(path) == (
        {"pool": 325, "block": 1568, "mode": "align", "prefix_caching": True},
        7,
    )


@pytest.mark.parametrize(
    ("labels", "settings"),
    [
        ({"num_gpu_blocks": "650", "engine": "1"}, {"pool": 325}),  # of both engines
        ({"block_size": "8", "mamba_block_size": "1600"}, {"block": 1600}),  # a ring's, 0.29
        ({"mamba_block_size": "16"}, {"block": 1568}),  # as it was configured, before 0.29
        ({"mamba_block_size": "4096", "user_specified_mamba_block_size": "True"}, {"block": 1568}),
        ({"mamba_block_size": "262144", "mamba_cache_mode": "none"}, {"block": 1568}),
        ({"kv_cache_memory_bytes": "32500000"}, {"block_bytes": 100_000}),
        ({"kv_cache_memory_bytes": "9", "num_gpu_blocks_override": "325"}, {"block_bytes": None}),
    ],
)
def test_metrics_tell_a_state_block_and_one_engines_pool(
    tmp_path: Path, labels: dict[str, str], settings: dict[str, int | None]
) -> None:
    shown = {"block_size": "1568", "mamba_cache_mode": "align", "num_gpu_blocks": "325"}
    shown |= {"num_gpu_blocks_override": "None", "engine": "0"} | labels
    engines = range(int(shown["engine"]) + 1)
    path = tmp_path / "metrics"
    lines = (
        ",".join(f'{name}="{value}"' for name, value in {**shown, "engine": str(each)}.items())
        for each in engines
    )
    path.write_text("".join(f"vllm:cache_config_info{{{line}}} 1.0\n" for line in lines))
    found, _ = read_metrics(path)
    assert {name: found.get(name) for name in settings} == settings


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
    (hint,) = hints(merge_sources({"given": settings}), affected, preemptions)
    assert said in hint


def test_nothing_is_hinted_at_without_a_sign() -> None:
    assert not list(hints(merge_sources({"given": {"version": "0.29.0"}}), True, 7))
    assert not list(
        hints(merge_sources({"given": {"version": "0.33.0", "drafter": "dflash"}}), False, 0)
    )


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


@pytest.mark.parametrize("text", ["", " ", "# only a comment"])
def test_a_script_without_a_command_has_no_flags(tmp_path: Path, text: str) -> None:
    (tmp_path / "start.sh").write_text(text)
    command = read_file(tmp_path / "start.sh")
    assert (command.model, command.flags) == (None, ())
