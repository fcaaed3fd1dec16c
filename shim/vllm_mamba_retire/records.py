"""One small JSON file per vLLM process, so that another process can see what was decided there.

Written when the verdict falls and then, off the hot path, from a daemon thread that looks every few
seconds whether the counters have moved. Holds no locks: a process may fork at any moment. Nothing
raises out of here; a folder that cannot be written costs the record and nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from . import procfs
from ._version import __version__
from .record import Record
from .retirement import Counters
from .target import find_target
from .verdict import Reason, Verdict

FOLDER_VARIABLE = "MAMBA_RETIRE_DIR"
SCHEMA = 1
REFRESH_SECONDS = 3.0
# A forked child gets its name and title right after the fork; its record should have them.
_SETTLING_SECONDS = 0.5
_HTTP_MODULE = "vllm.entrypoints.openai.api_server"
_DRAFT_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW

_logger = logging.getLogger("vllm.mamba_retire")


@dataclass(frozen=True, slots=True)
class Entry:
    """What one process left on disk about itself.

    Attributes:
        pid: process id, where `place` says.
        started: when the process started, in clock ticks since boot; tells a pid used again.
        place: host and PID namespace of the process; a folder may be shared by several.
        role: ``engine core``, ``worker``, ``API server``, ``coordinator`` or ``main``.
        verdict: what was decided, and why; None where vLLM's manager is not imported, so that
            nothing had to be decided yet.
        version: of this package.
        vllm: vLLM's version.
        manager_file: the file that defines `MambaManager` there.
        sha256: of that file.
        decided_at: seconds since the epoch; None with no verdict.
        counters: what retirement did so far; None where nothing is patched.
    """

    pid: int
    started: int
    place: str
    role: str
    verdict: Verdict | None
    version: str
    vllm: str | None
    manager_file: str | None
    sha256: str | None
    decided_at: float | None
    counters: Counters | None

    def to_data(self) -> dict[str, Any]:
        """As JSON knows it."""
        data = asdict(self)
        if self.verdict is not None:
            data["verdict"]["reason"] = self.verdict.reason.value
        return data

    @classmethod
    def from_data(cls, data: Any) -> Entry:
        """The inverse of `to_data`.

        Raises:
            ValueError: it is something else.
        """
        try:
            known = {field.name: data[field.name] for field in fields(cls)}
            verdict, counters = known["verdict"], known["counters"]
            known["verdict"] = (
                Verdict(Reason(verdict["reason"]), verdict["sentence"]) if verdict else None
            )
            known["counters"] = Counters(**counters) if counters else None
            return cls(**known)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a record: {error!r}") from error


def announce() -> None:
    """Let others see that this process is armed; a verdict will say more than that."""
    if not _writer.kept:
        _writer.start(None)


def keep(record: Record) -> None:
    """Keep `record` on disk for as long as this process lives."""
    _writer.start(record)


def withdraw() -> None:
    """Remove this process's record."""
    _writer.stop()


def folder(user: int | None = None) -> Path:
    """Where the records of a user's processes lie; by default of the caller's."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen)
    return Path(tempfile.gettempdir(), f"vllm-mamba-retire-{os.getuid() if user is None else user}")


def read(where: Path) -> Iterator[Entry]:
    """Records of the processes that still run here; removes those of dead ones.

    What cannot be read, or is no record, is left out: other files in the folder are not ours.
    Those of other containers and hosts are too, as nobody here can tell whether they still run.
    """
    try:
        paths = sorted(where.glob("[0-9]*.json"))
    except OSError:
        return
    for path in paths:
        try:
            data = json.loads(path.read_text())
            entry = Entry.from_data(data)
            known = data["schema"] == SCHEMA
        except (OSError, ValueError, KeyError):
            continue
        if not known or entry.place != _place():
            continue
        if procfs.started(entry.pid) == entry.started:
            yield entry
        else:
            _remove(path)


def _sweep() -> None:
    """Remove what killed processes left; a stopped server's processes often end that way."""
    for _ in read(folder()):
        pass


def _place() -> str:
    return f"{os.uname().nodename} {procfs.pid_namespace()}"


def _file_name() -> str:
    """Unique among all places that may share the folder."""
    return f"{os.getpid()}-{zlib.crc32(_place().encode()):08x}.json"


class _Writer:
    """Keeps the file of this process current."""

    def __init__(self) -> None:
        self.kept = False
        self.record: Record | None = None
        self.path: Path | None = None
        self.written = ""
        self.done = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self, record: Record | None) -> None:
        """Write the record now, and again whenever its counters have moved."""
        self.kept, self.record = True, record
        self.done.clear()
        self.write()
        self._follow()

    def stop(self) -> None:
        """Remove the record. The refreshing thread ends by itself."""
        self.kept, self.record = False, None
        self.done.set()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(timeout=1)
        if self.path is not None:
            _remove(self.path)
        self.path, self.written = None, ""

    def after_fork(self) -> None:
        """In a forked child: the file is the parent's, but the verdict holds here too."""
        self.path, self.written, self.thread = None, "", None
        self.done = threading.Event()
        if self.record is not None and self.record.counters is not None:
            self.record.counters.reset()
        if self.kept:
            self._follow()

    def write(self) -> None:
        """Write the record if it differs from what is on disk."""
        if not self.kept or self.done.is_set():
            return
        try:
            text = json.dumps({"schema": SCHEMA, **_describe(self.record).to_data()})
            if text != self.written:
                path = _make_folder() / _file_name()
                _replace(path, text)
                self.path, self.written = path, text
        except Exception as error:
            if not self.written:
                _logger.info("vllm-mamba-retire keeps no record of this process: %s", error)
            self.written = "given up"
            self.done.set()

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
        _sweep()
        while not self.done.is_set():
            self.write()
            if self.record is None or self.record.counters is None:
                return
            self.done.wait(REFRESH_SECONDS)

    def _remove_at_exit(self) -> None:
        """multiprocessing's children leave without running what `atexit` knows."""
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.Finalize(None, self.stop, exitpriority=0)


def _describe(record: Record | None) -> Entry:
    target = record.target if record else find_target()
    return Entry(
        pid=os.getpid(),
        started=procfs.started(os.getpid()) or 0,
        place=_place(),
        role=_role(record.counters if record else None),
        verdict=record.verdict if record else None,
        version=__version__,
        vllm=target.version if target else None,
        manager_file=str(target.manager_file) if target else None,
        sha256=target.sha256 if target else None,
        decided_at=record.decided_at if record else None,
        counters=record.counters if record else None,
    )


def _role(counters: Counters | None) -> str:
    """What this process is to vLLM."""
    named = procfs.role_of(_process_name()) or procfs.role_of(procfs.title(os.getpid()))
    if named is not None:
        return named
    # Only a scheduler retires: this one runs the engine core itself.
    if counters is not None and counters.calls:
        return "engine core"
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        return "engine core"
    return "API server" if _serves_http() else "main"


def _serves_http() -> bool:
    # `python -m` runs a module under another name.
    started_as = getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", "")
    return _HTTP_MODULE in (started_as, *sys.modules)


def _process_name() -> str:
    process = sys.modules.get("multiprocessing.process")
    return str(process.current_process().name) if process else ""


def _make_folder() -> Path:
    where = folder()
    if os.environ.get(FOLDER_VARIABLE):
        where.mkdir(parents=True, exist_ok=True)
        return where
    where.mkdir(mode=0o700, exist_ok=True)
    # Anybody can make a folder of this name in /tmp.
    found = where.lstat()
    if where.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{where} is not a folder that only this user can write")
    return where


def _replace(path: Path, text: str) -> None:
    """Write a file in one step: a reader sees the old text or the new one."""
    draft = path.with_name(f".{path.name}.{threading.get_ident()}")
    with os.fdopen(os.open(draft, _DRAFT_FLAGS, 0o600), "w") as file:
        file.write(text + "\n")
    draft.replace(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


_writer = _Writer()
os.register_at_fork(after_in_child=_writer.after_fork)
atexit.register(withdraw)
