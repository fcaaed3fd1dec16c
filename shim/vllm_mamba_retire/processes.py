"""Which vLLM processes run on this machine, and whether one runs unpatched that should not.

What processes say of themselves comes from `records`. An engine core that says nothing is found in
``/proc``: it was started before this package was installed, or vLLM was told to leave it out. Only
Linux, and only processes that the caller may look at.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import procfs, records
from .evidence import collect_evidence
from .names import MODE_VARIABLE, read_mode
from .records import Entry
from .releases import load_matrix
from .target import MANAGER_FILE, Target, read_target
from .verdict import Reason, decide

PLUGIN = "mamba_retire"
_LIBRARY = re.compile(rb"\s(/.*/vllm)/[^/\n]+\.so")


@dataclass(frozen=True, slots=True)
class Silent:
    """An engine core without a record.

    Attributes:
        pid: process id.
        vllm: version of the vLLM that it serves, where that can be seen.
        package: where that vLLM is.
        sentence: why it is as it is, and what to do.
        finding: whether it should be patched, or may have to be.
    """

    pid: int
    vllm: str | None
    package: str | None
    sentence: str
    finding: bool


@dataclass(frozen=True, slots=True)
class Survey:
    """What runs on one machine.

    Attributes:
        entries: processes that keep a record.
        silent: engine cores that keep none.
    """

    entries: list[Entry] = field(default_factory=list)
    silent: list[Silent] = field(default_factory=list)

    @property
    def finding(self) -> bool:
        """Whether something here may leak although it should not."""
        doubts = (entry.verdict is not None and entry.verdict.in_doubt for entry in self.entries)
        return any(doubts) or any(core.finding for core in self.silent)

    def to_data(self) -> dict[str, Any]:
        """As JSON knows it."""
        return {
            "processes": [entry.to_data() for entry in self.entries],
            "without_record": [asdict(core) for core in self.silent],
        }

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Survey:
        """The inverse of `to_data`."""
        return cls(
            [Entry.from_data(entry) for entry in data["processes"]],
            [Silent(**core) for core in data["without_record"]],
        )


@dataclass(frozen=True, slots=True)
class Node:
    """One machine's answer.

    Attributes:
        name: host name or address; empty for this machine.
        survey: what runs there.
        problem: why it could not be asked; `survey` is empty then.
    """

    name: str = ""
    survey: Survey = field(default_factory=Survey)
    problem: str | None = None

    @property
    def finding(self) -> bool:
        """Whether something may leak there, or nobody knows."""
        return self.problem is not None or self.survey.finding


def survey() -> Survey:
    """Look at the processes of this user; of every user where root asks."""
    cores = list(_engine_cores())
    owners = {os.getuid(), *(user for _, user in cores)}
    folders = sorted({records.folder(user) for user in owners})
    entries = [entry for where in folders for entry in records.read(where)]
    recorded = {entry.pid for entry in entries}
    return Survey(entries, [_judge(pid) for pid, _ in cores if pid not in recorded])


def _engine_cores() -> Iterator[tuple[int, int]]:
    """Pid and user of every engine core that the caller may look at."""
    own_namespace = procfs.pid_namespace()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            user = path.stat().st_uid
        except OSError:
            continue
        pid = int(path.name)
        if os.getuid() not in (0, user) or not _is_engine_core(pid):
            continue
        # A container's processes are told about inside the container.
        if procfs.pid_namespace(pid) == own_namespace:
            yield pid, user


def _is_engine_core(pid: int) -> bool:
    if title := procfs.title(pid):
        return procfs.role_of(title) == "engine core"
    # An engine core inside its client's process has no title of its own.
    environment = procfs.environment(pid)
    in_process = environment.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    return in_process and _package(pid) is not None


def _judge(pid: int) -> Silent:
    target = _target(pid)
    if target is None:
        return Silent(pid, None, None, "keeps no record, and its vLLM cannot be seen.", True)
    should_be = decide(collect_evidence(target, load_matrix()))
    seen = (pid, target.version, str(target.package))
    if not should_be.in_doubt and should_be.reason is not Reason.PATCHED:
        return Silent(*seen, f"needs no patch: {should_be.sentence}", False)
    environment = procfs.environment(pid)
    if read_mode(environment.get(MODE_VARIABLE)) == "off":
        return Silent(*seen, f"{MODE_VARIABLE}=off; vLLM is left as it is.", False)
    return Silent(*seen, _why_silent(pid, environment), True)


def _why_silent(pid: int, environment: Mapping[str, str]) -> str:
    allowed = environment.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed} leaves this package out; add {PLUGIN} and restart it."
    if procfs.started_at(pid) < Path(__file__).stat().st_ctime:
        return "was started before this package was installed; restart it."
    return (
        "keeps no record in the folder looked at; install this package into its environment, "
        f"or set the same {records.FOLDER_VARIABLE} here."
    )


def _target(pid: int) -> Target | None:
    package = _package(pid)
    return read_target(package) if package else None


def _package(pid: int) -> Path | None:
    """The vLLM that a process has loaded compiled code from."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return None
    found = {Path(os.fsdecode(match.group(1))) for match in _LIBRARY.finditer(maps)}
    return next((path for path in sorted(found) if (path / MANAGER_FILE).exists()), None)
