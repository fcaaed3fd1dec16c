"""Keeps one small JSON record per vLLM process: its verdict, its vLLM, its counters.

A record is written with the verdict, and again by a daemon thread, off the hot path, whenever it
has changed. The writer holds no locks, because a process may fork at any moment, and raises
nothing: if the folder cannot be written, there is no record and vLLM is not affected.

The reader trusts only records that the writer could have written, and removes a record only when
its process has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import stat
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import psutil

from . import identity
from ._version import __version__
from .files import read_regular
from .keep import KeepCounters
from .keep_verdict import OFF, KeepState, KeepVerdict
from .retirement import Counters
from .target import Target, find_target
from .verdict import Verdict

FOLDER_VARIABLE = "MAMBA_RETIRE_DIR"
SCHEMA = 1
REFRESH_SECONDS = 3.0
# A forked child gets its name and title right after the fork; its record should have them.
_SETTLING_SECONDS = 0.5
_MAXIMUM_SIZE = 64 * 1024  # bytes of one record; a usual one has 700
_DRAFT_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_logger = logging.getLogger("vllm.mamba_retire")

Pid = Annotated[int, msgspec.Meta(gt=0)]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one process.

    A field that is added later needs a default; readers ignore fields that they do not know.

    Attributes:
        pid: process id within `place`.
        started: when the process started, in clock ticks since boot; detects a reused pid.
        place: host and PID namespace of the process; a folder may be shared by several.
        role: ``engine core``, ``worker``, ``API server``, ``coordinator`` or ``main``.
        verdict: None while vLLM's manager is not imported.
        version: of this package.
        vllm: vLLM's version.
        manager_file: the file that defines `MambaManager` there.
        sha256: of that file.
        decided_at: seconds since the epoch; None without a verdict.
        counters: of retirement; None if nothing is patched.
        keep: whether the newest states are kept.
        keep_counters: of keeping; None if nothing is kept.
    """

    pid: Pid
    started: int
    place: str
    role: str
    verdict: Verdict | None = None
    version: str = __version__
    vllm: str | None = None
    manager_file: str | None = None
    sha256: str | None = None
    decided_at: float | None = None
    counters: Counters | None = None
    keep: KeepVerdict = OFF
    keep_counters: KeepCounters | None = None

    @classmethod
    def of(
        cls,
        verdict: Verdict | None,
        target: Target | None,
        counters: Counters | None = None,
        *,
        keep: KeepVerdict = OFF,
        keep_counters: KeepCounters | None = None,
    ) -> Record:
        """Return the record of this process.

        Args:
            verdict: its verdict.
            target: the vLLM that serves.
            counters: the live object, so that the record is always current.
            keep: whether the newest states are kept.
            keep_counters: the live object, likewise.
        """
        return cls(
            pid=os.getpid(),
            started=identity.start_ticks(os.getpid()) or 0,
            place=identity.place(),
            role=identity.role(retires=bool(counters and counters.calls)),
            verdict=verdict,
            vllm=target.version if target else None,
            manager_file=str(target.manager_file) if target else None,
            sha256=target.sha256 if target else None,
            decided_at=time.time() if verdict else None,
            counters=counters,
            keep=keep,
            keep_counters=keep_counters,
        )

    def replaced(self, verdict: Verdict) -> Record:
        """Return this record with another verdict."""
        return msgspec.structs.replace(self, verdict=verdict, decided_at=time.time())

    @property
    def reason(self) -> str:
        """Reason code of the verdict; ``armed`` while there is none."""
        return self.verdict.reason.value if self.verdict else "armed"

    @property
    def in_doubt(self) -> bool:
        """Whether vLLM may leak in this process although this package is installed."""
        return self.verdict is not None and self.verdict.in_doubt

    @property
    def level(self) -> int:
        """Level of the log line: a warning if the operator may have to act."""
        return logging.WARNING if self.in_doubt or self.keep.warns else logging.INFO

    def line(self) -> str:
        """The one log line of this process."""
        vllm = f"vLLM {self.vllm} at {self.manager_file}" if self.manager_file else "no vLLM"
        keep = "" if self.keep.state is KeepState.OFF else f" {self.keep}"
        return f"vllm-mamba-retire {self.version}: {self.verdict}{keep} ({vllm}, pid {self.pid})"


class _Format(msgspec.Struct):
    """The schema number that every record file contains."""

    schema: Literal[1]


class Folder(NamedTuple):
    """A folder of records.

    Attributes:
        path: where it is.
        owner: the user id that must own it; None for a folder that the operator chose.
    """

    path: Path
    owner: int | None = None


class Reading(NamedTuple):
    """The records in a folder.

    Attributes:
        records: of the processes that run here.
        problem: why the folder is not trusted or cannot be read, as a sentence, or None.
    """

    records: list[Record]
    problem: str | None = None


def announce() -> None:
    """Write a record without a verdict: the patch is armed here. The verdict replaces it."""
    if _writer.record is None:
        try:
            _writer.start(Record.of(None, find_target()), None)
        except Exception as error:
            _logger.warning("vllm-mamba-retire keeps no record of this process: %r", error)


def keep(record: Record, recheck: Callable[[Record], Record] | None = None) -> None:
    """Keep `record` on disk for as long as this process lives.

    Args:
        record: the record of the verdict.
        recheck: called every few seconds on a thread; returns the current record, the same object
            if nothing changed.
    """
    _writer.start(record, recheck)


def withdraw() -> None:
    """Remove this process's record."""
    _writer.stop()


def folder(user: int | None = None) -> Folder:
    """Return the folder with the records of a user's processes; by default the caller's.

    Raises:
        ValueError: ``MAMBA_RETIRE_DIR`` is a relative path.
    """
    if chosen := os.environ.get(FOLDER_VARIABLE):
        where = Path(os.path.expanduser(chosen))  # noqa: PTH111  # Path's raises without a home
        if not where.is_absolute():
            raise ValueError(
                f"{FOLDER_VARIABLE}={chosen} is a relative path, which means another folder in "
                "each process; set an absolute path"
            )
        return Folder(where)
    # Not tempfile.gettempdir: what it answers depends on who can write where.
    base = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108
    owner = os.getuid() if user is None else user
    return Folder(Path(base, f"vllm-mamba-retire-{owner}"), owner)


def read(where: Path, owner: int | None = None) -> Reading:
    """Read the records of the processes that run here; remove those of processes that have ended.

    Args:
        where: the folder.
        owner: the user that must own it and be the only one who may write to it.

    Other files in the folder are ignored, and so are records of other containers and hosts, whose
    processes cannot be seen from here.
    """
    if identity.start_ticks(os.getpid()) is None:
        return Reading([], f"{where}: /proc is not mounted, so processes cannot be checked.")
    try:
        if problem := _untrusted(where, owner):
            return Reading([], f"{problem}; it is not read. Remove it, or set {FOLDER_VARIABLE}.")
        paths = sorted(path for path in where.iterdir() if _is_record_name(path.name))
    except FileNotFoundError:
        return Reading([])
    except OSError as error:
        return Reading([], f"{where} cannot be read ({error.strerror}).")
    found = {}  # by process: a user can write two records about one of his own
    for path in paths:
        if (record := _read(path)) is None:
            continue
        ticks = identity.start_ticks(record.pid)
        if ticks == record.started:
            found[record.pid] = record
        elif ticks is not None or identity.has_ended(record.pid):
            _remove(path)
    return Reading(list(found.values()))


def _is_record_name(name: str) -> bool:
    return name[:1].isdigit() and name.endswith(".json")


def _read(path: Path) -> Record | None:
    """Read a record written by its process here or by root; None for any other file."""
    try:
        data, found = read_regular(path, _MAXIMUM_SIZE)
        msgspec.json.decode(data, type=_Format)
        record = msgspec.json.decode(data, type=Record)
    except (OSError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None
    if record.place != identity.place():
        return None
    try:
        owner = psutil.Process(record.pid).uids().effective
    except psutil.Error:
        owner = found.st_uid  # the process has ended: nothing of it will be believed
    return record if found.st_uid in (0, owner) and not found.st_mode & 0o022 else None


def _untrusted(where: Path, owner: int | None) -> str | None:
    """Return why a folder is not trusted: any user can make one in the temporary folder.

    Raises:
        OSError: there is none.
    """
    found = where.lstat()
    if owner is None:
        return None  # chosen by the operator, and maybe shared: each record is checked by itself
    if stat.S_ISDIR(found.st_mode) and found.st_uid == owner and not found.st_mode & 0o022:
        return None
    return f"{where} is not a folder that only user {owner} can write"


def _file_name() -> str:
    """Return a file name that is unique among all hosts and namespaces that share the folder."""
    return f"{os.getpid()}-{zlib.crc32(identity.place().encode()):08x}.json"


class _Writer:
    """Writes the record file of this process and keeps it current."""

    def __init__(self) -> None:
        self.record: Record | None = None
        self.recheck: Callable[[Record], Record] | None = None
        self.forked = False
        self.path: Path | None = None
        self.written = b""
        self.problem = ""
        self.done = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self, record: Record, recheck: Callable[[Record], Record] | None) -> None:
        """Write the record now, and again whenever it has changed."""
        self.record, self.recheck = record, recheck
        self.done.clear()
        self.write()
        self._follow()

    def stop(self) -> None:
        """Remove the record. The refreshing thread ends by itself."""
        self.record = self.recheck = None
        self.done.set()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(timeout=1)
        if self.path is not None:
            _remove(self.path)
        self.path, self.written = None, b""

    def after_fork(self) -> None:
        """In a forked child: write a new file; the old one is the parent's, the verdict holds."""
        self.path, self.written, self.thread = None, b"", None
        self.forked = True
        self.done = threading.Event()
        if self.record is not None:
            for counters in (self.record.counters, self.record.keep_counters):
                if counters is not None:
                    counters.reset()
            self._follow()

    def write(self) -> None:
        """Write the record if it differs from what is on disk, or is not there any more.

        A failure is logged once and tried again: a full disk does not stay full.
        """
        record = self.record
        if record is None or self.done.is_set():
            return
        try:
            # This process may be a fork of the one that decided, and get its title later.
            record = msgspec.structs.replace(
                record,
                pid=os.getpid(),
                started=identity.start_ticks(os.getpid()) or 0,
                role=identity.role(retires=bool(record.counters and record.counters.calls)),
            )
            text = msgspec.json.encode({"schema": SCHEMA, **msgspec.structs.asdict(record)})
            if text == self.written and self.path is not None and self.path.exists():
                return
            path = _make_folder() / _file_name()
            self.path = path  # from here on there may be a file to remove
            _replace(path, text)
            self.written, self.problem = text, ""
        except Exception as error:
            if not self.problem:
                _logger.warning("vllm-mamba-retire keeps no record of this process: %s", error)
            self.problem = str(error) or repr(error)

    def _follow(self) -> None:
        if self.done.is_set() or (self.thread is not None and self.thread.is_alive()):
            return
        self.thread = threading.Thread(target=self._refresh, name="mamba-retire", daemon=True)
        try:
            self.thread.start()
        except RuntimeError:  # no threads to be had: the record stays as first written
            self.thread = None

    def _refresh(self) -> None:
        self.done.wait(_SETTLING_SECONDS)
        self._remove_at_exit()
        self._log_fork()
        with contextlib.suppress(Exception):  # a daemon thread has nobody to raise to
            read(*folder())  # removes what killed processes left
        while not self.done.is_set():
            self._recheck()
            self.write()
            self.done.wait(REFRESH_SECONDS)

    def _recheck(self) -> None:
        record, recheck = self.record, self.recheck
        if record is None or recheck is None:
            return
        try:
            now = recheck(record)
        except Exception as error:
            _logger.warning("vllm-mamba-retire cannot check its patch again: %r", error)
            self.recheck = None
            return
        if now is not record and self.record is record:
            self.record = now

    def _log_fork(self) -> None:
        """The log line of a process that inherited its verdict."""
        if self.forked and self.record is not None and self.record.verdict is not None:
            own = msgspec.structs.replace(self.record, pid=os.getpid())
            _logger.log(own.level, own.line())
        self.forked = False

    def _remove_at_exit(self) -> None:
        """Remove the record at exit, also in multiprocessing's children, which skip `atexit`."""
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.Finalize(None, self.stop, exitpriority=0)


def _make_folder() -> Path:
    where, owner = folder()
    if owner is None:
        where.mkdir(parents=True, exist_ok=True)
    else:
        where.mkdir(mode=0o700, exist_ok=True)
    if problem := _untrusted(where, owner):
        raise PermissionError(problem)
    return where


def _replace(path: Path, text: bytes) -> None:
    """Write a file in one step: a reader sees the old text or the new one."""
    draft = path.with_name(f".{path.name}.{threading.get_ident()}")
    _remove(draft)
    try:
        with os.fdopen(os.open(draft, _DRAFT_FLAGS, 0o600), "wb") as file:
            file.write(text + b"\n")
        draft.replace(path)
    except OSError:
        _remove(draft)
        raise


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


_writer = _Writer()
os.register_at_fork(after_in_child=_writer.after_fork)
atexit.register(withdraw)
