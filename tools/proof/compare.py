"""Runs the same sequences on two releases, each in its own process, and finds differences.

Imports no vLLM. hypothesis reduces a sequence that differs to the operations that are needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tools.proof.sequences import Scope, Sequence

ROOT = Path(__file__).parents[2]
MANAGER_FILE = Path("vllm/v1/core/single_type_kv_cache_manager.py")
_LINES_SHOWN = 20
_SHRINK_TRIES = 500

Job = dict[str, Any]


class ProcessError(Exception):
    """A process failed; the message ends with what it printed last."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One release, used in one way.

    Attributes:
        tree: folder that holds its ``vllm`` package.
        use: the side, as in `sequence_process`.
        native_source: manager file whose method is used, for ``graft``.
        package: folder that holds this package, for example a mutant of it.
    """

    tree: Path
    use: Literal["patched", "as-is", "graft"]
    native_source: Path | None = None
    package: Path | None = None


@dataclass(slots=True)
class Tally:
    """The result of a comparison.

    Attributes:
        steps: operations run on both sides.
        raised: sequences that ended early with the same error of vLLM on both sides.
        different: seeds of sequences that differ.
        versions: of vLLM, left and right.
        counters: of this package, on the left side.
    """

    steps: int = 0
    raised: int = 0
    different: list[int] = field(default_factory=list)
    versions: tuple[str, str] = ("", "")
    counters: dict[str, int] = field(default_factory=dict)


class Runner:
    """A process for one side that runs one job after the other."""

    def __init__(self, side: Variant) -> None:
        package = side.package or ROOT / "shim"
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (see `close`)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tools.proof.sequence_process",
                side.use,
                str(side.native_source or ""),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(map(str, (package, side.tree, ROOT))),
                "MAMBA_RETIRE": "auto" if side.use == "patched" else "off",
                # Block hashes start from it, and they are compared.
                "PYTHONHASHSEED": "0",
            },
        )
        self.version = str(self._read()["ready"])

    def start(self, job: Job) -> None:
        """Send a job; read its answers with `answers`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yield the answers to the job that was sent; the last one is ``done``."""
        while True:
            answer = self._read()
            yield answer
            if answer.get("done"):
                return

    def trace(self, sequence: Sequence) -> dict[str, Any]:
        """Return what one sequence did, step by step."""
        self.start({"sequence": sequence.to_data()})
        first, _done = self.answers()
        return first

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.log.close()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.log.seek(0)
            tail = "".join(self.log.readlines()[-_LINES_SHOWN:])
            raise ProcessError(f"process ended with {self.process.returncode}:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def runners(*sides: Variant) -> Iterator[list[Runner]]:
    """Start a process per side; end all of them on exit."""
    with ExitStack() as stack:
        started = []
        for side in sides:
            started.append(Runner(side))
            stack.callback(started[-1].close)
        yield started


def compare(
    left: Variant, right: Variant, *, seed: int, steps: int, length: int, scope: Scope
) -> Tally:
    """Run `steps` operations on both sides: the seeds from `seed` on, `length` operations each."""
    job = {"seed": seed, "steps": steps, "length": length, "scope": scope}
    result = Tally()
    with runners(left, right) as (one, other):
        result.versions = (one.version, other.version)
        for runner in (one, other):
            runner.start(job)
        for mine, theirs in zip(one.answers(), other.answers(), strict=True):
            if mine.get("done"):
                result.counters = mine["counters"]
            elif mine["digest"] != theirs["digest"]:
                result.different.append(mine["seed"])
            else:
                result.raised += mine["error"] is not None
                result.steps += mine["steps"]
    return result


def first_difference(left: Runner, right: Runner, sequence: Sequence) -> str | None:
    """Return the first difference of two sides on a sequence, in words, or None."""
    ours, theirs = left.trace(sequence)["steps"], right.trace(sequence)["steps"]
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            parts = [key for key in {**mine, **other} if mine.get(key) != other.get(key)]
            shown = "; ".join(f"{key}: {mine.get(key)} / {other.get(key)}" for key in parts)
            return f"step {number} {sequence.operations[number]}: {shown}"
    return None


def shrink(sequence: Sequence, fails: Callable[[Sequence], bool]) -> Sequence:
    """Return the shortest part of a failing sequence that still fails and hypothesis finds."""
    from hypothesis import Phase, find, settings
    from hypothesis import strategies as st
    from hypothesis.errors import NoSuchExample

    # An integer that is 0 leaves its operation out: rarely at first, and the simplest there is.
    count = len(sequence.operations)
    keep = st.lists(st.integers(0, 1 << 16), min_size=count, max_size=count)

    def part(kept: list[int]) -> Sequence:
        pairs = zip(sequence.operations, kept, strict=True)
        return Sequence(sequence.geometry, tuple(op for op, number in pairs if number))

    quiet = settings(
        max_examples=_SHRINK_TRIES,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
    )
    try:
        return part(find(keep, lambda kept: fails(part(kept)), settings=quiet))
    except NoSuchExample:
        return sequence
