"""Runs a workload through a real vLLM engine in a process of its own and records its blocks.

Defines the workload and the result; imports no vLLM. The engine's process runs `worker`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from vllm_mamba_retire import replay
from vllm_mamba_retire.child import ChildError, ask
from vllm_mamba_retire.replay.sides import FIXED, Side

# Configs only; the weights are made from a seed.
MODELS = {
    "qwen3_next": Path(replay.__file__).with_name("stand_in"),
    "falcon_h1": Path(__file__).with_name("models") / "falcon_h1",
}


@dataclass(frozen=True, slots=True)
class Action:
    """One call of a client on the engine.

    Attributes:
        do: the kind of call.
        request: id of the request; not used by ``reset_prefix_cache``.
        at: scheduled steps to wait for, or until no request is left; None waits for the latter.
        prompt: pieces ``(seed, tokens)``; equal pieces are equal text: a prefix can be shared.
        output: tokens to generate.
    """

    do: Literal["add", "abort", "reset_prefix_cache"]
    request: str = ""
    at: int | None = 0
    prompt: tuple[tuple[int, int], ...] = ()
    output: int = 8


@dataclass(frozen=True, slots=True)
class Workload:
    """One engine and the calls made on it, in order.

    Attributes:
        actions: the calls.
        model: one of `MODELS`.
        lag: steps scheduled but not yet settled; 0 is synchronous scheduling.
        budget: ``max_num_batched_tokens``.
        pool: blocks in the pool; None lets vLLM size it, which is ample here.
        cache_mode: ``mamba_cache_mode``.
        max_tokens: ``max_model_len``.
        options: further engine arguments.
    """

    actions: tuple[Action, ...]
    model: str = "qwen3_next"
    lag: int = 1
    budget: int = 2560
    pool: int | None = None
    cache_mode: Literal["align", "all", "none"] = "align"
    max_tokens: int = 65_536
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStep:
    """The scheduler's state right after one step was scheduled.

    Attributes:
        tokens: tokens scheduled in this step.
        seconds: since the first action.
        used: blocks of the pool in use.
        states: per request and Mamba group, the table indices that hold a state.
        preempted: requests rolled back since the step before because the pool was exhausted.
    """

    tokens: int
    seconds: float
    used: int
    states: Mapping[str, list[list[int]]]
    preempted: int

    @property
    def live(self) -> int:
        """Most states that one request holds in one Mamba group."""
        return max((len(group) for groups in self.states.values() for group in groups), default=0)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request.

    Attributes:
        tokens: generated token ids.
        logprobs: log probability of each of them.
        cached: prompt tokens served from the prefix cache.
        first_token: seconds from the request to its first token; None if it got none.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0
    first_token: float | None = None

    @property
    def sha(self) -> str:
        """Digest of the generated tokens, short enough for a table."""
        return hashlib.sha256(json.dumps(self.tokens).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class EngineRun:
    """The result of a workload on one engine.

    Attributes:
        vllm: vLLM's version.
        verdict: reason code of this package in that process, or ``off``.
        freed_beyond_stock: states freed that stock vLLM would have kept.
        refreshed: times that a state was moved to the end of the free queue.
        cache_mode: ``mamba_cache_mode`` in effect; vLLM may change the requested one.
        block: Mamba block size, in tokens.
        groups: Mamba groups that share the pool.
        steps: one entry per step that scheduled tokens.
        answers: by request; the last one where an id was used again.
        pool: blocks in the pool, the null block left out.
        free_after: free blocks after all requests have ended.
        referenced_after: blocks with references then, the null block left out.
        watermarks_after: watermarks left then.
    """

    vllm: str
    verdict: str
    freed_beyond_stock: int
    refreshed: int
    cache_mode: str
    block: int
    groups: int
    steps: list[EngineStep]
    answers: dict[str, Answer]
    pool: int
    free_after: int
    referenced_after: int
    watermarks_after: int

    @property
    def peak(self) -> int:
        """Most states that one request ever held in one Mamba group."""
        return max((step.live for step in self.steps), default=0)

    @property
    def scheduled(self) -> int:
        """Tokens scheduled, those computed again after a roll-back included."""
        return sum(step.tokens for step in self.steps)

    @property
    def preemptions(self) -> int:
        """Roll-backs of requests because the pool was exhausted."""
        return sum(step.preempted for step in self.steps)

    @property
    def nothing_left(self) -> bool:
        """Whether all blocks are back, with no reference and no watermark left."""
        left = self.pool - self.free_after, self.referenced_after, self.watermarks_after
        return left == (0, 0, 0)


def run(
    workload: Workload,
    *,
    side: Side = FIXED,
    path: Sequence[str | Path] = (),
    on_step: Callable[[int], None] | None = None,
) -> EngineRun:
    """Run a workload in a new process.

    Args:
        workload: what to run.
        side: with the fix or without.
        path: folders searched before those of this process (which vLLM).
        on_step: called with the tokens of each step while it runs.

    Raises:
        ChildError: the process failed; the message ends with what it printed last.
    """
    answer = ask_engine(f"{__package__}.worker", workload, side, path, on_step)
    return msgspec.convert(answer, EngineRun)


def ask_engine(
    module: str,
    workload: Workload,
    side: Side,
    path: Sequence[str | Path] = (),
    on_step: Callable[[int], None] | None = None,
) -> Any:
    """Return the answer of an engine process; see `run`."""
    payload = msgspec.to_builtins(workload)
    try:
        return ask(module, payload, environment=side.environment, path=path, on_event=on_step)
    except ChildError as error:
        raise ChildError(f"{error}\n{error.log}") from None
