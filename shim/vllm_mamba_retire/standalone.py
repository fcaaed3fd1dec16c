"""A real `MambaManager` on a real block pool, outside any engine.

Constructors gained arguments from release to release; here each is given those it knows. Knows
nothing of the fix: whatever is bound to the class is what gets built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any


def build_manager(
    module: ModuleType,
    block: int,
    pool: int,
    manager_class: type | None = None,
    spec: int = 0,
) -> Any:
    """Build a manager in align mode with a pool of its own.

    Args:
        module: the imported ``single_type_kv_cache_manager`` of some release.
        block: block size in tokens.
        pool: blocks in the pool, the null block among them.
        manager_class: class to build; by default the module's `MambaManager`.
        spec: speculative blocks per request (`num_speculative_blocks`).
    """
    import torch  # vLLM's manager module has imported it already

    state = call_known(
        module.MambaSpec,
        block_size=block,
        shapes=((1,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        num_speculative_blocks=spec,
    )
    return call_known(
        manager_class or module.MambaManager,
        module.SingleTypeKVCacheManager,
        kv_cache_spec=state,
        block_pool=call_known(
            module.BlockPool, num_gpu_blocks=pool, enable_caching=True, hash_block_size=block
        ),
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=block,
    )


def call_known(
    function: Callable[..., Any], declared_by: Callable[..., Any] | None = None, **offered: Any
) -> Any:
    """Call `function` with those of the offered arguments that this release's signature has.

    Args:
        function: what to call.
        declared_by: whose signature to read, where `function` itself takes ``**kwargs``.
        offered: arguments by name.
    """
    known = inspect.signature(declared_by or function).parameters
    return function(**{name: value for name, value in offered.items() if name in known})
