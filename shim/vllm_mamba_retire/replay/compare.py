"""Replays scenarios in child processes, without the fix and with it.

A process per side, because vLLM, the patch and the environment that they read are decided once a
process. This side imports no vLLM.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import IO, Any, Literal

from packaging.version import Version

from .runs import Run
from .scenario import Scenario

_LINES_SHOWN = 20

Side = Literal["stock", "fixed"]
_MODES: dict[Side, str] = {"stock": "off", "fixed": "auto"}
OnProgress = Callable[[Side, int, int, int], None]
OLDEST = "0.26"  # schedulers before it are replayed by tools/table/behaviour.py alone


class ReplayError(Exception):
    """The child process failed; the message ends with what it printed last."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One scenario without the fix and with it. On a native release both are the same."""

    scenario: Scenario
    stock: Run
    fixed: Run


def replayable(version: str) -> bool:
    """Whether replays on this vLLM release are to be trusted."""
    return Version(Version(version).base_version) >= Version(OLDEST)


def compare(scenarios: Sequence[Scenario], on_progress: OnProgress | None = None) -> list[Pair]:
    """Replay scenarios on both sides at once.

    `on_progress` gets side, scenario number, steps and tokens, from a thread per side.

    Raises:
        ReplayError: a child process failed.
    """
    run = functools.partial(replay_all, scenarios, on_progress=on_progress)
    with ThreadPoolExecutor() as sides:
        stock, fixed = sides.map(run, _MODES)
    return [Pair(*each) for each in zip(scenarios, stock, fixed, strict=True)]


def replay_all(
    scenarios: Sequence[Scenario],
    side: Side,
    *,
    path: str | None = None,
    on_progress: OnProgress | None = None,
) -> list[Run]:
    """Replay scenarios in one child process; `path` is its ``PYTHONPATH`` (which vLLM).

    Raises:
        ReplayError: the child process failed.
    """
    environment = os.environ | {"MAMBA_RETIRE": _MODES[side]}
    if path is not None:
        environment["PYTHONPATH"] = path
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        with subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            with child.stdin:
                json.dump([asdict(scenario) for scenario in scenarios], child.stdin)
            runs = list(_read(child.stdout, side, on_progress))
        if child.returncode or len(runs) != len(scenarios):
            raise ReplayError(f"the {side} replay failed:\n{_tail(log)}")
    return runs


def _read(events: IO[str], side: Side, on_progress: OnProgress | None) -> Iterator[Run]:
    for line in events:
        event: dict[str, Any] = json.loads(line)
        if "run" in event:
            yield Run.from_data(event["run"])
        elif on_progress is not None:
            on_progress(side, event["scenario"], event["steps"], event["tokens"])


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return "".join(log.readlines()[-_LINES_SHOWN:]).strip()
