"""The decision, as a pure function: what was seen in, one verdict out.

Looks at nothing and changes nothing itself. The order of the questions is the safety argument, so
it stands in one place, `decide`, from the most to the least reason to keep the hands off.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from .releases import Row, Status
from .target import Target


class Mode(str, Enum):
    """What the operator asked for with ``MAMBA_RETIRE``."""

    AUTO = "auto"  # patch what is known to need it; in doubt leave vLLM alone and warn once
    REQUIRE = "require"  # in doubt stop the process
    OFF = "off"  # do nothing, import nothing


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


class Outcome(str, Enum):
    """What the probe saw the class do with a null gap."""

    RETIRES = "retires"  # frees the state before the gap, as vLLM 0.30.0 does
    STOPS_AT_GAP = "stops at the gap"  # the defect
    WRONG = "wrong"  # neither: must not be relied on


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


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was seen before deciding.

    Attributes:
        mode: what the operator asked for.
        target: the vLLM on disk, or None.
        loaded_from: file that the manager module was loaded from; None where vLLM is only looked
            at, not imported.
        ours_installed: the class carries this package's patch.
        foreign: a method we rely on that somebody else replaced, with whose it is.
        subclass: a method of somebody's subclass that stands in for one we patch.
        series: this package's on-disk series, where the file is its result.
        row: the release whose methods this source has, to the token.
        changed: methods that differ from the release that the version string names.
        outcome: what the probe saw, None where it was not or could not be asked.
        drift_allowed: the operator opted in to patching an unlisted source that shows the defect.
    """

    mode: Mode
    target: Target | None
    loaded_from: str | None = None
    ours_installed: bool = False
    foreign: str | None = None
    subclass: str | None = None
    series: str | None = None
    row: Row | None = None
    changed: tuple[str, ...] = ()
    outcome: Outcome | None = None
    drift_allowed: bool = False

    @property
    def retires(self) -> bool:
        """Whether the class was seen to retire across a gap."""
        return self.outcome is Outcome.RETIRES


def decide(seen: Evidence) -> Verdict:
    """One verdict for what was seen. `Reason.PATCHED` means: patch, and look again."""
    target = seen.target
    if seen.mode is Mode.OFF:
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
