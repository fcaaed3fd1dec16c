"""What state a vLLM tree is in, by the hashes of its files. Reads only.

The version string picks the series to compare with only where no hash is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from vllm_mamba_retire.releases import Matrix, Status
from vllm_mamba_retire.target import MANAGER_FILE, read_target

from . import hunks, statefile
from .series import Change, Series, sha256


class TreeError(Exception):
    """There is no vLLM tree that can be patched; the message names the folder and says why."""


class State(str, Enum):
    """Of one file, and of a tree."""

    PRISTINE = "pristine"  # as released
    APPLIED = "applied"
    HALF_APPLIED = "half applied"  # some hunks or files of the series, and nothing else
    OUTDATED = "outdated"  # patched by another version of this series
    FOREIGN = "foreign change"
    NOT_COVERED = "not covered"  # a release that has no series


@dataclass(frozen=True, slots=True)
class File:
    """One file of the series in a tree.

    Attributes:
        change: what the series does to it.
        path: where it is.
        data: its bytes; None where it does not exist.
        state: what it is.
        pristine: its bytes as released, found by taking known hunks out of it; None where the
            series makes the file, and where `state` is foreign.
    """

    change: Change
    path: Path
    data: bytes | None
    state: State
    pristine: bytes | None


@dataclass(frozen=True, slots=True)
class Tree:
    """A vLLM tree.

    Attributes:
        root: the folder that holds ``vllm/``.
        version: as the tree says.
        series: the one that fits; None where the release has none.
        files: the files of the series that are looked at.
        statefile_data: bytes of the state file, None where there is none.
        settled: there is no series because the release needs none.
        note: why there is no series.
    """

    root: Path
    version: str | None
    series: Series | None
    files: tuple[File, ...]
    statefile_data: bytes | None
    settled: bool = False
    note: str = ""

    @property
    def state(self) -> State:
        """Of the whole tree."""
        states = {file.state for file in self.files}
        for state in (State.FOREIGN, State.OUTDATED, State.HALF_APPLIED):
            if state in states:
                return state
        if len(states) > 1:
            return State.HALF_APPLIED
        return states.pop() if states else State.NOT_COVERED


def root_of(folder: Path) -> Path:
    """The real folder that holds ``vllm/``, from that folder or from ``vllm/`` itself.

    Raises:
        TreeError: no vLLM there.
    """
    package = folder if folder.name == "vllm" and (folder / MANAGER_FILE).exists() else None
    package = (package or folder / "vllm").resolve()
    if not (package / MANAGER_FILE).is_file():
        raise TreeError(f"{folder}: no vllm/{MANAGER_FILE} in it")
    if package.name != "vllm":
        raise TreeError(f"{folder}: its vllm is a link to {package}, which has another name")
    return package.parent


def look(root: Path, matrix: Matrix, all_series: tuple[Series, ...], tests: bool = False) -> Tree:
    """See what is there.

    Args:
        root: as `root_of` gives it.
        matrix: the table.
        all_series: as `series.shipped_series` gives them.
        tests: look at the series' test files too; they are looked at anyway where they exist.

    Raises:
        TreeError: a file cannot be read, or is a symbolic link.
    """
    version = read_target(root / "vllm").version
    recorded, data = statefile.read(root)
    series = _series_of(root, matrix, version, all_series, recorded)
    if series is None:
        settled, note = _why_not_covered(matrix, version)
        return Tree(root, version, None, (), data, settled, note)
    files = tuple(
        _look_at(root, change, recorded)
        for change in series.changes
        if tests or not change.is_test or (root / change.path).exists()
    )
    return Tree(root, version, series, files, data)


def _series_of(
    root: Path,
    matrix: Matrix,
    version: str | None,
    all_series: tuple[Series, ...],
    recorded: statefile.StateFile | None,
) -> Series | None:
    row = matrix.row_for(version)
    # 0.27.0 and 0.27.1 have the same file: the version's own series first.
    own_first = sorted(all_series, key=lambda s: row is None or s.release != row.version)
    for series in own_first:
        if _hash(root / series.code.path) in (series.code.before, series.code.after):
            return series
    names = {row.version if row else None, recorded.series if recorded else None}
    return next((s for s in own_first if s.release in names or s.name in names), None)


def _hash(path: Path) -> str | None:
    data = _read(path)
    return None if data is None else sha256(data)


def _read(path: Path) -> bytes | None:
    if path.is_symlink():
        raise TreeError(
            f"{path} is a symbolic link to {path.resolve()}, which other environments may share; "
            "install vLLM with copied files (uv: --link-mode=copy)"
        )
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TreeError(f"{path}: {error.strerror}") from error


def _look_at(root: Path, change: Change, recorded: statefile.StateFile | None) -> File:
    path = root / change.path
    data = _read(path)
    digest = None if data is None else sha256(data)
    if digest == change.before:
        return File(change, path, data, State.PRISTINE, data)
    if change.before is None:
        # Made by the series, so there is nothing below it to come back to.
        entry = recorded.entry(change.path) if recorded else None
        recorded_as = entry.after if entry else None
        states = {recorded_as: State.OUTDATED, change.after: State.APPLIED}
        return File(change, path, data, states.get(digest, State.FOREIGN), None)
    by_series = _undo(change.diff, data, change.before)
    if by_series is not None:
        state = State.APPLIED if digest == change.after else State.HALF_APPLIED
        return File(change, path, data, state, by_series)
    older = recorded.diff(change.path) if recorded else None
    by_record = _undo(older, data, change.before) if older else None
    state = State.OUTDATED if by_record is not None else State.FOREIGN
    return File(change, path, data, state, by_record)


def _undo(diff: hunks.FileDiff, data: bytes | None, before: str) -> bytes | None:
    """The bytes with the hunks of `diff` taken out, if that gives the file as released."""
    try:
        undone = hunks.undo_present(diff, (data or b"").decode("utf-8")).encode("utf-8")
    except UnicodeDecodeError:
        return None
    return undone if sha256(undone) == before else None


def _why_not_covered(matrix: Matrix, version: str | None) -> tuple[bool, str]:
    reasons = {
        Status.NATIVE: "carries the fix itself",
        Status.LATENT: "does not reach the defect",
        Status.ABSENT: "has no align mode",
    }
    row = matrix.row_for(version)
    if row is None or row.status not in reasons:
        return False, f"vLLM {version} is not a release this package has a series for"
    return True, f"vLLM {version} {reasons[row.status]}; there is nothing to apply"
