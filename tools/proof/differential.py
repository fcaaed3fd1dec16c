"""Compares releases over many steps: ``tools.proof.differential TREES RESULTS --release 0.29.0``.

The steps are divided evenly among the scopes of `tools.proof.sequences.geometry`. Writes a JSON
file per release and scope into RESULTS; exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.proof.compare import MANAGER_FILE, Variant, compare
from tools.proof.sequences import Scope
from vllm_mamba_retire import __version__

NATIVE = "0.30.0"
LENGTH = 200  # operations of a sequence
SCOPES: tuple[Scope, ...] = ("native", "graft", "wide")


def compare_release(
    trees: Path, release: str, scope: Scope, steps: int, seed: int
) -> dict[str, Any]:
    """Run one comparison of a patched release; return plain data for the report."""
    patched = Variant(trees / release, "patched")
    if scope == "graft":
        other = Variant(trees / release, "graft", trees / NATIVE / MANAGER_FILE)
    else:
        other = Variant(trees / NATIVE, "as-is")
    print(f"{release} {scope}: {steps} steps, seeds from {seed}", flush=True)
    done = compare(patched, other, seed=seed, steps=steps, length=LENGTH, scope=scope)
    print(f"  {done.steps} equal, {len(done.different)} sequences differ", flush=True)
    seeds = [seed, seed + -(-steps // LENGTH) - 1]
    comparison = {"scope": scope, "seeds": seeds, "length": LENGTH, **asdict(done)}
    return {"version": __version__, "release": release, "comparisons": [comparison]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", type=Path, help="folder with a folder per release")
    parser.add_argument("results", type=Path)
    parser.add_argument("--release", action="append", required=True)
    parser.add_argument("--scope", action="append", choices=SCOPES)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    asked.results.mkdir(parents=True, exist_ok=True)
    scopes = asked.scope or SCOPES
    steps = -(-asked.steps // len(scopes))
    different = False
    for release in asked.release:
        for scope in scopes:
            data = compare_release(asked.trees, release, scope, steps, asked.seed)
            different |= bool(data["comparisons"][0]["different"])
            path = asked.results / f"differential-{release}-{scope}.json"
            path.write_text(json.dumps(data, indent=1))
    return int(different)


if __name__ == "__main__":
    sys.exit(main())
