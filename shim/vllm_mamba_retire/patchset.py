"""Applies the on-disk patch series to a vLLM tree and reverts it.

A series changes one file, the one that defines `MambaManager`. The file is recognised by sha256 and
replaced by one rename, so there is nothing to roll back and nothing to record: a process that is
killed leaves the old file or the new one. The new text is probed before the rename, in a child
process that imports it from memory (``python -m`` this module).
"""

from __future__ import annotations

import base64
import csv
import difflib
import errno
import fcntl
import hashlib
import importlib.util
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchSet

from . import child
from .evidence import Outcome, collect_evidence
from .forecast import predict
from .names import MANAGER_MODULE, MODE_VARIABLE
from .releases import Matrix, PatchedFile, Status
from .target import MANAGER_FILE, read_target
from .verdict import Reason

FILE = Path("vllm") / MANAGER_FILE
_PROBE_TIMEOUT = 300  # seconds; the import of vLLM and torch takes a few
_STAGED = f".{FILE.name}.mamba-retire-new"  # the new file until it is renamed
# Files of ours that a killed process may leave; all but the first are of earlier versions.
_LEFTOVERS = (
    FILE.with_name(_STAGED),
    FILE.with_name(f".{FILE.name}.mamba-retire-old"),
    FILE.with_name(f".{FILE.name}.mamba-retire-part"),
    Path(".vllm-mamba-retire.json"),
)
_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
_SETTLED = {Reason.NATIVE, Reason.LATENT, Reason.ABSENT, Reason.FIXED_ELSEWHERE}


class PatchsetError(Exception):
    """A tree or a series cannot be read; the message names it and says why."""


class RefusedError(Exception):
    """The change was refused and nothing was changed; the message says why and what to do."""


class State(str, Enum):
    """State of a tree."""

    PRISTINE = "pristine"  # as released
    APPLIED = "applied"
    HALF_APPLIED = "half applied"  # some hunks of the series, and no other change
    FOREIGN = "foreign change"  # the code of a release that leaks, changed
    NOT_COVERED = "not covered"  # a release that has no series


_SENTENCES = {
    State.PRISTINE: "as released; run apply to patch it",
    State.APPLIED: "the series is applied",
    State.HALF_APPLIED: "only a part of the series is applied; run apply to finish or revert to "
    "go back",
}


@dataclass(frozen=True, slots=True)
class Tree:
    """A vLLM tree.

    Attributes:
        root: the folder that holds ``vllm/``, without links.
        version: the tree's own version.
        data: bytes of its manager file.
        state: by the file's hash; for an unknown hash, by the verdict on the source.
        done: the series is applied, or the release needs none.
        sentence: the state for people, with what to do.
        series: name of the series for it, or None.
        released: its manager file as released; None without a series for it.
        patched: its manager file with the series applied; None without a series for it.
    """

    root: Path
    version: str | None
    data: bytes
    state: State
    done: bool
    sentence: str
    series: str | None = None
    released: bytes | None = None
    patched: bytes | None = None

    @property
    def file(self) -> Path:
        """The manager file."""
        return self.root / FILE


def sha256(data: bytes) -> str:
    """Return the SHA-256 of `data` as hex digits, as in the matrix."""
    return hashlib.sha256(data).hexdigest()


def series_folder() -> Path:
    """Return the folder with all series that is installed with this package."""
    beside = Path(__file__).with_name("patches")
    # In a source checkout it is at the top.
    return beside if beside.exists() else Path(__file__).parents[2] / "patches"


def read_hunks(entry: PatchedFile) -> tuple[tuple[bytes, bytes], ...]:
    """Return the hunks of a series as pairs of text, before and after, with their context lines.

    Raises:
        PatchsetError: it is missing, unreadable or changes another file than the matrix lists.
    """
    folder = series_folder() / entry.series
    try:
        names = (folder / "series").read_text("utf-8").split()
        # Text mode reads CRLF as LF: a checkout may have changed the patch, but not the tree.
        files = PatchSet("".join((folder / name).read_text("utf-8") for name in names))
    except (OSError, UnicodeDecodeError, UnidiffParseError) as error:
        raise PatchsetError(f"{folder}: {error}") from error
    if [(file.path, file.is_modified_file) for file in files] != [(entry.file, True)]:
        raise PatchsetError(f"{folder} does not change {entry.file} alone")
    return tuple(
        (
            "".join(line.value for line in hunk.source_lines()).encode(),
            "".join(line.value for line in hunk.target_lines()).encode(),
        )
        for hunk in files[0]
    )


def read_tree(folder: Path, matrix: Matrix, probe: bool = False) -> Tree:
    """Read a vLLM tree; symbolic links are followed.

    Args:
        folder: the folder that holds ``vllm/``, or ``vllm/`` itself.
        matrix: the known releases and series.
        probe: run a manager file with an unknown hash in a child process, as `status` does.

    Raises:
        PatchsetError: no vLLM there, or it or a series cannot be read.
    """
    root = _root(folder)
    target = read_target(root / "vllm")
    data = _read(root / FILE)
    tree = partial(Tree, root, target.version, data)
    own = matrix.row_for(target.version)
    # 0.27.0 and 0.27.1 have the same file: the version's own series first.
    for entry in sorted(matrix.patches, key=lambda e: own is None or e.release != own.version):
        hunks = read_hunks(entry)
        released = _swap(data, [(new, old) for old, new in hunks])
        if sha256(released) != entry.sha256_before:
            continue
        patched = _swap(released, hunks)
        if sha256(patched) != entry.sha256_after:
            raise PatchsetError(f"{entry.series} does not give the file that the matrix lists")
        state = {released: State.PRISTINE, patched: State.APPLIED}.get(data, State.HALF_APPLIED)
        done, sentence = state is State.APPLIED, _SENTENCES[state]
        return tree(state, done, sentence, entry.series, released, patched)
    verdict = predict(target, matrix, probe=probe)
    if verdict.reason in _SETTLED:
        return tree(State.NOT_COVERED, True, verdict.sentence)
    if not any(
        row is not None and row.status is Status.LIVE
        for row in (own, collect_evidence(target, matrix).row)
    ):
        return tree(State.NOT_COVERED, False, verdict.sentence)
    changed = (
        f"{root / FILE} (sha256 {sha256(data)}) is neither as released nor patched by this series; "
        "apply and revert do not change it. Reinstall vLLM, or use the run-time patch"
    )
    return tree(State.FOREIGN, False, changed)


def as_diff(tree: Tree, after: bytes) -> str:
    """Return the change of the manager file as a unified diff for ``patch -p1``."""
    old, new = (data.decode().splitlines(keepends=True) for data in (tree.data, after))
    return "".join(difflib.unified_diff(old, new, f"a/{FILE}", f"b/{FILE}"))


def link_in(tree: Tree) -> str | None:
    """Return why a tree is not changed if a part of the file's path in it is a symbolic link."""
    path = [tree.root / part for part in [*reversed(FILE.parents), FILE][1:]]
    if (link := next((part for part in path if part.is_symlink()), None)) is None:
        return None
    return (
        f"{link} is a symbolic link to {link.resolve()}, which other environments may share. Only "
        "a tree without links from vllm/ on is changed: name the real folder with --target, or "
        "install vLLM with copied files (uv: --link-mode=copy)"
    )


def overriding_code(tree: Tree, data: bytes) -> list[Path]:
    """Return compiled files that Python runs instead of `data` without comparing the two.

    These are ``.pyc`` files of the unchecked-hash kind (PEP 552), in ``__pycache__`` and under this
    process's PYTHONPYCACHEPREFIX, and extension modules of the same name.
    """
    file = tree.file
    folders = {file.parent / "__pycache__", Path(importlib.util.cache_from_source(file)).parent}
    compiled = sorted(path for f in folders for path in f.glob(f"{file.stem}.*.pyc"))
    unchecked = (path for path in compiled if _is_unchecked(path, data))
    return [*unchecked, *file.parent.glob(f"{file.stem}.*so")]


def change(
    tree: Tree, after: bytes, probed: bool, waiting: Callable[[], None] = lambda: None
) -> str | None:
    """Replace the manager file, and remove compiled code that would hide the change.

    Args:
        tree: as read before, and as shown to the user.
        after: the new bytes; may equal the file's.
        probed: run `after` in a child process first, and refuse code that does not retire.
        waiting: called once if another process changes the tree, before waiting for it.

    Returns:
        What the probe observed; None without a probe.

    Raises:
        RefusedError: nothing was changed.
    """
    with _locked(tree.root, waiting):
        if (link := link_in(tree)) is not None:
            raise RefusedError(link)
        if (now := _read(tree.file)) not in (tree.data, after):
            raise RefusedError(f"{tree.file} has changed since it was read; start again")
        _remove_leftovers(tree)
        detail = _probe(tree, after) if probed else None
        _replace(tree, after, differs=now != after)
        return detail


def tidy(tree: Tree) -> list[str]:
    """Remove files left by killed processes, unless another process changes the tree now.

    Returns:
        One note for each such file, removed or not.
    """
    left = [tree.root / name for name in _LEFTOVERS if os.path.lexists(tree.root / name)]
    if left:
        with suppress(RefusedError), _locked(tree.root, None):
            _remove_leftovers(tree)
    return [
        f"{path} was left by a killed process{'' if os.path.lexists(path) else '; removed it'}"
        for path in left
    ]


def notes(tree: Tree, after: bytes) -> Iterator[str]:
    """Yield notes about a tree that gets `after`: other trees, and pip's record of the file."""
    roots = dict.fromkeys(Path(entry).resolve() for entry in sys.path)
    for root in roots:
        with suppress(OSError):  # a folder that may not be searched
            if root != tree.root and (root / FILE).is_file():
                yield f"another vLLM is at {root / 'vllm'} and is not changed"
    digest = base64.urlsafe_b64encode(hashlib.sha256(after).digest()).rstrip(b"=").decode()
    for record in sorted(tree.root.glob("vllm*.dist-info/RECORD")):
        # A record may name a file and leave its hash out.
        if any(listed := _recorded(record)) and f"sha256={digest}" not in listed:
            yield (
                f"{record.parent.name}/RECORD lists the hash of the file as released: pip check "
                "does not compare it, pip uninstall removes the file all the same, and any "
                "reinstall or upgrade of vLLM restores stock code, so apply again after it"
            )


def _swap(data: bytes, hunks: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Replace whole lines that occur in exactly one place; the hash tells whether they did."""
    data = b"\n" + data  # ties a hunk to the start of a line
    for old, new in hunks:
        if data.count(b"\n" + old) == 1:
            data = data.replace(b"\n" + old, b"\n" + new)
    return data[1:]


def _root(folder: Path) -> Path:
    package = folder.absolute()
    try:
        inside = package.name == "vllm" and (package / MANAGER_FILE).exists()
        root = (package.parent if inside else package).resolve()
        if (root / FILE).is_file():
            return root
    except OSError as error:
        raise PatchsetError(f"{folder}: {error.strerror}") from error
    raise PatchsetError(f"{folder}: no {FILE} in it")


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise PatchsetError(f"{file}: {error.strerror}") from error


def _recorded(record: Path) -> list[str]:
    """Hashes that a wheel's record lists for the manager file."""
    with suppress(OSError, ValueError, csv.Error):
        lines = record.read_text("utf-8").splitlines() if record.is_file() else []
        return [row[1] for row in csv.reader(lines) if len(row) > 1 and row[0] == FILE.as_posix()]
    return []


def _is_unchecked(compiled: Path, data: bytes) -> bool:
    try:
        with compiled.open("rb") as stream:
            header = stream.read(16)
    except OSError:
        return True  # the server may be allowed to read it
    # Only a hash made by this version of Python can be compared.
    fresh = (importlib.util.MAGIC_NUMBER, importlib.util.source_hash(data))
    return header[4:8] == b"\1\0\0\0" and (header[:4], header[8:]) != fresh


def _remove_leftovers(tree: Tree) -> None:
    for name in _LEFTOVERS:
        with suppress(OSError):
            (tree.root / name).unlink()


@contextmanager
def _locked(root: Path, waiting: Callable[[], None] | None) -> Iterator[None]:
    """Hold the tree's lock: an advisory lock on its folder, which leaves no file behind.

    Args:
        root: the tree.
        waiting: called once if another process has the lock; None: refuse instead of waiting.

    Raises:
        RefusedError: the folder cannot be locked.
    """
    with ExitStack() as stack:
        try:
            handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting is None:
                    raise
                waiting()
                fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            raise RefusedError(f"{root} cannot be locked: {error.strerror}") from error
        yield


def _replace(tree: Tree, after: bytes, differs: bool) -> None:
    staged = tree.file.with_name(_STAGED)
    # A signal that ends the process waits for these few milliseconds.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        if differs:
            with staged.open("xb") as stream:
                stream.write(after)
                _keep_attributes(tree.file, stream.fileno())
                stream.flush()
                os.fsync(stream.fileno())
        # Before the rename: no moment has the new source beside code compiled from the old.
        for compiled in overriding_code(tree, after):
            if compiled.suffix != ".pyc":
                raise RefusedError(f"Python imports {compiled} instead of {tree.file}")
            compiled.unlink(missing_ok=True)
        if differs:
            staged.replace(tree.file)
    except OSError as error:
        raise RefusedError(f"{error.filename or tree.file}: {error.strerror}") from error
    finally:
        with suppress(OSError):
            staged.unlink()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _keep_attributes(source: Path, handle: int) -> None:
    """Give a new file the owner, mode, access list and extended attributes of `source`."""
    like, attributes = source.stat(), _extended(source)
    with suppress(PermissionError):  # the comparison tells
        if (like.st_uid, like.st_gid) != (os.fstat(handle).st_uid, os.fstat(handle).st_gid):
            os.fchown(handle, like.st_uid, like.st_gid)
        present = _extended(handle)
        for name in present.keys() - attributes.keys():  # a default access list of the folder
            os.removexattr(handle, name)
        for name, value in attributes.items() - present.items():
            os.setxattr(handle, name, value)
        # After the owner: changing that clears the set-id bits.
        os.fchmod(handle, stat.S_IMODE(like.st_mode))
    mine = os.fstat(handle)
    if (mine.st_uid, mine.st_gid, mine.st_mode, _extended(handle)) != (
        *(like.st_uid, like.st_gid, like.st_mode),
        attributes,
    ):
        also = f" and attributes ({', '.join(sorted(attributes))})" if attributes else ""
        raise RefusedError(
            f"{source} belongs to user {like.st_uid} and group {like.st_gid}; user {os.geteuid()} "
            f"cannot keep its owner, group, mode{also}. Run this as its owner or as root"
        )


def _extended(file: Path | int) -> dict[str, bytes]:
    try:
        return {name: os.getxattr(file, name) for name in os.listxattr(file)}
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        return {}  # a file system without any


def _probe(tree: Tree, text: bytes) -> str:
    try:
        outcome, detail = child.ask(
            __name__,
            {"file": str(tree.file), "text": text.decode()},
            environment={MODE_VARIABLE: "off", "PYTHONDONTWRITEBYTECODE": "1"},
            path=[tree.root],
            folder=tree.root,  # with -m the working folder is searched first
            timeout=_PROBE_TIMEOUT,
        )
    except child.ChildError as error:
        raise PatchsetError(f"{error} To apply without a probe, pass --no-probe.") from error
    if outcome is None:
        raise RefusedError(
            f"{sys.executable} cannot import {MANAGER_MODULE} from {tree.root} ({detail}); run "
            "this with the interpreter that serves, or pass --no-probe"
        )
    if outcome != Outcome.RETIRES.value:
        raise RefusedError(f"the patched code fails the probe: {detail}")
    return str(detail)


def _import_from(file: str, text: str) -> ModuleType:
    """Import the manager module as if its file had this text."""
    spec = importlib.util.find_spec(MANAGER_MODULE)
    found = spec.origin if spec else None
    if spec is None or found is None or Path(found).resolve() != Path(file).resolve():
        raise ImportError(f"it imports {found}")
    module = sys.modules[MANAGER_MODULE] = importlib.util.module_from_spec(spec)
    exec(compile(text, found, "exec", dont_inherit=True), vars(module))  # noqa: S102
    return module


def _answer(payload: dict[str, str], _report: Callable[[Any], None]) -> list[str | None]:
    """In the child: probe the class with the payload as the text of the manager file."""
    from .probe import probe

    try:
        module = _import_from(payload["file"], payload["text"])
    except Exception as error:
        return [None, child.describe(error)]
    seen = probe(module)
    if seen.error is not None:
        raise seen.error
    return [seen.outcome.value, seen.detail]


if __name__ == "__main__":
    child.answer(_answer)
