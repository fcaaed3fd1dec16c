"""``inspect-image``: exit codes, JSON, and an engine that is not there or fails."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.images.image_making import (
    ARM64,
    NATIVE_SOURCE,
    PYTHON,
    Link,
    layer,
    own,
    saved,
    unpacked,
    vllm,
)
from vllm_mamba_retire.cli import app
from vllm_mamba_retire.images.engine import Engine

RUN = CliRunner()


def engine(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A docker of our own, alone on PATH; it writes down how it was called."""
    calls = folder / "calls"
    command = folder / "docker"
    command.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{script}\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return calls


WORKING = """
case $1 in
  image) echo '[{"Id": "ab", "Architecture": "amd64", "RepoDigests": ["r@sha256:cd"],
                 "Config": {"Env": ["A=b"]}}]' ;;
  create) echo c0ffee ;;
  export) cat %s; exit %d ;;
esac
"""


@pytest.mark.parametrize(
    ("entries", "code", "reason"),
    [
        ({**PYTHON, **vllm()}, 1, "unpatched"),
        ({**PYTHON, **vllm(), **own()}, 0, "patched"),
        ({**PYTHON, **vllm("0.30.0", NATIVE_SOURCE)}, 0, "native"),
    ],
    ids=["unpatched", "patched", "native"],
)
def test_verdict_as_json_and_as_exit_code(
    tmp_path: Path, entries: dict[str, bytes], code: int, reason: str
) -> None:
    tar = saved(tmp_path / "a.tar", layer(entries))
    done = RUN.invoke(app, ["inspect-image", "--tar", str(tar), "--json"])
    data = json.loads(done.stdout)
    assert (done.exit_code, data["schema"], data["reason"]) == (code, 1, reason)
    assert data["image"] == "local/vllm:test"


def test_text_names_file_hash_and_verdict(tmp_path: Path) -> None:
    root = unpacked(tmp_path, {**PYTHON, **vllm()})
    done = RUN.invoke(app, ["inspect-image", "--rootfs", str(root)])
    for part in ("/usr/lib/python3/dist-packages/vllm", "sha256 ", "0.29.0", "unpatched:"):
        assert part in done.stdout


@pytest.mark.parametrize("arguments", [[], ["a", "--tar", "b"], ["--tar", "b", "--rootfs", "c"]])
def test_exactly_one_image(arguments: list[str]) -> None:
    assert RUN.invoke(app, ["inspect-image", *arguments]).exit_code == 2


def test_error_as_json_and_as_sentence(tmp_path: Path) -> None:
    root = unpacked(tmp_path, PYTHON)
    done = RUN.invoke(app, ["inspect-image", "--rootfs", str(root), "--json"])
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"].endswith("has no vLLM")
    assert "has no vLLM" in done.stderr


def test_image_for_another_architecture_is_refused_where_one_is_asked_for(tmp_path: Path) -> None:
    arm = {"usr/bin/python3.11": ARM64, "usr/bin/python3": Link("python3.11"), **vllm()}
    arguments = ["inspect-image", "--rootfs", str(unpacked(tmp_path, arm))]
    assert RUN.invoke(app, arguments).exit_code == 1
    done = RUN.invoke(app, [*arguments, "--architecture=amd64"])
    assert done.exit_code == 2
    assert "is for arm64, not for amd64" in done.stderr


def test_image_of_an_engine_is_created_exported_and_removed_never_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = tmp_path / "rootfs.tar"
    exported.write_bytes(layer({**PYTHON, **vllm()}))
    calls = engine(tmp_path, monkeypatch, WORKING % (exported, 0))
    done = RUN.invoke(app, ["inspect-image", "vllm:test", "--engine=docker", "--json"])
    data = json.loads(done.stdout)
    assert (done.exit_code, data["reason"]) == (1, "unpatched")
    assert (data["image_id"], data["digest"]) == ("sha256:ab", "sha256:cd")
    verbs = [line.split()[0] for line in calls.read_text().splitlines()]
    assert verbs == ["info", "image", "create", "export", "rm"]


@pytest.mark.parametrize(("keep", "code"), [(0.5, 0), (1.0, 1)])
def test_container_is_removed_when_reading_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: float, code: int
) -> None:
    exported = tmp_path / "rootfs.tar"
    data = layer({**PYTHON, **vllm(), "usr/share/words": b"w" * 100_000})
    exported.write_bytes(data[: int(len(data) * keep)])
    calls = engine(tmp_path, monkeypatch, WORKING % (exported, code))
    done = RUN.invoke(app, ["inspect-image", "vllm:test", "--engine=docker"])
    assert done.exit_code == 2
    assert calls.read_text().splitlines()[-1] == "rm --force --volumes c0ffee"


def test_interrupted_run_leaves_no_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = engine(tmp_path, monkeypatch, '[ "$1" = rm ] || { kill -INT $PPID; sleep 5; }')
    with pytest.raises(KeyboardInterrupt):
        Engine("docker").run("vllm:test", [], "true")
    (name,) = re.findall(r"--name=(\S+)", calls.read_text())
    assert calls.read_text().splitlines()[-1] == f"rm --force {name}"


def test_wrong_image_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine(tmp_path, monkeypatch, '[ "$1" = info ] || { echo "no such image" >&2; exit 1; }')
    done = RUN.invoke(app, ["inspect-image", "vllm:typo", "--engine=docker"])
    assert done.exit_code == 2
    assert "docker has no image vllm:typo; check the name" in done.stderr


def test_engine_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine(tmp_path, monkeypatch, 'echo "is the daemon running?" >&2; exit 1')
    monkeypatch.setenv("PATH", str(tmp_path))
    done = RUN.invoke(app, ["inspect-image", "vllm:test"])
    assert done.exit_code == 2
    assert "docker does not answer (" in done.stderr
    assert "podman is not installed" in done.stderr
