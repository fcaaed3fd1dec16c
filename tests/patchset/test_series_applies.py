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
    TESTS,
    files_only,
    fix_for,
    importable,
    patch_with_gnu,
    series_for,
    source_of,
)
from vllm_mamba_retire.patchset import read_hunks, sha256

# Of the tests for vLLM's own tree, those that a release without the fix passes too: the other
# modes, and prefills with one block per chunk or nothing in flight.
PASS_WITHOUT_THE_FIX = 12
ALL_TESTS = 32

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
    assert sha256((tree / MANAGER).read_bytes()) == series.sha256_before
    for patch in (fix_for(release), TESTS):
        run_tool(tool, tree, patch)
    assert sha256((tree / MANAGER).read_bytes()) == series.sha256_after
    left = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    assert left == {
        "vllm/_version.py",
        MANAGER,
        "tests/v1/core/test_mamba_state_retirement.py",
    }
    for patch in (TESTS, fix_for(release)):
        run_tool(tool, tree, patch, "-R")
    assert sha256((tree / MANAGER).read_bytes()) == series.sha256_before


def test_git_am_refuses_a_plain_diff_and_changes_nothing(release: str, tmp_path: Path):
    tree = files_only(release, tmp_path / "tree")
    subprocess.run(["git", "init", "-q", "."], cwd=tree, check=True)
    done = subprocess.run(
        ["git", "am", fix_for(release)], cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert sha256((tree / MANAGER).read_bytes()) == series_for(release).sha256_before


@each_tool
def test_series_goes_on_where_lines_have_moved(release: str, tool: str, tmp_path: Path):
    tree = files_only(release, tmp_path / "tree")
    moved = b"# one\n# two\n# three\n"
    expected = (tree / MANAGER).read_bytes()
    for old, new in read_hunks(series_for(release)):
        expected = expected.replace(old, new)
    (tree / MANAGER).write_bytes(moved + (tree / MANAGER).read_bytes())
    run_tool(tool, tree, fix_for(release))
    assert (tree / MANAGER).read_bytes() == moved + expected


def run_tests(tree: Path, tmp_path: Path) -> tuple[int, int]:
    """Run the tests for vLLM's own tree on the vLLM in `tree`; returns passes and failures."""
    beside = tmp_path / "own-tests"  # away from vllm/, as pytest puts its root on the path
    beside.mkdir()
    run_tool("patch", beside, TESTS)
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
    patch_with_gnu(tree, release)
    assert run_tests(tree, tmp_path) == (ALL_TESTS, 0)


def test_tests_of_the_series_fail_without_the_fix(release: str, tmp_path: Path):
    passed, failed = run_tests(source_of(release, "wheel"), tmp_path)
    assert (passed, failed) == (PASS_WITHOUT_THE_FIX, ALL_TESTS - PASS_WITHOUT_THE_FIX)


def test_tools_are_the_real_ones():
    assert "GNU patch" in subprocess.check_output(["patch", "--version"], text=True)
    assert shutil.which("git")
