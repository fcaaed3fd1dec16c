"""Finds the vLLM processes of this machine, and those that should be patched and are not.

Processes with this package have a record (`records`). An engine core without one is found by its
title or its environment: it started before this package was installed, or vLLM skips the plug-in.
Only Linux.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil

from . import identity, records
from .names import MODE_VARIABLE, read_mode
from .records import Record
from .releases import load_matrix
from .settings import PACKAGE, Settings, find_installed, judge_files, obstacle
from .target import MANAGER_FILE, Target, read_target
from .verdict import Reason, Verdict

_LIBRARY = re.compile(rb"\s(/.*/vllm)/[^/\n]+\.so")
_SITE = re.compile(rb"\s(/.*/(?:site|dist)-packages)/.*\.so")


class UnrecordedEngine(msgspec.Struct, frozen=True):
    """An engine core without a record.

    Attributes:
        pid: process id.
        vllm: version of the vLLM that it serves; None if unknown.
        package: folder of that vLLM; None if unknown.
        sentence: why it has no record, and what to do.
        finding: whether it should be patched, or may need the patch.
        unseen: whether it belongs to another user and cannot be inspected.
    """

    pid: int
    vllm: str | None
    package: str | None
    sentence: str
    finding: bool
    unseen: bool = False


class Survey(msgspec.Struct, frozen=True):
    """The vLLM processes of one machine.

    Attributes:
        processes: records of the processes that have one.
        without_record: engine cores without a record.
        problems: what could not be read, a sentence each.
    """

    processes: list[Record] = []
    without_record: list[UnrecordedEngine] = []
    problems: list[str] = []

    @property
    def finding(self) -> bool:
        """Whether a process here may leak, or a problem hides that."""
        return any(record.in_doubt for record in self.processes) or any(
            core.finding for core in self.without_record
        )

    @property
    def unseen(self) -> bool:
        """Whether a process runs here that cannot be inspected."""
        return bool(self.problems) or any(core.unseen for core in self.without_record)

    def to_data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Survey:
        """The inverse of `to_data`; `data` may hold other keys."""
        return msgspec.convert(data, cls)


@dataclass(frozen=True, slots=True)
class Node:
    """The result for one machine.

    Attributes:
        name: host name or address; empty for this machine.
        survey: its vLLM processes.
        problem: why it could not be queried; `survey` is empty then.
    """

    name: str = ""
    survey: Survey = field(default_factory=Survey)
    problem: str | None = None

    @property
    def finding(self) -> bool:
        """Whether a process may leak there, or the machine could not be queried."""
        return self.problem is not None or self.survey.finding


def survey(here: Settings | None = None) -> Survey:
    """Return the vLLM processes of this user; for root, of every user.

    Args:
        here: this interpreter's settings; its verdict is reused for a process that serves the
            same vLLM.

    Raises:
        ValueError: ``MAMBA_RETIRE_DIR`` is not a usable folder.
    """
    folders = {records.folder()}
    if not Path("/proc/self/stat").exists():
        return Survey(problems=["/proc is not mounted, so running processes cannot be seen."])
    cores = list(_engine_cores())
    folders |= {records.folder(user) for _, user in cores if _visible(user)}
    readings = [records.read(*folder) for folder in sorted(folders)]
    found = {record.pid: record for reading in readings for record in reading.records}
    return Survey(
        list(found.values()),
        [_judge(core, user, here) for core, user in cores if core.pid not in found],
        [reading.problem for reading in readings if reading.problem],
    )


def _engine_cores() -> Iterator[tuple[psutil.Process, int]]:
    """Yield every engine core and its user."""
    own_namespace = identity.pid_namespace()
    for process in psutil.process_iter():
        try:
            user = process.uids().effective
            if not _is_engine_core(process, user):
                continue
        except psutil.Error:
            continue
        # A container's processes are told about inside the container.
        if not _visible(user) or identity.pid_namespace(process.pid) == own_namespace:
            yield process, user


def _visible(user: int) -> bool:
    """Whether a process of this user can be inspected."""
    return os.getuid() in (0, user)


def _is_engine_core(process: psutil.Process, user: int) -> bool:
    if title := identity.title(process.pid):
        return identity.role_of(title) == "engine core"
    # An engine core inside its client's process has no title of its own.
    if not _visible(user):
        return False
    in_process = _environment(process).get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    return in_process and _package(process.pid) is not None


def _environment(process: psutil.Process) -> dict[str, str]:
    """Return the environment that a process was started with.

    A process title may overwrite it; then the parent's is used, which the process inherited.
    """
    ancestor: psutil.Process | None = process
    try:
        while ancestor is not None:
            found = ancestor.environ()
            if found.keys() & {"PATH", "HOME"} or not identity.title(ancestor.pid):
                return found
            ancestor = ancestor.parent()
    except psutil.Error:
        pass
    return {}


def _judge(process: psutil.Process, user: int, here: Settings | None) -> UnrecordedEngine:
    pid = process.pid
    if not _visible(user):
        sentence = f"belongs to user {user} and cannot be inspected; run this as that user or root."
        return UnrecordedEngine(pid, None, None, sentence, False, unseen=True)
    package = _package(pid)
    target = read_target(package) if package else None
    if target is None:
        sentence = "keeps no record, and its vLLM cannot be seen."
        return UnrecordedEngine(pid, None, None, sentence, True)
    try:
        sentence, finding = _why_unrecorded(process, target, here)
    except (psutil.Error, OSError) as error:
        sentence, finding = f"keeps no record, and cannot be inspected ({error}).", True
    return UnrecordedEngine(pid, target.version, str(target.package), sentence, finding)


def _why_unrecorded(
    process: psutil.Process, target: Target, here: Settings | None
) -> tuple[str, bool]:
    """Return why an engine core has no record, and whether that is a finding."""
    started = _started_at(process.pid)
    verdict = _verdict(target, here)
    if not verdict.in_doubt and verdict.reason is not Reason.PATCHED:
        if started < _changed_at(target.manager_file):
            return "was started before its vLLM was changed on disk; restart it.", True
        return f"needs no patch: {verdict.sentence}", False
    environment = _environment(process)
    if read_mode(environment.get(MODE_VARIABLE)) == "off":
        return f"{MODE_VARIABLE}={environment[MODE_VARIABLE]}; vLLM is left as it is.", False
    path = _search_path(process.pid, target, environment)
    # From outside only a part of its path is seen, so that nothing can be called missing.
    if reason := obstacle(environment, replace(find_installed(path), missing=())):
        return f"{reason.removesuffix('.')}, and restart it.", True
    plugin = next(p for f in path if (p := Path(f, PACKAGE, "plugin.py")).exists())
    if started < _changed_at(plugin):
        return "was started before this package was installed; restart it.", True
    return (
        "keeps no record in the folder that was read; set the same "
        f"{records.FOLDER_VARIABLE} here.",
        True,
    )


def _verdict(target: Target, here: Settings | None) -> Verdict:
    if here is not None and here.target is not None and here.target.package == target.package:
        return here.verdict
    return judge_files(target, load_matrix())


def _started_at(pid: int) -> float:
    """When a process was started, in seconds since the epoch, to a hundredth of a second.

    psutil's `create_time` starts from the boot time in whole seconds.
    """
    ticks = identity.start_ticks(pid) or 0
    booted_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted_at + (ticks + 1) / os.sysconf("SC_CLK_TCK")


def _changed_at(path: Path) -> float:
    # Not the time of modification: a wheel's files can keep the one they were packed with.
    return path.stat().st_ctime


def _search_path(pid: int, target: Target, environment: Mapping[str, str]) -> list[str]:
    """Return the folders that a process imports from, as far as /proc shows them."""
    named = environment.get("PYTHONPATH", "").split(os.pathsep)
    loaded_from = {os.fsdecode(found) for found in _SITE.findall(_maps(pid))}
    return [*filter(os.path.isabs, named), str(target.package.parent), *sorted(loaded_from)]


def _package(pid: int) -> Path | None:
    """Return the vLLM that a process has loaded compiled code from."""
    found = {Path(os.fsdecode(package)) for package in _LIBRARY.findall(_maps(pid))}
    return next((path for path in sorted(found) if (path / MANAGER_FILE).exists()), None)


def _maps(pid: int) -> bytes:
    """The files that a process has mapped.

    psutil reads smaps, which takes seconds for a process that maps as much as an engine core.
    """
    try:
        return Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return b""
