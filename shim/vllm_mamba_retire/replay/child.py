"""The child's side of `compare`: ``python -m`` this, scenarios on stdin, JSON lines on stdout.

One line per replayed scenario, and progress in between. Whether the fix is in is decided by
``MAMBA_RETIRE`` in the environment, as in any vLLM process.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from typing import TextIO

_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
_STEPS_PER_REPORT = 20


def main() -> None:
    out = _claim_stdout()
    os.environ.update(_ENVIRONMENT)
    from .scenario import Scenario
    from .scheduler import replay

    verdict = _activate()
    for number, data in enumerate(json.load(sys.stdin)):
        progress = _Progress(number, out)
        run = replay(Scenario.from_data(data), progress.step)
        progress.report()
        print(json.dumps({"run": asdict(replace(run, verdict=verdict))}), file=out, flush=True)
    # Interpreter shutdown runs vLLM's exit handlers, seconds of work for nothing.
    os._exit(0)


class _Progress:
    """Counts a replay's steps and tokens and says so now and then."""

    def __init__(self, number: int, out: TextIO) -> None:
        self.number, self.out = number, out
        self.steps = self.tokens = 0

    def step(self, tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens
        if self.steps % _STEPS_PER_REPORT == 0:
            self.report()

    def report(self) -> None:
        event = {"scenario": self.number, "steps": self.steps, "tokens": self.tokens}
        print(json.dumps(event), file=self.out, flush=True)


def _activate() -> str:
    """Reason code of this package's verdict on the vLLM of this process."""
    if os.environ.get("MAMBA_RETIRE") == "off":
        return "off"
    import vllm.v1.core.single_type_kv_cache_manager  # noqa: F401

    from vllm_mamba_retire import activate

    verdict = activate()
    assert verdict is not None, "vLLM's manager module was imported just above"
    if verdict.in_doubt:
        sys.exit(verdict.sentence)
    return verdict.reason.value


def _claim_stdout() -> TextIO:
    """The real stdout for answers alone; vLLM prints to stdout too, which now means stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


if __name__ == "__main__":
    main()
