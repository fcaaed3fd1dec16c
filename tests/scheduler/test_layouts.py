"""Groups of public hybrid families, by the release's own model classes and grouping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from vllm_mamba_retire import child
from vllm_mamba_retire.releases import Status

pytestmark = pytest.mark.about(Status.LIVE)

MODELS = Path(__file__).parents[1] / "cases" / "models"
STAND_INS = Path(__file__).parent / "stand_ins"
# Layers of each kind -> Mamba groups and attention groups of equal size.
GROUPS = {
    "qwen3-next": (3, 1),  # 36 linear, 12 full
    "qwen3.5-0.8b": (3, 1),  # 18 linear, 6 full
    "qwen3.5-35b-a3b": (3, 1),  # 30 linear, 10 full
    "qwen3.6-27b": (3, 1),  # 48 linear, 16 full
    "nemotron-h": (7, 1),  # 27 Mamba-2, 4 attention, 25 without a cache
    "nemotron-3-nano": (4, 1),  # 23 Mamba-2, 6 attention, 23 of experts
    "nemotron-3-super": (5, 1),  # 40 Mamba-2, 8 attention, 40 of experts
    "granite-4-h": (9, 1),  # 36 Mamba-2, 4 attention
    "falcon-h1": (1, 1),  # 44 layers with both
    "lfm2": (2, 1),  # 10 short convolutions, 6 attention
    "lfm2-moe": (3, 1),  # 18 short convolutions, 6 attention
    "olmo-hybrid": (3, 1),  # 24 linear, 8 full
    "kimi-linear": (3, 1),  # 20 delta attention, 7 latent attention
    "ring-2.5": (4, 1),  # 16 linear, 4 latent attention
    "jamba": (7, 1),  # 28 Mamba, 4 attention
    "zamba2": (6, 1),  # 54 Mamba-2, 9 of them with attention
}
# Blocks that public logs and recipes of these models name, one GPU, states in 32 bits.
BLOCKS = {"qwen3.5-0.8b": 544, "qwen3.5-35b-a3b": 1056, "qwen3.6-27b": 784}
LATENT = ("kimi-linear", "ring-2.5")  # no backend without a GPU before 0.29
NOT_HERE = "vLLM cannot build this model on this machine ("
LING = "ling-3"  # 35 delta attention, 7 latent attention; since 0.28
GONE = ("bamba", "minimax-m1")  # until 0.23
FLAGS = ["--enable-prefix-caching", "--mamba-cache-mode", "align"]
FLAGS += ["--max-num-batched-tokens", "16384"]


def _drafting(method: str, tokens: int, **more: str) -> list[str]:
    config = {"method": method, "num_speculative_tokens": tokens, **more}
    return ["--speculative-config", json.dumps(config)]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Layouts, or the sentence of a refusal, by model and what is changed."""
    folder = tmp_path_factory.mktemp("models")
    for path in MODELS.glob("*.json"):
        (folder / path.stem).mkdir()
        (folder / path.stem / "config.json").write_text(path.read_text())
    drafter = str(folder / "dflash-drafter")
    runs: dict[str, tuple[str, list[str]]] = {name: (name, []) for name in (*GROUPS, LING, *GONE)}
    runs |= {f"{name} tp": (name, ["-tp", "2"]) for name in ("qwen3-next", "nemotron-h")}
    for name in ("qwen3-next", "qwen3.6-27b", "nemotron-3-super"):
        runs[f"{name} mtp"] = (name, _drafting("mtp", 3))
    runs["qwen3.6-27b dflash"] = ("qwen3.6-27b", _drafting("dflash", 7, model=drafter))
    answers = child.ask(
        "tests.scheduler.layouts",
        [{"model": str(folder / name), "flags": FLAGS + more} for name, more in runs.values()],
        environment={"MAMBA_RETIRE": "off"},
        path=[STAND_INS],
    )
    return dict(zip(runs, answers, strict=True))


@pytest.mark.parametrize("name", GROUPS)
def test_groups_are_those_the_release_makes(
    layouts: dict[str, Any], release: str, name: str
) -> None:
    found = layouts[name]
    if name in LATENT and Version(release) < Version("0.29"):
        assert found.startswith(NOT_HERE)
        assert "\n" not in found
        return
    assert not isinstance(found, str), found
    assert (found["groups"], found["attention_groups"]) == GROUPS[name]
    assert found["mode"] == "align"
    assert found["block"] % 16 == 0


def test_a_block_holds_a_state_and_a_page_per_layer_of_a_group(
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


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_the_one_that_servers_print(layouts: dict[str, Any], name: str) -> None:
    assert layouts[name]["block"] == BLOCKS[name]


@pytest.mark.parametrize(
    ("name", "layers"), [("qwen3-next", 12), ("qwen3.6-27b", 16), ("nemotron-3-super", 8)]
)
def test_a_drafter_with_attention_of_its_own_is_a_layer_more(
    layouts: dict[str, Any], name: str, layers: int
) -> None:
    alone, found = layouts[name], layouts[f"{name} mtp"]
    assert (found["groups"], found["attention_groups"]) == GROUPS[name]
    assert (found["spec"], found["drafter"]) == (3, "mtp")
    token = alone["block_bytes"] // (layers * alone["block"])
    assert found["block_bytes"] == (layers + 1) * found["block"] * token


def test_a_drafter_with_other_heads_has_a_group_of_its_own(layouts: dict[str, Any]) -> None:
    """5 layers of another shape: groups of 5 out of 48 linear and 16 full layers."""
    found = layouts["qwen3.6-27b dflash"]
    assert (found["groups"], found["attention_groups"]) == (10, 4 + 1)
    assert (found["spec"], found["drafter"]) == (7, "dflash")


def test_a_model_that_is_newer_than_the_release_is_refused(
    layouts: dict[str, Any], release: str
) -> None:
    found = layouts[LING]
    if Version(release) < Version("0.28"):
        assert found == (
            "Model architectures ['BailingMoeV3ForCausalLM'] are not supported for now."
        )
    elif Version(release) < Version("0.29"):
        assert found.startswith(NOT_HERE)
    else:
        assert (found["groups"], found["attention_groups"]) == (5, 1)


@pytest.mark.parametrize("name", GONE)
def test_a_model_that_is_older_than_the_release_is_refused(
    layouts: dict[str, Any], name: str
) -> None:
    assert "was supported in vLLM until v0.23.0" in layouts[name]
    assert "\n" not in layouts[name]
