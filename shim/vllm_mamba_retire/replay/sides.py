"""Replays scenarios through the installed vLLM once per side: stock, fixed, newest states kept.

A side is the environment of a child process, because vLLM and the patch are fixed for the life of a
process. This module imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import Version

from vllm_mamba_retire.child import ask
from vllm_mamba_retire.names import KEEP_VARIABLE, MODE_VARIABLE

from .runs import Run
from .scenario import Scenario

OLDEST = "0.26"  # schedulers before it are replayed by tools/table/behaviour.py alone

# Side, scenario number, steps and tokens so far; called from a thread per side.
OnProgress = Callable[[str, int, int, int], None]


@dataclass(frozen=True, slots=True)
class Side:
    """A way to run the installed vLLM.

    Attributes:
        name: as it appears in tables, figures and JSON.
        environment: variables of the child process.
    """

    name: str
    environment: Mapping[str, str] = field(hash=False)


STOCK = Side("stock", {MODE_VARIABLE: "off"})
FIXED = Side("fixed", {MODE_VARIABLE: "auto", KEEP_VARIABLE: "none"})
KEPT = Side("kept", {MODE_VARIABLE: "auto", KEEP_VARIABLE: "newest"})
SIDES = (STOCK, FIXED, KEPT)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One scenario and its runs, by the name of the side and in the order of the sides.

    On a native release stock and fixed are the same.
    """

    scenario: Scenario
    runs: Mapping[str, Run]

    @property
    def stock(self) -> Run:
        """The run without this package."""
        return self.runs[STOCK.name]

    @property
    def fixed(self) -> Run:
        """The run with this package."""
        return self.runs[FIXED.name]

    @property
    def kept(self) -> Run:
        """The run with this package and the newest states kept."""
        return self.runs[KEPT.name]


def replayable(version: str) -> bool:
    """Whether replays are tested on this vLLM release, so that their figures are right."""
    return Version(Version(version).base_version) >= Version(OLDEST)


def compare(
    scenarios: Sequence[Scenario],
    sides: Sequence[Side] = SIDES,
    on_progress: OnProgress | None = None,
    *,
    path: Sequence[str | Path] = (),
) -> list[Comparison]:
    """Replay scenarios on all sides at once; the arguments are those of `replay_all`.

    Raises:
        ChildError: a child process failed.
    """

    def run(side: Side) -> list[Run]:
        return replay_all(scenarios, side, path=path, on_progress=on_progress)

    with ThreadPoolExecutor(len(sides)) as threads:
        runs = threads.map(run, sides)
    names = [side.name for side in sides]
    return [
        Comparison(scenario, dict(zip(names, each, strict=True)))
        for scenario, each in zip(scenarios, zip(*runs, strict=True), strict=True)
    ]


def replay_all(
    scenarios: Sequence[Scenario],
    side: Side,
    *,
    path: Sequence[str | Path] = (),
    on_progress: OnProgress | None = None,
) -> list[Run]:
    """Replay scenarios on one side, in one child process.

    Args:
        scenarios: what to replay.
        side: which side.
        path: folders searched for vLLM before those of this process.
        on_progress: called every few steps.

    Raises:
        ChildError: the child process failed.
    """

    def report(event: dict[str, Any]) -> None:
        if on_progress is not None:
            on_progress(side.name, event["scenario"], event["steps"], event["tokens"])

    answer = ask(
        f"{__package__}.scheduler",
        msgspec.to_builtins(list(scenarios)),
        environment=side.environment,
        path=path,
        on_event=report,
    )
    return msgspec.convert(answer, list[Run])
