"""The state file of a patched tree: which series is on it, and the patches themselves.

It lies beside the ``vllm`` folder, not in it: a file left behind there would make a removed vLLM
importable again as an empty namespace package. It holds the patches so that a later version of
this package, with another series, can still take this one off. Nothing in it is trusted: what it
leads to is compared with the hashes in the table before anything is written.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_mamba_retire._version import __version__

from . import hunks
from .series import Change, Series

NAME = ".vllm-mamba-retire.json"
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the tree: path below the root, its hashes, and the patch that was applied."""

    path: str
    before: str | None
    after: str
    patch: str


@dataclass(frozen=True, slots=True)
class StateFile:
    """What was applied to a tree, and by which version of this package."""

    series: str
    version: str
    files: tuple[Entry, ...]

    def entry(self, path: str) -> Entry | None:
        """What is recorded of one file."""
        return next((entry for entry in self.files if entry.path == path), None)

    def diff(self, path: str) -> hunks.FileDiff | None:
        """The recorded patch's part for one file; None where it is not recorded or not readable."""
        if (entry := self.entry(path)) is None:
            return None
        try:
            return next((d for d in hunks.parse(entry.patch) if d.path == path), None)
        except hunks.HunkError:
            return None

    def dump(self) -> bytes:
        """The state file's bytes."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1).encode() + b"\n"


def for_series(series: Series, changes: tuple[Change, ...]) -> StateFile:
    """The state file of a tree that has these changes of a series."""
    files = (Entry(c.path, c.before, c.after, c.text) for c in changes)
    return StateFile(series.name, __version__, tuple(files))


def read(root: Path) -> tuple[StateFile | None, bytes | None]:
    """A tree's state file and its bytes; None where the file is missing or not one of ours."""
    try:
        data = (root / NAME).read_bytes()
    except OSError:
        return None, None
    try:
        fields = json.loads(data)
        if fields["schema"] != SCHEMA:
            return None, data
        files = tuple(Entry(**entry) for entry in fields["files"])
        return StateFile(fields["series"], fields["version"], files), data
    except (ValueError, KeyError, TypeError):
        return None, data
