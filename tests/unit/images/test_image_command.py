"""``inspect-image``: exit codes, what reaches the terminal, and an engine that fails."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.images.image_making import (
    PYTHON,
    SOURCE,
    Docker,
    native,
    own,
    tarred,
    unpacked,
    vllm,
)
from vllm_mamba_retire.cli import app
from vllm_mamba_retire.images.engine import LABEL

RUN = CliRunner()


@pytest.mark.parametrize(
    ("entries", "code", "reason"),
    [
        ({**PYTHON, **vllm()}, 1, "unpatched"),
        ({**PYTHON, **vllm(), **own()}, 0, "patched"),
        ({**PYTHON, **native()}, 0, "native"),
    ],
    ids=["unpatched", "patched", "native"],
)
def test_verdict_as_json_and_as_exit_code(
    tmp_path: Path, entries: dict[str, bytes], code: int, reason: str
) -> None:
    root = unpacked(tmp_path, entries)
    done = RUN.invoke(app, ["inspect-image", "--rootfs", str(root), "--json"])
    data = json.loads(done.stdout)
    assert (done.exit_code, data["schema"], data["reason"]) == (code, 1, reason)
    assert data["image"] == str(root)


def test_text_names_file_hash_and_verdict(tmp_path: Path) -> None:
    root = unpacked(tmp_path, {**PYTHON, **vllm()})
    done = RUN.invoke(app, ["inspect-image", "--rootfs", str(root)])
    for part in ("/usr/lib/python3/dist-packages/vllm", "sha256 ", "0.29.0", "unpatched:"):
        assert part in done.stdout
    manager = hashlib.sha256(SOURCE).hexdigest()
    assert f"sha256 {manager}\n" in done.stdout  # neither wrapped nor shortened


@pytest.mark.parametrize("arguments", [[], ["a", "--rootfs", "b"], ["--tar", "b"]])
def test_exactly_one_image(arguments: list[str]) -> None:
    assert RUN.invoke(app, ["inspect-image", *arguments]).exit_code == 2


def test_error_as_json_and_as_sentence(tmp_path: Path) -> None:
    root = unpacked(tmp_path, PYTHON)
    done = RUN.invoke(app, ["inspect-image", "--rootfs", str(root), "--json"])
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"].endswith("has no vLLM")
    assert "has no vLLM" in done.stderr


ODD = "\x1b]0;owned\x07[/red][link=x]\x9b31m\u202e"


def test_text_from_an_image_is_no_terminal_code_and_no_markup(docker: Docker) -> None:
    entries = {**PYTHON, **vllm(f"0.29.0+{ODD}"), **native(f"srv/{ODD}/x")}
    docker.image(tarred(entries), Cmd=["python3"], Env=[f"MAMBA_RETIRE={ODD}\nnative: fine"])
    done = RUN.invoke(app, ["inspect-image", "vllm:test", "--engine=docker"])
    assert done.exit_code == 1
    assert not set(ODD) & {c for c in done.output if not c.isprintable()} - {"\n"}
    assert "[/red][link=x]" in done.stdout
    assert not any(line.startswith("native") for line in done.output.splitlines())


def test_nothing_of_an_error_does_either(tmp_path: Path) -> None:
    done = RUN.invoke(app, ["inspect-image", "--rootfs", str(tmp_path / ODD)])
    assert done.exit_code == 2
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert {c for c in done.stderr if not c.isprintable()} == {"\n"}


@pytest.mark.parametrize(
    "about",
    [
        "",
        "[]",
        "{",
        "[{}]",
        '[{"Id": 1}]',
        '[{"Id": "a", "Config": {"Env": "A=b"}}]',
        "[" * 200_000,
        '[{"Id": "a", "Config": {"Labels": ' + '{"a":' * 200_000,
    ],
    ids=["empty", "none", "broken", "no id", "number", "no list", "deep", "deep inside"],
)
def test_image_that_the_engine_describes_oddly(docker: Docker, about: str) -> None:
    docker.image(b"")
    (docker.folder / "about").write_text(about)
    code, data = docker.inspected()
    assert code == 2
    assert data["error"].startswith("`docker image inspect vllm:test` has an unknown format")


def test_container_is_created_exported_and_removed_never_started(docker: Docker) -> None:
    docker.image(tarred({**PYTHON, **native()}))
    assert docker.inspected()[0] == 0
    assert [line.split()[0] for line in docker.calls] == [
        *("info", "image", "ps", "create", "export", "rm")
    ]
    created = next(line for line in docker.calls if line.startswith("create"))
    assert "--pull=never" in created
    assert "--network=none" in created


@pytest.mark.parametrize(("keep", "code"), [(0.5, 0), (1.0, 1)], ids=["truncated", "failed"])
def test_container_is_removed_when_reading_fails(docker: Docker, keep: float, code: int) -> None:
    data = tarred({**PYTHON, **vllm(), "usr/share/words": b"w" * 100_000})
    docker.image(data[: int(len(data) * keep)], code)
    assert docker.inspected()[0] == 2
    assert docker.calls[-1].startswith(f"rm --force --volumes {LABEL}-")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("during", ["create", "export"])
def test_signal_ends_the_export_and_removes_the_container(
    docker: Docker, number: signal.Signals, during: str
) -> None:
    docker.image(tarred({**PYTHON, **native()}))
    docker.first(f'[ "$1" = {during} ] && {{ echo $$ > {docker.folder}/pid; exec sleep 60; }}')
    command = [sys.executable, "-c", "from vllm_mamba_retire.cli import main; main()"]
    with subprocess.Popen(
        [*command, "inspect-image", "vllm:test", "--engine=docker"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        pid = docker.folder / "pid"
        while not pid.exists() or not pid.read_text():
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(0.2)  # until Python has noted its child
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert docker.calls[-1].startswith(f"rm --force --volumes {LABEL}-")
    assert not Path("/proc", pid.read_text().strip()).exists()


def names_of_containers(docker: Docker) -> tuple[str, str]:
    """That of a container of this process, and what one of a process that is gone has."""
    docker.image(tarred({**PYTHON, **native()}))
    docker.inspected()
    ours = next(word for word in docker.calls[-1].split() if word.startswith(LABEL))
    dead = subprocess.Popen(["true"])
    dead.wait()
    return ours, ours.replace(f"-{os.getpid()}-", f"-{dead.pid}-")


def test_container_of_a_killed_process_is_removed_by_the_next(docker: Docker) -> None:
    ours, left = names_of_containers(docker)
    elsewhere = left.replace(LABEL, f"{LABEL}-elsewhere")
    docker.first(f'[ "$1" = ps ] && echo {ours} {left} {elsewhere} kept')
    docker.calls_file.unlink()
    docker.inspected()
    removed = [line.split()[-1] for line in docker.calls if line.startswith("rm")]
    assert removed[0] == left
    assert len(removed) == 2  # that, and its own in the end


def test_export_of_a_killed_process_is_ended_by_the_next(docker: Docker) -> None:
    ours, left = names_of_containers(docker)
    (docker.folder / "export").write_text("import time; time.sleep(60)")
    orphan, other = (
        subprocess.Popen([sys.executable, "export", name], cwd=docker.folder)
        for name in (left, ours)
    )
    try:
        docker.inspected()
        assert orphan.wait(10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (orphan, other):
            process.kill()
            process.wait()


def test_wrong_image_name(docker: Docker) -> None:
    docker.script('[ "$1" = info ] || { echo "no such image" >&2; exit 1; }')
    code, data = docker.inspected()
    assert code == 2
    assert "docker has no image vllm:test; check the name" in data["error"]


def test_engine_that_does_not_answer(docker: Docker, monkeypatch: pytest.MonkeyPatch) -> None:
    docker.script('echo "is the daemon running?" >&2; exit 1')
    monkeypatch.setenv("PATH", str(docker.folder))
    done = RUN.invoke(app, ["inspect-image", "vllm:test"])
    assert done.exit_code == 2
    assert "docker does not answer (" in done.stderr
    assert "podman is not installed" in done.stderr
