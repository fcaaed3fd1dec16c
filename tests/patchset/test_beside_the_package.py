"""A patched tree with this package installed too: it sees the fix and keeps its hands off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patchset.real_trees import MANAGER, RELEASE, importable, patch_with_gnu, series_for
from vllm_mamba_retire.patchset import read_hunks

LOOK = """
import json
import vllm_mamba_retire
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.core import single_type_kv_cache_manager as module
verdict = vllm_mamba_retire.activate()
own = [vars(module.MambaManager)[n] for n in ("_remove_blocks_in_range", "pop_blocks_for_free")]
print(json.dumps({
    "reason": verdict.reason.value,
    "sentence": verdict.sentence,
    "from": [function.__code__.co_filename for function in own],
    "file": module.__file__,
    "marks": [name for name in vars(module.MambaManager) if "mamba_retire" in name],
}))
"""


def look(tree: Path, mode: str = "auto") -> dict[str, object]:
    """Import the tree's manager with the package armed, and say what became of it."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(tree)]),
        "MAMBA_RETIRE": mode,
        "MAMBA_RETIRE_DIR": str(tree / "records"),
    }
    done = subprocess.run(
        [sys.executable, "-c", LOOK], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("mode", ["auto", "require"])
def test_verdict_is_fixed_elsewhere_and_nothing_is_done_twice(mode: str, tmp_path: Path):
    tree = importable(RELEASE, tmp_path / "tree")
    patch_with_gnu(tree, RELEASE)
    seen = look(tree, mode)
    assert seen["reason"] == "fixed-elsewhere", seen["sentence"]
    assert seen["from"] == [str(tree / MANAGER)] * 2
    assert seen["marks"] == []


def test_same_tree_without_the_series_is_patched(tmp_path: Path):
    seen = look(importable(RELEASE, tmp_path / "tree"))
    assert seen["reason"] == "patched"
    assert seen["from"] != [seen["file"]] * 2
    assert seen["marks"] != []


@pytest.mark.parametrize("number", [0, 1], ids=["only-the-records", "only-the-methods"])
def test_half_a_series_is_never_called_fixed(number: int, tmp_path: Path):
    tree = importable(RELEASE, tmp_path / "tree")
    old, new = read_hunks(series_for(RELEASE))[number]
    (tree / MANAGER).write_bytes((tree / MANAGER).read_bytes().replace(old, new))
    seen = look(tree)
    # The first half changes no method: stock code, which the run-time patch mends as usual. With
    # the second alone every request fails, and nobody may say that it is fixed.
    assert seen["reason"] == ("patched", "drifted")[number], seen["sentence"]
