"""Runs an engine whose freed states are overwritten at once: ``python -m tools.engine.poison``.

A block that is freed while it is still read usually keeps its content for a while, so the error
does not show. Here the memory of a freed block without a cache entry is filled with a value that no
state has, and so is the memory of every newly allocated block; and after every step no live table
may refer to a free block. The answers can then be compared with those of an engine that never
reuses a block.

A CPU computes a step before the next one is scheduled. With `late`, a step is computed when its
result is needed, which is after those that the lag allows were scheduled: what they free is
overwritten when the step in flight reads it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from tools.engine import worker
from tools.engine.harness import EngineRun, Workload, ask_engine
from vllm_mamba_retire.child import answer
from vllm_mamba_retire.replay.sides import FIXED, STOCK, Side

# Large beside any state and finite: what is masked out may be multiplied by zero and must vanish.
_POISON = 1e4
# The package stays out and `binding` is installed by hand, past the probe that refuses a mutant.
TRUSTED = Side("trusted", {**STOCK.environment, "POISON_TRUSTED": "1"})


@dataclass(frozen=True, slots=True)
class Poisoned:
    """The result of a poisoned engine, and how many blocks were overwritten."""

    run: EngineRun
    overwritten: int


def run(
    workload: Workload, *, side: Side = FIXED, path: Sequence[str | Path] = (), late: bool = False
) -> Poisoned:
    """Run a workload in a process of its own, on a poisoned pool.

    Args:
        workload: what to run.
        side: `TRUSTED` binds the package on the path, a mutant, without its own probe.
        path: folders searched before those of this process.
        late: compute each step only when its result is needed.

    Raises:
        ChildError: the process failed, or a live table referred to a free block.
    """
    if late:
        side = replace(side, environment={**side.environment, "POISON_LATE": "1"})
    return msgspec.convert(ask_engine(__name__, workload, side, path), Poisoned)


def _run(payload: Any, report: Callable[[Any], None]) -> Any:
    """In the engine's process."""
    os.environ.update(worker.ENVIRONMENT)
    if os.environ.get("POISON_TRUSTED"):
        from vllm.v1.core.single_type_kv_cache_manager import MambaManager

        from vllm_mamba_retire import binding

        binding.install(MambaManager)
    engine = worker.EngineProcess(msgspec.convert(payload, Workload), report)
    if os.environ.get("POISON_LATE"):
        compute_late(engine.core.model_executor)
    pool = PoisonedPool(engine)
    return msgspec.to_builtins(Poisoned(engine.run(), pool.overwritten))


def compute_late(executor: Any) -> None:
    """Make a step in flight wait until its result is wanted; steps stay in order."""
    waiting: deque[Callable[[], None]] = deque()

    class Late(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            while not self.done():
                waiting.popleft()()
            return super().result(timeout)

    def late(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, non_block: bool = False) -> Any:
            if not non_block:
                return method(*args)
            future = Late()
            waiting.append(lambda: future.set_result(method(*args)))
            return future

        return called

    for name in ("execute_model", "sample_tokens"):
        setattr(executor, name, late(getattr(executor, name)))


class PoisonedPool:
    """Watches an engine's block pool and overwrites the states of unreferenced blocks."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.overwritten = 0
        self.states = list(_state_tensors(engine))
        assert self.states, "the engine has no state that could be overwritten"
        pool = engine.cache.block_pool
        free_blocks, get_new_blocks = pool.free_blocks, pool.get_new_blocks
        schedule = engine.core.scheduler.schedule

        def free(ordered_blocks: Iterable[Any], *args: Any, **kwargs: Any) -> None:
            blocks = list(ordered_blocks)
            free_blocks(blocks, *args, **kwargs)
            # A cached state may be hit later; it is overwritten when it is evicted.
            self._overwrite(b for b in blocks if b.ref_cnt == 0 and b.block_hash is None)

        def hand_out(*args: Any, **kwargs: Any) -> Any:
            blocks = get_new_blocks(*args, **kwargs)
            self._overwrite(blocks)
            return blocks

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._check_tables()
            return output

        pool.free_blocks, pool.get_new_blocks = free, hand_out
        engine.core.scheduler.schedule = scheduled

    def _overwrite(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            if not block.is_null:
                self.overwritten += 1
                for state in self.states:
                    state[block.block_id].fill_(_POISON)

    def _check_tables(self) -> None:
        for manager in self.engine.cache.coordinator.single_type_managers:
            for request, table in manager.req_to_blocks.items():
                for place, block in enumerate(table):
                    if not block.is_null and block.ref_cnt < 1:
                        raise AssertionError(f"block {place} of {request} is free and in its table")


def _state_tensors(engine: Any) -> Iterator[Any]:
    """State tensors of the recurrent layers; their first dimension is the block."""
    config = engine.engine.vllm_config
    layers = config.compilation_config.static_forward_context
    for group in engine.cache.kv_cache_config.kv_cache_groups:
        if type(group.kv_cache_spec).__name__ == "MambaSpec":
            for name in group.layer_names:
                yield from _tensors(layers[name].kv_cache)


def _tensors(cache: Any) -> Iterator[Any]:
    if isinstance(cache, list | tuple):
        for part in cache:
            yield from _tensors(part)
    else:
        yield cache


if __name__ == "__main__":
    answer(_run)
