"""What check, apply and revert make of a tree, on a small release with a small series."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import pytest

from tests.unit.patchset.small_release import (
    HELPER,
    MANAGER,
    PATCHED,
    RELEASED,
    TEST,
    Checkout,
    known,
)
from vllm_mamba_retire.patchset import operations, statefile
from vllm_mamba_retire.patchset.lock import locked
from vllm_mamba_retire.patchset.operations import Known, RefusedError, to_apply, to_revert
from vllm_mamba_retire.patchset.transaction import TransactionError
from vllm_mamba_retire.patchset.tree import State, TreeError, look, root_of

CODE = {path: text for path, text in PATCHED.items() if path != TEST}


def nothing() -> None:
    """A verification that is content."""


def state(checkout: Checkout, small: Known, tests: bool = False) -> State:
    return look(checkout.root, small.matrix, small.series, tests).state


def run(checkout: Checkout, small: Known, plan, tests: bool = False, verify=nothing) -> int:
    """Perform as the command line does; returns the number of edits."""
    shown = plan(look(checkout.root, small.matrix, small.series, tests))
    operations.perform(checkout.root, small, plan, shown, verify, tests)
    return len(shown)


def test_a_release_is_pristine_then_applied_then_byte_for_byte_as_before(
    checkout: Checkout, small: Known
):
    before = checkout.everything()
    assert state(checkout, small) is State.PRISTINE
    run(checkout, small, to_apply)
    assert state(checkout, small) is State.APPLIED
    assert checkout.read(*PATCHED) == CODE
    run(checkout, small, to_revert)
    assert state(checkout, small) is State.PRISTINE
    assert checkout.everything() == before


def test_apply_and_revert_twice_change_nothing_the_second_time(checkout: Checkout, small: Known):
    assert run(checkout, small, to_apply) > 0
    after = checkout.everything()
    assert run(checkout, small, to_apply) == 0
    assert checkout.everything() == after
    assert run(checkout, small, to_revert) > 0
    assert run(checkout, small, to_revert) == 0


def test_an_applied_tree_is_verified_again(checkout: Checkout, small: Known):
    run(checkout, small, to_apply)
    asked = []
    run(checkout, small, to_apply, verify=lambda: asked.append(True))
    assert asked == [True]


def test_tests_are_handled_only_when_asked_for(checkout: Checkout, small: Known):
    run(checkout, small, to_apply, tests=True)
    assert checkout.read(*PATCHED) == PATCHED
    assert state(checkout, small, tests=True) is State.APPLIED
    # Not asked for, but there: they go too.
    run(checkout, small, to_revert)
    assert checkout.read(*PATCHED) == RELEASED


def test_a_tree_patched_without_tests_is_half_applied_where_tests_are_asked_for(
    checkout: Checkout, small: Known
):
    run(checkout, small, to_apply)
    assert state(checkout, small, tests=True) is State.HALF_APPLIED
    run(checkout, small, to_apply, tests=True)
    assert checkout.read(*PATCHED) == PATCHED


def test_tests_are_refused_where_vllm_has_none(checkout: Checkout, small: Known):
    shutil.rmtree(checkout.root / "tests")
    with pytest.raises(RefusedError, match="tests/v1/core does not exist; --tests is for source"):
        run(checkout, small, to_apply, tests=True)
    assert checkout.read(*PATCHED) == RELEASED


@pytest.mark.parametrize("plan", [to_apply, to_revert])
@pytest.mark.parametrize(
    "half",
    [
        {MANAGER: PATCHED[MANAGER]},  # one file of two
        {MANAGER: RELEASED[MANAGER].replace("b = 2\n", "b = 2\nb2 = 20\n")},  # one hunk of two
        {
            HELPER: PATCHED[HELPER],
            MANAGER: RELEASED[MANAGER].replace("f = 6\n", "f = 60\nf2 = 61\n"),
        },
    ],
    ids=["one-file", "one-hunk", "a-file-and-a-hunk"],
)
def test_a_half_applied_tree_is_finished_or_taken_back(
    checkout: Checkout, small: Known, half: dict[str, str], plan
):
    for path, text in half.items():
        checkout.write(path, text)
    assert state(checkout, small) is State.HALF_APPLIED
    run(checkout, small, plan)
    assert checkout.read(*PATCHED) == (CODE if plan is to_apply else RELEASED)


def test_a_tree_patched_by_hand_is_known_and_can_be_reverted(checkout: Checkout, small: Known):
    for path, text in CODE.items():
        checkout.write(path, text)
    assert state(checkout, small) is State.APPLIED
    run(checkout, small, to_revert)
    assert checkout.read(*PATCHED) == RELEASED


@pytest.mark.parametrize("plan", [to_apply, to_revert])
@pytest.mark.parametrize("patched", [False, True])
def test_a_foreign_change_is_refused_and_named(
    checkout: Checkout, small: Known, patched: bool, plan
):
    if patched:
        run(checkout, small, to_apply)
    checkout.write(MANAGER, checkout.read(MANAGER)[MANAGER] + "# mine\n")
    before = checkout.everything()
    assert state(checkout, small) is State.FOREIGN
    with pytest.raises(RefusedError, match=rf"{MANAGER} \(sha256 [0-9a-f]{{64}}\) is neither"):
        run(checkout, small, plan)
    assert checkout.everything() == before


def test_a_missing_file_is_a_foreign_change(checkout: Checkout, small: Known):
    (checkout.root / HELPER).unlink()
    with pytest.raises(RefusedError, match=rf"{HELPER} \(missing\)"):
        run(checkout, small, to_apply)


def test_line_ends_of_another_system_are_a_foreign_change(checkout: Checkout, small: Known):
    (checkout.root / MANAGER).write_bytes(RELEASED[MANAGER].replace("\n", "\r\n").encode())
    assert state(checkout, small) is State.FOREIGN


def test_the_version_string_is_not_believed(checkout: Checkout, small: Known):
    checkout.write("vllm/_version.py", "version = '0.30.0'\n")
    assert state(checkout, small) is State.PRISTINE
    run(checkout, small, to_apply)
    assert checkout.read(*PATCHED) == CODE


@pytest.mark.parametrize(
    ("version", "settled", "note"),
    [("0.30.0", True, "carries the fix itself"), ("0.31.0", False, "not a release")],
)
def test_a_release_without_a_series_is_told_why(
    checkout: Checkout, small: Known, version: str, settled: bool, note: str
):
    checkout.write("vllm/_version.py", f"version = '{version}'\n")
    checkout.write(MANAGER, "other = True\n")
    tree = look(checkout.root, small.matrix, small.series)
    assert (tree.state, tree.settled) == (State.NOT_COVERED, settled)
    assert note in tree.note
    with pytest.raises(RefusedError, match=note):
        to_apply(tree)


def test_a_tree_patched_by_an_older_series_is_renewed_or_reverted(
    checkout: Checkout, small: Known, tmp_path: Path
):
    older = known(
        tmp_path / "older", CODE | {MANAGER: "a = 1\nb = 2\nc = 33\nd = 4\ne = 5\nf = 6\ng = 7\n"}
    )
    released = checkout.everything()
    for plan, wanted in [(to_apply, CODE), (to_revert, RELEASED)]:
        run(checkout, older, to_apply)
        assert state(checkout, small) is State.OUTDATED
        run(checkout, small, plan)
        assert checkout.read(*PATCHED) == wanted
        run(checkout, small, to_revert)
        assert checkout.everything() == released


def test_a_state_file_that_leads_elsewhere_is_not_followed(
    checkout: Checkout, small: Known, tmp_path: Path
):
    older = known(tmp_path / "older", {MANAGER: RELEASED[MANAGER].replace("c = 3", "c = 33")})
    run(checkout, older, to_apply)
    path = checkout.root / statefile.NAME
    path.write_text(path.read_text().replace("-c = 3\\n", "-c = 4\\n"))
    assert state(checkout, small) is State.FOREIGN


@pytest.mark.parametrize("garbage", ["", "{", "[]", '{"schema": 99}', '{"schema": 1, "files": 3}'])
def test_a_broken_state_file_does_no_harm(checkout: Checkout, small: Known, garbage: str):
    run(checkout, small, to_apply)
    checkout.write(statefile.NAME, garbage)
    assert state(checkout, small) is State.APPLIED
    run(checkout, small, to_revert)
    assert checkout.read(*PATCHED, statefile.NAME) == RELEASED


def test_the_state_file_says_what_was_done_and_lies_beside_the_package(
    checkout: Checkout, small: Known
):
    run(checkout, small, to_apply)
    written = json.loads((checkout.root / ".vllm-mamba-retire.json").read_text())
    assert (written["schema"], written["series"]) == (1, "v0.29.0")
    assert [entry["path"] for entry in written["files"]] == [MANAGER, HELPER]
    known_after = {file.file: file.sha256_after for file in small.matrix.patches}
    assert {e["path"]: e["after"] for e in written["files"]}.items() <= known_after.items()


def test_a_failed_verification_takes_everything_back(checkout: Checkout, small: Known):
    before = checkout.everything()

    def verify() -> None:
        raise RefusedError("the probe says no")

    with pytest.raises(TransactionError, match="the probe says no"):
        run(checkout, small, to_apply, verify=verify)
    assert checkout.everything() == before


def test_a_file_that_is_not_what_was_written_takes_everything_back(
    checkout: Checkout, small: Known, monkeypatch: pytest.MonkeyPatch
):
    before = checkout.everything()
    replace = Path.replace

    def spoiled(self: Path, target: Path) -> Path:
        if self.name.endswith("new") and target.name == Path(HELPER).name:
            self.write_text("spoiled\n")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", spoiled)
    with pytest.raises(TransactionError, match="is not what was written"):
        run(checkout, small, to_apply)
    assert checkout.everything() == before


def test_a_tree_that_changed_after_the_diff_was_shown_is_refused(checkout: Checkout, small: Known):
    shown = to_apply(look(checkout.root, small.matrix, small.series))
    checkout.write(HELPER, PATCHED[HELPER])
    with pytest.raises(RefusedError, match="has changed meanwhile"):
        operations.perform(checkout.root, small, to_apply, shown, nothing)
    assert checkout.read(MANAGER)[MANAGER] == RELEASED[MANAGER]


def test_two_processes_apply_one_after_the_other(checkout: Checkout, small: Known):
    context = multiprocessing.get_context("fork")
    inside = context.Value("i", 0)
    most = context.Value("i", 0)

    def one() -> None:
        def verify() -> None:
            with inside.get_lock():
                inside.value += 1
                most.value = max(most.value, inside.value)
            time.sleep(0.05)  # long enough for another process to get in, were there no lock
            with inside.get_lock():
                inside.value -= 1

        shown = to_apply(look(checkout.root, small.matrix, small.series))
        operations.perform(checkout.root, small, to_apply, shown, verify)

    processes = [context.Process(target=one) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
    assert most.value == 1
    assert checkout.read(*PATCHED) == CODE


def test_a_process_that_has_to_wait_says_so(checkout: Checkout):
    said = []
    child = os.fork()
    if child == 0:
        with locked(checkout.root, nothing):
            (checkout.root / "held").touch()
            while not said and not (checkout.root / "seen").exists():
                time.sleep(0.005)
        os._exit(0)
    while not (checkout.root / "held").exists():
        time.sleep(0.005)

    def waiting() -> None:
        said.append(True)
        (checkout.root / "seen").touch()

    with locked(checkout.root, waiting):
        pass
    os.waitpid(child, 0)
    assert said == [True]


def test_a_dead_process_holds_no_lock(checkout: Checkout):
    child = os.fork()
    if child == 0:
        with locked(checkout.root, nothing):
            os._exit(1)
    os.waitpid(child, 0)
    said = []
    with locked(checkout.root, lambda: said.append(True)):
        pass
    assert said == []


def test_the_diff_shown_is_one_that_patch_takes(checkout: Checkout, small: Known):
    tree = look(checkout.root, small.matrix, small.series, tests=True)
    shown = operations.as_diff(tree.root, to_apply(tree))
    assert shown.count("\n--- ") + shown.startswith("--- ") == 3
    assert f"--- a/{MANAGER}\n+++ b/{MANAGER}\n" in shown
    assert f"--- /dev/null\n+++ b/{TEST}\n" in shown
    assert statefile.NAME not in shown


def test_a_linked_package_is_patched_where_it_really_lies(checkout: Checkout, tmp_path: Path):
    elsewhere = tmp_path / "linked"
    elsewhere.mkdir()
    (elsewhere / "vllm").symlink_to(checkout.root / "vllm")
    assert root_of(elsewhere) == checkout.root
    assert root_of(checkout.root / "vllm") == checkout.root


def test_a_link_to_another_name_is_refused(checkout: Checkout, tmp_path: Path):
    (checkout.root / "vllm").rename(checkout.root / "vllm-fork")
    (checkout.root / "vllm").symlink_to(checkout.root / "vllm-fork")
    with pytest.raises(TreeError, match="which has another name"):
        root_of(checkout.root)


def test_a_linked_file_is_refused_with_whose_it_is(
    checkout: Checkout, small: Known, tmp_path: Path
):
    shared = tmp_path / "cache.py"
    (checkout.root / MANAGER).rename(shared)
    (checkout.root / MANAGER).symlink_to(shared)
    with pytest.raises(TreeError, match=f"symbolic link to {shared}"):
        look(checkout.root, small.matrix, small.series)


def test_no_vllm_is_told_with_the_folder(tmp_path: Path):
    with pytest.raises(TreeError, match=f"{tmp_path}: no vllm/v1/core"):
        root_of(tmp_path)
