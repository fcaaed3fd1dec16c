"""Unified diffs on text, with no fuzz: a hunk fits in exactly one place or not at all.

Knows neither files on disk nor vLLM. Line numbers are ignored on purpose: with every context line
equal and the place unique they add nothing, and a half-applied file moves them.
"""

from __future__ import annotations

from dataclasses import dataclass

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchSet


class HunkError(ValueError):
    """A diff cannot be read, or does not fit the text."""


@dataclass(frozen=True, slots=True)
class Hunk:
    """Whole lines, with their context, before and after."""

    old: str
    new: str


@dataclass(frozen=True, slots=True)
class FileDiff:
    """What a patch does to one file; `creates` means there is no such file before."""

    path: str
    creates: bool
    hunks: tuple[Hunk, ...]


def parse(patch: str) -> tuple[FileDiff, ...]:
    """The files of a ``-p1`` patch, in order.

    Raises:
        HunkError: not a unified diff, or one that removes or renames a file.
    """
    # A checkout that turned line ends into CRLF changed the patch and not the tree.
    try:
        files = PatchSet(patch.replace("\r\n", "\n"))
    except UnidiffParseError as error:
        raise HunkError(f"not a unified diff: {error}") from error
    if not files or any(file.is_removed_file or file.is_rename for file in files):
        raise HunkError("a patch of this series only changes or adds files")
    return tuple(
        FileDiff(
            file.path,
            file.is_added_file,
            tuple(
                Hunk(
                    "".join(line.value for line in hunk.source_lines()),
                    "".join(line.value for line in hunk.target_lines()),
                )
                for hunk in file
            ),
        )
        for file in files
    )


def apply(diff: FileDiff, text: str | None) -> str:
    """The text after the patch; None stands for no file.

    Raises:
        HunkError: a hunk fits nowhere or in more than one place.
    """
    if diff.creates:
        if text is not None:
            raise HunkError(f"{diff.path} exists already")
        return "".join(hunk.new for hunk in diff.hunks)
    if text is None:
        raise HunkError(f"{diff.path} does not exist")
    for number, hunk in enumerate(diff.hunks, 1):
        places = _places(text, hunk.old)
        if places != 1:
            raise HunkError(f"hunk {number} of {diff.path} fits in {places} places")
        text = _swap(text, hunk.old, hunk.new)
    return text


def undo_present(diff: FileDiff, text: str) -> str:
    """The text with every hunk taken out that is in it; the others are passed over."""
    for hunk in diff.hunks:
        if _places(text, hunk.new) == 1:
            text = _swap(text, hunk.new, hunk.old)
    return text


# The line end in front ties a block to the start of a line.
def _places(text: str, block: str) -> int:
    return ("\n" + text).count("\n" + block)


def _swap(text: str, old: str, new: str) -> str:
    return ("\n" + text).replace("\n" + old, "\n" + new, 1)[1:]
