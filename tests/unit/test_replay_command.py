"""The replay command where there is nothing that it can replay on."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from typer.testing import CliRunner

from vllm_mamba_retire import target
from vllm_mamba_retire.cli import app


@dataclass
class _Found:
    version: str | None


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "vllm: not installed here"),
        (_Found(None), "vllm: not installed here"),
        (_Found("0.25.1"), "vllm: 0.25.1 cannot be replayed, only 0.26 and newer"),
        (_Found("0.11.2.dev280+gabc"), "cannot be replayed"),
    ],
)
def test_without_a_replayable_vllm_the_error_names_one(
    monkeypatch: pytest.MonkeyPatch, found: _Found | None, said: str
) -> None:
    monkeypatch.setattr(target, "find_target", lambda: found)
    result = CliRunner().invoke(app, ["replay", "--block", "1568"])
    assert result.exit_code == 2
    assert said in result.stderr
