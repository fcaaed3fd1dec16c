"""Measures what keeping the newest states saves: random conversations in tight pools.

``python -m tools.proof.conversations TREE --out FILE`` replays conversations in a pool that is too
small for all of them. No eviction rule is best for every workload; the result says how often each
is better, by how much, and which seeds are the worst and the best. There are two kinds of
conversations: answers stay in the history of the next turn, or are dropped from it, as chat
templates do with reasoning.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_mamba_retire.names import KEEP_VARIABLE
from vllm_mamba_retire.replay.scenario import Arrival, Scenario
from vllm_mamba_retire.replay.sides import FIXED, KEPT, SIDES, Side, compare

BLOCK, BUDGET, GROUPS = 1568, 4096, 3  # tokens, tokens, Mamba groups beside the attention group
PROMPT = Side("prompt", {**KEPT.environment, KEEP_VARIABLE: "prompt"})
_BATCH = 20  # seeds between two writes of the figures
_KINDS = {"kept answers": (20, 100, 200, 400), "dropped answers": (200, 800, 2000, 4000)}
_SHOWN = 5  # seeds at either end


def conversations(seed: int, kind: str) -> Scenario:
    """Return a scenario: 4-7 conversations of 2-5 turns in a pool of 60-110 blocks."""
    draw = random.Random(f"{kind} {seed}")
    pool = draw.randint(60, 110)
    dropped = kind == "dropped answers"
    arrivals: list[Arrival] = []
    for number in range(draw.randint(4, 7)):
        prompt, starts, before = draw.randint(2000, 9000), draw.randint(0, 20), None
        for turn in range(draw.randint(2, 5)):
            output = draw.choice(_KINDS[kind])
            if -(-(prompt + output) // BLOCK) + 2 * GROUPS + 1 > pool:
                break
            arrival = Arrival(
                f"{number}.{turn}",
                prompt,
                output,
                at=0 if before else starts,
                after=before,
                text=str(number),
                shared=prompt if dropped else None,
            )
            arrivals.append(arrival)
            before = arrival.id
            prompt += (0 if dropped else output) + draw.randint(500, 12_000)
    return Scenario(
        f"{kind} {seed}",
        block=BLOCK,
        budget=BUDGET,
        arrivals=tuple(arrivals),
        groups=GROUPS,
        pool=pool,
        retention_interval="dense" if dropped else draw.choice(("dense", 0)),
    )


def measure(tree: Path, kind: str, seeds: range) -> list[dict[str, Any]]:
    """Return, per seed and side: tokens computed, tokens hit, roll-backs, most blocks in use."""
    sides = (*SIDES, PROMPT)
    scenarios = [conversations(seed, kind) for seed in seeds]
    rows = []
    for seed, replayed in zip(seeds, compare(scenarios, sides, path=[tree]), strict=True):
        figures = {
            name: [run.scheduled_tokens, run.hit_tokens, run.rollbacks, run.peak_used]
            for name, run in replayed.runs.items()
        }
        assert not any(run.stuck for run in replayed.runs.values()), f"{kind} {seed} is stuck"
        rows.append({"seed": seed, "release": replayed.stock.vllm, **figures})
    return rows


def summary(rows: Sequence[dict[str, Any]], side: str) -> dict[str, Any]:
    """Summarise one side over all seeds, compared with the fix alone."""
    change = sorted((row[side][0] / row[FIXED.name][0] - 1, row["seed"]) for row in rows)
    told = [{"seed": seed, "percent": round(100 * value, 1)} for value, seed in change]
    return {
        "tokens": sum(row[side][0] for row in rows),
        "hits": sum(row[side][1] for row in rows),
        "rollbacks": sum(row[side][2] for row in rows),
        "better": sum(value < 0 for value, _ in change),
        "equal": sum(value == 0 for value, _ in change),
        "worse": sum(value > 0 for value, _ in change),
        "best": told[:_SHOWN],
        "worst": told[: -_SHOWN - 1 : -1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path, help="folder of a vLLM release")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--dropped-seeds", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for kind, count in zip(_KINDS, (asked.seeds, asked.dropped_seeds), strict=True):
        rows: list[dict[str, Any]] = []
        for start in range(0, count, _BATCH):
            rows += measure(asked.tree, kind, range(start, min(count, start + _BATCH)))
            names = [name for name in rows[0] if name not in ("seed", "release")]
            found[kind] = {
                "release": rows[0]["release"],
                "seeds": len(rows),
                **{name: summary(rows, name) for name in names},
            }
            asked.out.write_text(json.dumps(found, indent=1) + "\n")
            print(kind, json.dumps(found[kind]), flush=True)


if __name__ == "__main__":
    main()
