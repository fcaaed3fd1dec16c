"""Each series goes on with other people's tools, without fuzz, and its tests pass where it is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patchset.real_trees import (
    MANAGER,
    files_only,
    folder_of,
    importable,
    patch_with_gnu,
    series_for,
    source_of,
)
from vllm_mamba_retire.patchset import hunks
from vllm_mamba_retire.patchset.series import sha256

# Of the tests in 0002, those that a release without 0001 passes too: the other modes, and prefills
# with one block per chunk or nothing in flight.
PASS_WITHOUT_THE_FIX = 12
TESTS = 32

each_kind = pytest.mark.parametrize("kind", ["wheel", "archive"])
each_tool = pytest.mark.parametrize("tool", ["patch", "git"])


def run_tool(tool: str, tree: Path, patch: Path, *options: str) -> None:
    """Apply one patch to a tree with GNU patch or git."""
    if tool == "patch":
        command = ["patch", "-p1", "--fuzz=0", "-i", str(patch), *options]
    else:
        command = ["git", "apply", str(patch), *options]
    # Not the checkout that the temporary folder may lie in.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fuzz" not in done.stdout


@each_tool
@each_kind
def test_series_goes_on_and_off_without_fuzz(release: str, kind: str, tool: str, tmp_path: Path):
    tree = files_only(release, tmp_path / "tree", kind)
    series = series_for(release)
    assert sha256((tree / MANAGER).read_bytes()) == series.code.before
    patches = [folder_of(series) / change.patch for change in series.changes]
    for patch in patches:
        run_tool(tool, tree, patch)
    for change in series.changes:
        assert sha256((tree / change.path).read_bytes()) == change.after
    left = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    assert left == {"vllm/_version.py", *(change.path for change in series.changes)}
    for patch in reversed(patches):
        run_tool(tool, tree, patch, "-R")
    assert sha256((tree / MANAGER).read_bytes()) == series.code.before


@each_tool
def test_series_goes_on_where_lines_have_moved(release: str, tool: str, tmp_path: Path):
    tree = files_only(release, tmp_path / "tree")
    series = series_for(release)
    moved = "# one\n# two\n# three\n"
    text = (tree / MANAGER).read_text()
    (tree / MANAGER).write_text(moved + text)
    run_tool(tool, tree, folder_of(series) / series.code.patch)
    assert (tree / MANAGER).read_text() == moved + hunks.apply(series.code.diff, text)


def test_own_applier_gives_the_same_bytes(release: str):
    series = series_for(release)
    text = (source_of(release, "wheel") / MANAGER).read_text()
    patched = hunks.apply(series.code.diff, text)
    assert sha256(patched.encode()) == series.code.after
    assert hunks.undo_present(series.code.diff, patched) == text


def run_tests(release: str, tree: Path, tmp_path: Path) -> tuple[int, int]:
    """Run the tests of 0002 on the vLLM in `tree`; returns passes and failures."""
    series = series_for(release)
    beside = tmp_path / "own-tests"  # away from vllm/, as pytest puts its root on the path
    beside.mkdir()
    run_tool("patch", beside, folder_of(series) / series.changes[1].patch)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", "."],
        cwd=beside / "tests/v1/core",
        env=os.environ | {"PYTHONPATH": str(tree), "MAMBA_RETIRE": "off"},
        capture_output=True,
        text=True,
        check=False,
    )
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    assert "error" not in counts, done.stdout
    return counts.get("passed", 0), counts.get("failed", 0)


@each_kind
def test_tests_of_the_series_pass_with_the_fix(release: str, kind: str, tmp_path: Path):
    tree = importable(release, tmp_path / "tree", kind)
    patch_with_gnu(tree, series_for(release))
    assert run_tests(release, tree, tmp_path) == (TESTS, 0)


def test_tests_of_the_series_fail_without_the_fix(release: str, tmp_path: Path):
    passed, failed = run_tests(release, source_of(release, "wheel"), tmp_path)
    assert (passed, failed) == (PASS_WITHOUT_THE_FIX, TESTS - PASS_WITHOUT_THE_FIX)


def test_tools_are_the_real_ones():
    assert "GNU patch" in subprocess.check_output(["patch", "--version"], text=True)
    assert shutil.which("git")
