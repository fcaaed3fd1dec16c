"""Checks the verdict on the installed vLLM with the probe and replays, stock and patched.

Each side runs in a child process (``python -m`` this module), because a process is either patched
or not. The parent imports no vLLM.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from .child import ChildError, answer, ask, describe
from .evidence import Outcome
from .keep_probe import KeepOutcome
from .keep_verdict import OFF, KeepState, KeepVerdict
from .names import KEEP_VARIABLE, MANAGER_MODULE, MODE_VARIABLE, read_keep
from .verdict import Reason, Verdict

# A geometry in which every chunk spans two blocks; lengths in tokens.
BLOCK, SPEC, BUDGET, PROMPT = 3584, 5, 8192, 480_031
LAGS = (0, 1, 2)  # chunks scheduled but not yet settled


@dataclass(frozen=True, slots=True)
class Observation:
    """The observations of one child process.

    Attributes:
        verdict: its verdict.
        vllm: version of the vLLM.
        package: folder of the vLLM.
        outcome: what the probe observed; None if it did not run.
        peaks: peak live states of one Mamba group, by `LAGS`; empty if nothing ran.
        problem: why nothing could be run.
        keep: whether the newest states are kept.
        newest: what the class does with them; None if keeping is not requested.
    """

    verdict: Verdict
    vllm: str | None = None
    package: str | None = None
    outcome: Outcome | None = None
    peaks: tuple[int, ...] = ()
    problem: str | None = None
    keep: KeepVerdict = OFF
    newest: KeepOutcome | None = None

    @property
    def bounded(self) -> bool:
        """Whether no replay held more states than `bound` allows."""
        return len(self.peaks) == len(LAGS) and all(
            peak <= bound(lag) for lag, peak in zip(LAGS, self.peaks, strict=True)
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
    """The observations of both sides, and the result."""

    stock: Observation
    patched: Observation

    @property
    def proven(self) -> bool:
        """Whether the observations agree with the verdicts."""
        return self.retirement_proven and self.keep_proven

    @property
    def keep_proven(self) -> bool:
        """Whether the newest states are kept, where that was requested."""
        state = self.patched.keep.state
        if state is KeepState.ON:
            seen = self.stock.newest, self.patched.newest
            return seen == (KeepOutcome.PLAIN, KeepOutcome.KEEPS)
        return state is KeepState.OFF

    @property
    def retirement_proven(self) -> bool:
        """Whether states are retired as the verdict says."""
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
    def problem(self) -> str | None:
        """Why nothing could be run."""
        if self.patched.verdict.reason is Reason.NO_TARGET:
            return self.patched.verdict.sentence
        return self.patched.problem or self.stock.problem

    @property
    def sentence(self) -> str:
        """The result for people."""
        reason = self.patched.verdict.reason
        if not self.retirement_proven:
            return f"not proven: {self.problem or self.patched.verdict.sentence}"
        if not self.keep_proven:
            return f"not proven: {self.patched.keep}"
        return {
            Reason.PATCHED: "proven: stock keeps states before a null gap, patched retires them.",
            Reason.NATIVE: "proven: this vLLM carries the fix.",
            Reason.FIXED_ELSEWHERE: "proven: this vLLM retires across null gaps by itself.",
            Reason.LATENT: "proven: the walk has the flaw, but this release's scheduler retires "
            "with lag 0, and then nothing is kept.",
            Reason.ABSENT: "this vLLM has no align mode; there is nothing to run.",
        }[reason]


def bound(lag: int) -> int:
    """Return the most live states that one request needs per Mamba group (vllm#55450)."""
    return SPEC + 2 + lag


def verify() -> Verification:
    """Run both sides on the vLLM of this interpreter, one after the other."""
    return Verification(stock=look("off"), patched=look("auto"))


def look(mode: str, keep: str | None = None) -> Observation:
    """Run one side in a child process.

    Args:
        mode: its ``MAMBA_RETIRE``. With ``off`` the verdict is the one without that setting.
        keep: its ``MAMBA_RETIRE_KEEP``; by default that of this process.
    """
    environment = {MODE_VARIABLE: mode} | ({KEEP_VARIABLE: keep} if keep else {})
    try:
        data = ask(__name__, environment=environment)
    except ChildError as error:
        return Observation(Verdict(Reason.FAILED, str(error)), problem=str(error))
    return msgspec.convert(data, Observation)


def _observe(_payload: Any, _report: Callable[[Any], None]) -> Any:
    """In the child: decide, probe and replay."""
    from .releases import load_matrix
    from .settings import judge_files
    from .target import find_target

    target = find_target()
    seen = Observation(
        judge_files(target, load_matrix()),
        vllm=target.version if target else None,
        package=str(target.package) if target else None,
    )
    if seen.verdict.reason not in (Reason.ABSENT, Reason.NO_TARGET):
        try:
            importlib.import_module(MANAGER_MODULE)
        except Exception as error:
            problem = f"{MANAGER_MODULE} cannot be imported ({describe(error)})"
            seen = replace(seen, problem=problem)
        else:
            seen = _run(seen)
    return msgspec.to_builtins(seen)


def _run(seen: Observation) -> Observation:
    from . import activate, current
    from .keep_probe import probe_keep
    from .probe import probe
    from .replay.manager import peak_states

    module = sys.modules[MANAGER_MODULE]
    # Importing the manager has patched it already, where that is right; off gives None.
    if os.environ[MODE_VARIABLE] != "off" and (verdict := activate()) is not None:
        record = current()
        seen = replace(seen, verdict=verdict, keep=record.keep if record else OFF)
    if read_keep(os.environ.get(KEEP_VARIABLE)) != "none":
        seen = replace(seen, newest=probe_keep(module, module.MambaManager)[0])
    result = probe(module)
    if result.error is not None:
        raise result.error
    peaks = tuple(peak_states(BLOCK, SPEC, BUDGET, PROMPT, lag) for lag in LAGS)
    return replace(seen, outcome=result.outcome, peaks=peaks)


if __name__ == "__main__":
    answer(_observe)
