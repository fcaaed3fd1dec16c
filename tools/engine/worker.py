"""The engine's process of `harness` (``python -m`` this): a `Workload` in, an `EngineRun` out.

This is the only module that depends on the engine's internals: scheduling with a lag on the CPU
platform, weights made from a seed, and a record of the block tables after every step.
"""

from __future__ import annotations

import os
import random
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec

from tools.engine.harness import MODELS, Action, Answer, EngineRun, EngineStep, Workload
from vllm_mamba_retire.child import answer

ENVIRONMENT = {
    # The engine core in this process, where its scheduler can be observed.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
}
_FIRST_TEXT_TOKEN = 2  # the configs' vocabularies start with two special tokens


def _run(payload: Any, report: Callable[[Any], None]) -> Any:
    os.environ.update(ENVIRONMENT)
    return msgspec.to_builtins(EngineProcess(msgspec.convert(payload, Workload), report).run())


class EngineProcess:
    """One engine with its observer; `report` gets the tokens of each step."""

    def __init__(self, workload: Workload, report: Callable[[int], None]) -> None:
        self.workload = workload
        self.report = report
        self.steps: list[EngineStep] = []
        self.answers: dict[str, Answer] = {}
        self.added: dict[str, float] = {}
        self.started = 0.0
        self.preempted = 0  # since the last step that scheduled tokens
        self.engine = _boot(workload)
        self.core = self.engine.engine_core.engine_core
        self.cache = self.core.scheduler.kv_cache_manager
        managers = self.cache.coordinator.single_type_managers
        self.mamba = [m for m in managers if type(m.kv_cache_spec).__name__ == "MambaSpec"]
        self._observe(self.core.scheduler)

    def run(self) -> EngineRun:
        """Make each call at its step, and run until all requests have ended."""
        self.started = time.perf_counter()
        actions = list(self.workload.actions)
        while actions or self._busy():
            while actions and self._due(actions[0]):
                self._act(actions.pop(0))
            for output in self.engine.step():
                self._note(output)
        return self._result()

    def _busy(self) -> bool:
        scheduled = bool(self.core.batch_queue)
        return scheduled or self.core.scheduler.has_requests()

    def _due(self, action: Action) -> bool:
        if action.at is None or not self._busy():
            return not self._busy()
        return len(self.steps) >= action.at

    def _act(self, action: Action) -> None:
        if action.do == "add":
            self._add(action)
        elif action.do == "abort":
            self.engine.abort_request([action.request])
        elif not self.engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not reset: blocks are in use")

    def _add(self, action: Action) -> None:
        from vllm import SamplingParams

        self.answers[action.request] = Answer()
        self.added[action.request] = time.perf_counter()
        self.engine.add_request(
            action.request,
            {"prompt_token_ids": list(_prompt(action, self._vocabulary()))},
            SamplingParams(temperature=0, max_tokens=action.output, ignore_eos=True, logprobs=0),
        )

    def _vocabulary(self) -> int:
        return int(self.engine.vllm_config.model_config.get_vocab_size())

    def _note(self, output: Any) -> None:
        """Store the answer of a request so far."""
        completion = output.outputs[0]
        before = self.answers[output.request_id]
        self.answers[output.request_id] = replace(
            before,
            tokens=list(completion.token_ids),
            logprobs=[
                entry[token].logprob
                for token, entry in zip(
                    completion.token_ids, completion.logprobs or (), strict=False
                )
            ],
            cached=output.num_cached_tokens or 0,
            first_token=before.first_token or time.perf_counter() - self.added[output.request_id],
        )

    def _observe(self, scheduler: Any) -> None:
        """Record the tables after each scheduled step, when they hold the most states."""
        schedule = scheduler.schedule

        def observed(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.preempted += len(output.preempted_req_ids or ())
            if output.total_num_scheduled_tokens:
                self._record(output)
            return output

        scheduler.schedule = observed

    def _record(self, output: Any) -> None:
        pool = self.cache.block_pool
        requests = {request for manager in self.mamba for request in manager.req_to_blocks}
        self.steps.append(
            EngineStep(
                tokens=output.total_num_scheduled_tokens,
                seconds=time.perf_counter() - self.started,
                used=pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
                # vLLM adds a random tail to the client's id.
                states={
                    request.rpartition("-")[0]: [_states(m, request) for m in self.mamba]
                    for request in sorted(requests)
                },
                preempted=self.preempted,
            )
        )
        self.preempted = 0
        self.report(output.total_num_scheduled_tokens)

    def _result(self) -> EngineRun:
        import vllm

        from vllm_mamba_retire import current

        record = current()
        counters = record.counters if record else None
        keeping = record.keep_counters if record else None
        pool = self.cache.block_pool
        return EngineRun(
            vllm=vllm.__version__,
            verdict=record.reason if record else "off",
            freed_beyond_stock=counters.states_stock_would_keep if counters else 0,
            refreshed=keeping.states_refreshed if keeping else 0,
            cache_mode=self.mamba[0].mamba_cache_mode,
            block=self.mamba[0].block_size,
            groups=len(self.mamba),
            steps=self.steps,
            answers=self.answers,
            pool=pool.num_gpu_blocks - 1,
            free_after=pool.get_num_free_blocks(),
            referenced_after=sum(b.ref_cnt > 0 and not b.is_null for b in pool.blocks),
            watermarks_after=sum(len(getattr(m, "_num_retired_blocks", ())) for m in self.mamba),
        )


def _states(manager: Any, request: str) -> list[int]:
    table = manager.req_to_blocks.get(request, ())
    return [index for index, block in enumerate(table) if not block.is_null]


def _prompt(action: Action, vocabulary: int) -> Iterator[int]:
    for seed, tokens in action.prompt:
        yield from random.Random(seed).choices(range(_FIRST_TEXT_TOKEN, vocabulary), k=tokens)


def _boot(workload: Workload) -> Any:
    if workload.lag:
        schedule_ahead(workload.lag)
    register_seeded_weights()
    from vllm import EngineArgs, LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(MODELS[workload.model]),
            load_format="seeded",
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            mamba_ssm_cache_dtype="float32",
            max_model_len=workload.max_tokens,
            max_num_batched_tokens=workload.budget,
            num_gpu_blocks_override=workload.pool,
            enable_prefix_caching=workload.cache_mode != "none",
            mamba_cache_mode=workload.cache_mode,
            **dict(workload.options),
            disable_log_stats=True,
        )
    )


def schedule_ahead(lag: int) -> None:
    """Turn async scheduling back on behind the CPU platform's check, `lag` steps deep.

    The check sets it to False (``CpuPlatform.check_and_update_config``); the engine core, its queue
    of batches and the runner that the CPU uses work with it.
    """
    from vllm.config import VllmConfig
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    VllmConfig.max_concurrent_batches = property(lambda _config: lag + 1)


def register_seeded_weights() -> None:
    """Register weights with which the output depends on the whole prompt.

    vLLM's own dummy weights are so small that every prompt gets the same answer, so that comparing
    outputs would prove nothing. With these a state affects thousands of later tokens.
    """
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader("seeded")
    class SeededWeights(BaseModelLoader):  # type: ignore[misc,unused-ignore]
        def download_model(self, model_config: Any) -> None:
            """There is nothing to download."""

        def load_weights(self, model: Any, model_config: Any) -> None:  # noqa: ARG002
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    _fill(name, weight)


def _fill(name: str, weight: Any) -> None:
    import torch

    kind = name.rsplit(".", 1)[-1]
    if kind == "A_log":
        weight.fill_(-7.0)  # a state loses a tenth of a percent per token
    elif kind == "A":
        weight.fill_(-1e-3)
    elif kind in ("dt_bias", "bias"):
        weight.zero_()
    elif weight.dim() < 2:
        weight.fill_(1.0)
    else:
        generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
        weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)


if __name__ == "__main__":
    answer(_run)
