"""Asks the code on disk, in a process of its own, whether it retires across a null gap.

A process that has looked at the tree before may hold the old code; a fresh one cannot.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from vllm_mamba_retire.names import MANAGER_MODULE
from vllm_mamba_retire.target import MANAGER_FILE

_TIMEOUT = 300  # seconds; the import of vLLM and torch takes a few
_SCRIPT = f"""
import importlib, json
module = importlib.import_module({MANAGER_MODULE!r})
from vllm_mamba_retire.probe import probe
seen = probe(module)
print(json.dumps([module.__file__, seen.outcome.value, seen.retires_across_gap, seen.detail]))
"""


class ProbeError(Exception):
    """The probe could not be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the probe saw."""

    outcome: str
    retires: bool
    detail: str


def ask(root: Path) -> Answer:
    """Probe the tree at `root` with this interpreter, this package's run-time patch switched off.

    Raises:
        ProbeError: the manager cannot be imported from there.
    """
    ours = str(Path(__file__).parents[2])
    path = [str(root), ours, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "MAMBA_RETIRE": "off",
        "PYTHONPATH": os.pathsep.join(path),
        # A probe leaves no trace in the tree.
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            cwd=root,  # with -c the working folder is searched first
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProbeError(f"{sys.executable}: {error}") from error
    try:
        file, outcome, retires, detail = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ProbeError(
            f"{sys.executable} cannot import {MANAGER_MODULE} from {root} ({last}); "
            "run this with the interpreter that serves, or pass --no-probe"
        ) from None
    if Path(file).resolve() != (root / "vllm" / MANAGER_FILE).resolve():
        raise ProbeError(f"{sys.executable} imports {file} and not the tree at {root}")
    return Answer(outcome, retires, detail)
