"""What the system tells of a process: when it started, what it calls itself, where it lives.

Reads /proc and raises nothing: a process may end while it is looked at.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

# Parts of the names and titles that vLLM, or Ray for it, gives its processes.
_ROLES = {
    "EngineCore": "engine core",
    "Worker": "worker",
    "ApiServer": "API server",
    "APIServer": "API server",
    "Coordinator": "coordinator",
}


def started(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none."""
    try:
        # Field 22; the second field, the name, may hold spaces and parentheses.
        stat = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if stat[0] in (b"Z", b"X") else int(stat[19])
    except (OSError, IndexError, ValueError):
        return None


def title(pid: int) -> str:
    """The title that a process gave itself (``VLLM::EngineCore``), or else nothing."""
    try:
        first = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""
    return first.strip() if "::" in first else ""


def role_of(name: str) -> str | None:
    """What a process of this name or title is to vLLM."""
    return next((role for part, role in _ROLES.items() if part in name), None)


def pid_namespace(pid: int | str = "self") -> str:
    """The PID namespace of a process: pids mean something only within one."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def environment(pid: int) -> dict[str, str]:
    """The environment a process was started with.

    A title written over it leaves nothing to read; then its parent's, which it inherited.
    """
    while pid > 1:
        try:
            pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            return {}
        found = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        if found.keys() & {"PATH", "HOME"} or not title(pid):
            return found
        pid = parent(pid)
    return {}


def parent(pid: int) -> int:
    """Process id of the parent; 0 if there is none to be seen."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def started_at(pid: int) -> float:
    """When a process was started, in seconds since the epoch."""
    ticks = started(pid) or 0
    boot = re.search(r"^btime (\d+)$", Path("/proc/stat").read_text(), re.M)
    return (int(boot.group(1)) if boot else 0) + ticks / os.sysconf("SC_CLK_TCK")
