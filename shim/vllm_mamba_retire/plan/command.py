"""Takes a pasted command, a compose file or a Kubernetes manifest apart into vLLM's arguments.

A shell's, a container engine's and a scheduler's own words are skipped, as are flags of vLLM that
decide nothing here.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from vllm_mamba_retire.replay.scenario import InputError

from .arguments import settings_from

_IMAGE = re.compile(
    r"(?:^|/)[\w.-]*vllm[\w.-]*(?:@|:(?:v?(\d+\.\d+\.\d+(?:\.?(?:post|dev|rc)\d+)?)?))"
)
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ENDS = re.compile(r"[|;&]+|\d*>+&?.*")
_SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-sc": "speculative-config",
}
_SIZES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)")


@dataclass(frozen=True, slots=True)
class Command:
    """How a server is started.

    Attributes:
        model: the model's path or name, where it is told.
        flags: what vLLM is given, the model left out.
        version: release in the image's tag.
        environment: variables that are set for it.
    """

    model: str | None = None
    flags: tuple[str, ...] = ()
    version: str | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings by the names of `deployment.SETTINGS`.

        Raises:
            InputError: a flag that decides something has a value that cannot be read.
        """
        settings = settings_from(_arguments(self.flags))
        if self.version is not None:
            settings["version"] = self.version
        if self.environment.get(_RUNNER) in ("0", "1"):
            settings["runner"] = "V2" if self.environment[_RUNNER] == "1" else "V1"
        return settings


def read_command(words: Sequence[str]) -> Command:
    """A command as a shell has split it, or as one word that holds all of it.

    Raises:
        InputError: its quotes do not close.
    """
    words = list(_split(words))
    at, image = _start(words)
    environment = {
        found[1]: found[2] for word in words[:at] if (found := _VARIABLE.fullmatch(word))
    }
    flags = list(takewhile(lambda word: not _ENDS.fullmatch(word), words[at:]))
    model = None
    if flags and not flags[0].startswith("-"):
        model, *flags = flags
    for number, word in enumerate(flags):
        name, joined, value = word.partition("=")
        if name in ("--model", "--model-tag"):
            model = value if joined else next(iter(flags[number + 1 :]), model)
            del flags[number : number + (1 if joined else 2)]
            break
    return Command(model, tuple(flags), image, environment)


def read_manifest(path: Path) -> Command:
    """The vLLM container of a compose file or a Kubernetes manifest.

    Raises:
        InputError: it cannot be read, or has none or several.
    """
    try:
        documents = list(yaml.safe_load_all(path.read_text()))
    except OSError as error:
        raise InputError(f"manifest: {path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise InputError(f"manifest: {path} is not YAML.") from None
    found = [command for container in _containers(documents) if (command := _serving(container))]
    if len(found) != 1:
        raise InputError(
            f"manifest: {path} has {len(found) or 'no'} containers that serve vLLM; paste the "
            "command of one behind --."
        )
    return found[0]


def _split(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if len(words) == 1 or (any(c.isspace() for c in word) and "vllm" in word):
            try:
                split = shlex.split(word)
            except ValueError as error:
                raise InputError(f"command: {word!r} cannot be read: {error}.") from None
            if split != [word]:
                yield from _split(split)
                continue
        if word.strip() not in ("", "\\"):
            yield word


def _start(words: list[str]) -> tuple[int, str | None]:
    """Where vLLM's own words begin, and the release that an image's tag in front of them names."""
    at, version = 0, None
    for number, word in enumerate(words):
        if (image := _IMAGE.search(word)) and not word.startswith("-"):
            at, version = number + 1, image[1]
        elif word.startswith("vllm.entrypoints") or word.endswith("api_server.py"):
            at = number + 1
        elif PurePosixPath(word).name == "vllm" and words[number + 1 : number + 2] == ["serve"]:
            return number + 2, version
        elif (number == at and word == "serve") or (number == at and _VARIABLE.fullmatch(word)):
            at = number + 1
    return at, version


def _arguments(flags: Sequence[str]) -> dict[str, Any]:
    """Flags as vLLM's arguments by their Python names; values are read as far as they can be."""
    arguments: dict[str, Any] = {}
    words = list(flags)
    while words:
        word = words.pop(0)
        name, found, value = word.partition("=")
        name = _SHORT.get(name, name.lstrip("-")).replace("-", "_")
        if not word.startswith("-"):
            continue
        if not found and words and not re.match(r"-(?!\d)", words[0]):
            value, found = words.pop(0), "="
        if not found:
            no = name.startswith("no_")
            arguments[name.removeprefix("no_") if no else name] = not no
        elif "." in name:  # --speculative-config.method mtp
            outer, _, inner = name.partition(".")
            nested = arguments.setdefault(outer, {})
            if isinstance(nested, dict):
                nested[inner] = _read(value)
        else:
            arguments[name] = _read(value)
    return arguments


def _read(text: str) -> Any:
    if number := _NUMBER.fullmatch(text.replace("_", "")):
        return int(float(number[1]) * _SIZES.get(number[2], 1))
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return json.loads(text)
    except ValueError:
        return text


def _containers(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if "image" in node or "args" in node or "command" in node:
            yield node
        for child in node.values():
            yield from _containers(child)
    elif isinstance(node, list):
        for child in node:
            yield from _containers(child)


def _serving(container: dict[str, Any]) -> Command | None:
    parts = (container.get(name) for name in ("image", "entrypoint", "command", "args"))
    words = [word for part in parts for word in _words(part)]
    if not any("vllm" in word for word in words):
        return None
    command = read_command(words)
    listed = container.get("env", container.get("environment", {}))
    if isinstance(listed, list):
        pairs = (
            (each.get("name"), each.get("value"))
            if isinstance(each, dict)
            else each.partition("=")[::2]
            for each in listed
            if isinstance(each, (dict, str))
        )
        listed = dict(pairs)
    variables = {str(name): str(value) for name, value in (listed or {}).items()}
    return Command(
        command.model, command.flags, command.version, {**variables, **command.environment}
    )


def _words(part: Any) -> list[str]:
    if isinstance(part, str):
        try:
            return shlex.split(part)
        except ValueError:
            return []
    return [str(word) for word in part] if isinstance(part, list) else []
