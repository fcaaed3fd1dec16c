"""diff, apply, check and revert: what they mean, on one tree.

The way of a request: `root_of` -> `look` -> `to_apply` or `to_revert` -> `carry_out` -> hashes and
probe. Asking people and printing is the command line's work.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_mamba_retire.releases import Matrix

from . import childprobe, hunks, statefile
from .lock import locked
from .series import Series, sha256
from .transaction import Edit, carry_out
from .tree import File, State, Tree, look


class RefusedError(Exception):
    """Nothing was changed; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Known:
    """What this package brings along: the table and the series."""

    matrix: Matrix
    series: tuple[Series, ...]


def to_apply(tree: Tree) -> tuple[Edit, ...]:
    """The edits that put the series on a tree; none where it is on it.

    Raises:
        RefusedError: a file that is not known by its hash, or a release without a series.
    """
    if tree.series is None:
        raise RefusedError(tree.note)
    _refuse_foreign(tree)
    if tree.state is State.APPLIED:
        return ()
    edits = []
    for file in tree.files:
        if not file.path.parent.is_dir():
            raise RefusedError(
                f"{file.path.parent} does not exist; --tests is for source checkouts"
            )
        after = _patched(file)
        if after != file.data:
            edits.append(Edit(file.path, file.data, after))
    changes = tuple(file.change for file in tree.files)
    record = statefile.for_series(tree.series, changes).dump()
    return (Edit(tree.root / statefile.NAME, tree.statefile_data, record), *edits)


def to_revert(tree: Tree) -> tuple[Edit, ...]:
    """The edits that give a tree the bytes of the release again; none where it has them.

    Raises:
        RefusedError: a file that is not known by its hash, or a release without a series.
    """
    if tree.series is None:
        raise RefusedError(tree.note)
    _refuse_foreign(tree)
    edits = [
        Edit(file.path, file.data, file.pristine)
        for file in reversed(tree.files)
        if file.data != file.pristine
    ]
    if tree.statefile_data is not None:
        # Last: until then the tree can be reverted with what it says.
        edits.append(Edit(tree.root / statefile.NAME, tree.statefile_data, None))
    return tuple(edits)


def as_diff(root: Path, edits: Sequence[Edit]) -> str:
    """Edits of a tree's sources as a unified diff for ``patch -p1``, without the state file."""
    parts: list[str] = []
    for edit in edits:
        if edit.path.name != statefile.NAME:
            name = edit.path.relative_to(root).as_posix()
            parts += difflib.unified_diff(
                (edit.before or b"").decode().splitlines(keepends=True),
                (edit.after or b"").decode().splitlines(keepends=True),
                "/dev/null" if edit.before is None else f"a/{name}",
                "/dev/null" if edit.after is None else f"b/{name}",
            )
    return "".join(parts)


def perform(
    root: Path,
    known: Known,
    plan: Callable[[Tree], tuple[Edit, ...]],
    shown: Sequence[Edit],
    verify: Callable[[], None],
    tests: bool = False,
    waiting: Callable[[], None] = lambda: None,
) -> None:
    """Carry out, under the tree's lock, the edits that somebody agreed to.

    Args:
        root: the tree, as `tree.root_of` gives it.
        known: table and series.
        plan: `to_apply` or `to_revert`.
        shown: what it gave when the user was asked.
        verify: called after the edits, on top of the comparison of hashes.
        tests: handle the series' test files too.
        waiting: called if another process works on the tree.

    Raises:
        RefusedError: the tree has changed since, or cannot be locked; nothing was changed.
        TransactionError: it failed; every file is as before.
    """
    try:
        with locked(root, waiting):
            edits = plan(look(root, known.matrix, known.series, tests))
            if edits and edits != tuple(shown):
                raise RefusedError(f"{root} has changed meanwhile; start again")
            carry_out(edits, lambda: _verify(edits, verify))
    except OSError as error:
        raise RefusedError(f"{root} cannot be locked: {error.strerror}") from error


def require_fixed(root: Path) -> childprobe.Answer:
    """Probe a tree in a process of its own.

    Raises:
        RefusedError: it does not retire across a gap, or could not be asked.
    """
    try:
        answer = childprobe.ask(root)
    except childprobe.ProbeError as error:
        raise RefusedError(str(error)) from error
    if not answer.retires:
        raise RefusedError(f"the code on disk does not behave as it should: {answer.detail}")
    return answer


def _refuse_foreign(tree: Tree) -> None:
    for file in tree.files:
        if file.state is State.FOREIGN:
            digest = "missing" if file.data is None else f"sha256 {sha256(file.data)}"
            raise RefusedError(
                f"{file.path} ({digest}) is neither vLLM {tree.version} as released nor patched "
                "by this series; somebody else changed it. Reinstall vLLM, or use the run-time "
                "patch"
            )


def _patched(file: File) -> bytes:
    pristine = None if file.pristine is None else file.pristine.decode("utf-8")
    try:
        after = hunks.apply(file.change.diff, pristine).encode("utf-8")
    except hunks.HunkError as error:
        raise RefusedError(f"{file.change.patch}: {error}") from error
    if sha256(after) != file.change.after:
        raise RefusedError(
            f"{file.change.patch} does not lead to the file that the table describes"
        )
    return after


def _verify(edits: Sequence[Edit], verify: Callable[[], None]) -> None:
    for edit in edits:
        found = edit.path.read_bytes() if edit.path.exists() else None
        if found != edit.after:
            raise RefusedError(f"{edit.path} is not what was written")
    verify()
