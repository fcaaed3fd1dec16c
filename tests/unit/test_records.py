"""Each process keeps one truthful record, and nothing of it can hurt the process."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.children import eventually
from vllm_mamba_retire import identity, records
from vllm_mamba_retire.keep import KeepCounters
from vllm_mamba_retire.records import Record
from vllm_mamba_retire.retirement import Counters
from vllm_mamba_retire.verdict import Reason, Verdict

# A process that keeps a record and does what it is told, one line at a time.
PROCESS = """
import os, sys, time
from vllm_mamba_retire import identity, records
from vllm_mamba_retire.keep import KeepCounters
from vllm_mamba_retire.records import Record
from vllm_mamba_retire.retirement import Counters
from vllm_mamba_retire.verdict import Reason, Verdict

records.REFRESH_SECONDS = records._SETTLING_SECONDS = 0.05
counters = Counters(calls=3, states_freed=2)
kept = KeepCounters(states_refreshed=4)

def keep():
    verdict = Verdict(Reason.PATCHED, "by a test.")
    records.keep(Record.of(verdict, None, counters, keep_counters=kept))

def child(name="SpawnProcess"):
    # Named as vLLM names it. It ends when told, as a real one does.
    import multiprocessing
    event = multiprocessing.get_context("fork").Event()
    process = multiprocessing.get_context("fork").Process(target=event.wait, name=name)
    process.start()
    return process, event

def main():
    for line in sys.stdin:
        exec(line, globals())
        print("done", flush=True)

if __name__ == "__main__":
    main()
"""


class Process:
    """The other process, and its records."""

    def __init__(self, folder: Path, tmp_path: Path) -> None:
        self.folder = folder
        script = tmp_path / "process.py"
        script.write_text(PROCESS)
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "MAMBA_RETIRE_DIR": str(folder)},
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def path(self) -> Path:
        return next(iter(self.folder.glob(f"{self.pid}-*.json")), self.folder / "none")

    def do(self, line: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def end(self) -> int:
        self.process.communicate(timeout=30)
        return self.process.returncode

    def entries(self) -> list[Record]:
        return records.read(self.folder).records


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(folder: Path = tmp_path / "records") -> Process:
        started.append(Process(folder, tmp_path))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


def test_a_record_says_who_and_what(process: Callable[..., Process]) -> None:
    one = process()
    one.do("keep()")
    (entry,) = one.entries()
    assert (entry.pid, entry.role) == (one.pid, "engine core")
    assert entry.verdict == Verdict(Reason.PATCHED, "by a test.")
    assert entry.counters == Counters(calls=3, states_freed=2)
    assert entry.started == identity.start_ticks(one.pid)


def test_only_its_user_may_read_a_record(process: Callable[..., Process]) -> None:
    one = process()
    one.do("os.umask(0)")
    one.do("keep()")
    assert stat.S_IMODE(one.path.stat().st_mode) == 0o600


def test_counters_are_refreshed_without_being_asked(process: Callable[..., Process]) -> None:
    one = process()
    one.do("keep()")
    one.do("counters.states_freed += 40")
    eventually(lambda: one.entries()[0].counters == Counters(calls=3, states_freed=42))


def test_a_record_that_has_not_changed_is_not_written_again(
    process: Callable[..., Process],
) -> None:
    one = process()
    one.do("keep()")
    before = one.path.stat()
    one.do("time.sleep(0.5)")
    assert one.path.stat().st_ino == before.st_ino
    one.do("counters.calls += 1")  # control: this one is
    eventually(lambda: one.path.stat().st_ino != before.st_ino)


def test_a_record_goes_with_its_process(process: Callable[..., Process]) -> None:
    one = process()
    one.do("keep()")
    assert one.path.exists()
    assert one.end() == 0
    assert list(one.folder.iterdir()) == []


def test_a_withdrawn_record_is_gone_and_may_come_back(process: Callable[..., Process]) -> None:
    one = process()
    one.do("keep()")
    one.do("records.withdraw()")
    one.do("time.sleep(0.3)")
    assert not one.path.exists()
    one.do("keep()")
    one.do("counters.calls += 1")
    eventually(lambda: one.entries()[0].counters.calls == 4)


def test_an_armed_process_has_a_record_without_a_verdict(
    process: Callable[..., Process],
) -> None:
    one = process()
    one.do("records.announce()")
    assert [entry.verdict for entry in one.entries()] == [None]
    one.do("keep()")
    one.do("records.announce()")
    assert [entry.verdict.reason for entry in one.entries()] == [Reason.PATCHED]


def test_the_record_of_a_killed_process_is_ignored_and_removed(
    process: Callable[..., Process],
) -> None:
    one = process()
    one.do("keep()")
    path = one.path
    one.process.send_signal(signal.SIGKILL)
    one.end()
    assert path.exists()
    assert one.entries() == []
    assert not path.exists()


def test_a_pid_used_again_is_not_taken_for_the_process_before(
    process: Callable[..., Process],
) -> None:
    one = process()
    one.do("keep()")
    data = json.loads(one.path.read_text())
    other = one.folder / f"{os.getpid()}.json"
    other.write_text(json.dumps({**data, "pid": os.getpid()}))
    assert [entry.pid for entry in one.entries()] == [one.pid]
    assert not other.exists()


def test_a_new_process_clears_up_after_killed_ones(process: Callable[..., Process]) -> None:
    killed, fresh = process(), process()
    killed.do("keep()")
    left = killed.path
    killed.process.kill()
    killed.end()
    assert left.exists()
    fresh.do("keep()")
    eventually(lambda: not left.exists())
    assert fresh.path.exists()


def test_records_of_other_containers_and_hosts_are_left_alone(
    process: Callable[..., Process],
) -> None:
    one = process()
    one.do("keep()")
    data = json.loads(one.path.read_text())
    other = one.folder / "1-0.json"
    other.write_text(json.dumps({**data, "pid": 1, "place": "elsewhere pid:[1]"}))
    assert [entry.pid for entry in one.entries()] == [one.pid]
    assert other.exists()


def test_the_same_pid_in_two_containers_is_two_files(monkeypatch: pytest.MonkeyPatch) -> None:
    here = records._file_name()
    monkeypatch.setattr(identity, "pid_namespace", lambda: "pid:[1]")
    assert records._file_name() != here


@pytest.mark.parametrize("text", ["", "{}", "[]", "7", '{"schema": 2}', "\0", '{"schema": 1}'])
def test_a_file_that_is_no_record_is_left_out_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "77.json"
    path.write_text(text)
    assert records.read(tmp_path).records == []
    assert path.read_text() == text


@pytest.mark.parametrize("name", ["EngineCore_DP1", "VllmWorker-0", "ApiServer_2"])
def test_a_forked_child_has_a_record_of_its_own(process: Callable[..., Process], name: str) -> None:
    one = process()
    one.do("keep()")
    one.do(f"forked, event = child({name!r})")
    eventually(lambda: len(one.entries()) == 2)
    parent, child = sorted(one.entries(), key=lambda entry: entry.pid != one.pid)
    assert parent.counters == Counters(calls=3, states_freed=2)
    assert child.counters == Counters(), "what the parent freed is the parent's"
    assert (parent.keep_counters, child.keep_counters) == (KeepCounters(4), KeepCounters())
    assert child.verdict == parent.verdict
    assert child.role == identity.role_of(name)
    one.do("event.set(); forked.join()")
    assert [entry.pid for entry in one.entries()] == [one.pid]
    assert len(list(one.folder.glob("*.json"))) == 1, "the child removed its own"


def test_a_fork_of_a_process_without_a_record_has_none(process: Callable[..., Process]) -> None:
    one = process()
    one.do("forked, event = child()")
    one.do("time.sleep(0.3)")
    assert one.entries() == []
    one.do("event.set(); forked.join()")


@pytest.mark.parametrize("folder", ["/proc/nowhere", "/dev/null", "/dev/null/below"])
def test_a_folder_that_cannot_be_written_costs_only_the_record(
    process: Callable[..., Process], folder: str
) -> None:
    one = process(Path(folder))
    one.do("keep()")
    one.do("counters.calls += 1")
    one.do("time.sleep(0.2)")
    assert one.entries() == []
    assert one.end() == 0


def test_a_folder_in_tmp_that_others_can_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MAMBA_RETIRE_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    made = records._make_folder()
    assert stat.S_IMODE(made.stat().st_mode) == 0o700  # control
    made.chmod(0o777)
    with pytest.raises(PermissionError, match=str(made)):
        records._make_folder()
    made.rmdir()
    made.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match=str(made)):
        records._make_folder()


def test_a_removed_or_unwritable_record_is_written_again(
    process: Callable[..., Process],
) -> None:
    one = process()
    one.do("keep()")
    one.path.unlink()
    eventually(one.entries)
    one.do("os.environ['MAMBA_RETIRE_DIR'] += '/../file/below'")
    (one.folder.parent / "file").touch()
    one.do("counters.calls += 1; time.sleep(0.3)")
    assert one.entries()[0].counters == Counters(calls=3, states_freed=2)  # control: not written
    (one.folder.parent / "file").unlink()
    one.do("os.environ['MAMBA_RETIRE_DIR'] = " + repr(str(one.folder)))
    eventually(lambda: one.entries()[0].counters.calls == 4)


def test_a_reader_refuses_the_folder_that_a_writer_would_refuse(
    process: Callable[..., Process],
) -> None:
    one = process()
    one.do("keep()")
    one.folder.chmod(0o700)
    assert [e.pid for e in records.read(one.folder, os.getuid()).records] == [one.pid]  # control
    one.folder.chmod(0o777)
    records_found, problem = records.read(one.folder, os.getuid())
    assert records_found == []
    assert problem is not None
    assert "that only user" in problem
    assert records.read(one.folder, os.getuid() + 1).records == []


def test_a_record_that_others_can_write_is_not_believed(process: Callable[..., Process]) -> None:
    one = process()
    one.do("keep()")
    one.path.chmod(0o666)
    assert one.entries() == []


def test_a_record_written_by_another_user_is_ignored(
    process: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = process()
    one.do("keep()")
    assert [entry.pid for entry in one.entries()] == [one.pid]  # control
    real = os.fstat
    monkeypatch.setattr(os, "fstat", lambda file: _Owned(real(file), os.getuid() + 1))
    assert one.entries() == []


class _Owned:
    """The status of a file, with another owner."""

    def __init__(self, real: os.stat_result, owner: int) -> None:
        self.real, self.st_uid = real, owner

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)


def test_two_records_of_one_process_are_one(process: Callable[..., Process]) -> None:
    one = process()
    one.do("keep()")
    (one.folder / f"{one.pid}-copy.json").write_bytes(one.path.read_bytes())
    assert [entry.pid for entry in one.entries()] == [one.pid]


@pytest.mark.parametrize("made", ["fifo", "device", "deep", "endless"])
def test_hostile_files_neither_hang_nor_stop_the_reader(
    process: Callable[..., Process], made: str
) -> None:
    one = process()
    one.do("keep()")
    path = one.folder / "1-0.json"
    if made == "fifo":
        os.mkfifo(path)
    elif made == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("[" * 50_000 if made == "deep" else " " * 1_000_000)
    assert [entry.pid for entry in one.entries()] == [one.pid]
    assert os.path.lexists(path)


@pytest.mark.parametrize("field", ["pid", "started", "verdict", "counters"])
def test_a_record_of_wrong_types_is_ignored(process: Callable[..., Process], field: str) -> None:
    one = process()
    one.do("keep()")
    data = json.loads(one.path.read_text())
    for value in ([[]], {"calls": "many"}, "x", -1):
        (one.folder / "1-0.json").write_text(json.dumps({**data, field: value}))
        assert [entry.pid for entry in one.entries()] == [one.pid]


def test_a_relative_folder_is_refused_and_a_home_is_expanded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MAMBA_RETIRE_DIR", "~/run")
    assert records.folder().path == tmp_path / "run"
    monkeypatch.setenv("MAMBA_RETIRE_DIR", "run")
    with pytest.raises(ValueError, match="MAMBA_RETIRE_DIR=run is a relative path"):
        records.folder()


def test_a_forked_process_logs_its_own_line(process: Callable[..., Process]) -> None:
    one = process()
    log = one.folder.parent / "log"
    one.do(f"import logging; logging.basicConfig(filename={str(log)!r}, level=logging.INFO)")
    one.do("keep()")
    one.do("forked, event = child()")
    try:
        eventually(lambda: log.exists() and f"pid {one.pid}" not in log.read_text())
        eventually(lambda: "patched: by a test." in log.read_text())
    finally:
        one.do("event.set(); forked.join()")
        log.unlink(missing_ok=True)


SERVE = "vllm.entrypoints.cli.main"
SINCE_0_29 = "vllm.entrypoints.launchers.api_server.entry"
BEFORE_0_29 = "vllm.entrypoints.openai.api_server"


@pytest.mark.parametrize(
    ("modules", "command", "role"),
    [
        ([SERVE, BEFORE_0_29], ["vllm", "serve", "model"], "API server"),
        ([SERVE, SINCE_0_29], ["vllm", "serve", "model"], "API server"),
        ([BEFORE_0_29], ["my_server.py"], "API server"),
        ([SERVE, SINCE_0_29], ["vllm", "bench", "throughput"], "main"),
        ([], ["my_program.py"], "main"),
    ],
)
def test_what_answers_http_requests_is_an_api_server(
    monkeypatch: pytest.MonkeyPatch, modules: list[str], command: list[str], role: str
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setattr(sys, "argv", command)
    assert Record.of(None, None).role == role


def test_what_starts_several_api_servers_answers_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, BEFORE_0_29, ModuleType(BEFORE_0_29))
    assert Record.of(None, None).role == "API server"  # control
    child = multiprocessing.get_context("spawn").Process(target=int, name="ApiServer_0")
    child.start()
    try:
        assert Record.of(None, None).role == "main"
    finally:
        child.join()


def test_two_hosts_of_one_name_are_two_places(monkeypatch: pytest.MonkeyPatch) -> None:
    here = records._file_name()
    monkeypatch.setattr(Path, "read_text", lambda _path: "another boot")
    assert records._file_name() != here


def test_a_process_that_gets_no_thread_keeps_its_first_record(
    process: Callable[..., Process],
) -> None:
    one = process()
    one.do("import threading")
    one.do("def none_left(thread): raise RuntimeError('no threads')")
    one.do("threading.Thread.start = none_left")
    one.do("keep()")
    (entry,) = one.entries()
    assert entry.counters is not None
    assert entry.counters.states_freed == 2


def test_a_recheck_that_fails_is_logged_once_and_not_tried_again(
    process: Callable[..., Process],
) -> None:
    one = process()
    one.do("import logging; lines = []")
    one.do("logging.getLogger('vllm.mamba_retire').warning = lambda *said: lines.append(said)")
    one.do("def fails(record): raise OSError('torn')")
    one.do("records.keep(Record.of(Verdict(Reason.PATCHED, 'by a test.'), None, counters), fails)")
    one.do("while not lines: time.sleep(0.01)")
    one.do("counters.states_freed = 7")
    assert eventually(lambda: one.entries()[0].counters == Counters(calls=3, states_freed=7))
    one.do("assert len(lines) == 1 and 'cannot check its patch again' in lines[0][0], lines")
