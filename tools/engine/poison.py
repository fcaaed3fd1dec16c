"""An engine whose freed states are overwritten at once: ``python -m tools.engine.poison``.

A block that is freed while somebody still reads it usually keeps its content for a while, and
nothing is seen. Here the memory of a freed block that no cache entry points to is filled with a
value no state has, as is the memory of every block handed out; and after every step no live table
may refer to a free block. What was answered can then be compared with an engine that never reuses
a block.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tools.engine.harness import EngineRun, Workload

# Large beside any state and finite: what is masked out may be multiplied by zero and must vanish.
_POISON = 1e4


class PoisonError(Exception):
    """The poisoned engine failed; the message ends with what it printed last."""


@dataclass(frozen=True, slots=True)
class Poisoned:
    """What a poisoned engine did, and how many blocks were overwritten."""

    run: EngineRun
    overwritten: int


def run(workload: Workload, *, path: str, trusted: bool = False) -> Poisoned:
    """Run a workload in a process of its own, on a poisoned pool.

    Args:
        workload: what to run.
        path: ``PYTHONPATH`` of the process: this package (or a mutant of it), vLLM, this folder.
        trusted: put the binding on without the package's own probe, which would refuse a mutant.

    Raises:
        PoisonError: the process failed, or a live table referred to a free block.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tools.engine.poison", *(["--trusted"] if trusted else [])],
        input=workload.to_json(),
        env=os.environ | {"PYTHONPATH": path, "MAMBA_RETIRE": "off" if trusted else "require"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise PoisonError(f"engine process ended with {done.returncode}:\n{done.stderr[-3000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return Poisoned(EngineRun.from_data(answer["run"]), answer["overwritten"])


def main(trusted: bool) -> None:
    """The engine's side: a workload on stdin, the answer on stdout."""
    from tools.engine import worker

    out = worker._claim_stdout()
    workload = Workload.from_json(sys.stdin.read())
    os.environ.update(worker._ENVIRONMENT)
    if trusted:
        from vllm.v1.core.single_type_kv_cache_manager import MambaManager

        from vllm_mamba_retire import binding

        binding.install(MambaManager)
    engine = worker.EngineProcess(workload, out)
    pool = PoisonedPool(engine)
    done = engine.run()
    print(json.dumps({"run": asdict(done), "overwritten": pool.overwritten}), file=out, flush=True)
    os._exit(0)  # see `worker.main`


class PoisonedPool:
    """Watches an engine's block pool and overwrites the states of blocks without an owner."""

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
    main("--trusted" in sys.argv)
