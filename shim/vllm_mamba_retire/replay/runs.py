"""Defines the result of a replay through the scheduler: figures per step and their totals."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Step:
    """The figures of one step, right after it was scheduled.

    Attributes:
        tokens: tokens scheduled.
        prefilling: requests of which it computed prompt tokens.
        running: requests running.
        waiting: requests waiting.
        states: live states per Mamba group, all requests together.
        deepest: most live states that one request holds in one Mamba group.
        used: blocks of the pool in use, of `Run.pool`.
        preempted: requests rolled back to the start for want of blocks.
        redone: tokens that requests resumed in this step must compute again.
        hit: tokens that requests admitted or resumed in this step found in the prefix cache.
    """

    tokens: int
    prefilling: int
    running: int
    waiting: int
    states: tuple[int, ...]
    deepest: int
    used: int
    preempted: int
    redone: int
    hit: int


@dataclass(slots=True)
class Run:
    """A scenario's replay.

    Attributes:
        vllm: vLLM's version.
        verdict: reason code of this package in that process, "off" for the control.
        pool: blocks in the pool, the null block left out.
        steps: one entry per step that scheduled tokens.
        hits: prompt tokens found in the prefix cache when the request was first admitted, by id.
        ended: step in which each request ended, by id.
        stuck: why no request could proceed; None if every request ended.
    """

    vllm: str
    pool: int
    verdict: str = "off"
    steps: list[Step] = field(default_factory=list)
    hits: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    stuck: str | None = None

    @property
    def scheduled_tokens(self) -> int:
        """Tokens scheduled, those computed again after a roll-back included."""
        return sum(step.tokens for step in self.steps)

    @property
    def prefill_steps(self) -> int:
        """Steps that computed prompt tokens."""
        return sum(step.prefilling > 0 for step in self.steps)

    @property
    def rollbacks(self) -> int:
        """Preemptions: each sets a request's computed tokens back to 0."""
        return sum(step.preempted for step in self.steps)

    @property
    def redone_tokens(self) -> int:
        """Tokens computed again after a roll-back, those found in the prefix cache left out."""
        return sum(step.redone for step in self.steps)

    @property
    def peak_states(self) -> int:
        """Most live states that one request ever held in one Mamba group."""
        return max((step.deepest for step in self.steps), default=0)

    @property
    def peak_used(self) -> int:
        """Most blocks of the pool ever in use."""
        return max((step.used for step in self.steps), default=0)

    def states_after(self, tokens: int) -> int | None:
        """Most states of one request in one group in the step that brings the scheduled tokens
        to exactly `tokens`; None if no step does."""
        scheduled = 0
        for step in self.steps:
            scheduled += step.tokens
            if scheduled == tokens:
                return step.deepest
        return None

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens served from the prefix cache."""
        return sum(self.hits.values())
