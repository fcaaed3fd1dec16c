"""Defines the input of a replay: one geometry, one pool, one lag, and the requests that arrive.

Plain data whose limits are checked; without vLLM and files, so that a child process can get it as
JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal


class InputError(ValueError):
    """The user's input is invalid; the message is one sentence that names the field."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Attributes:
        id: name, unique in its scenario.
        prompt: prompt length, in tokens.
        output: tokens it generates before it ends.
        at: step at which it arrives.
        after: id of a request that has to end first (a client waiting for its answer).
        text: name of the text that its prompt is cut from. Requests with the same text share their
            common prefix; answers continue the text, so a longer prompt is the next turn of the
            conversation. By default its own id.
        shared: length in tokens of the prefix that is cut from `text`; the rest is unique to the
            request. By default the whole prompt.
    """

    id: str
    prompt: int
    output: int = 1
    at: int = 0
    after: str | None = None
    text: str | None = None
    shared: int | None = None

    def __post_init__(self) -> None:
        _at_least(self, prompt=1, output=1, at=0, shared=0)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A geometry, a pool and the requests that use it.

    Attributes:
        id: name.
        block: Mamba (= aligned attention) block size, in tokens.
        budget: ``max_num_batched_tokens``.
        arrivals: the requests.
        spec: ``num_speculative_blocks`` = draft tokens a step.
        drafter: "mtp" or "ngram". With "mtp" a hit leaves out the last cached block, as vLLM does
            for EAGLE and MTP. No effect without `spec`.
        accepted: draft tokens accepted a step.
        lag: steps scheduled but not yet settled; 0 is synchronous scheduling.
        groups: Mamba groups that share the pool with one attention group.
        pool: blocks in the pool with the null block (``num_gpu_blocks``); None: `ample_pool`.
        retention_interval: ``prefix_cache_retention_interval`` in tokens; "dense" keeps every
            state, "default" is the release's default.
        max_seqs: ``max_num_seqs``.
    """

    id: str
    block: int
    budget: int
    arrivals: tuple[Arrival, ...]
    spec: int = 0
    drafter: Literal["mtp", "ngram"] = "mtp"
    accepted: int = 0
    lag: int = 1
    groups: int = 1
    pool: int | None = None
    retention_interval: int | Literal["default", "dense"] = "default"
    max_seqs: int = 128

    def __post_init__(self) -> None:
        _at_least(self, block=1, budget=1, spec=0, accepted=0, lag=0, groups=1, pool=2, max_seqs=1)
        if self.budget < self.block:
            raise InputError(
                f"budget: {self.budget} tokens hold no block of {self.block} tokens; align mode "
                "needs max_num_batched_tokens >= block."
            )
        if self.accepted > self.spec:
            raise InputError(f"accepted: {self.accepted} of {self.spec} draft tokens.")
        if self.drafter not in ("mtp", "ngram"):
            raise InputError(f"drafter: {self.drafter} is neither mtp nor ngram.")
        interval = self.retention_interval
        if isinstance(interval, int) and (interval < 0 or interval % self.block):
            raise InputError(
                f"retention_interval: {interval} is not a multiple of the block ({self.block})."
            )
        self._check_arrivals()
        if self.pool is not None and self.pool < self.least_pool:
            raise InputError(
                f"pool: {self.pool} blocks are less than the {self.least_pool} that the longest "
                "request needs alone."
            )

    def _check_arrivals(self) -> None:
        known = [arrival.id for arrival in self.arrivals]
        if not known:
            raise InputError("requests: there is none.")
        for place, arrival in enumerate(self.arrivals):
            if arrival.id in known[:place]:
                raise InputError(f"requests: id {arrival.id} is used twice.")
            if arrival.after is not None and arrival.after not in known[:place]:
                raise InputError(
                    f"requests: {arrival.id} waits for {arrival.after}, which is not above it."
                )

    @property
    def longest(self) -> int:
        """Tokens of the longest request, with its output."""
        return max(arrival.prompt + arrival.output for arrival in self.arrivals)

    @property
    def least_pool(self) -> int:
        """Fewest blocks with which the longest request can finish when it runs alone.

        These are its attention blocks, two states and the speculative blocks per Mamba group, and
        the null block.
        """
        last = self.longest - 1  # the last token sampled is never computed
        states = min(2, -(-last // self.block))
        return -(-last // self.block) + self.groups * (states + self.spec) + 1

    @property
    def ample_pool(self) -> int:
        """Number of blocks that these requests cannot exhaust, even with the leak."""
        blocks = (-(-(a.prompt + a.output) // self.block) for a in self.arrivals)
        return sum((each + 2 * self.spec + 2) * (1 + self.groups) for each in blocks) + 1


def _at_least(item: Arrival | Scenario, **least: int) -> None:
    for name, bound in least.items():
        value = getattr(item, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(f"{name}: {value!r} is not a whole number.")
        if value < bound:
            raise InputError(f"{name}: {value} is less than {bound}.")


ARRIVAL_FIELDS = tuple(field.name for field in fields(Arrival))
SCENARIO_FIELDS = tuple(field.name for field in fields(Scenario))
