"""Runs the engine on a CUDA device: time to first token and pool use, stock and patched.

For the CUDA wheel of a leaking release. The model is the tiny hybrid one of the CPU sessions, with
random weights: the figures compare two runs on one machine and do not predict a real model's speed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.engine.harness import Action, EngineRun, Workload, run
from tools.env.cuda import cuda_devices
from vllm_mamba_retire.replay.sides import SIDES

PROMPT = 40_000  # tokens
LAG = 1  # what async scheduling has on CUDA
REQUEST = "long"


@dataclass(frozen=True)
class Figures:
    """One run.

    Attributes:
        vllm: version.
        verdict: reason code of this package in that process, or ``off``.
        first_token: seconds to the first token.
        peak: most live states of the request in one Mamba group.
        used: most blocks of the pool in use, and the pool.
        pool: blocks in the pool.
        preemptions: roll-backs for want of blocks.
        answer: digest of the generated tokens.
    """

    vllm: str
    verdict: str
    first_token: float | None
    peak: int
    used: int
    pool: int
    preemptions: int
    answer: str

    @classmethod
    def of(cls, seen: EngineRun) -> Figures:
        answer = seen.answers[REQUEST]
        used = max(step.used for step in seen.steps)
        about = seen.vllm, seen.verdict, answer.first_token, seen.peak, used, seen.pool
        return cls(*about, seen.preemptions, answer.sha)


def problems(stock: Figures, patched: Figures) -> list[str]:
    """Return what is wrong, a sentence each. Times are not checked."""
    found = []
    if (stock.verdict, patched.verdict) != ("off", "patched"):
        found.append(f"verdicts are {stock.verdict} and {patched.verdict}")
    if patched.peak > 2 + LAG:
        found.append(f"patched vLLM holds {patched.peak} states, the bound is {2 + LAG}")
    if stock.peak <= 2 + LAG:
        found.append(f"stock vLLM holds only {stock.peak} states: the control shows no defect")
    if stock.answer != patched.answer:
        found.append(f"answers differ: {stock.answer} and {patched.answer}")
    return found


def main() -> int:
    """Run both, print both, write them as JSON."""
    parser = argparse.ArgumentParser(prog="nox -s gpu --", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the figures")
    options = parser.parse_args()
    action = Action("add", REQUEST, prompt=((7, PROMPT),))
    workload = Workload((action,), lag=LAG, options=(("gpu_memory_utilization", 0.5),))
    stock, patched = (Figures.of(run(workload, side=side)) for side in SIDES)
    for name, seen in (("stock", stock), ("patched", patched)):
        print(
            f"{name}: first token after {seen.first_token:.2f} s, {seen.peak} states, "
            f"{seen.used} of {seen.pool} blocks, {seen.preemptions} roll-backs"
        )
    data = {"devices": cuda_devices(), "stock": asdict(stock), "patched": asdict(patched)}
    options.out.write_text(json.dumps(data, indent=2) + "\n")
    found = problems(stock, patched)
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
