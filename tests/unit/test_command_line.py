"""Name, version and help texts of the command line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from vllm_mamba_retire import __version__
from vllm_mamba_retire.cli import COMMANDS, app

NAME = "vllm-mamba-retire"


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


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_a_completion_for_the_command(shell: str) -> None:
    done = run("--show-completion", shell)
    assert done.returncode == 0
    assert NAME in done.stdout
    assert "_VLLM_MAMBA_RETIRE_COMPLETE" in done.stdout
