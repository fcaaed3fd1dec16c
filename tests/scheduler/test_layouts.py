"""Groups of public hybrid families, by the release's own model classes and grouping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_mamba_retire import child
from vllm_mamba_retire.releases import Status

pytestmark = pytest.mark.about(Status.LIVE)

MODELS = Path(__file__).parents[1] / "cases" / "models"
# Layers of each kind -> Mamba groups and attention groups of equal size.
GROUPS = {
    "qwen3-next": (3, 1),  # 36 linear, 12 full
    "nemotron-h": (7, 1),  # 27 Mamba-2, 4 attention, 25 without a cache
    "granite-4-h": (9, 1),  # 36 Mamba-2, 4 attention
    "falcon-h1": (1, 1),  # 44 layers with both
    "lfm2": (2, 1),  # 10 short convolutions, 6 attention
    "kimi-linear": (3, 1),  # 20 delta attention, 7 latent attention
    "jamba": (7, 1),  # 28 Mamba, 4 attention
    "zamba2": (6, 1),  # 54 Mamba-2, 9 of them with attention
}
FLAGS = ["--enable-prefix-caching", "--mamba-cache-mode", "align"]
FLAGS += ["--max-num-batched-tokens", "16384"]
DRAFTING = json.dumps({"method": "mtp", "num_speculative_tokens": 3})


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    requests = []
    for name in GROUPS:
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text((MODELS / f"{name}.json").read_text())
        requests.append({"model": str(folder), "flags": FLAGS})
        if name in ("qwen3-next", "nemotron-h"):
            requests.append({"model": str(folder), "flags": [*FLAGS, "-tp", "2"]})
        if name == "qwen3-next":
            flags = [*FLAGS, "--speculative-config", DRAFTING]
            requests.append({"model": str(folder), "flags": flags})
    answers = child.ask("tests.scheduler.layouts", requests, environment={"MAMBA_RETIRE": "off"})
    found: dict[str, Any] = {}
    for request, answer in zip(requests, answers, strict=True):
        name = Path(str(request["model"])).name[:-1]
        kind = {len(FLAGS): "", len(FLAGS) + 2: " tp"}[len(request["flags"])]
        found[name + (" mtp" if DRAFTING in request["flags"] else kind)] = answer
    return found


@pytest.mark.parametrize("name", GROUPS)
def test_groups_are_those_the_release_makes(layouts: dict[str, Any], name: str) -> None:
    found = layouts[name]
    assert not isinstance(found, str), found
    assert (found["groups"], found["attention_groups"]) == GROUPS[name]
    assert found["mode"] == "align"
    assert found["block"] % 16 == 0


def test_a_block_holds_a_state_and_a_page_for_each_layer_of_a_group(
    layouts: dict[str, Any],
) -> None:
    config = json.loads((MODELS / "qwen3-next.json").read_text())
    token = 2 * config["num_key_value_heads"] * config["head_dim"] * 2  # K and V, 16 bits
    state = 32 * 128 * 128 * 2 + (2 * 16 * 128 + 32 * 128) * 3 * 2
    found = layouts["qwen3-next"]
    assert found["block"] == -(-state // (16 * token)) * 16
    assert found["block_bytes"] == 12 * found["block"] * token


@pytest.mark.parametrize("name", ["qwen3-next", "nemotron-h"])
def test_tensor_parallelism_shrinks_a_block_and_keeps_the_groups(
    layouts: dict[str, Any], name: str
) -> None:
    whole, part = layouts[name], layouts[f"{name} tp"]
    assert (part["groups"], part["attention_groups"]) == GROUPS[name]
    assert 0.4 < part["block_bytes"] / whole["block_bytes"] < 0.6


def test_a_drafter_with_attention_of_its_own_is_a_layer_more(layouts: dict[str, Any]) -> None:
    found = layouts["qwen3-next mtp"]
    assert (found["groups"], found["attention_groups"]) == GROUPS["qwen3-next"]
    assert (found["spec"], found["drafter"]) == (3, "mtp")
    token = layouts["qwen3-next"]["block_bytes"] // (12 * layouts["qwen3-next"]["block"])
    assert found["block_bytes"] == 13 * found["block"] * token
