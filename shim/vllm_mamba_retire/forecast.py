"""Predicts the verdict of the vLLM processes that this interpreter will start.

The files decide if the manager file is that of a known release, byte for byte. Otherwise other code
in it may change how the class behaves; then a child process imports it and collects the same
evidence as a vLLM process does.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from . import child
from .evidence import Evidence, Outcome, collect_evidence
from .names import ALLOW_DRIFT_VARIABLE, MANAGER_MODULE, MODE_VARIABLE, is_true
from .releases import Matrix
from .target import Target, find_target
from .verdict import Verdict, decide

_TIMEOUT = 120.0  # seconds; a cold import of torch on a busy machine takes most of a minute


def predict(target: Target | None, matrix: Matrix, *, probe: bool = True) -> Verdict:
    """Return the verdict that a vLLM process will reach.

    Args:
        target: the vLLM that this interpreter would import.
        matrix: the known releases.
        probe: run a child process if the files do not decide.
    """
    evidence = collect_evidence(target, matrix)
    remark = ""
    if probe and evidence.undecided and target is not None:
        try:
            evidence = _probe(evidence, target)
        except child.ChildError as error:
            reason = (str(error).splitlines() or [""])[-1]
            remark = f" Decided by the files alone: the probe did not run ({reason})."
    allowed = is_true(os.environ.get(ALLOW_DRIFT_VARIABLE))
    verdict = decide(replace(evidence, drift_allowed=allowed))
    return replace(verdict, sentence=verdict.sentence + remark)


def _probe(evidence: Evidence, target: Target) -> Evidence:
    """Add the evidence that a child process collects from the imported class."""
    seen = child.ask(
        __name__,
        # A safe path: a folder "vllm" where the command is called must not be imported instead.
        environment={MODE_VARIABLE: "off", "PYTHONSAFEPATH": "1"},
        path=[target.package.parent],
        timeout=_TIMEOUT,
    )
    loaded_from = seen.pop("loaded_from")
    # Not imported here, so that the verdict is in the future tense; two trees are a conflict.
    elsewhere = None if loaded_from == str(target.manager_file) else loaded_from
    outcome = seen.pop("outcome")  # None where the module has no such class
    outcome = Outcome(outcome) if outcome else None
    return replace(evidence, loaded_from=elsewhere, outcome=outcome, **seen)


def _inspect(_payload: Any, _report: Callable[[Any], None]) -> dict[str, str | None]:
    from .activation import inspect_process

    try:
        importlib.import_module(MANAGER_MODULE)
    except Exception as error:
        message = f"{MANAGER_MODULE} cannot be imported: {type(error).__name__}: {error}"
        raise child.RefusalError(message) from error
    seen = inspect_process(find_target(), sys.modules[MANAGER_MODULE])
    return {
        "loaded_from": seen.loaded_from,
        "foreign": seen.foreign,
        "subclass": seen.subclass,
        "outcome": seen.outcome.value if seen.outcome else None,
        "obstacle": seen.obstacle,
    }


if __name__ == "__main__":
    child.answer(_inspect)
