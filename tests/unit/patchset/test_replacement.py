"""One rename: whatever stops or fails, the tree has the old file or the new one, and no litter.

A process is stopped before every single line of `change`, found by tracing, and each of its system
calls that Python announces (PEP 578) is made to fail. A line or call added later is covered too.
"""

from __future__ import annotations

import errno
import os
import py_compile
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.patchset.small_release import (
    PATCHED,
    RELEASED,
    everything,
    make_site,
)
from vllm_mamba_retire import patchset
from vllm_mamba_retire.patchset import (
    FILE,
    PatchsetError,
    RefusedError,
    change,
    overriding_code,
    read_tree,
    tidy,
)
from vllm_mamba_retire.releases import Matrix

OLD, NEW = RELEASED.encode(), PATCHED.encode()
LITTER = (
    f"vllm/v1/core/.{FILE.name}.mamba-retire-new",
    f"vllm/v1/core/.{FILE.name}.mamba-retire-old",
    f"vllm/v1/core/.{FILE.name}.mamba-retire-part",
    ".vllm-mamba-retire.json",
)
MORE_THAN_ENOUGH = 1000


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    # No test here cuts the power, and flushing takes most of the time.
    monkeypatch.setattr(os, "fsync", lambda _: None)


def in_child(act: Callable[[], object]) -> int:
    """Run `act` in a fork; returns its wait status (exit 1: refused, 2: unreadable, 3: a bug)."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            act()
            code = 0
        except RefusedError:
            code = 1
        except PatchsetError:
            code = 2
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def stopped_before_line(number: int, ending: signal.Signals) -> None:
    """From now on this process gets a signal before the `number`-th line that it runs there."""
    count = 0

    def trace(frame, event, _argument):
        nonlocal count
        if frame.f_code.co_filename != patchset.__file__:
            return None
        count += event == "line"
        if count == number:
            sys.settrace(None)
            os.kill(os.getpid(), ending)
        return trace

    sys.settrace(trace)


@pytest.mark.parametrize(
    "ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT], ids=lambda s: s.name
)
@pytest.mark.parametrize("act", ["apply", "revert"])
def test_signal_before_any_line_leaves_the_old_or_the_new_file(
    act: str, ending: signal.Signals, small: Matrix, tmp_path: Path
):
    start, wanted = (OLD, NEW) if act == "apply" else (NEW, OLD)
    stops = files = 0
    for number in range(1, MORE_THAN_ENOUGH):
        site = make_site(tmp_path / str(number), start.decode())
        clean = set(everything(site))
        tree = read_tree(site, small)

        def run(tree=tree, number=number) -> None:
            signal.signal(ending, signal.SIG_DFL) if ending is not signal.SIGKILL else None
            stopped_before_line(number, ending)
            change(tree, wanted, probed=False)

        status = in_child(run)
        left = everything(site)
        assert left[str(FILE)] in (OLD, NEW), f"line {number}"
        if ending is not signal.SIGKILL:
            assert set(left) == clean, f"line {number}"
        # Both ways to go on take away what a killed process leaves.
        files += set(left) != clean
        if number % 2:
            change(read_tree(site, small), wanted, probed=False)
            assert everything(site)[str(FILE)] == wanted
        else:
            tidy(tree)
        assert set(everything(site)) == clean, f"line {number}"
        if not os.WIFSIGNALED(status):
            break
        stops += 1
    assert os.waitstatus_to_exitcode(status) == 0
    assert stops > 30, "no signal reached the replacement"
    assert (files > 0) == (ending is signal.SIGKILL), "the control: a kill does leave a file"


@pytest.mark.parametrize("act", ["apply", "revert"])
def test_any_call_that_fails_leaves_the_old_file_and_no_litter(
    act: str, small: Matrix, tmp_path: Path
):
    start, wanted = (OLD, NEW) if act == "apply" else (NEW, OLD)
    refused = []
    for number in range(1, MORE_THAN_ENOUGH):
        site = make_site(tmp_path / str(number), start.decode())
        clean = set(everything(site))
        tree = read_tree(site, small)
        calls = os.pipe()

        def run(tree=tree, number=number, calls=calls) -> None:
            count = 0

            def fail(event: str, _arguments: tuple[object, ...]) -> None:
                nonlocal count
                if event not in ("import", "compile", "exec", "object.__getattr__"):
                    count += 1
                    if count == number:
                        os.write(calls[1], event.encode())
                        raise OSError(errno.EIO, "Input/output error", "the disk")

            sys.addaudithook(fail)
            change(tree, wanted, probed=False)

        status = os.waitstatus_to_exitcode(in_child(run))
        os.close(calls[1])
        failed = os.read(calls[0], 100).decode()
        os.close(calls[0])
        left = everything(site)
        assert set(left) == clean, f"{failed} failed"
        # After the rename nothing is left to fail: exit 0 and the new file belong together.
        assert (status, left[str(FILE)]) in (
            (0, wanted),
            (1, start),
            (2, start),
        ), f"{failed} failed"
        if not failed:
            break
        if status:
            refused.append(failed)
    assert {"open", "os.rename", "os.chmod", "os.listxattr", "fcntl.flock"} <= set(refused)


def test_full_disk_leaves_the_old_file_and_no_litter(
    site: Path, small: Matrix, monkeypatch: pytest.MonkeyPatch
):
    before = everything(site)

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RefusedError, match="No space left on device"):
        change(read_tree(site, small), NEW, probed=False)
    assert everything(site) == before


@pytest.mark.parametrize("name", LITTER)
@pytest.mark.parametrize("start", [OLD, NEW])
def test_every_command_takes_away_what_a_killed_process_left(
    start: bytes, name: str, site: Path, small: Matrix
):
    (site / FILE).write_bytes(start)
    clean = everything(site)
    tree = read_tree(site, small)
    for wanted in (start, OLD, NEW):
        (site / name).write_text("left")
        change(read_tree(site, small), wanted, probed=False)
        assert set(everything(site)) == set(clean)
    (site / name).write_text("left")
    assert tidy(tree) == [f"{site / name} was left by a killed process; removed it"]
    assert set(everything(site)) == set(clean)
    assert tidy(tree) == []


def test_check_leaves_the_files_of_a_process_at_work(site: Path, small: Matrix):
    tree = read_tree(site, small)
    (site / LITTER[0]).write_text("in use")
    with patchset._locked(site, None):
        assert tidy(tree) == [f"{site / LITTER[0]} was left by a killed process"]
    assert (site / LITTER[0]).exists()


def test_folder_named_like_a_leftover_stays_and_does_no_harm(site: Path, small: Matrix):
    (site / LITTER[3]).mkdir()
    change(read_tree(site, small), NEW, probed=False)
    assert (site / FILE).read_bytes() == NEW
    assert tidy(read_tree(site, small)) == [f"{site / LITTER[3]} was left by a killed process"]


# What belongs to the file besides its bytes.


def access_list(*entries: tuple[int, int, int]) -> bytes:
    """A POSIX access list as the kernel keeps it: (tag, rights, id) each."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


NOBODY = 0xFFFFFFFF
# user::rw- user:1234:rw- group::--- mask::rw- other::---: as a plain mode, 0660 gives the group rw.
SHARED = access_list((1, 6, NOBODY), (2, 6, 1234), (4, 0, NOBODY), (16, 6, NOBODY), (32, 0, NOBODY))


def set_attribute(file: Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(file, name, value)
    except OSError as error:
        pytest.skip(f"{name} cannot be set on this file system: {error.strerror}")


def test_mode_owner_access_list_and_attributes_are_kept(site: Path, small: Matrix):
    (site / FILE).chmod(0o640)
    if os.geteuid() == 0:
        os.chown(site / FILE, 1234, 5678)
    set_attribute(site / FILE, "user.origin", b"a vendor")
    set_attribute(site / FILE, "system.posix_acl_access", SHARED)
    # New files in this folder would get another access list.
    set_attribute((site / FILE).parent, "system.posix_acl_default", SHARED)
    before = (site / FILE).stat()
    attributes = patchset._extended(site / FILE)
    assert len(attributes) == 2
    change(read_tree(site, small), NEW, probed=False)
    after = (site / FILE).stat()
    assert after.st_ino != before.st_ino
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode,
        before.st_uid,
        before.st_gid,
    )
    assert patchset._extended(site / FILE) == attributes


def test_folders_default_access_list_is_not_given_to_the_file(site: Path, small: Matrix):
    set_attribute((site / FILE).parent, "system.posix_acl_default", SHARED)
    mode = (site / FILE).stat().st_mode
    change(read_tree(site, small), NEW, probed=False)
    assert patchset._extended(site / FILE) == {}
    assert (site / FILE).stat().st_mode == mode


@pytest.mark.parametrize("error", [PermissionError(errno.EPERM, "no"), OSError(errno.ENOSPC, "no")])
def test_attribute_that_cannot_be_kept_is_a_reason_to_refuse(
    error: OSError, site: Path, small: Matrix, monkeypatch: pytest.MonkeyPatch
):
    set_attribute(site / FILE, "user.origin", b"a vendor")
    before = everything(site)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, "setxattr", fail)
    with pytest.raises(RefusedError, match="user.origin" if error.errno == errno.EPERM else "no"):
        change(read_tree(site, small), NEW, probed=False)
    assert everything(site) == before


def test_another_name_of_the_same_file_keeps_the_old_bytes(site: Path, small: Matrix):
    # uv links the files of an environment to its cache.
    os.link(site / FILE, site / "in-a-cache.py")
    change(read_tree(site, small), NEW, probed=False)
    assert (site / "in-a-cache.py").read_bytes() == OLD


# Compiled code.


def imported(site: Path) -> str:
    """Whether Python runs the patched text, as ``True`` or ``False``."""
    script = f"import {FILE.stem} as m; print(hasattr(m, 'f2'))"
    return subprocess.check_output(
        [sys.executable, "-c", script],
        cwd=(site / FILE).parent,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": ""},
        text=True,
    ).strip()


def compile_unchecked(site: Path, text: bytes) -> Path:
    """Compile the file as if it had `text`, with a hash that Python does not compare."""
    source = (site / FILE).read_bytes()
    (site / FILE).write_bytes(text)
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    done = py_compile.compile(str(site / FILE), invalidation_mode=mode, doraise=True)
    compiled = Path(str(done))
    (site / FILE).write_bytes(source)
    return compiled


def test_unchecked_code_is_seen_and_apply_and_revert_drop_it(site: Path, small: Matrix):
    for start, wanted in ((OLD, NEW), (NEW, OLD)):
        (site / FILE).write_bytes(start)
        compiled = compile_unchecked(site, start)
        assert overriding_code(read_tree(site, small), start) == []  # it is of this very source
        (site / FILE).write_bytes(wanted)  # as GNU patch does
        assert imported(site) == str(start == NEW), "the control: Python runs the old code"
        assert overriding_code(read_tree(site, small), wanted) == [compiled]
        change(read_tree(site, small), wanted, probed=False)
        assert imported(site) == str(wanted == NEW)
        assert overriding_code(read_tree(site, small), wanted) == []


def test_code_that_python_compares_is_left_to_python(site: Path, small: Matrix):
    assert imported(site) == "False"  # compiles, with time and size
    compiled = list((site / FILE).parent.glob("__pycache__/*"))
    assert compiled
    change(read_tree(site, small), NEW, probed=False)
    assert all(path.exists() for path in compiled)
    assert imported(site) == "True"


def test_unchecked_code_of_another_python_or_prefix_is_dropped(
    site: Path, small: Matrix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other = compile_unchecked(site, OLD).rename(
        (site / FILE).parent / f"__pycache__/{FILE.stem}.cpython-399.opt-1.pyc"
    )
    other.write_bytes(b"\0\0\r\n" + other.read_bytes()[4:])
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "prefix"))
    prefixed = compile_unchecked(site, OLD)
    assert str(tmp_path / "prefix") in str(prefixed)
    bystander = prefixed.with_name(f"{FILE.stem}_too.cpython-310.pyc")
    bystander.write_bytes(prefixed.read_bytes())
    assert set(overriding_code(read_tree(site, small), NEW)) == {other, prefixed}
    change(read_tree(site, small), NEW, probed=False)
    assert (other.exists(), prefixed.exists(), bystander.exists()) == (False, False, True)


def test_refused_if_compiled_code_cannot_be_removed(site: Path, small: Matrix):
    compiled = compile_unchecked(site, OLD)
    compiled.unlink()
    compiled.mkdir()  # the way of this test to make a name that cannot be read or removed
    before = everything(site)
    with pytest.raises(RefusedError, match=str(compiled)):
        change(read_tree(site, small), NEW, probed=False)
    assert everything(site) == before


@pytest.mark.parametrize("ending", [".so", ".cpython-312-x86_64-linux-gnu.so", ".abi3.so"])
def test_extension_module_of_the_same_name_is_seen_and_refused(
    ending: str, site: Path, small: Matrix
):
    module = (site / FILE).with_suffix(ending)
    module.write_bytes(b"")
    assert overriding_code(read_tree(site, small), OLD) == [module]
    with pytest.raises(RefusedError, match=f"Python imports {module} instead of"):
        change(read_tree(site, small), NEW, probed=False)
    assert (site / FILE).read_bytes() == OLD
