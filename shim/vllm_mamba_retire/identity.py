"""Identifies a process: start time, host and PID namespace, title, role in vLLM.

Reads /proc for what psutil does not provide.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

# Modules of vLLM's HTTP server; `vllm serve` loads the second one from 0.29.0 on.
_HTTP_MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.launchers.api_server.entry",
)
_CLI_MODULE = "vllm.entrypoints.cli.main"
# Parts of the names and titles that vLLM, or Ray for it, gives its processes.
_ROLES = {
    "EngineCore": "engine core",
    "Worker": "worker",
    "ApiServer": "API server",
    "APIServer": "API server",
    "Coordinator": "coordinator",
}


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if that cannot be read.

    psutil's `create_time` adds the boot time, which changes when the clock is set, so it does not
    identify a process.
    """
    stat_line = _process_status(pid)
    return stat_line and stat_line[1]


def parent(pid: int) -> int | None:
    """Process id of the parent of a running process."""
    stat_line = _process_status(pid)
    return stat_line and stat_line[0]


def pid_namespace(pid: int | str = "self") -> str:
    """Return the PID namespace of a process; pids are comparable only within one."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def title(pid: int | str) -> str:
    """Return the title that a process set for itself (``VLLM::EngineCore``), else ""."""
    try:
        with Path(f"/proc/{pid}/cmdline").open("rb") as file:
            first = file.read(4096).split(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""
    return first.strip() if "::" in first else ""


def role_of(name: str) -> str | None:
    """Return the role in vLLM of a process with this name or title."""
    return next((role for part, role in _ROLES.items() if part in name), None)


def has_ended(pid: int) -> bool:
    """Whether no process of this id runs; False where that is not certain."""
    if Path(f"/proc/{pid}").exists():
        return True  # a zombie: a running one has a status
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    return False


def place() -> str:
    """Return host and PID namespace of this process; within them a pid is unique."""
    # Two hosts can have one name; the boot id tells them apart.
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return f"{os.uname().nodename} {boot} {pid_namespace()}"


def role(*, retires: bool = False) -> str:
    """Return this process's role: ``engine core``, ``worker``, ``API server``, ... or ``main``.

    Args:
        retires: whether it has retired states, as only a scheduler does.
    """
    named = role_of(_process_name()) or role_of(title("self"))
    if named is not None:
        return named
    # This one runs the engine core itself.
    if retires or os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        return "engine core"
    return "API server" if _serves_http() else "main"


def _process_status(pid: int) -> tuple[int, int] | None:
    """Parent and start of a process that runs."""
    try:
        # Fields 4 and 22; the second field, the name, may hold spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else (int(fields[1]), int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None


def _serves_http() -> bool:
    # `python -m` runs a module under another name.
    started_as = getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", "")
    loaded = {started_as, *sys.modules}
    if _CLI_MODULE in loaded and sys.argv[1:2] != ["serve"]:
        return False  # the command line loads the modules of all its commands
    # With several API servers, the process that starts them answers no request.
    children = list(getattr(sys.modules.get("multiprocessing.process"), "_children", ()))
    return not any(role_of(child.name) == "API server" for child in children) and any(
        module in loaded for module in _HTTP_MODULES
    )


def _process_name() -> str:
    process = sys.modules.get("multiprocessing.process")
    return str(process.current_process().name) if process else ""
