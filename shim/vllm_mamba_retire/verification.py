"""Proves on the installed vLLM what the verdict says: probe and replays, stock and patched.

Each side runs in a child process, since a process is either patched or not. This side imports no
vLLM; the child's side is `main`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from .evidence import Outcome
from .verdict import Reason, Verdict, decide

# A geometry in which every chunk spans two blocks; lengths in tokens.
BLOCK, SPEC, BUDGET, PROMPT = 3584, 5, 8192, 480_031
LAGS = (0, 1, 2)  # chunks scheduled but not yet settled
_LINES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Side:
    """What one child process saw.

    Attributes:
        verdict: what was decided there.
        vllm: version of the vLLM.
        package: folder of the vLLM.
        outcome: what the probe saw; None where it was not asked.
        peaks: peak live states of one Mamba group, by `LAGS`; None where that did not run.
        problem: why something did not run.
    """

    verdict: Verdict
    vllm: str | None = None
    package: str | None = None
    outcome: Outcome | None = None
    peaks: tuple[int | None, ...] = ()
    problem: str | None = None

    @property
    def bounded(self) -> bool:
        """Whether no replay held more states than speculation and lag explain."""
        return len(self.peaks) == len(LAGS) and all(
            peak is not None and peak <= bound(lag)
            for lag, peak in zip(LAGS, self.peaks, strict=True)
        )

    @property
    def behaves(self) -> bool:
        """Whether it retires across gaps, by probe and by replay."""
        return self.outcome is Outcome.RETIRES and self.bounded

    @property
    def leaks(self) -> bool:
        """Whether it shows the defect, by probe and by replay."""
        return self.outcome is Outcome.STOPS_AT_GAP and not self.bounded


@dataclass(frozen=True, slots=True)
class Verification:
    """Both sides, and what they add up to."""

    stock: Side
    patched: Side

    @property
    def proven(self) -> bool:
        """Whether what was seen is what the verdict promises."""
        reason = self.patched.verdict.reason
        if reason is Reason.PATCHED:
            return self.stock.leaks and self.patched.behaves
        if reason in (Reason.NATIVE, Reason.FIXED_ELSEWHERE):
            return self.stock.behaves and self.patched.behaves
        if reason is Reason.LATENT:
            # Without a lag, which its scheduler never has, the walk reaches every state.
            return self.stock.peaks[:1] == (bound(0),)
        return reason is Reason.ABSENT

    @property
    def sentence(self) -> str:
        """What was proven, or what is wrong."""
        reason = self.patched.verdict.reason
        if not self.proven:
            problem = self.patched.problem or self.stock.problem
            return f"not proven: {problem or self.patched.verdict.sentence}"
        return {
            Reason.PATCHED: "stock keeps states before a null gap, patched retires them.",
            Reason.NATIVE: "this vLLM retires across null gaps by itself.",
            Reason.FIXED_ELSEWHERE: "this vLLM retires across null gaps without this package.",
            Reason.LATENT: "the walk has the flaw, but this release's scheduler retires without a "
            "lag (row 0), where nothing is kept.",
            Reason.ABSENT: "this vLLM has no align mode; there is nothing to run.",
        }[reason]


def bound(lag: int) -> int:
    """Most live states that one request needs per Mamba group (vllm#55450)."""
    return SPEC + 2 + lag


def verify() -> Verification:
    """Run both sides on the vLLM of this interpreter, one after the other."""
    return Verification(stock=look("off"), patched=look("auto"))


def look(mode: str) -> Side:
    """Run one side in a child process with this ``MAMBA_RETIRE``.

    The verdict of the side that is off is the one that would have been.
    """
    environment = os.environ | {"MAMBA_RETIRE": mode, "VLLM_LOGGING_LEVEL": "ERROR"}
    child = subprocess.run(
        [sys.executable, "-m", __name__],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    for line in reversed(child.stdout.splitlines()):
        if line.startswith("{"):
            return _side(json.loads(line))
    tail = "\n".join(child.stderr.splitlines()[-_LINES_SHOWN:])
    sentence = f"the child process ended with status {child.returncode} and no answer:\n{tail}"
    return Side(Verdict(Reason.FAILED, sentence), problem=sentence)


def _side(data: dict[str, Any]) -> Side:
    return Side(
        **data
        | {
            "verdict": Verdict(Reason(data["verdict"]["reason"]), data["verdict"]["sentence"]),
            "outcome": Outcome(data["outcome"]) if data["outcome"] else None,
            "peaks": tuple(data["peaks"]),
        }
    )


def main() -> None:
    """The child's side: one JSON line on stdout."""
    print(json.dumps(asdict(_answer())))
    sys.stdout.flush()
    # Interpreter shutdown runs vLLM's exit handlers, seconds of work for nothing.
    os._exit(0)


def _answer() -> Side:
    from .evidence import collect_evidence
    from .names import MANAGER_MODULE
    from .releases import load_matrix
    from .target import find_target

    target = find_target()
    side = Side(
        decide(collect_evidence(target, load_matrix())),
        vllm=target.version if target else None,
        package=str(target.package) if target else None,
    )
    if side.verdict.reason in (Reason.ABSENT, Reason.NO_TARGET):
        return side
    try:
        importlib.import_module(MANAGER_MODULE)
    except Exception as error:
        return replace(side, problem=f"{MANAGER_MODULE} cannot be imported ({_text(error)})")
    return _ask(side)


def _ask(side: Side) -> Side:
    from . import activate
    from .names import MANAGER_MODULE
    from .probe import probe

    if os.environ["MAMBA_RETIRE"] != "off" and (verdict := activate()) is not None:
        side = replace(side, verdict=verdict)
    result = probe(sys.modules[MANAGER_MODULE])
    try:
        return replace(side, outcome=result.outcome, peaks=tuple(_peaks()))
    except Exception as error:
        return replace(side, outcome=result.outcome, problem=f"no replay ({_text(error)})")


def _peaks() -> Iterator[int]:
    from .replay.manager import peak_states

    return (peak_states(BLOCK, SPEC, BUDGET, PROMPT, lag) for lag in LAGS)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
