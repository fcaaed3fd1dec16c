"""Several files replaced together: all of them, or none.

Each new file is written and flushed beside its target and each old one is kept under a second
name, before the first rename. What can fail for want of space or rights therefore fails while the
tree is still untouched, and going back needs neither. A process that is killed leaves every file
whole, old or new, and at worst the two kinds of extra names, which the next transaction removes.

Knows files and bytes, not patches or vLLM.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


class TransactionError(Exception):
    """Nothing was changed, or all that was changed is back; the message says what went wrong."""


class RollbackError(TransactionError):
    """It failed, and so did going back; the message names what is left to mend by hand."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One file: its bytes before and after; None stands for no file."""

    path: Path
    before: bytes | None
    after: bytes | None


def carry_out(edits: Sequence[Edit], verify: Callable[[], None]) -> None:
    """Make the edits in order, then verify; on any failure undo them, newest first.

    Args:
        edits: what to change. The caller holds the tree's lock and has compared `before`.
        verify: called with the edits made; raises where the result is not right.

    Raises:
        TransactionError: it failed, or was interrupted by Ctrl-C; every file is as before.
    """
    try:
        # All of them first: going back must not meet a name that a killed process has kept.
        for edit in edits:
            _remove_leftovers(edit)
    except OSError as error:
        raise TransactionError(_sentence(error)) from error
    try:
        for edit in edits:
            _stage(edit)
            _keep(edit)
        for edit in edits:
            _swap(edit)
        verify()
    except BaseException as error:
        with _no_interrupt():
            stuck = [*filter(None, map(_restore, reversed(edits)))]
        if stuck:
            raise RollbackError(
                f"{_sentence(error)}; going back failed: {'; '.join(stuck)}"
            ) from error
        raise TransactionError(_sentence(error)) from error
    for edit in edits:
        # The tree is right; a name that cannot be removed now is removed next time.
        with suppress(OSError):
            _remove(_kept(edit))


def _staged(edit: Edit) -> Path:
    return edit.path.with_name(f".{edit.path.name}.mamba-retire-new")


def _kept(edit: Edit) -> Path:
    return edit.path.with_name(f".{edit.path.name}.mamba-retire-old")


def _half_kept(edit: Edit) -> Path:
    return edit.path.with_name(f".{edit.path.name}.mamba-retire-part")


def _remove_leftovers(edit: Edit) -> None:
    for path in (_staged(edit), _half_kept(edit), _kept(edit)):
        _remove(path)


def _remove(path: Path) -> None:
    # Asked first: on a read-only file system even the removal of nothing is an error.
    if os.path.lexists(path):
        path.unlink()


def _stage(edit: Edit) -> None:
    if edit.after is None:
        return
    handle = os.open(_staged(edit), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "wb") as stream:
        stream.write(edit.after)
        stream.flush()
        _take_rights(handle, edit)
        os.fsync(handle)


def _take_rights(handle: int, edit: Edit) -> None:
    """Owner and mode of the file that is replaced; a new file belongs where its folder does."""
    like = edit.path.stat() if edit.before is not None else edit.path.parent.stat()
    mine = os.fstat(handle)
    if (mine.st_uid, mine.st_gid) != (like.st_uid, like.st_gid):
        os.fchown(handle, like.st_uid, like.st_gid)
    # After the owner: changing that clears the set-id bits.
    os.fchmod(handle, like.st_mode & (0o7777 if edit.before is not None else 0o666))


def _keep(edit: Edit) -> None:
    if edit.before is None:
        return
    try:
        # The same file under a second name: no space needed, and back come the very bytes, owner,
        # mode and times.
        os.link(edit.path, _kept(edit))
    except OSError:
        # Not every file system or user may link. The name appears with the last byte in place: what
        # has it is put back.
        shutil.copy2(edit.path, _half_kept(edit))
        like = edit.path.stat()
        os.chown(_half_kept(edit), like.st_uid, like.st_gid)
        _half_kept(edit).replace(_kept(edit))


def _swap(edit: Edit) -> None:
    # Before the rename, so that no moment has the new source beside bytecode of the old. Bytecode
    # compiled as unchecked would be used for ever.
    _drop_bytecode(edit.path)
    if edit.after is None:
        edit.path.unlink()
    else:
        _staged(edit).replace(edit.path)
    _flush_folder(edit.path.parent)


def _restore(edit: Edit) -> str | None:
    """Back to `before`, from wherever the transaction stopped; says what could not be done."""
    try:
        if edit.before is None:
            # Where it could be put in place, its staged name is gone.
            if edit.after is not None and not _staged(edit).exists():
                _remove(edit.path)
        elif _kept(edit).exists():
            _drop_bytecode(edit.path)
            _kept(edit).replace(edit.path)
            _flush_folder(edit.path.parent)
        _remove_leftovers(edit)
    except OSError as error:
        return _sentence(error)
    return None


def _drop_bytecode(source: Path) -> None:
    """Remove what any interpreter has compiled from a source file."""
    if source.suffix != ".py":
        return
    # The folder of this interpreter's cache, which may be elsewhere (PYTHONPYCACHEPREFIX).
    folders = {source.parent / "__pycache__", Path(importlib.util.cache_from_source(source)).parent}
    for folder in folders:
        for compiled in folder.glob(f"{source.stem}.*.pyc"):
            _remove(compiled)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """Ctrl-C waits: going back must not stop half way."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _sentence(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError):
        return f"{error.filename or 'the tree'}: {error.strerror or error}"
    return str(error)
