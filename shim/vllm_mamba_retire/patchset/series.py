"""The patch series that came with this package, held against the hashes in the table.

Reads this package's own files; it must not know where a vLLM is installed, nor write anything.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from vllm_mamba_retire.releases import Matrix

from . import hunks

TESTS = "tests/"


class SeriesError(Exception):
    """The shipped series cannot be used; the message names the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a series does to one file.

    Attributes:
        patch: name of the patch that does it.
        text: that patch, whole.
        diff: its part for this file.
        before: sha256 of the file in the release; None where the series makes the file.
        after: sha256 of the file with the series applied.
    """

    patch: str
    text: str
    diff: hunks.FileDiff
    before: str | None
    after: str

    @property
    def path(self) -> str:
        """Path of the file below the tree's root."""
        return self.diff.path

    @property
    def is_test(self) -> bool:
        """Whether this is for source checkouts only."""
        return self.path.startswith(TESTS)


@dataclass(frozen=True, slots=True)
class Series:
    """The patches for one release, in order; no two of them touch the same file."""

    name: str
    release: str
    changes: tuple[Change, ...]

    @property
    def code(self) -> Change:
        """The change of the file that decides which release a tree is."""
        return next(change for change in self.changes if not change.is_test)


def shipped_series(matrix: Matrix, folder: Path | None = None) -> tuple[Series, ...]:
    """Every series of the table, oldest release first.

    Args:
        matrix: the table, for the hashes.
        folder: folder of the series; by default the one that came with this package.

    Raises:
        SeriesError: a series is missing, unreadable, or is not what the table describes.
    """
    folder = folder or _shipped()
    releases = dict.fromkeys((file.series, file.release) for file in matrix.patches)
    return tuple(_read(folder / name, release, matrix) for name, release in releases)


def sha256(data: bytes) -> str:
    """Hex digest, as in the table."""
    return hashlib.sha256(data).hexdigest()


def _read(folder: Path, release: str, matrix: Matrix) -> Series:
    listed = {file.file: file for file in matrix.patches if file.series == folder.name}
    changes = []
    for name in _lines(folder / "series"):
        text = _text(folder / name)
        try:
            diffs = hunks.parse(text)
        except hunks.HunkError as error:
            raise SeriesError(f"{folder / name}: {error}") from error
        for diff in diffs:
            if (known := listed.pop(diff.path, None)) is None:
                raise SeriesError(f"{folder / name}: {diff.path} is not in the table, or is twice")
            changes.append(Change(name, text, diff, known.sha256_before, known.sha256_after))
    if listed:
        raise SeriesError(f"{folder}: no patch for {', '.join(listed)}")
    return Series(folder.name, release, tuple(changes))


def _lines(series: Path) -> list[str]:
    lines = (line.split("#")[0].strip() for line in _text(series).splitlines())
    return [line for line in lines if line]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SeriesError(f"{path}: {error}") from error


def _shipped() -> Path:
    beside = Path(__file__).parents[1] / "patches"
    # In a source checkout the series lies at the top.
    return beside if beside.exists() else Path(__file__).parents[3] / "patches"
