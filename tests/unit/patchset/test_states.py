"""What check, apply and revert do with a tree in each state, on a small release."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.unit.patchset.small_release import HALVES, PATCHED, RELEASED, everything
from vllm_mamba_retire import patchset
from vllm_mamba_retire.patchset import (
    FILE,
    PatchsetError,
    RefusedError,
    State,
    as_diff,
    change,
    link_in,
    read_tree,
)
from vllm_mamba_retire.releases import Matrix


def apply(site: Path, small: Matrix) -> None:
    tree = read_tree(site, small)
    assert tree.patched is not None
    change(tree, tree.patched, probed=False)


def revert(site: Path, small: Matrix) -> None:
    tree = read_tree(site, small)
    assert tree.released is not None
    change(tree, tree.released, probed=False)


def test_apply_and_revert_restore_a_pristine_release_exactly(site: Path, small: Matrix):
    before = everything(site)
    assert read_tree(site, small).state is State.PRISTINE
    apply(site, small)
    assert read_tree(site, small).state is State.APPLIED
    assert everything(site) == before | {str(FILE): PATCHED.encode()}
    apply(site, small)
    assert everything(site) == before | {str(FILE): PATCHED.encode()}
    for _ in range(2):
        revert(site, small)
        assert everything(site) == before


@pytest.mark.parametrize("half", HALVES, ids=["first-hunk", "second-hunk"])
@pytest.mark.parametrize(("act", "result"), [(apply, PATCHED), (revert, RELEASED)])
def test_half_applied_tree_is_finished_or_reverted(
    half: str, act, result: str, site: Path, small: Matrix
):
    (site / FILE).write_text(half)
    assert read_tree(site, small).state is State.HALF_APPLIED
    act(site, small)
    assert (site / FILE).read_text() == result


@pytest.mark.parametrize(
    "text",
    [
        RELEASED + "# mine\n",
        PATCHED + "# mine\n",
        RELEASED.replace("\n", "\r\n"),
        RELEASED.replace("b = 2", "b  = 2"),
        RELEASED + RELEASED,  # a hunk fits in two places
        "",
        "\N{LATIN SMALL LETTER E WITH ACUTE} = 1\n",
    ],
)
def test_any_other_text_of_a_leaking_release_is_a_foreign_change(
    text: str, site: Path, small: Matrix
):
    (site / FILE).write_text(text, newline="")
    tree = read_tree(site, small)
    assert (tree.state, tree.done) == (State.FOREIGN, False)
    assert (tree.patched, tree.released, tree.series) == (None, None, None)
    assert patchset.sha256((site / FILE).read_bytes()) in tree.sentence


@pytest.mark.parametrize("version", ["0.30.0", "0.30.0rc1", "0.25.1", "9.9", "no version"])
def test_version_string_does_not_count_where_the_hash_is_known(
    version: str, site: Path, small: Matrix
):
    (site / "vllm/_version.py").write_text(f"version = '{version}'\n")
    assert read_tree(site, small).state is State.PRISTINE
    apply(site, small)
    assert read_tree(site, small).state is State.APPLIED


def test_diff_is_one_for_patch(site: Path, small: Matrix):
    tree = read_tree(site, small)
    shown = as_diff(tree, tree.patched or b"")
    subprocess.run(["patch", "-s", "-p1", "-d", site], input=shown, text=True, check=True)
    assert (site / FILE).read_text() == PATCHED


def test_tree_that_changed_after_it_was_read_is_refused(site: Path, small: Matrix):
    tree = read_tree(site, small)
    (site / FILE).write_text(HALVES[0])
    with pytest.raises(RefusedError, match="has changed since it was read"):
        change(tree, PATCHED.encode(), probed=False)
    assert (site / FILE).read_text() == HALVES[0]


def test_tree_that_another_process_has_patched_meanwhile_is_fine(site: Path, small: Matrix):
    tree = read_tree(site, small)
    (site / FILE).write_text(PATCHED)
    change(tree, PATCHED.encode(), probed=False)
    assert (site / FILE).read_text() == PATCHED


def test_processes_change_a_tree_one_after_the_other(
    site: Path, small: Matrix, monkeypatch: pytest.MonkeyPatch
):
    context = multiprocessing.get_context("fork")
    inside, most = context.Value("i", 0), context.Value("i", 0)

    def slow(*_: object) -> str:
        with inside.get_lock():
            inside.value += 1
            most.value = max(most.value, inside.value)
        time.sleep(0.05)  # long enough for another process to get in, if there were no lock
        with inside.get_lock():
            inside.value -= 1
        return ""

    monkeypatch.setattr(patchset, "_probe", slow)
    tree = read_tree(site, small)
    processes = [
        context.Process(target=change, args=(tree, PATCHED.encode(), True)) for _ in range(6)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
    assert most.value == 1
    assert (site / FILE).read_text() == PATCHED


def test_process_that_waits_says_so_and_a_dead_one_holds_no_lock(site: Path, small: Matrix):
    ready, go = os.pipe(), os.pipe()
    holder = os.fork()
    if holder == 0:
        with patchset._locked(site, None):
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            os._exit(0)  # without letting go
    os.read(ready[0], 1)
    said = []

    def waiting() -> None:
        said.append(True)
        os.write(go[1], b"x")

    change(read_tree(site, small), PATCHED.encode(), probed=False, waiting=waiting)
    os.waitpid(holder, 0)
    assert said == [True]
    assert (site / FILE).read_text() == PATCHED


@pytest.mark.parametrize("part", ["vllm", "vllm/v1", "vllm/v1/core", str(FILE)])
def test_a_symlink_from_vllm_on_is_read_but_never_written(
    part: str, site: Path, small: Matrix, tmp_path: Path
):
    (site / part).rename(tmp_path / "elsewhere")
    (site / part).symlink_to(tmp_path / "elsewhere")
    tree = read_tree(site, small)
    assert tree.state is State.PRISTINE
    with pytest.raises(RefusedError) as refused:
        change(tree, PATCHED.encode(), probed=False)
    assert f"{site / part} is a symbolic link to {tmp_path / 'elsewhere'}, " in str(refused.value)
    assert str(refused.value) == link_in(tree)
    assert read_tree(site, small).data == RELEASED.encode()


def test_link_above_the_tree_is_followed(site: Path, small: Matrix, tmp_path: Path):
    (tmp_path / "lib64").symlink_to(site)
    for folder in (tmp_path / "lib64", tmp_path / "lib64/vllm", site / "vllm"):
        assert read_tree(folder, small).root == site
    apply(tmp_path / "lib64", small)
    assert (site / FILE).read_text() == PATCHED


def test_folder_without_vllm_is_an_error_that_names_it(tmp_path: Path, small: Matrix):
    (tmp_path / "vllm").mkdir()
    for folder in (tmp_path, tmp_path / "vllm", tmp_path / "missing"):
        with pytest.raises(PatchsetError, match=f"{folder}: no vllm/v1/core"):
            read_tree(folder, small)


def test_pipe_in_place_of_the_file_is_an_error(site: Path, small: Matrix):
    (site / FILE).unlink()
    os.mkfifo(site / FILE)
    with pytest.raises(PatchsetError, match="no vllm/v1/core"):
        read_tree(site, small)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "series").unlink(), "v0.29.0: .*No such file"),
        (lambda f: (f / "series").write_text(""), "does not change vllm/v1/core"),
        (lambda f: (f / "series").write_text("none.patch"), "v0.29.0: .*No such file"),
        (lambda f: (f / "0001-part.patch").write_text("nothing"), "does not change"),
        (lambda f: (f / "0001-part.patch").write_bytes(b"\xff"), "v0.29.0: .*decode"),
        (
            lambda f: (f / "0001-part.patch").write_text("--- a/f\n+++ b/f\n@@ -1,9 +1 @@\n x\n"),
            "v0.29.0: ",
        ),
        (
            lambda f: (f / "0001-part.patch").write_text(
                (f / "0001-part.patch").read_text().replace("+f2 = 61", "+f2 = 62")
            ),
            "v0.29.0 does not give the file",
        ),
    ],
)
def test_spoiled_series_is_an_error_that_names_it(
    spoil, message: str, site: Path, small: Matrix, tmp_path: Path
):
    spoil(tmp_path / "patches/v0.29.0")
    with pytest.raises(PatchsetError, match=message):
        read_tree(site, small)
