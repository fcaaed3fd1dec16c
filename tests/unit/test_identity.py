"""What can be told of a process that is gone, or that cannot be seen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_mamba_retire import identity, records

BEYOND = 2**22 + 1  # above the greatest process id of Linux


def test_of_a_process_that_is_not_there_nothing_is_told() -> None:
    assert identity.start_ticks(BEYOND) is None
    assert identity.parent(BEYOND) is None
    assert identity.pid_namespace(BEYOND) == ""
    assert identity.title(BEYOND) == ""
    assert identity.has_ended(BEYOND)


def test_a_number_that_is_no_process_id_is_not_called_ended() -> None:
    assert not identity.has_ended(2**80)


def test_a_zombie_has_ended_and_a_running_process_has_a_start() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert identity.start_ticks(child.pid)
    assert identity.parent(child.pid) == os.getpid()
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and not collected yet
    assert identity.start_ticks(child.pid) is None
    assert identity.has_ended(child.pid)
    child.wait()


def test_without_proc_no_record_is_judged_or_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "1-0.json"
    record.touch()
    monkeypatch.setattr(identity, "start_ticks", lambda _pid: None)
    reading = records.read(tmp_path)
    assert reading.records == []
    assert "/proc is not mounted" in str(reading.problem)
    assert record.exists()
