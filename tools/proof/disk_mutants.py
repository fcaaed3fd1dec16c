"""Runs the series' own tests and the properties on mutants of a release patched on disk.

``python -m tools.proof.disk_mutants RESULTS --release 0.29.0 --tree FOLDER``, FOLDER on the path.
Only lines that the series adds are changed. As in `mutants`, exit code 1 means that a mutant
survived which is not known to be equivalent.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

from unidiff.patch import PatchSet

from tools.proof import manager_file
from tools.proof.forks import ROOT, first_failure, in_fork
from tools.proof.mutations import mutants
from vllm_mamba_retire import __version__
from vllm_mamba_retire.patchset import read_tree
from vllm_mamba_retire.releases import load_matrix

# Mutants that behave as the series does, by part of their name, with the reason.
EQUIVALENT = {
    "_remove_blocks_in_range one more: 0 in: retired = self._num": (
        "a table is never remembered without its number"
    ),
}


def patched_text(folder: Path) -> tuple[str, set[int]]:
    """Return the manager's source with the series applied, and the line numbers that it adds."""
    tree = read_tree(folder, load_matrix())
    assert tree.patched is not None
    stock, text = tree.data.decode(), tree.patched.decode()
    matcher = difflib.SequenceMatcher(None, stock.splitlines(), text.splitlines(), autojunk=False)
    added = (range(j1 + 1, j2 + 1) for tag, _, _, j1, j2 in matcher.get_opcodes() if tag != "equal")
    return text, {line for lines in added for line in lines}


def killer(source: str, tests: str) -> str | None:
    """Return the test that fails with this text as the manager's, run in forks."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "manager.py"
        file.write_text(source)
        own = Path(folder) / "test_mamba_state_retirement.py"
        own.write_text(tests)
        return in_fork(lambda: _own_tests(file, own)) or in_fork(lambda: _properties(file))


def _own_tests(manager: Path, tests: Path) -> str | None:
    manager_file.serve(manager)
    return first_failure([], str(tests))


def _properties(manager: Path) -> str | None:
    manager_file.serve(manager)
    sys.path[:0] = [str(ROOT / "tests" / "properties"), str(ROOT)]
    machine = importlib.import_module("test_live_states")
    try:
        machine.search(machine.Requests)
    except Exception as error:
        return f"properties: {error}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--release", required=True)
    parser.add_argument("--tree", type=Path, required=True)
    asked = parser.parse_args()
    os.environ |= {"MAMBA_RETIRE": "off", "VLLM_LOGGING_LEVEL": "CRITICAL"}
    (added_file,) = PatchSet((ROOT / "patches/tests/mamba-state-retirement.patch").read_text())
    tests = "".join(line.value for line in added_file[0].target_lines())
    text, added = patched_text(asked.tree)
    for name in ("pytest", "hypothesis.stateful", "vllm.v1.core.block_pool", "vllm.v1.request"):
        importlib.import_module(name)
    if broken := killer(text, tests):
        print(f"fails without any mutant: {broken}")
        return 2
    fates = []
    for mutant in mutants(text, added):
        killed_by = killer(mutant.source, tests)
        print(f"{mutant.name}\n    {killed_by or '** SURVIVED **'}", flush=True)
        excuse = next((why for part, why in EQUIVALENT.items() if part in mutant.name), None)
        fates.append({"mutant": mutant.name, "killed_by": killed_by, "excuse": excuse})
    asked.results.mkdir(parents=True, exist_ok=True)
    data = {"version": __version__, "release": asked.release, "mutants": fates}
    (asked.results / "disk-mutants.json").write_text(json.dumps(data, indent=1))
    survivors = [fate for fate in fates if fate["killed_by"] is None]
    print(f"{len(fates) - len(survivors)} of {len(fates)} killed")
    return int(any(fate["excuse"] is None for fate in survivors))


if __name__ == "__main__":
    sys.exit(main())
