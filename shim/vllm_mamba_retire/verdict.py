"""Decides from evidence: a pure function, `Evidence` in, one `Verdict` out.

Reads nothing and changes nothing. The checks run in order of severity and the first that applies
decides; that order is the safety argument, so it stands in one place, `decide`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from .evidence import Evidence, Outcome
from .releases import Row, Status
from .target import Target


class Reason(str, Enum):
    """Why this process is as it is."""

    PATCHED = "patched"
    NATIVE = "native"
    FIXED_ELSEWHERE = "fixed-elsewhere"
    LATENT = "latent"
    ABSENT = "absent"
    OFF = "off"
    DRIFTED = "drifted"
    CONFLICT = "conflict"
    FAILED = "failed"
    NO_TARGET = "no-target"


_IN_DOUBT = frozenset({Reason.DRIFTED, Reason.CONFLICT, Reason.FAILED, Reason.NO_TARGET})


@dataclass(frozen=True, slots=True)
class Verdict:
    """A reason code and one sentence for people."""

    reason: Reason
    sentence: str

    @property
    def in_doubt(self) -> bool:
        """Whether vLLM may leak here although this package is installed."""
        return self.reason in _IN_DOUBT

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.sentence}"


def decide(seen: Evidence) -> Verdict:
    """One verdict for the evidence. In a process `Reason.PATCHED` means: patch and probe again."""
    target = seen.target
    if seen.off:
        return Verdict(Reason.OFF, "MAMBA_RETIRE=off; vLLM is left as it is.")
    if target is None:
        return Verdict(
            Reason.NO_TARGET,
            "no vLLM can be imported by this interpreter; install this package into the "
            "environment that serves.",
        )
    if seen.loaded_from is not None and Path(seen.loaded_from).with_suffix(".py") != (
        target.manager_file
    ):
        return Verdict(
            Reason.CONFLICT,
            f"vLLM is found at {target.package} but its Mamba manager was loaded from "
            f"{seen.loaded_from}; leave one vLLM on the path.",
        )
    if seen.ours_installed:
        return _installed(seen, target)
    if target.source is None:
        return _sourceless(target)
    if seen.series is not None and seen.outcome in (None, Outcome.RETIRES):
        return Verdict(
            Reason.FIXED_ELSEWHERE,
            f"vLLM {target.version} is patched on disk by this package's series {seen.series}; "
            "nothing more to do.",
        )
    if seen.row is None:
        return _unlisted(seen, target)
    return _listed(seen, seen.row, target)


def _installed(seen: Evidence, target: Target) -> Verdict:
    """Our patch is on the class; did others come after us?"""
    if seen.foreign is not None and seen.outcome is not Outcome.RETIRES:
        return _replaced(seen.foreign)
    if seen.subclass is not None:
        return _overridden(seen.subclass)
    return Verdict(Reason.PATCHED, f"vLLM {target.version} retires across null gaps.")


def _sourceless(target: Target) -> Verdict:
    if target.predates_align:
        return Verdict(
            Reason.ABSENT, f"vLLM {target.version} is older than align mode; nothing to fix."
        )
    return Verdict(Reason.FAILED, f"{target.problem}; reinstall vLLM with its source files.")


def _replaced(method: str) -> Verdict:
    return Verdict(
        Reason.CONFLICT,
        f"{method} was replaced by other code; remove that patch or this package.",
    )


def _overridden(method: str) -> Verdict:
    return Verdict(
        Reason.CONFLICT,
        f"{method} stands in for a method that this patch changes, and may leak; ask its authors, "
        "or remove this package.",
    )


def _listed(seen: Evidence, row: Row, target: Target) -> Verdict:
    known = f"the methods are those of vLLM {row.version}"
    if row.status is Status.ABSENT:
        return Verdict(Reason.ABSENT, f"{known}, which has no align mode; nothing to fix.")
    if row.status is Status.LATENT:
        return Verdict(
            Reason.LATENT,
            f"{known}, whose scheduler does not reach the defect; left as it is.",
        )
    if row.status is Status.NATIVE and seen.outcome in (None, Outcome.RETIRES):
        # Wrappers and subclasses of a release that behaves are their authors' affair.
        return Verdict(Reason.NATIVE, f"{known}, which carries the fix itself.")
    if seen.foreign is not None:
        return _elsewhere(seen.foreign) if seen.retires else _replaced(seen.foreign)
    if row.status is Status.LIVE and seen.subclass is not None:
        return _overridden(seen.subclass)
    if row.status is Status.LIVE and seen.loaded_from is None:
        return Verdict(
            Reason.PATCHED,
            f"{known}, which keep states that lie before a null gap; every vLLM process patches "
            "itself when it starts.",
        )
    if row.status is Status.LIVE and seen.outcome is Outcome.STOPS_AT_GAP:
        return Verdict(Reason.PATCHED, f"vLLM {target.version} retires across null gaps.")
    return Verdict(
        Reason.FAILED,
        f"{known} ({row.status.value}), but the class was seen to be different "
        f"({seen.outcome.value if seen.outcome else 'not probed'}); report this.",
    )


def _elsewhere(method: str) -> Verdict:
    return Verdict(
        Reason.FIXED_ELSEWHERE,
        f"{method} was replaced by other code, and the class retires across null gaps; left as it "
        "is.",
    )


def _unlisted(seen: Evidence, target: Target) -> Verdict:
    if seen.retires:
        return Verdict(
            Reason.FIXED_ELSEWHERE,
            f"vLLM {target.version} has other code than any known release and already retires "
            "across null gaps; left as it is.",
        )
    if seen.foreign is not None:
        return _replaced(seen.foreign)
    if seen.subclass is not None:
        return _overridden(seen.subclass)
    if seen.outcome is Outcome.STOPS_AT_GAP and seen.drift_allowed:
        return Verdict(
            Reason.PATCHED,
            f"vLLM {target.version} is not a known release; patched on request.",
        )
    if "mamba_cache_mode" not in (target.source or ""):
        return Verdict(
            Reason.ABSENT, f"vLLM {target.version} has no align mode; there is nothing to fix."
        )
    methods = ", ".join(seen.changed) or "the methods this patch relies on"
    return Verdict(
        Reason.DRIFTED,
        f"vLLM {target.version} differs from every known release in {methods}; "
        "`vllm-mamba-retire verify` shows how it behaves. Update this package, or set "
        "MAMBA_RETIRE_ALLOW_DRIFT=1 to patch it where it shows the defect.",
    )
