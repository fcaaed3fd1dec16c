"""Decides whether the newest states are kept: a pure function of the request and the evidence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .evidence import Evidence
from .names import KEEP_VARIABLE
from .verdict import Reason, Verdict


class KeepState(str, Enum):
    """Whether the newest states are kept in this process."""

    ON = "on"
    OFF = "off"
    UNAVAILABLE = "unavailable"  # requested, and not possible here


@dataclass(frozen=True, slots=True)
class KeepVerdict:
    """A state and one sentence for people."""

    state: KeepState
    sentence: str

    @property
    def warns(self) -> bool:
        """Whether keeping was requested and is not active."""
        return self.state is KeepState.UNAVAILABLE

    def __str__(self) -> str:
        return f"keep {self.state.value}: {self.sentence}"


OFF = KeepVerdict(KeepState.OFF, f"{KEEP_VARIABLE} is not set.")
# The states of these retire as those of 0.30.0, by code that is known to the token.
_RETIRES = frozenset({Reason.PATCHED, Reason.NATIVE, Reason.FIXED_ELSEWHERE})


def decide_keep(
    rule: str | None, asked: str | None, verdict: Verdict, seen: Evidence, subclass: str | None
) -> KeepVerdict:
    """Decide whether to keep. In a process `KeepState.ON` means: install and probe.

    Args:
        rule: what is requested: ``"none"``, ``"newest"``, ``"prompt"``; None for an unknown value.
        asked: the value of ``MAMBA_RETIRE_KEEP`` as set.
        verdict: the verdict about retirement.
        seen: the evidence that it is based on.
        subclass: a method of a subclass that overrides one that keeping needs.
    """
    if rule == "none":
        return OFF
    if verdict.reason is Reason.OFF:
        return KeepVerdict(KeepState.OFF, "MAMBA_RETIRE=off; vLLM is left as it is.")
    if rule is None:
        return unavailable(f"{KEEP_VARIABLE}={asked} is not none, newest or prompt")
    if verdict.reason not in _RETIRES:
        return unavailable(f"it needs a vLLM that retires its states ({verdict.reason.value} here)")
    if seen.row is None and seen.series is None:
        return unavailable("the methods are those of no known release")
    if seen.foreign is not None:
        return unavailable(f"{seen.foreign} was replaced by other code")
    if subclass is not None:
        return unavailable(f"{subclass} overrides a method that it needs")
    return kept(rule)


def kept(rule: str) -> KeepVerdict:
    """Return the verdict if states are kept."""
    which = "of the prompt " if rule == "prompt" else ""
    return KeepVerdict(
        KeepState.ON, f"the newest cached state {which}of a running request is evicted last."
    )


def unavailable(why: str) -> KeepVerdict:
    """Return the verdict if keeping was requested and is not possible."""
    return KeepVerdict(
        KeepState.UNAVAILABLE,
        f"{why}; no state is kept, and prefix-cache hits are as without it. "
        f"Unset {KEEP_VARIABLE} to silence this.",
    )
