"""Derives the pool of a model and its serving flags by vLLM's own code: a child of `model`.

The release builds its own model and drafter without weights or device (PyTorch's meta device),
their layers tell their cache specs, and the release groups them. Block sizes depend on the
attention backend's kernels; here they are multiples of 16 tokens, as FlashAttention, FlashInfer and
Triton have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

from vllm_mamba_retire import child

_KERNEL_BLOCK = 16  # tokens
_PARSER_PLACES = ("common.cli_args", "launchers.cli_args", "openai.cli_args")  # newest first
# Arguments that decide about the cache; the others may want a device, a network or a tokenizer.
_DECIDING = (
    "model",
    "hf_config_path",
    "hf_overrides",
    "trust_remote_code",
    "dtype",
    "max_model_len",
    "language_model_only",
    "kv_cache_dtype",
    "block_size",
    "enable_prefix_caching",
    "prefix_match_unit",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "mamba_block_size",
    "mamba_cache_mode",
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "max_num_batched_tokens",
    "max_num_scheduled_tokens",
    "max_num_seqs",
    "long_prefill_token_threshold",
    "enable_chunked_prefill",
    "async_scheduling",
    "speculative_config",
    "spec_method",
    "spec_model",
    "spec_tokens",
    "num_lookahead_slots",
)


def derive(request: dict[str, Any], _report: Any) -> dict[str, Any]:
    """Settings of a deployment, by the names of `deployment.SETTINGS`; null where unknown.

    Args:
        request: ``model``, a folder, and ``flags`` as for ``vllm serve``.

    Raises:
        child.RefusalError: vLLM refuses the configuration, or it has no states.
    """
    try:
        return _derive(request["model"], request["flags"])
    except child.RefusalError:
        raise
    except Exception as error:
        raise child.RefusalError(_reason(error)) from error


def _derive(model: str, flags: list[str]) -> dict[str, Any]:
    from vllm_mamba_retire.replay.platform import configure_only

    configure_only()
    _leave_out_experts()
    arguments = _parse(model, flags)
    given_budget = arguments.max_num_batched_tokens is not None
    config = arguments.create_engine_config()
    if not config.model_config.is_hybrid:
        raise child.RefusalError(f"{config.model_config.architecture} is not a hybrid Mamba model.")
    _align_blocks(config)
    try:
        groups = _group(config)
    except Exception as error:
        raise child.RefusalError(
            f"vLLM cannot build this model on this machine ({_reason(error)}); give the log of "
            "the server instead."
        ) from error
    mamba = [group for group in groups if type(group.kv_cache_spec).__name__ == "MambaSpec"]
    if not mamba:
        raise child.RefusalError("vLLM puts states and attention into one group of uneven pages.")
    scheduler, cache = config.scheduler_config, config.cache_config
    block_bytes = _block_bytes(config, groups)
    pool = cache.num_gpu_blocks_override
    if pool is None and cache.kv_cache_memory_bytes is not None:
        pool = cache.kv_cache_memory_bytes // block_bytes
    return {
        "version": _version(),
        "architecture": config.model_config.architecture,
        "prefix_caching": cache.enable_prefix_caching,
        "mode": cache.mamba_cache_mode,
        "block": cache.block_size if cache.mamba_cache_mode == "none" else cache.mamba_block_size,
        "groups": len(mamba),
        "attention_groups": len(groups) - len(mamba),
        "block_bytes": block_bytes,
        "budget": scheduler.max_num_batched_tokens,
        "budget_given": given_budget,
        "scheduled": scheduler.max_num_scheduled_tokens if given_budget else None,
        "chunk_limit": scheduler.long_prefill_token_threshold or None,
        "spec": mamba[0].kv_cache_spec.num_speculative_blocks,
        "drafter": getattr(config.speculative_config, "method", None),
        "asynchronous": bool(scheduler.async_scheduling),
        "pipeline": config.parallel_config.pipeline_parallel_size,
        "prompt": config.model_config.max_model_len,
        "pool": pool,
    }


def _leave_out_experts() -> None:
    """Build models without their experts: these hold no cache, and most are refused on a CPU.

    Call it before vLLM imports a model's module.
    """
    import torch
    from vllm.model_executor.layers import fused_moe

    class Nothing(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, *_arguments: Any, **_keywords: Any) -> None:
            super().__init__()

    name = "FusedMoEFactory" if hasattr(fused_moe, "FusedMoEFactory") else "FusedMoE"  # >= 0.27
    setattr(fused_moe, name, Nothing)


def _parse(model: str, flags: list[str]) -> Any:
    """The arguments that decide about the cache; a flag that no server has is an error."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise child.RefusalError(f"{message}.")

    parser = next(filter(None, map(_parser_in, _PARSER_PLACES)))
    parsed = parser(Parser(prog="vllm serve")).parse_args(flags)
    known = {name: getattr(parsed, name) for name in _DECIDING if hasattr(parsed, name)}
    return EngineArgs(**known | {"model": model, "skip_tokenizer_init": True})


def _parser_in(place: str) -> Any:
    """The function that adds a server's flags to a parser; None where this release has it not."""
    try:
        return import_module(f"vllm.entrypoints.{place}").make_arg_parser
    except ModuleNotFoundError:
        return None


def _reason(error: Exception) -> str:
    """vLLM's own sentence; pydantic puts its heading around it and a link behind it."""
    for line in str(error).splitlines():
        text = line.strip().removeprefix("Value error, ").removeprefix("Assertion failed, ")
        if text != line.strip():
            # Not the names of all that it supports, nor what pydantic puts behind it.
            return text.partition(" [type=")[0].partition(" Supported architectures:")[0]
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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

    groups: list[Any] = get_kv_cache_groups(config, _layer_specs(config))
    return groups


def _layer_specs(config: Any) -> dict[str, Any]:
    """The layers' cache specs, those of a drafter with layers of its own included."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    drafting = config.speculative_config
    drafter = getattr(drafting, "draft_model_config", None)
    models = [config.model_config]
    if drafter is not None and drafter is not config.model_config:
        models.append(drafter)
    with set_current_vllm_config(config), _without_device(config):
        for model in models:
            initialize_model(vllm_config=config, model_config=model)
    layers = config.compilation_config.static_forward_context
    specs = {
        name: layer.get_kv_cache_spec(config)
        for name, layer in layers.items()
        if hasattr(layer, "get_kv_cache_spec")
    }
    return {name: spec for name, spec in specs.items() if spec is not None}


@contextmanager
def _without_device(config: Any) -> Iterator[None]:
    """Let model classes be built where there is neither a device nor a process group.

    Their tensors are on the meta device, compiled operators that are not there are stubs, and the
    process groups only know their size.
    """
    import torch
    import torch._ops
    from vllm.distributed import parallel_state
    from vllm.triton_utils import triton

    if not hasattr(triton, "set_allocator"):  # vLLM's placeholder for Triton
        triton.set_allocator = lambda _allocator: None
    sizes = {"_TP": config.parallel_config.tensor_parallel_size}
    sizes["_WORLD"] = sizes["_EP"] = sizes["_TP"]
    for name in ("_WORLD", "_TP", "_PP", "_DP", "_EP", "_EPLB", "_PCP", "_DCP"):
        if hasattr(parallel_state, name):
            setattr(parallel_state, name, _ProcessGroup(sizes.get(name, 1)))
    look_up = torch._ops._OpNamespace.__getattr__
    if not torch.cuda.is_available():
        # Some layers keep a second stream for their shared experts.
        torch.cuda.Stream = torch.cuda.Event = _ProcessGroup

    def operator(namespace: Any, name: str) -> Any:
        try:
            return look_up(namespace, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return lambda *_arguments, **_keywords: None

    torch._ops._OpNamespace.__getattr__ = operator
    try:
        before = torch.get_default_dtype()
        torch.set_default_dtype(config.model_config.dtype)
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)
        torch._ops._OpNamespace.__getattr__ = look_up


class _ProcessGroup:
    """First rank of a group of processes that are not there."""

    is_first_rank = is_last_rank = True
    rank = local_rank = rank_in_group = 0
    unique_name = "none"

    def __init__(self, size: int = 1) -> None:
        self.world_size = size
        self.ranks = list(range(size))
        self.device_group = self.cpu_group = _TorchGroup(size)

    def __getattr__(self, name: str) -> None:
        """Communicators and the like: none."""


class _TorchGroup:
    """The same as torch has it."""

    def __init__(self, size: int) -> None:
        self.size = lambda: size
        self.rank = lambda: 0


def _block_bytes(config: Any, groups: list[Any]) -> int:
    """Bytes of one block of the pool, as the release counts them."""
    try:
        from vllm.v1.core import kv_cache_planning as counting  # >= 0.33
    except ImportError:
        from vllm.v1.core import kv_cache_utils as counting
    from vllm_mamba_retire.probe import call_known

    return int(
        call_known(counting._pool_bytes_per_block, vllm_config=config, kv_cache_groups=groups)
    )


def _version() -> str:
    import vllm

    return str(vllm.__version__)


if __name__ == "__main__":
    child.answer(derive)
