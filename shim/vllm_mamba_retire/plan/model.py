"""Asks the installed vLLM, in a child process, what it makes of a model and its serving flags."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_mamba_retire import child
from vllm_mamba_retire.replay.scenario import InputError


def find_model(name: str | None) -> Path | None:
    """A pasted command's model: a local folder, or a hub model that the local cache holds."""
    if name is None:
        return None
    if (Path(name).expanduser() / "config.json").is_file():
        return Path(name).expanduser()
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    snapshots = hub / f"models--{name.replace('/', '--')}" / "snapshots"
    return next((config.parent for config in sorted(snapshots.glob("*/config.json"))), None)


def read_model(model: Path, flags: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Settings by the names of `deployment.SETTINGS`, by where they come from.

    Args:
        model: a local folder with a config.json, or such a file.
        flags: flags as for ``vllm serve``.

    Returns:
        What the flags and the model decide, what vLLM only assumes here because it would depend
        on the GPU, and the configuration's own architecture and length, which need no vLLM.

    Raises:
        InputError: no such model, not a hybrid one, flags that vLLM refuses, or no vLLM.
    """
    with _folder(model) as (folder, config):
        try:
            figures: dict[str, Any] = child.ask(
                f"{__package__}.layout",
                {"model": str(folder), "flags": list(flags)},
                environment={"MAMBA_RETIRE": "off"},
            )
        except child.ChildError as error:
            raise InputError(f"model: {model}: {str(error).splitlines()[-1]}") from None
    architectures = config.get("architectures") or [None]
    sources = {"vLLM": figures, "config.json": {"architecture": architectures[0]}}
    if not figures.pop("budget_given"):
        sources["vLLM's default without a GPU"] = {"budget": figures.pop("budget")}
    return sources


@contextmanager
def _folder(model: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The folder vLLM reads the configuration from, and that configuration; a lone file gets a
    folder under its usual name."""
    path = model / "config.json" if model.is_dir() else model
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"model: {path}: {error.strerror}.") from None
    except ValueError:
        raise InputError(f"model: {path} is not JSON.") from None
    if not isinstance(config, dict):
        raise InputError(f"model: {path} is no model configuration.")
    if model.is_dir():
        yield model, config
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield Path(folder), config
