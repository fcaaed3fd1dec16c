"""The long comparison: ``python -m proof.differential TREES RESULTS --release 0.29.0 ...``.

Half of the steps against 0.30.0 itself, half against 0.30.0's method on the release's own code.
Writes one JSON file per release into RESULTS; exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_mamba_retire import __version__

from .compare import MANAGER_FILE, Side, compare
from .sequences import Scope

NATIVE = "0.30.0"
LENGTH = 200  # operations of a sequence
SCOPES: tuple[Scope, ...] = ("native", "graft")


def compare_release(trees: Path, release: str, steps: int, seed: int) -> list[dict[str, Any]]:
    """Both comparisons of one patched release, as plain data for the report."""
    results = []
    for scope in SCOPES:
        patched = Side(trees / release, "patched")
        if scope == "native":
            other = Side(trees / NATIVE, "as-is")
        else:
            other = Side(trees / release, "graft", trees / NATIVE / MANAGER_FILE)
        print(f"{release} {scope}: {steps // 2} steps, seeds from {seed}", flush=True)
        done = compare(patched, other, seed=seed, steps=steps // 2, length=LENGTH, scope=scope)
        seeds = [seed, seed + -(-steps // 2 // LENGTH) - 1]
        results.append({"scope": scope, "seeds": seeds, "length": LENGTH, **asdict(done)})
        print(f"  {done.steps} equal, {len(done.different)} sequences differ", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", type=Path, help="folder with a folder per release")
    parser.add_argument("results", type=Path)
    parser.add_argument("--release", action="append", required=True)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    asked.results.mkdir(parents=True, exist_ok=True)
    different = False
    for release in asked.release:
        results = compare_release(asked.trees, release, asked.steps, asked.seed)
        different |= any(result["different"] for result in results)
        data = {"version": __version__, "release": release, "comparisons": results}
        path = asked.results / f"differential-{release}.json"
        path.write_text(json.dumps(data, indent=1))
    return int(different)


if __name__ == "__main__":
    sys.exit(main())
