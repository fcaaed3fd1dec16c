"""Runs vLLM's own tests on a release, stock and patched, and 0.30.0's tests for the fix.

``python -m tools.proof.upstream_tests RESULTS --release 0.29.0 --sources FOLDER`` with that release
and this package on the path; FOLDER holds a source archive per release (see `tools.env.sources`),
which is never committed. The suite is what vLLM has about its KV-cache manager and scheduler; it
needs no GPU, and of a model no more than its config. Exits with 1 unless every test that is not
left out by name (see `upstream_plugin`) passes on both sides, and 0.30.0's seven tests fail in
three on stock and pass on patched.
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
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NATIVE = "0.30.0"
SUITE = ("tests/v1/core", "tests/v1/test_kv_cache_spec_registry.py")
RETIREMENT_FILE = "tests/v1/core/test_single_type_kv_cache_manager.py"
RETIREMENT_TESTS = "mamba_retirement"
FAIL_ON_STOCK, ALL = 3, 7
# A test that asks the hub for one of these finds a folder of that name with this config. The rest
# is as transformers has it by default.
MODELS = {
    "facebook/opt-125m": {"model_type": "opt", "architectures": ["OPTForCausalLM"]},
    "facebook/opt-350m": {"model_type": "opt", "architectures": ["OPTForCausalLM"]},
    "Qwen/Qwen1.5-7B": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    # What vLLM's own `ModelConfig` has by default.
    "Qwen/Qwen3-0.6B": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
}


class UpstreamError(Exception):
    """A run of vLLM's tests has no result: no test ran, or the patch was not installed."""


@dataclass
class Results:
    """The results of the tests of one run, by their names."""

    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    left_out: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def seen(self) -> int:
        """Number of tests, skipped ones included."""
        return len(self.passed) + len(self.failed) + sum(map(len, self.left_out.values()))


def run(sources: Path, paths: tuple[str, ...], mode: str, keyword: str = "") -> Results:
    """Run pytest, which prints a line per file.

    Args:
        sources: a release's source archive, unpacked.
        paths: what to run, from the archive's top.
        mode: ``MAMBA_RETIRE`` for the run.
        keyword: pytest's ``-k``; what `paths` names are then files of a newer release.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Beside the archive's `vllm/`, pytest would import that one.
        shutil.copytree(sources / "tests", folder / "tests", ignore=_only_v1)
        if keyword:
            for path in paths:
                carried = folder / path
                carried.write_text(_carried(carried.read_text(), keyword))
        for model, config in MODELS.items():
            (folder / model).mkdir(parents=True)
            (folder / model / "config.json").write_text(json.dumps(config))
        (folder / "pytest.ini").write_text(
            "[pytest]\nmarkers = cpu_test\n slow_test\n skip_global_cleanup\n optional\n"
        )
        env = os.environ | {"MAMBA_RETIRE": mode, "HF_HUB_OFFLINE": "1"}
        env.pop("VLLM_LOGGING_LEVEL", None)  # some tests look for what is logged
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--noconftest"),
                *("-p", "tools.proof.patching_plugin", "-p", "tools.proof.upstream_plugin"),
                *("-k", keyword),
                *(
                    "--no-header",
                    "--disable-warnings",
                    "--tb=short",
                    "--junitxml=results.xml",
                    *paths,
                ),
            ],
            cwd=folder,
            env=env,
            check=False,
        )
        results = folder / "results.xml"
        if done.returncode not in (0, 1) or not results.exists():
            raise UpstreamError(f"pytest ended with {done.returncode}")
        return _read(results)


def _only_v1(folder: str, names: list[str]) -> list[str]:
    if Path(folder).name != "tests":
        return []
    return [name for name in names if name not in ("__init__.py", "utils.py", "v1")]


def _carried(source: str, keyword: str) -> str:
    """Adapt a newer release's test module: only the wanted tests and what this release has."""
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


def _read(results: Path) -> Results:
    outcome = Results()
    for case in ET.parse(results).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        skipped = case.find("skipped")
        if skipped is not None:
            outcome.left_out[skipped.get("message", "")].append(name)
        else:
            (outcome.failed if len(case) else outcome.passed).add(name)
    return outcome


def compare(sources: Path, release: str) -> tuple[dict[str, Any], list[str]]:
    """Run both suites on both sides; return plain data for the report, and what is wrong."""
    own: dict[str, Results] = {}
    native: dict[str, Results] = {}
    for side, mode in (("stock", "off"), ("patched", "require")):
        print(f"{release} {side}: its own tests, then {NATIVE}'s for the fix", flush=True)
        own[side] = run(sources / release, SUITE, mode)
        native[side] = run(sources / NATIVE, (RETIREMENT_FILE,), mode, RETIREMENT_TESTS)
    data: dict[str, Any] = {
        side: {
            "passed": len(own[side].passed),
            "ran": own[side].seen,
            "native tests passed": len(native[side].passed),
            "native tests": native[side].seen,
        }
        for side in own
    }
    data |= {"release": release, "files": SUITE, "left out": own["stock"].left_out}
    return data, [*_faults_of(own), *_faults_of_native(native)]


def _faults_of(own: dict[str, Results]) -> list[str]:
    stock, patched = own["stock"], own["patched"]
    found = [f"fails on stock, unexplained: {name}" for name in sorted(stock.failed)]
    differ = stock.passed ^ patched.passed
    found += [f"passes on one side only: {name}" for name in sorted(differ)]
    if not stock.passed:
        found.append("no test of the release's own passed")
    return found


def _faults_of_native(native: dict[str, Results]) -> list[str]:
    return [
        f"{side}: {len(native[side].passed)} of {native[side].seen} of {NATIVE}'s tests pass"
        for side, expected in (("stock", ALL - FAIL_ON_STOCK), ("patched", ALL))
        if (len(native[side].passed), native[side].seen) != (expected, ALL)
    ]


def main() -> int:
    from vllm_mamba_retire import __version__

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--release", required=True)
    parser.add_argument("--sources", type=Path, required=True)
    asked = parser.parse_args()
    data, wrong = compare(asked.sources, asked.release)
    for reason, names in data["left out"].items():
        print(f"left out, {reason}: {len(names)}", *names, sep="\n  ")
    for side in ("stock", "patched"):
        seen = data[side]
        print(
            f"{asked.release} {side}: {seen['passed']} of {seen['ran']} of its own pass, "
            f"{seen['native tests passed']} of {seen['native tests']} of {NATIVE}'s"
        )
    print(*wrong, sep="\n")
    asked.results.mkdir(parents=True, exist_ok=True)
    (asked.results / f"upstream-{asked.release}.json").write_text(
        json.dumps({"version": __version__, **data, "faults": wrong}, indent=1)
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
