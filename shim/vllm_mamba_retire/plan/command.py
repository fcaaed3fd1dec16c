"""Takes a pasted command, or a file that has one in it, apart into vLLM's arguments.

The words of a shell, a container engine and a scheduler are skipped, as are flags of vLLM that
decide nothing here.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from packaging.version import Version

from vllm_mamba_retire.replay.scenario import InputError

from .arguments import settings_from

_IMAGE = re.compile(
    r"(?:--image=|(?!-))(?!.*//)(?:[^\s\"'=]*/)?(?:[\w.-]*vllm[\w.-]*(?:@|:(?=[\w$]))|vllm-openai[\w-]*$)"
)
# Tags of vLLM's own images, or of copies of them, are its releases; those of other projects' images
# are theirs ("nvcr.io/nvidia/vllm:25.11.1-py3", "ai-dynamo/vllm-runtime:0.9.0", LMCache's).
_TAG = re.compile(
    r"(?<!lmcache)/vllm(?:-openai(?:-[a-z]+)?)?:v?(0\.\d+\.\d+(?:\.?(?:post|dev|rc)\d+)?)(?![\d.])"
)
# Of a shell, a container engine, or a unit.
_VARIABLE = re.compile(r"(?:Environment=|--env=|-e)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|\((\w+)\)|(\w+))")
_STARTS_SERVER = re.compile(r"vllm\s+serve\b|vllm\.entrypoints|api_server")
_ENDS = re.compile(r"[|;&]+|\d*>+&?.*|#.*")
# The next line belongs to this one, also where it only goes on with a flag.
_JOINED = re.compile(r"\\\r?\n|\r?\n(?=\s*-)")
_COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
_ARRAY = re.compile(r"^[ \t]*(\w+)=\(([^()]*)\)", re.MULTILINE)
_INSTRUCTION = re.compile(r"[ \t]*(FROM|ARG|ENV|ENTRYPOINT|CMD)[ \t]+(.*)", re.IGNORECASE)
_SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-sc": "speculative-config",
}
_WITHOUT_VALUE = ("enable_", "disable_", "no_", "async_scheduling", "trust_", "enforce_")
_SIZES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_RUNNER, _RAY = "VLLM_USE_V2_MODEL_RUNNER", "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)")
_OTHER_PROGRAM = re.compile(r"(?:^|/)(?:sh|bash|ray|python3?|sleep|[^/]+\.(?:sh|py))$")
# Where a container says what it runs; the last two are KServe's.
_SAYS = ("image", "entrypoint", "command", "args", "runtime", "modelFormat")


@dataclass(frozen=True, slots=True)
class Command:
    """How a server is started.

    Attributes:
        model: the model's path or name, where it is told.
        flags: what vLLM is given, without the model; a configuration file is written out.
        version: release in the image's tag.
        environment: variables that are set for it.
    """

    model: str | None = None
    flags: tuple[str, ...] = ()
    version: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings by the names of `deployment.SETTINGS`.

        Raises:
            InputError: a flag that decides something has a value that cannot be read.
        """
        settings = settings_from(_arguments(_options(self.flags)))
        settings.pop("block", None)  # vLLM enlarges it until it holds a state
        if self.version is not None:
            settings["version"] = self.version
        if self.environment.get(_RUNNER) in ("0", "1"):
            settings["runner"] = "V2" if self.environment[_RUNNER] == "1" else "V1"
        if self.environment.get(_RAY) in ("0", "1"):
            settings["ray_v2"] = self.environment[_RAY] == "1"
        return settings


@dataclass(frozen=True, slots=True)
class _Option:
    """A flag with the words it is made of, or a loose word, which has no name."""

    name: str
    value: str | None
    words: tuple[str, ...]


def read_command(words: Sequence[str], environment: Mapping[str, str] | None = None) -> Command:
    """A command as a shell has split it, or as one word that holds all of it.

    Args:
        words: the words.
        environment: variables that are set around it.

    Raises:
        InputError: its quotes do not close, variables that are not set here stand for flags, or
            its configuration file cannot be read.
    """
    words = list(_split(words))
    known = dict(environment or {})
    for word in words:
        if found := _VARIABLE.fullmatch(word):
            known[found[1]] = _filled_in(found[2], known)
    at, version = _start([_filled_in(word, known) for word in words])
    if at == 0 and any(word == ";" for word in words[:-1]):
        raise InputError("command: no 'vllm serve' in it; paste the command that starts vLLM.")
    own = takewhile(lambda word: not _ENDS.fullmatch(word), words[at:])
    options = list(_options(_filled_in(word, known) for word in own))
    for option in options:
        if option.name == "config":
            options = [*_options(_configured(option.value, version)), *options]  # flags overrule it
            break
    named = [option for option in options if option.name in ("model", "model_tag")]
    model = next((option for option in [*reversed(named), *options] if not _is_flag(option)), None)
    flags = [
        word
        for option in options
        if option is not model and option.name not in ("model", "model_tag", "config")
        for word in option.words
    ]
    return Command(model.value if model else None, tuple(flags), version, known)


def read_file(path: Path) -> Command:
    """The command in a compose file, Kubernetes manifest, Dockerfile, systemd unit or script.

    Raises:
        InputError: it cannot be read, or does not start one vLLM server.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise InputError(f"file: {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise InputError(f"file: {path} is not text.") from None
    if path.suffix in (".yaml", ".yml"):
        try:
            documents = list(yaml.safe_load_all(text))
        except yaml.YAMLError:
            raise InputError(f"file: {path} is not YAML; render a Helm chart first.") from None
    elif "dockerfile" in path.name.lower() or "containerfile" in path.name.lower():
        documents = [_built(text)]
    else:
        return read_command([text])
    known = _beside(path)
    found = [
        command for each in _containers(documents) if (command := _serving(each, known)) is not None
    ]
    if len(found) != 1:
        raise InputError(
            f"file: {path} has {len(found) or 'no'} containers that serve vLLM; paste the command "
            "of one behind --, or render a Helm chart first (helm template)."
        )
    return found[0]


def _split(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        nested = _STARTS_SERVER.search(word) and not word.startswith(("{", "["))
        if word and (nested or len(words) == 1):
            split = _lex(word)
            if split != [word]:
                yield from _split([*split, ""])
                continue
        if word.strip() not in ("", "\\", "-"):
            yield word


def _lex(text: str) -> list[str]:
    """The words of a shell, arrays written out; a line that ends a command is a semicolon."""
    text = _COMMENT.sub("", text)
    for name, lines in _ARRAY.findall(text):
        words = " ".join(re.sub(r"\s#.*", "", lines).split("\n"))
        for reference in (f'"${{{name}[@]}}"', f"${{{name}[@]}}"):
            text = text.replace(reference, words)
    text = _JOINED.sub(" ", _ARRAY.sub("", text))
    lexer = shlex.shlex(text, posix=True, punctuation_chars="\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        return [";" if word and not word.strip("\n") else word for word in lexer]
    except ValueError as error:
        raise InputError(f"command: {text[:80]!r} cannot be read: {error}.") from None


def _start(words: list[str]) -> tuple[int, str | None]:
    """Where vLLM's own words begin, and the release that an image's tag in front of them names."""
    at, version = 0, None
    for number, word in enumerate(words):
        if _IMAGE.match(word):
            tag = _TAG.search(f"/{word}")
            at, version = number + 1, tag and tag[1]
        elif word.startswith("vllm.entrypoints") or word.endswith("api_server.py"):
            at = number + 1
        elif PurePosixPath(word).name == "vllm" and words[number + 1 : number + 2] == ["serve"]:
            return number + 2, version
        elif (number == at and word == "serve") or (number == at and _VARIABLE.fullmatch(word)):
            at = number + 1
    return at, version


def _filled_in(word: str, environment: Mapping[str, str]) -> str:
    """The word with the variables that are known; ``$$`` is a compose file's ``$``."""
    return _REFERENCE.sub(
        lambda found: environment.get(found[1] or found[3] or found[4], found[2] or found[0]),
        word.replace("$$", "$"),
    )


def _options(words: Iterable[str]) -> Iterator[_Option]:
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("-"):
            yield _Option("", word, (word,))
            continue
        flag, found, value = word.partition("=")
        name = _SHORT.get(flag, flag.lstrip("-")).replace("-", "_")
        if not found and left and _is_value(left[0], name):
            yield _Option(name, left[0], (word, left.pop(0)))
        else:
            yield _Option(name, value if found else None, (word,))


def _is_value(word: str, name: str) -> bool:
    if name.startswith(_WITHOUT_VALUE):
        return word.lower() in ("true", "false")
    return re.match(r"-(?!\d)", word) is None


def _is_flag(option: _Option) -> bool:
    return option.name not in ("", "model", "model_tag")


def _configured(name: str | None, version: str | None) -> Iterator[str]:
    """The flags that vLLM makes of a file behind ``--config``; before 0.28 none of a ``false``."""
    negates = version is None or Version(version) >= Version("0.28")
    try:
        flags = yaml.safe_load(Path(name or "").read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        flags = None
    if not isinstance(flags, dict):
        raise InputError(
            f"config: {name} is no readable YAML file of flags here; give the file's path on this "
            "machine, or its flags in place of --config."
        )
    for key, value in flags.items():
        if isinstance(value, bool):
            yield from [f"--{key}"] if value else [f"--no-{key}"] * negates
            continue
        yield f"--{key}"
        if isinstance(value, dict):
            yield json.dumps(value)
        else:
            yield from map(str, value if isinstance(value, list) else [value])


def _arguments(options: Iterable[_Option]) -> dict[str, Any]:
    """vLLM's arguments by their Python names; values are read as far as they can be."""
    arguments: dict[str, Any] = {}
    for option in options:
        name, value = option.name, option.value
        if not name:
            if str(value).startswith("$"):
                raise InputError(f"command: {value} is not set here; put its flags in its place.")
        elif value is None:
            arguments[name.removeprefix("no_")] = not name.startswith("no_")
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


def _built(text: str) -> dict[str, Any]:
    """The container that a Dockerfile's last stage makes."""
    container: dict[str, Any] = {}
    environment: dict[str, str] = {}
    for line in _COMMENT.sub("", text).replace("\\\n", " ").splitlines():
        if (found := _INSTRUCTION.match(line)) is None:
            continue
        name, value = found[1].upper(), _filled_in(found[2], environment)
        words = _words(value)
        if name == "FROM":
            image = next((word for word in words if not word.startswith("-")), "")
            if _IMAGE.match(image):
                container["image"] = image
        elif name in ("ENTRYPOINT", "CMD"):
            container["command" if name == "CMD" else "entrypoint"] = _read(value)
        else:
            environment |= dict(word.split("=", 1) for word in words if "=" in word)
    return {**container, "environment": environment}


def _containers(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if "image" in node or "args" in node or "command" in node:
            yield node
        for child in node.values():
            yield from _containers(child)
    elif isinstance(node, list):
        for child in node:
            yield from _containers(child)


def _beside(path: Path) -> dict[str, str]:
    """Variables that compose reads from the file ``.env`` beside its own."""
    try:
        lines = path.with_name(".env").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    pairs = filter(None, (_VARIABLE.fullmatch(line.strip()) for line in lines))
    return {found[1]: found[2].strip("'\"") for found in pairs}


def _serving(container: dict[str, Any], known: Mapping[str, str]) -> Command | None:
    says = {name: container[name] for name in _SAYS if name in container}
    others = str({name: says[name] for name in says if name != "args"})  # a proxy names it there
    parts = [word for name in ("command", "args") for word in _words(says.get(name))]
    if "vllm" not in others.lower() and not _STARTS_SERVER.search(" ".join(parts)):
        return None
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
    environment = {
        **known,
        **{str(name): _filled_in(str(value), known) for name, value in (listed or {}).items()},
    }
    start = [word for name in ("image", "entrypoint") for word in _words(says.get(name))]
    command = read_command([*start, *parts, ""], environment)
    # A worker of a cluster has the image and another command.
    return None if _OTHER_PROGRAM.search(command.model or "") else command


def _words(part: Any) -> list[str]:
    if isinstance(part, str):
        try:
            return shlex.split(part)
        except ValueError:
            return []
    return [str(word) for word in part] if isinstance(part, list) else []
