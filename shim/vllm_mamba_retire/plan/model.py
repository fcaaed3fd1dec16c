"""Asks the installed vLLM, in a child process, what it makes of a model and its serving flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_mamba_retire.replay.scenario import InputError


def read_model(model: Path, flags: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures by the names of `deployment.Deployment`.

    Args:
        model: a local folder with a config.json, or such a file.
        flags: flags as for ``vllm serve``.

    Returns:
        What the flags and the model decide, and what vLLM only assumes here because it would
        depend on the GPU.

    Raises:
        InputError: no such model, not a hybrid one, or flags that vLLM refuses.
    """
    with _folder(model) as folder:
        child = subprocess.run(
            [sys.executable, "-m", f"{__package__}.layout", "--model", str(folder), *flags],
            env=os.environ | {"MAMBA_RETIRE": "off"},
            capture_output=True,
            text=True,
            check=False,
        )
    if child.returncode:
        lines = child.stderr.strip().splitlines() or ["vLLM said nothing"]
        raise InputError(f"model: {model}: {lines[-1]}")
    figures: dict[str, Any] = json.loads(child.stdout)
    if figures.pop("budget_given"):
        return figures, {}
    return figures, {"budget": figures.pop("budget")}


@contextmanager
def _folder(model: Path) -> Iterator[Path]:
    """The folder vLLM reads the configuration from; a lone file gets one under its usual name."""
    config = model / "config.json" if model.is_dir() else model
    try:
        text = config.read_text()
        json.loads(text)
    except OSError as error:
        raise InputError(f"model: {config}: {error.strerror}.") from None
    except ValueError:
        raise InputError(f"model: {config} is not JSON.") from None
    if model.is_dir():
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(text)
        yield Path(folder)
