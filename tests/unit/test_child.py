"""One way to run a child process: its answer, its refusals, its failures and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import vllm_mamba_retire
from vllm_mamba_retire.child import ChildError, ask

SHIM = Path(vllm_mamba_retire.__file__).parents[1]


@pytest.fixture
def module(tmp_path: Path) -> str:
    (tmp_path / "answering.py").write_text(
        textwrap.dedent(
            """
            import os, sys, time
            from vllm_mamba_retire.child import RefusalError, answer

            def work(payload, report):
                print("noise on stdout")
                os.write(1, b"noise on the descriptor\\n")
                if payload == "refuse":
                    raise RefusalError("vLLM 9.9 has no such method.")
                if payload == "fail":
                    raise RuntimeError("it broke")
                if payload == "die":
                    os._exit(7)
                if payload == "wait":
                    report(os.getpid())
                    time.sleep(600)
                report({"half": 1})
                return {"payload": payload, "mode": os.environ.get("MAMBA_RETIRE")}

            answer(work)
            """
        )
    )
    return "answering"


def test_an_answer_and_what_was_reported_before_it(module: str, tmp_path: Path) -> None:
    events: list[object] = []
    got = ask(
        module,
        [1, "é"],
        path=[tmp_path],
        environment={"MAMBA_RETIRE": "off"},
        on_event=events.append,
    )
    assert got == {"payload": [1, "é"], "mode": "off"}
    assert events == [{"half": 1}]


def test_a_variable_can_be_unset(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAMBA_RETIRE", "require")
    assert ask(module, path=[tmp_path], environment={"MAMBA_RETIRE": None})["mode"] is None


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        ("refuse", r"^vLLM 9\.9 has no such method\.$"),
        ("fail", r"^No vLLM is installed for .+: RuntimeError: it broke\.$"),
        ("die", r"ended with status 7"),
    ],
)
def test_no_answer_is_an_error_that_says_why(
    module: str, tmp_path: Path, payload: str, says: str
) -> None:
    with pytest.raises(ChildError, match=says):
        ask(module, payload, path=[tmp_path])


def test_a_child_that_takes_too_long_is_killed(module: str, tmp_path: Path) -> None:
    pids: list[int] = []
    with pytest.raises(ChildError, match=r"no answer within 2 seconds"):
        ask(module, "wait", path=[tmp_path], timeout=2, on_event=pids.append)
    assert _gone(pids[0])


@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_child_ends_with_its_parent(
    module: str, tmp_path: Path, ended_by: signal.Signals
) -> None:
    code = (
        "from vllm_mamba_retire.child import ask\n"
        f"ask({module!r}, 'wait', path=[{str(tmp_path)!r}], "
        "on_event=lambda pid: print(pid, flush=True))"
    )
    environment = {**os.environ, "PYTHONPATH": str(SHIM)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL,
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(ended_by)
        parent.wait(timeout=30)
    assert _gone(pid)


def _gone(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:
            return True
        if state == b"Z":
            return True
        time.sleep(0.1)
    return False
