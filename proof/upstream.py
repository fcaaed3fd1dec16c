"""Runs vLLM's own tests on a release, stock and patched, and 0.30.0's tests for the fix.

``python -m proof.upstream RESULTS --release 0.29.0 --sources FOLDER`` with that release and this
package on the path; FOLDER holds a source archive per release (see `lanes.sources`), which is never
committed. The manager's own files need neither a GPU nor a model. Exits with 1 unless the same
tests pass on both sides, and 0.30.0's seven tests fail in three on stock and pass on patched.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

NATIVE = "0.30.0"
RETIREMENT_FILE = "test_single_type_kv_cache_manager.py"
RETIREMENT_TESTS = "mamba_retirement"
FAIL_ON_STOCK, ALL = 3, 7
# What is about blocks; each release has those that it has.
MANAGER_FILES = (
    RETIREMENT_FILE,
    "test_prefix_caching.py",
    "test_mamba_align_chunk_split.py",
    "test_mamba_partial_prefix_cache.py",
    "test_contiguous_kv_packing.py",
    "test_kv_sharing.py",
    "test_output.py",
    "test_kv_cache_metrics.py",
    "test_swa_inflight_window_free.py",
    "test_deferred_block_free.py",
    "prefix_cache",
)


class UpstreamError(Exception):
    """A run of vLLM's tests says nothing: it was not one, or the patch was not on."""


def passed(sources: Path, files: list[str], mode: str, keyword: str = "") -> tuple[set[str], int]:
    """Names of the tests that pass, and how many ran.

    Args:
        sources: a release's source archive, unpacked.
        files: of ``tests/v1/core``.
        mode: ``MAMBA_RETIRE`` for the run.
        keyword: pytest's ``-k``.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Beside the archive's `vllm/`, pytest would import that one.
        shutil.copytree(sources / "tests", f"{folder}/tests", ignore=_only_v1)
        core = Path("tests/v1/core")
        if keyword:
            for file in files:
                carried = folder / core / file
                carried.write_text(_carried(carried.read_text(), keyword))
        (Path(folder) / "pytest.ini").write_text(
            "[pytest]\nmarkers = cpu_test\n slow_test\n skip_global_cleanup\n optional\n"
        )
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
                # Upstream's conftest wants what only its own test image has.
                *("--noconftest", "-p", "proof.armed", "-k", keyword, "--junitxml=results.xml"),
                *(str(core / file) for file in files),
            ],
            cwd=folder,
            env=os.environ | {"MAMBA_RETIRE": mode, "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        results = Path(folder) / "results.xml"
        if done.returncode not in (0, 1) or not results.exists():
            raise UpstreamError(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}")
        return _read(results)


def _only_v1(folder: str, names: list[str]) -> list[str]:
    if Path(folder).name != "tests":
        return []
    return [name for name in names if name not in ("__init__.py", "utils.py", "v1")]


def _carried(source: str, keyword: str) -> str:
    """A test module of a newer release, with only the wanted tests and what this release has."""
    parts = ["import contextlib"]
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            for name in map(ast.unparse, node.names):
                parts.append(
                    f"with contextlib.suppress(ImportError):\n    from {origin} import {name}"
                )
        elif not getattr(node, "name", "").startswith("test_") or keyword in getattr(
            node, "name", ""
        ):
            parts.append(ast.unparse(node))
    return "\n".join(parts)


def _read(results: Path) -> tuple[set[str], int]:
    cases = list(ET.parse(results).iter("testcase"))
    good = [case for case in cases if not list(case)]
    return {f"{case.get('classname')}::{case.get('name')}" for case in good}, len(cases)


def compare(sources: Path, release: str) -> dict[str, Any]:
    """Both suites on both sides, as plain data for the report."""
    own = [name for name in MANAGER_FILES if (sources / release / "tests/v1/core" / name).exists()]
    sides: dict[str, Any] = {"release": release, "files": own}
    for side, mode in (("stock", "off"), ("patched", "require")):
        names, ran = passed(sources / release, own, mode)
        seven, all_seven = passed(sources / NATIVE, [RETIREMENT_FILE], mode, RETIREMENT_TESTS)
        sides[side] = {
            "passed": sorted(names),
            "ran": ran,
            "native tests passed": len(seven),
            "native tests": all_seven,
        }
    return sides


def faults(sides: dict[str, Any]) -> list[str]:
    """What is not as it must be, in words."""
    stock, patched = sides["stock"], sides["patched"]
    differ = set(stock["passed"]) ^ set(patched["passed"])
    found = [f"passes on one side only: {name}" for name in sorted(differ)]
    if not stock["passed"]:
        found.append("no test of the release's own passed")
    for side, expected in (("stock", ALL - FAIL_ON_STOCK), ("patched", ALL)):
        seen = (sides[side]["native tests passed"], sides[side]["native tests"])
        if seen != (expected, ALL):
            found.append(f"{side}: {seen[0]} of {seen[1]} of {NATIVE}'s tests pass")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--release", required=True)
    parser.add_argument("--sources", type=Path, required=True)
    asked = parser.parse_args()
    sides = compare(asked.sources, asked.release)
    wrong = faults(sides)
    for side in ("stock", "patched"):
        seen = sides[side]
        print(
            f"{asked.release} {side}: {len(seen['passed'])} of {seen['ran']} of its own pass, "
            f"{seen['native tests passed']} of {seen['native tests']} of {NATIVE}'s"
        )
    print(*wrong, sep="\n")
    asked.results.mkdir(parents=True, exist_ok=True)
    (asked.results / f"upstream-{asked.release}.json").write_text(
        json.dumps({**_counts(sides), "faults": wrong}, indent=1)
    )
    return int(bool(wrong))


def _counts(sides: dict[str, Any]) -> dict[str, Any]:
    """The same with numbers in place of names, and the version of this package."""
    from vllm_mamba_retire import __version__

    kept: dict[str, Any] = {"version": __version__, **sides}
    for side in ("stock", "patched"):
        kept[side] = {**sides[side], "passed": len(sides[side]["passed"])}
    return kept


if __name__ == "__main__":
    sys.exit(main())
