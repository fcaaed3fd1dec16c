"""What a model and its serving flags make of the pool, by vLLM's own code: ``python -m`` this.

Takes ``vllm serve``'s flags, prints one JSON object: block size, groups, bytes of a pool block,
budget, lag, blocks. No weights and no device: the layers' specs are made from the configuration.
Block sizes depend on the attention backend's kernels; here they are multiples of 16 tokens, as
FlashAttention, FlashInfer and Triton have them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

_KERNEL_BLOCK = 16  # tokens
_STATE_LAYERS = ("linear_attention", "mamba")


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    print(json.dumps(derive(sys.argv[1:])), file=out, flush=True)
    os._exit(0)


def derive(flags: list[str]) -> dict[str, Any]:
    """Figures of a deployment, by the names of `deployment.Deployment`; null where unknown."""
    from vllm_mamba_retire.replay.platform import configure_only

    configure_only()
    arguments = _parse(flags)
    given_budget = arguments.max_num_batched_tokens is not None
    config = arguments.create_engine_config()
    if not config.model_config.is_hybrid:
        _refuse(f"model: {config.model_config.architecture} is not a hybrid Mamba model.")
    _align_blocks(config)
    groups = _group(config)
    # Groups share the pool: a block is a page for each layer of the group that has most.
    layers = max(len(group.layer_names) for group in groups)
    block_bytes = layers * max(group.kv_cache_spec.page_size_bytes for group in groups)
    mamba = [group for group in groups if _is_state(group.kv_cache_spec)]
    return {
        "version": _version(),
        "align": config.cache_config.mamba_cache_mode == "align",
        "block": config.cache_config.mamba_block_size,
        "groups": len(mamba),
        "attention_groups": len(groups) - len(mamba),
        "block_bytes": block_bytes,
        "budget": config.scheduler_config.max_num_batched_tokens,
        "budget_given": given_budget,
        "chunk_limit": config.scheduler_config.long_prefill_token_threshold or None,
        "spec": mamba[0].kv_cache_spec.num_speculative_blocks,
        "lag": config.max_concurrent_batches - 1,
        "prompt": config.model_config.max_model_len,
        "pool": _pool(config, block_bytes),
    }


def _parse(flags: list[str]) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm serve"))
    return EngineArgs.from_cli_args(parser.parse_args([*flags, "--skip-tokenizer-init"]))


def _align_blocks(config: Any) -> None:
    """Let vLLM choose the block size at which an attention page holds a state."""
    from vllm.platforms.interface import Platform

    if not config.cache_config.user_specified_block_size:
        config.cache_config.block_size = _KERNEL_BLOCK
    Platform._align_hybrid_block_size(config, _Backend)
    if getattr(config.cache_config, "kv_cache_layout", "") is None:  # >= 0.29
        # How a page is laid out, which the engine would settle with the backend; sizes stay.
        from vllm.v1.kv_cache_layout import KVCacheLayout

        config.cache_config.kv_cache_layout = next(iter(KVCacheLayout)).name


class _Backend:
    """The two questions that the alignment puts to an attention backend."""

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        from vllm.v1.attention.backend import MultipleOf

        return [MultipleOf(_KERNEL_BLOCK)]

    @staticmethod
    def customize_spec(spec: Any) -> Any:
        return spec


def _group(config: Any) -> list[Any]:
    """The cache groups that vLLM makes of the layers."""
    try:
        from vllm.v1.core.kv_cache_planning import get_kv_cache_groups  # >= 0.33
    except ImportError:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    groups: list[Any] = get_kv_cache_groups(config, dict(_layer_specs(config)))
    return groups


def _layer_specs(config: Any) -> Iterator[tuple[str, Any]]:
    """The layers' specs as the loaded model would give them, the drafter's attention included."""
    model, parallel = config.model_config, config.parallel_config
    states = sum(model.get_num_layers_by_block_type(parallel, kind) for kind in _STATE_LAYERS)
    attention = model.get_num_layers_by_block_type(parallel, "attention")
    state = _state_spec(config)
    for number in range(states):
        yield f"layers.{number}.state", state
    drafting = config.speculative_config
    drafter = getattr(drafting, "draft_model_config", None)
    if drafter is not None and drafting.use_eagle():
        attention += max(1, drafter.get_total_num_hidden_layers())
    for number in range(attention):
        yield f"layers.{number}.attention", _attention_spec(config)


def _state_spec(config: Any) -> Any:
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.kv_cache_interface import MambaSpec

    model, cache = config.model_config, config.cache_config
    model_class, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    drafting = config.speculative_config
    return MambaSpec(
        shapes=model_class.get_mamba_state_shape_from_config(config),
        dtypes=model_class.get_mamba_state_dtype_from_config(config),
        block_size=cache.mamba_block_size,
        page_size_padded=cache.mamba_page_size_padded,
        mamba_cache_mode=cache.mamba_cache_mode,
        num_speculative_blocks=drafting.num_speculative_tokens if drafting else 0,
    )


def _attention_spec(config: Any) -> Any:
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    model, dtype = config.model_config, config.cache_config.cache_dtype
    return (MLAAttentionSpec if model.use_mla else FullAttentionSpec)(
        block_size=config.cache_config.block_size,
        num_kv_heads=model.get_num_kv_heads(config.parallel_config),
        head_size=model.get_head_size(),
        dtype=model.dtype if dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[dtype],
    )


def _is_state(spec: Any) -> bool:
    return type(spec).__name__ == "MambaSpec"


def _pool(config: Any, block_bytes: int) -> int | None:
    cache = config.cache_config
    if cache.num_gpu_blocks_override is not None:
        return int(cache.num_gpu_blocks_override)
    if cache.kv_cache_memory_bytes is not None:
        return int(cache.kv_cache_memory_bytes // block_bytes)
    return None


def _version() -> str:
    import vllm

    return str(vllm.__version__)


def _refuse(sentence: str) -> NoReturn:
    print(sentence, file=sys.stderr, flush=True)
    os._exit(3)


if __name__ == "__main__":
    main()
