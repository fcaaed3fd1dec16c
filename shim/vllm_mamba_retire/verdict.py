"""Decides from evidence: a pure function, `Evidence` in, one `Verdict` out.

It reads and changes nothing. The checks run in order of severity and the first that applies
decides; safety depends on that order, so it is in one place, `decide`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from .evidence import Evidence, Outcome
from .releases import Row, Status
from .target import Target


class Reason(str, Enum):
    """The reason code of a verdict; docs/how-it-works.md explains each."""

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


_HARMLESS = {
    Status.ABSENT: "has no align mode; nothing to fix.",
    Status.LATENT: "does not reach the defect with its own scheduler; left as it is.",
}
_IN_DOUBT = frozenset({Reason.DRIFTED, Reason.CONFLICT, Reason.FAILED, Reason.NO_TARGET})


@dataclass(frozen=True, slots=True)
class Verdict:
    """A reason code, and one sentence for people that says what to do."""

    reason: Reason
    sentence: str

    @property
    def in_doubt(self) -> bool:
        """Whether vLLM may leak here although this package is installed."""
        return self.reason in _IN_DOUBT

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.sentence}"


def decide(seen: Evidence) -> Verdict:
    """Return the verdict. In a vLLM process `Reason.PATCHED` means: patch and probe again."""
    target = seen.target
    if seen.off:
        return Verdict(Reason.OFF, "MAMBA_RETIRE=off; vLLM is left as it is.")
    if target is None:
        return Verdict(
            Reason.NO_TARGET,
            "this interpreter cannot import vLLM; install this package into the environment that "
            "serves.",
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
    """Our patch is on the class; did other code come after it?"""
    if seen.foreign is not None and not seen.retires:
        return _replaced(seen.foreign)
    if seen.subclass is not None:
        return _overridden(seen.subclass)
    return _patched(seen, target)


def _sourceless(target: Target) -> Verdict:
    if target.predates_align:
        return Verdict(
            Reason.ABSENT, f"vLLM {target.version} is older than align mode; nothing to fix."
        )
    return Verdict(Reason.FAILED, f"{target.problem}; reinstall vLLM with its source files.")


def _listed(seen: Evidence, row: Row, target: Target) -> Verdict:
    known = _named(target, row)
    if row.status in _HARMLESS:
        return Verdict(Reason(row.status.value), f"{known} {_HARMLESS[row.status]}")
    if row.status is Status.NATIVE and seen.outcome in (None, Outcome.RETIRES):
        # A fixed release is not at risk from wrappers or subclasses; ignore them.
        return Verdict(Reason.NATIVE, f"{known} carries the fix; nothing to patch.")
    if seen.retires:
        return _fixed_elsewhere(f"{known} is fixed by {seen.foreign or 'other code'}")
    if seen.foreign is not None:
        return _replaced(seen.foreign)
    if row.status is Status.LIVE:
        if seen.subclass is not None:
            return _overridden(seen.subclass)
        if seen.outcome is Outcome.STOPS_AT_GAP:
            return _patched(seen, target)
        if seen.loaded_from is None and seen.outcome is None:
            return _patched(seen, target)
    behaves = seen.outcome.value if seen.outcome else "not probed"
    if seen.exact or seen.outcome is None:
        return Verdict(
            Reason.FAILED,
            f"{known} ({row.status.value}) behaves differently from that release ({behaves}); left "
            "as it is. Report this.",
        )
    return Verdict(
        Reason.DRIFTED,
        f"{known} ({row.status.value}) behaves differently ({behaves}) because of other code in "
        f"{target.manager_file}; left as it is. Remove that change.",
    )


def _unlisted(seen: Evidence, target: Target) -> Verdict:
    if seen.retires:
        return _fixed_elsewhere(f"vLLM {target.version} matches no known release")
    if seen.foreign is not None:
        return _replaced(seen.foreign)
    if seen.subclass is not None:
        return _overridden(seen.subclass)
    if "mamba_cache_mode" not in (target.source or ""):
        return Verdict(Reason.ABSENT, f"vLLM {target.version} has no align mode; nothing to fix.")
    if seen.outcome is Outcome.STOPS_AT_GAP and seen.drift_allowed and seen.obstacle is None:
        return _patched(seen, target, " It matches no known release; MAMBA_RETIRE_ALLOW_DRIFT=1.")
    changed = ", ".join(seen.changed) or "the methods this patch depends on"
    advice = (
        f"It cannot take the patch: {seen.obstacle}."
        if seen.obstacle
        else "Update this package, or set MAMBA_RETIRE_ALLOW_DRIFT=1 to patch it where it shows "
        "the defect."
    )
    return Verdict(
        Reason.DRIFTED,
        f"vLLM {target.version} differs from every known release in {changed}; left as it is. "
        f"`vllm-mamba-retire verify` shows how it behaves. {advice}",
    )


def _patched(seen: Evidence, target: Target, remark: str = "") -> Verdict:
    if seen.loaded_from is not None:
        sentence = f"vLLM {target.version} retires across null gaps."
    else:
        sentence = (
            f"{_named(target, seen.row)} keeps states that lie before a null gap; a process that "
            "loads this package patches it."
        )
    return Verdict(Reason.PATCHED, sentence + remark)


def _named(target: Target, row: Row | None) -> str:
    """The vLLM, and the release whose methods it has if its version says another one."""
    name = f"vLLM {target.version}"
    if row is None or row.version == (target.version or "").partition("+")[0]:
        return name
    return f"{name} (methods of vLLM {row.version})"


def _fixed_elsewhere(cause: str) -> Verdict:
    return Verdict(
        Reason.FIXED_ELSEWHERE, f"{cause}; it retires across null gaps and is left as it is."
    )


def _replaced(method: str) -> Verdict:
    return Verdict(
        Reason.CONFLICT,
        f"{method} was replaced by other code, and states before a null gap may leak; remove that "
        "patch or this package.",
    )


def _overridden(method: str) -> Verdict:
    return Verdict(
        Reason.CONFLICT,
        f"{method} overrides a method that this patch changes, and may leak; report it to its "
        "authors, or remove this package.",
    )
