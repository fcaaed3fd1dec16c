"""Runs a `Scenario` through the scheduler of the vLLM imported in this process.

``python -m`` this module is the child process of `sides`; there ``MAMBA_RETIRE`` decides whether
the fix is installed, as in any vLLM process. The release's own `AsyncScheduler` (its `Scheduler` at
lag 0), KV-cache manager, block pool and prefix cache run; no GPU, no weights, no compiled op. A
stand-in for the model answers with the next tokens of a request's text. This is the only module
that depends on the scheduler's interface; like `manager`, it does not depend on the fix.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from vllm_mamba_retire.child import RefusalError, answer
from vllm_mamba_retire.names import MODE_VARIABLE, read_mode

from .platform import configure_only
from .runs import Run, Step
from .scenario import Arrival, Scenario

_MODEL = Path(__file__).with_name("stand_in")
_TOKEN_IDS = 1 << 31  # 0.34 on keeps token ids as 32-bit integers
_RETENTION_VARIABLE = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"  # <= 0.28 reads it from here
_STEPS_PER_REPORT = 20
_FRUITLESS_PREEMPTIONS = 8  # per request, without any request getting further than ever before


def replay(scenario: Scenario, on_step: Callable[[Run], None] | None = None) -> Run:
    """Replay one scenario; `on_step` gets the run as it is after each step."""
    return Replay(scenario).run(on_step or (lambda _run: None))


class Replay:
    """One scheduler with its requests; `run` may be called once."""

    def __init__(self, scenario: Scenario) -> None:
        configure_only()
        import vllm

        self.scenario = scenario
        self.scheduler, self.hasher = _build_scheduler(scenario, self._configure())
        self.cache = self.scheduler.kv_cache_manager
        self.mamba = self.cache.coordinator.single_type_managers[: scenario.groups]
        self.result = Run(vllm.__version__, self.cache.block_pool.num_gpu_blocks - 1)
        self.to_come = list(scenario.arrivals)
        self.arrivals = {arrival.id: arrival for arrival in scenario.arrivals}
        self.texts: dict[str, int] = {}
        # Token ids of different texts never meet; a request has one of its own and shares one.
        texts = 2 * len(scenario.arrivals)
        self.stride = max(_TOKEN_IDS // texts, scenario.longest + scenario.spec + 1)
        self.in_flight: deque[tuple[Any, dict[str, int]]] = deque()
        self.reached: dict[str, int] = {}  # tokens computed so far, by request
        self.preemptions: dict[str, int] = {}  # already seen, by request
        self.rolled_back: set[str] = set()  # preempted and not resumed yet
        self.furthest: dict[str, int] = {}
        self.fruitless = 0  # preemptions since a request last got further than ever before

    def _configure(self) -> Any:
        """The release's configuration for the scenario."""
        return _build_config(self.scenario)

    def run(self, on_step: Callable[[Run], None]) -> Run:
        """Schedule until every request ended, or no request can proceed."""
        idle = 0
        while self.to_come or self.scheduler.has_unfinished_requests():
            self._admit()
            output = self.scheduler.schedule()
            scheduled = output.total_num_scheduled_tokens
            idle = 0 if scheduled else idle + 1
            if scheduled:
                self._record(output)
                on_step(self.result)
            self.in_flight.append((output, self._samples(output)))
            if not scheduled or len(self.in_flight) > self.scenario.lag:
                self._settle(*self.in_flight.popleft())
            if (reason := self._stuck(idle)) is not None:
                self.result.stuck = f"{reason} (after step {len(self.result.steps)})"
                break
        return self.result

    def _stuck(self, idle: int) -> str | None:
        """Return why no request can proceed, after `idle` empty schedules in a row, or None."""
        # Each empty schedule settles one step in flight, and one more may follow a preemption.
        if idle > self.scenario.lag + 2:
            return "nothing can be scheduled: the pool has no room for the next request"
        if self.fruitless > _FRUITLESS_PREEMPTIONS * len(self.arrivals):
            return "requests keep rolling each other back"
        return None

    def _admit(self) -> None:
        """Add the requests that arrive at this step; the next one if no other is left."""
        idle = not self.scheduler.has_unfinished_requests()
        for arrival in list(self.to_come):
            waits = arrival.after is not None and arrival.after not in self.result.ended
            if not waits and (idle or arrival.at <= len(self.result.steps)):
                self.to_come.remove(arrival)
                self.scheduler.add_request(self._request(arrival))
                idle = False

    def _request(self, arrival: Arrival) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        return Request(
            request_id=arrival.id,
            prompt_token_ids=self._tokens(arrival, 0, arrival.prompt),
            sampling_params=SamplingParams(max_tokens=arrival.output, ignore_eos=True),
            pooling_params=None,
            block_hasher=self.hasher,
            **_known(Request, eos_token_id=None),  # < 0.17
        )

    def _tokens(self, arrival: Arrival, start: int, stop: int) -> list[int]:
        """Token ids of a request at positions `start` to `stop`, prompt and answer alike."""
        told = stop if arrival.shared is None else arrival.shared
        text, own = self._text(arrival.text or arrival.id), self._text(f"own {arrival.id}")
        return [
            *range(text + start, text + min(stop, told)),
            *range(own + max(start, told), own + stop),
        ]

    def _text(self, name: str) -> int:
        return self.texts.setdefault(name, len(self.texts)) * self.stride

    def _samples(self, output: Any) -> dict[str, int]:
        """Return how many tokens each request of this step will sample."""
        drafted = output.scheduled_spec_decode_tokens
        requests = self.scheduler.requests
        return {
            name: 0
            if _is_prefill_chunk(requests[name])
            else 1 + min(self.scenario.accepted, len(drafted.get(name, ())))
            for name in output.num_scheduled_tokens
        }

    def _settle(self, output: Any, samples: dict[str, int]) -> None:
        """Settle a step: pass its output to the scheduler, as the engine does after the GPU."""
        from vllm.v1.outputs import ModelRunnerOutput

        requests = self.scheduler.requests
        sampled = [
            self._tokens(self.arrivals[name], at := requests[name].num_tokens, at + count)
            if name in requests
            else []
            for name, count in samples.items()
        ]
        names = list(samples)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                sampled_token_ids=sampled,
                **_known(  # < 0.34
                    ModelRunnerOutput, req_id_to_index={name: at for at, name in enumerate(names)}
                ),
            ),
        )
        if self.scenario.spec and not self.scenario.lag:
            self._draft(names)
        for name in names:
            if name not in requests:
                self.result.ended.setdefault(name, len(self.result.steps))
                self.reached.pop(name, None)
                self.fruitless = 0

    def _draft(self, names: list[str]) -> None:
        """Without a lag the drafts come back before the next step; with one, the scheduler
        reserves places for them itself."""
        from vllm.v1.outputs import DraftTokenIds

        alive = [name for name in names if name in self.scheduler.requests]
        drafts = [[0] * self.scenario.spec for _ in alive]
        self.scheduler.update_draft_token_ids(DraftTokenIds(alive, drafts))

    def _record(self, output: Any) -> None:
        pool = self.cache.block_pool
        preempted = self._count_preempted()
        self.fruitless += preempted
        prefilling, redone, hit = self._count_progress(output)
        held = [self._held(manager) for manager in self.mamba]
        self.result.steps.append(
            Step(
                tokens=output.total_num_scheduled_tokens,
                prefilling=prefilling,
                running=len(self.scheduler.running),
                waiting=len(self.scheduler.waiting),
                states=tuple(sum(group) for group in held),
                deepest=max((max(group, default=0) for group in held), default=0),
                used=pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
                preempted=preempted,
                redone=redone,
                hit=hit,
            )
        )

    def _held(self, manager: Any) -> list[int]:
        """Live states by request."""
        null = self.cache.block_pool.null_block
        return [
            sum(block is not null for block in table) for table in manager.req_to_blocks.values()
        ]

    def _count_preempted(self) -> int:
        count = 0
        for name, request in self.scheduler.requests.items():
            if new := request.num_preemptions - self.preemptions.get(name, 0):
                count += new
                self.preemptions[name] = request.num_preemptions
                self.rolled_back.add(name)
        return count

    def _count_progress(self, output: Any) -> tuple[int, int, int]:
        """Requests that compute prompt tokens, tokens to be computed again, tokens found cached."""
        prefilling = redone = hit = 0
        entered = {new.req_id for new in output.scheduled_new_reqs}
        resumed = self.rolled_back & output.num_scheduled_tokens.keys()
        self.rolled_back -= resumed
        for name, tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens
            start = end - tokens
            prefilling += start < request.num_prompt_tokens
            if name in entered:
                self.result.hits[name] = start
            if name in entered or name in resumed:
                hit += start
            if name in resumed:
                redone += max(0, self.reached[name] - start)
            self.reached[name] = end
            if end > self.furthest.get(name, 0):
                self.furthest[name] = end
                self.fruitless = 0
        return prefilling, redone, hit


def _is_prefill_chunk(request: Any) -> bool:
    """Whether prompt tokens remain after the step that was just scheduled."""
    unfinished: bool = request.num_computed_tokens < request.num_tokens  # < 0.16 does not say
    return bool(getattr(request, "is_prefill_chunk", unfinished))


def _build_scheduler(scenario: Scenario, config: Any) -> tuple[Any, Any]:
    """The release's scheduler for a geometry, and the function that hashes a request's blocks."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    cache = _build_cache(scenario, config)
    block, hash_block = _block_sizes(cache, config)
    scheduler = (AsyncScheduler if scenario.lag else Scheduler)(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block,
        **_known(Scheduler, hash_block_size=hash_block),  # >= 0.20
    )
    return scheduler, _block_hasher(config, hash_block)


def _build_config(scenario: Scenario) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    os.environ.pop(_RETENTION_VARIABLE, None)
    if isinstance(scenario.retention_interval, int):
        os.environ[_RETENTION_VARIABLE] = str(scenario.retention_interval)
    tokens = scenario.longest + scenario.spec + 1
    drafting = {"method": scenario.drafter, "num_speculative_tokens": scenario.spec}
    if scenario.drafter == "ngram":
        drafting["prompt_lookup_max"] = 3
    config = EngineArgs(
        model=str(_MODEL),
        hf_overrides={"max_position_embeddings": tokens},
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_num_batched_tokens=scenario.budget,
        max_num_seqs=min(scenario.max_seqs, scenario.budget),
        max_model_len=tokens,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        mamba_cache_mode="align",
        speculative_config=drafting if scenario.spec else None,
    ).create_engine_config()
    # The stand-in model's own geometry gives way to the scenario's.
    _set(config.cache_config, "block_size", scenario.block)
    _set(config.cache_config, "mamba_block_size", scenario.block)
    _set(config.cache_config, "num_gpu_blocks", scenario.pool or scenario.ample_pool)
    _set(config.scheduler_config, "async_scheduling", scenario.lag > 0)
    return config


def _set(config: Any, name: str, value: Any) -> None:
    """Change a setting that the release has; an unknown one would be ignored silently."""
    getattr(config, name)
    setattr(config, name, value)


def _known(function: Callable[..., Any], **offered: Any) -> dict[str, Any]:
    """Return those of the arguments that this release's signature has."""
    known = _parameters(function)
    return {name: value for name, value in offered.items() if name in known}


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _build_cache(scenario: Scenario, config: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
    )

    state = MambaSpec(
        block_size=scenario.block,
        shapes=((1,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        num_speculative_blocks=scenario.spec,
    )
    attention = FullAttentionSpec(
        block_size=scenario.block, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    groups = [
        *(KVCacheGroupSpec([f"mamba {index}"], state) for index in range(scenario.groups)),
        KVCacheGroupSpec(["attention"], attention),
    ]
    cache = KVCacheConfig(
        num_blocks=config.cache_config.num_gpu_blocks, kv_cache_tensors=[], kv_cache_groups=groups
    )
    if hasattr(cache, "prefix_cache_retention_interval"):  # >= 0.29
        asked = scenario.retention_interval
        default = config.cache_config.prefix_cache_retention_interval
        chosen = {"default": default, "dense": None}.get(str(asked), asked)
        object.__setattr__(cache, "prefix_cache_retention_interval", chosen)
    return cache


def _block_sizes(cache: Any, config: Any) -> tuple[int, int]:
    try:
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    except ImportError:  # < 0.20: one size for all
        return config.cache_config.block_size, config.cache_config.block_size

    sizes: tuple[int, int] = resolve_kv_cache_block_sizes(cache, config)
    return sizes


def _block_hasher(config: Any, hash_block: int) -> Any:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(function)
    lookahead = getattr(config, "num_hash_lookahead_tokens", 0)  # >= 0.33
    extra = (lookahead,) if lookahead else ()
    return get_request_block_hasher(hash_block, function, *extra)


def _answer(payload: Any, report: Callable[[Any], None]) -> Any:
    """In the child of `sides.replay_all`: replay every scenario and report its progress."""
    configure_only()
    verdict = _activate()
    runs: list[Run] = []
    for number, scenario in enumerate(msgspec.convert(payload, list[Scenario])):

        def on_step(run: Run, number: int = number) -> None:
            steps = len(run.steps)
            if steps % _STEPS_PER_REPORT == 0:
                report({"scenario": number, "steps": steps, "tokens": run.scheduled_tokens})

        runs.append(replay(scenario, on_step))
        runs[-1].verdict = verdict
    return msgspec.to_builtins(runs)


def _activate() -> str:
    """Reason code of this package's verdict on the vLLM of this process."""
    if read_mode(os.environ.get(MODE_VARIABLE)) == "off":
        return "off"
    import vllm.v1.core.single_type_kv_cache_manager  # noqa: F401

    from vllm_mamba_retire import activate

    verdict = activate()
    assert verdict is not None, "vLLM's manager module was imported just above"
    if verdict.in_doubt:
        raise RefusalError(verdict.sentence)
    return verdict.reason.value


if __name__ == "__main__":
    answer(_answer)
