"""Name, version and help texts of the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.imports import ROOT
from vllm_mamba_retire import __version__
from vllm_mamba_retire.cli import COMMANDS, app

NAME = "vllm-mamba-retire"
Script = Callable[..., subprocess.CompletedProcess[str]]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_mamba_retire", *arguments]
    environment = {**os.environ, "COLUMNS": "80"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_help_names_the_command_and_lists_all_commands_in_full() -> None:
    text = run("--help").stdout
    assert text.startswith(f"Usage: {NAME} [OPTIONS] COMMAND")
    assert all(f"\n  {command} " in text for command in COMMANDS)
    assert "..." not in text.replace("[ARGS]...", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_fits_into_80_columns(command: str) -> None:
    text = run(command, "--help").stdout
    assert text.startswith(f"Usage: {NAME} {command} [OPTIONS]")
    assert "Exit 0:" in text
    assert max(map(len, text.splitlines())) <= 80
    assert not {"`", "…"} & set(text)


def test_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"{NAME} {__version__}\n")


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Runs the console script, as an installer writes it, on this Python."""
    found = re.search(rf'^{NAME} = "(.+):(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert found
    file = tmp_path / NAME
    file.write_text(f"import sys\nfrom {found[1]} import {found[2]}\nsys.exit({found[2]}())\n")

    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "MAMBA_RETIRE_DIR": str(tmp_path / "records")}
        command = [sys.executable, str(file), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return start


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["--version"], f"{NAME} {__version__}\n"),
        (["--help"], f"Usage: {NAME} [OPTIONS] COMMAND"),
        (["plan", "--help"], f"Usage: {NAME} plan [OPTIONS]"),
    ],
)
def test_the_console_script_starts(script: Script, arguments: list[str], printed: str) -> None:
    done = script(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(printed)


def test_the_console_script_runs_status(script: Script) -> None:
    """Without a vLLM, which is a finding."""
    done = script("status", "--json")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["reason"] == "no-target"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_a_completion_for_the_command(shell: str) -> None:
    done = run("--show-completion", shell)
    assert done.returncode == 0
    assert NAME in done.stdout
    assert "_VLLM_MAMBA_RETIRE_COMPLETE" in done.stdout
