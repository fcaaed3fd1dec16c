"""All files or none: a failure, Ctrl-C or kill before every single line of the transaction.

The lines are found by tracing, so a line added later is covered without being named here.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_mamba_retire.patchset import transaction
from vllm_mamba_retire.patchset.transaction import Edit, RollbackError, TransactionError, carry_out

OLD = {"changed.py": b"old\n", "removed.py": b"going\n", "bystander.py": b"as it is\n"}
NEW = {"changed.py": b"new\n", "made.py": b"made\n", "bystander.py": b"as it is\n"}
MORE_THAN_ENOUGH = 2000  # lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in OLD.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def edits(folder: Path) -> list[Edit]:
    names = ("changed.py", "made.py", "removed.py")
    return [Edit(folder / name, OLD.get(name), NEW.get(name)) for name in names]


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def visible(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in files(folder).items() if not name.startswith(".")}


def leftovers(folder: Path) -> list[str]:
    return [name for name in files(folder) if name.startswith(".")]


def at_line(number: int, act: Callable[[], None]) -> Callable[[], bool]:
    """Trace the transaction and act before its `number`-th line; returns whether that came."""
    count = 0

    def trace(frame, event, _argument):
        nonlocal count
        if frame.f_code.co_filename != transaction.__file__:
            return None
        if event == "line":
            count += 1
            if count == number:
                sys.settrace(None)
                act()
        return trace

    sys.settrace(trace)
    return lambda: count >= number


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.fixture(autouse=True)
def _no_trace_left() -> Iterator[None]:
    yield
    sys.settrace(None)


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    # No test here cuts the power, and flushing some thousand files takes most of the time.
    monkeypatch.setattr(os, "fsync", lambda _: None)


def test_all_files_change_and_nothing_else_is_left(folder: Path):
    carry_out(edits(folder), lambda: None)
    assert files(folder) == NEW


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), RuntimeError("a bug")],
    ids=["disk-full", "ctrl-c", "bug"],
)
def test_a_failure_at_any_line_leaves_all_old_or_all_new(tmp_path: Path, error: BaseException):
    outcomes = []
    for number in range(1, MORE_THAN_ENOUGH):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, data in OLD.items():
            (folder / name).write_bytes(data)
        reached = at_line(number, raising(error))
        try:
            carry_out(edits(folder), lambda: None)
            failed = False
        except TransactionError:
            assert visible(folder) == OLD, f"line {number}"
            assert leftovers(folder) == [], f"line {number}"
            failed = True
        except type(error):
            # Before the first change, or after the last.
            assert visible(folder) in (OLD, NEW), f"line {number}"
            failed = True
        finally:
            sys.settrace(None)
        if not failed:
            assert visible(folder) == NEW, f"line {number}"
        outcomes.append(failed)
        if not reached():
            break
    assert sum(outcomes) > 60, "the injection did not reach the transaction"
    assert not outcomes[-1]


def test_a_kill_at_any_line_leaves_every_file_whole_and_can_be_done_again(tmp_path: Path):
    kills = 0
    for number in range(1, MORE_THAN_ENOUGH):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, data in OLD.items():
            (folder / name).write_bytes(data)
        child = os.fork()
        if child == 0:
            at_line(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
            carry_out(edits(folder), lambda: None)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        for name in OLD.keys() | NEW.keys():
            found = visible(folder).get(name)
            assert found in (OLD.get(name), NEW.get(name)), f"line {number}: {name}"
        again = [
            Edit(edit.path, visible(folder).get(edit.path.name), edit.after)
            for edit in edits(folder)
            if visible(folder).get(edit.path.name) != edit.after
        ]
        carry_out(again, lambda: None)
        assert visible(folder) == NEW, f"line {number}"
        if not os.WIFSIGNALED(status):
            break
        kills += 1
    assert kills > 60, "the injection did not reach the transaction"
    assert os.waitstatus_to_exitcode(status) == 0


def test_what_a_killed_process_kept_is_never_taken_for_ours(folder: Path):
    (folder / ".changed.py.mamba-retire-old").write_bytes(b"from long ago\n")
    with pytest.raises(TransactionError):
        carry_out(edits(folder), raising(RuntimeError("no")))
    assert files(folder) == OLD


def test_a_failed_check_afterwards_takes_everything_back(folder: Path):
    inode = (folder / "changed.py").stat().st_ino
    with pytest.raises(TransactionError, match="it does not behave"):
        carry_out(edits(folder), raising(RuntimeError("it does not behave")))
    assert files(folder) == OLD
    assert (folder / "changed.py").stat().st_ino == inode  # the very file


def test_going_back_is_newest_first(folder: Path, monkeypatch: pytest.MonkeyPatch):
    order = []
    restore = transaction._restore
    monkeypatch.setattr(
        transaction, "_restore", lambda edit: (order.append(edit.path.name), restore(edit))[1]
    )
    with pytest.raises(TransactionError):
        carry_out(edits(folder), raising(RuntimeError("no")))
    assert order == ["removed.py", "made.py", "changed.py"]


def test_what_cannot_be_taken_back_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def full(folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(folder))

    def verify() -> None:
        monkeypatch.setattr(transaction, "_flush_folder", full)
        raise RuntimeError("no")

    with pytest.raises(RollbackError, match=r"no; going back failed: .*Input/output error"):
        carry_out(edits(folder), verify)


def test_mode_and_owner_are_kept(folder: Path):
    (folder / "changed.py").chmod(0o640)
    if os.geteuid() == 0:
        os.chown(folder / "changed.py", 1234, 5678)
    before = (folder / "changed.py").stat()
    carry_out(edits(folder), lambda: None)
    after = (folder / "changed.py").stat()
    assert after.st_ino != before.st_ino
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode,
        before.st_uid,
        before.st_gid,
    )


def test_another_name_of_the_same_file_keeps_the_old_bytes(folder: Path):
    # uv links the files of an environment to its cache.
    os.link(folder / "changed.py", folder / "in-a-cache.py")
    carry_out(edits(folder), lambda: None)
    assert (folder / "in-a-cache.py").read_bytes() == OLD["changed.py"]


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.usefixtures("no_links")
def test_a_copy_that_breaks_off_is_never_put_back(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def break_off(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:2])
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr(transaction.shutil, "copy2", break_off)
    with pytest.raises(TransactionError, match="No space left on device"):
        carry_out(edits(folder), lambda: None)
    assert files(folder) == OLD


@pytest.mark.usefixtures("no_links")
def test_files_that_cannot_be_linked_are_copied(folder: Path):
    with pytest.raises(TransactionError):
        carry_out(edits(folder), raising(RuntimeError("no")))
    assert files(folder) == OLD
    carry_out(edits(folder), lambda: None)
    assert files(folder) == NEW


def test_bytecode_of_the_old_source_is_dropped(folder: Path, monkeypatch: pytest.MonkeyPatch):
    elsewhere = folder / "prefix"
    monkeypatch.setattr(sys, "pycache_prefix", str(elsewhere))
    prefixed = Path(importlib.util.cache_from_source(folder / "changed.py"))
    stale = [
        prefixed,
        folder / "__pycache__" / "changed.cpython-310.pyc",
        folder / "__pycache__" / "changed.cpython-313.opt-1.pyc",
    ]
    kept = folder / "__pycache__" / "changed_too.cpython-310.pyc"
    for path in (*stale, kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"compiled")
    carry_out(edits(folder), lambda: None)
    assert not any(path.exists() for path in stale)
    assert kept.exists()
