"""Runs the tests on mutants of this package and says which test killed which.

``python -m tools.proof.mutants RESULTS --release 0.29.0``, with that release on the path. vLLM is
imported once; every mutant runs in a fork of that process with its own copy of the package, the
quick tests first. A mutant that passes every test has survived; the exit code is 1 unless
`EQUIVALENT` gives the reason why no test can fail.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.proof.forks import ROOT, first_failure, in_fork
from tools.proof.mutations import mutants
from tools.proof.wrong_fixes import WRONG_FIXES

PACKAGE = ROOT / "shim"
_FILE = "mutants.json"

# Tests of each module, the quick ones first.
TESTS = {
    "retirement": (
        "tests/unit/test_retirement.py",
        "tests/unit/test_retirement_properties.py",
        "tests/release/test_retirement.py",
        "tests/properties/test_live_states.py::test_properties_hold_with_the_fix",
    ),
    "binding": ("tests/unit/test_binding.py", "tests/release/test_retirement.py"),
    "verdict": ("tests/unit/test_decisions.py",),
    "keep": ("tests/unit/test_keep.py",),
    "keep_binding": ("tests/unit/test_keep_binding.py",),
    "keep_probe": ("tests/release/test_keep_probe.py",),
    "keep_verdict": ("tests/unit/test_keep_binding.py",),
}

_FOR_THE_TYPE = "no source was answered before; this is for the type"
# Mutants that behave as the original does, by part of their name, with the reason.
EQUIVALENT = {
    "retirement retire one more: 0 in: first_block = max(first_block, self.watermarks.get(": (
        "a table is never remembered without its number"
    ),
    "verdict _unlisted always: '' in: if \"mamba_cache_mode\" not in": _FOR_THE_TYPE,
    "verdict _unlisted never: '' in: if \"mamba_cache_mode\" not in": _FOR_THE_TYPE,
    "keep note one more: 1 in: found.block, found.block_hash": "any number that is no turn",
    "keep refresh one more: 1 in: order.turn": "turns are only compared",
    "keep_binding _remove_skipped never: found is None": "without a state nothing is moved",
}


@dataclass(frozen=True, slots=True)
class Fate:
    """The result of one mutant: the test that killed it, ``clock``, or None if it survived."""

    module: str
    mutant: str
    killed_by: str | None

    @property
    def excuse(self) -> str | None:
        """The reason why it cannot be killed, if one is listed."""
        label = f"{self.module} {self.mutant}"
        return next((why for part, why in EQUIVALENT.items() if part in label), None)


def all_mutants() -> Iterator[tuple[str, str, str]]:
    """Yield module, name and source text of every mutant, wrong fixes first."""
    sources = {name: _file(PACKAGE, name).read_text() for name in TESTS}
    for fix in WRONG_FIXES:
        yield fix.module, f"wrong fix: {fix.name}", fix.of(sources[fix.module])
    for module, source in sources.items():
        for mutant in mutants(source):
            yield module, mutant.name, mutant.source


def try_mutant(module: str, name: str, source: str) -> Fate:
    """Run the tests of a module on a mutant of it, in a fork of this process."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        package = Path(folder) / "shim"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        for beside in ("compat_matrix.yaml", "patches"):
            (Path(folder) / beside).symlink_to(ROOT / beside)
        _file(package, module).write_text(source)
        killed_by = None
        for tests in TESTS[module]:
            # A fork for each: test modules of different folders share their names.
            killed_by = killed_by or in_fork(lambda: first_failure([package], tests))  # noqa: B023
        return Fate(module, name, killed_by)


def _file(package: Path, module: str) -> Path:
    return package / "vllm_mamba_retire" / f"{module}.py"


def _warm_up(modules: list[str]) -> None:
    """Import what the forks need. Not this package: each fork has its own."""
    names = ["pytest", "hypothesis.stateful"]
    if any(not tests.startswith("tests/unit") for module in modules for tests in TESTS[module]):
        names.append("vllm.v1.core.kv_cache_manager")
    for name in names:
        importlib.import_module(name)
    assert "vllm_mamba_retire" not in sys.modules


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--release", required=True)
    parser.add_argument("--module", choices=TESTS)
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--again", action="store_true", help="not those that the last run killed")
    asked = parser.parse_args()
    os.environ |= {
        "MAMBA_RETIRE": "off",
        "MAMBA_RETIRE_TEST_RELEASE": asked.release,
        "VLLM_LOGGING_LEVEL": "CRITICAL",
    }
    asked_for = [asked.module] if asked.module else list(TESTS)
    _warm_up(asked_for)
    for tests in {tests for module in asked_for for tests in TESTS[module]}:
        if broken := in_fork(lambda: first_failure([PACKAGE], tests)):  # noqa: B023 (called at once)
            print(f"fails without any mutant: {broken}")
            return 2
    earlier = _read(asked.results) if asked.again else {}
    fates = []
    started = time.monotonic()
    for module, name, source in all_mutants():
        known = earlier.get((module, name))
        if known is not None and known.killed_by is not None:
            fates.append(known)
        elif asked.module in (None, module) and asked.only in name:
            fates.append(try_mutant(module, name, source))
            _write(asked.results, asked.release, fates)
            print(f"{module} {name}\n    {fates[-1].killed_by or '** SURVIVED **'}", flush=True)
    _write(asked.results, asked.release, fates)
    survivors = [fate for fate in fates if fate.killed_by is None]
    killed = len(fates) - len(survivors)
    print(f"{killed} of {len(fates)} killed in {time.monotonic() - started:.0f} s")
    return int(any(fate.excuse is None for fate in survivors))


def _read(results: Path) -> dict[tuple[str, str], Fate]:
    data = json.loads((results / _FILE).read_text())["mutants"]
    fates = [Fate(each["module"], each["mutant"], each["killed_by"]) for each in data]
    return {(fate.module, fate.mutant): fate for fate in fates}


def _write(results: Path, release: str, fates: list[Fate]) -> None:
    results.mkdir(parents=True, exist_ok=True)
    data = {
        "version": runpy.run_path(str(_file(PACKAGE, "_version")))["__version__"],
        "release": release,
        "mutants": [{**asdict(fate), "excuse": fate.excuse} for fate in fates],
    }
    (results / _FILE).write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    sys.exit(main())
