"""Collects the evidence about a vLLM before the decision, without importing it.

A vLLM process that starts and the commands that only inspect use the same evidence, so that they
cannot reach different verdicts about the same file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from .fingerprint import call_basis, fingerprints
from .releases import Matrix, Row, Status
from .target import Target, caller_sources

_CALLED = "remove_skipped_blocks"


class Outcome(str, Enum):
    """What the class does with a state before a null gap, as the probe observed it."""

    RETIRES = "retires"  # frees the state before the gap, as vLLM 0.30.0 does
    STOPS_AT_GAP = "stops at the gap"  # the defect
    WRONG = "wrong"  # neither: must not be relied on


@dataclass(frozen=True, slots=True)
class Evidence:
    """The facts that a verdict is based on.

    Attributes:
        target: the vLLM on disk, or None.
        off: ``MAMBA_RETIRE=off``.
        loaded_from: file that the manager module was loaded from; None if vLLM is inspected on
            disk and not imported.
        ours_installed: the class has this package's patch.
        foreign: a method that the patch depends on and other code replaced, with its owner.
        subclass: a method of a subclass that overrides a patched one.
        series: name of this package's on-disk series, if the file is its result.
        row: the release whose methods this source has, token for token.
        exact: the manager file is that release's, byte for byte.
        changed: methods that differ from the release that the version string names.
        outcome: what the probe observed; None if it did not run.
        obstacle: why the patch does not fit the class, or None.
        drift_allowed: ``MAMBA_RETIRE_ALLOW_DRIFT`` permits patching an unlisted source that shows
            the defect.
    """

    target: Target | None
    off: bool = False
    loaded_from: str | None = None
    ours_installed: bool = False
    foreign: str | None = None
    subclass: str | None = None
    series: str | None = None
    row: Row | None = None
    exact: bool = False
    changed: tuple[str, ...] = ()
    outcome: Outcome | None = None
    obstacle: str | None = None
    drift_allowed: bool = False

    @property
    def retires(self) -> bool:
        """Whether the class retires across a gap, as the probe observed."""
        return self.outcome is Outcome.RETIRES

    @property
    def undecided(self) -> bool:
        """Whether the files do not determine how the class behaves, so that a probe is needed."""
        if self.target is None or self.target.source is None or self.series or self.exact:
            return False
        if self.row is not None:
            return self.row.status in (Status.LIVE, Status.NATIVE)
        return "mamba_cache_mode" in self.target.source


def collect_evidence(target: Target | None, matrix: Matrix) -> Evidence:
    """Compare a vLLM on disk with the matrix.

    Returns:
        Evidence from files; the fields about a running process keep their defaults.
    """
    if target is None or target.source is None:
        return Evidence(target)
    if (series := matrix.series_on(target.sha256)) is not None:
        return Evidence(target, series=series.series)
    try:
        row, changed = compare(matrix, target)
        exact = row is not None and row.manager_sha256 == target.sha256
        # Since vllm#47728 callers leave out tokens in flight; only then is the defect reached.
        if row is not None and row.call_basis is not None:
            callers, problem = caller_sources(target)
            if problem is not None:
                problem += ", so that it is not known whether the scheduler reaches the defect"
                return Evidence(replace(target, source=None, problem=problem))
            if call_basis(callers, _CALLED) != row.call_basis:
                row, exact, changed = None, False, (f"what is passed to {_CALLED}",)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        # The last two come from Python's parser, for code that is nested too deeply.
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        reason = error.args[0] if error.args else "nested too deeply"
        problem = f"{target.manager_file} does not parse ({reason}{line})"
        return Evidence(replace(target, source=None, problem=problem))
    return Evidence(target, row=row, exact=exact, changed=changed)


def compare(matrix: Matrix, target: Target) -> tuple[Row | None, tuple[str, ...]]:
    """Compare a vLLM's methods with the matrix.

    Returns:
        The row with the same methods, or None; the methods that differ from the row of its version.

    Raises:
        SyntaxError: the source does not parse; a ValueError where it holds null bytes.
    """
    own = matrix.row_for(target.version)
    if own is not None and own.manager_sha256 == target.sha256:
        return own, ()
    found = fingerprints(target.source or "", matrix.methods)
    row = matrix.row_like(found, target.version)
    if row is not None or own is None:
        return row, ()
    names = (name for name in matrix.methods if found.get(name) != own.fingerprints.get(name))
    return None, tuple(names)
