"""Finds the vLLM that an image would serve, from its files and configuration.

The command is followed if it starts a Python, or a script whose ``#!`` line names one. The search
path is rebuilt from the interpreter's flags, PYTHONPATH, its site folders and the plain lines of
their .pth files. A shell, ``tini`` or ``uv run`` is not followed: then every interpreter of the
image is a candidate.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from .image import Config, ImageError, Root, is_interpreter

_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_VERSION = re.compile(r"python(3\.\d+)")
_MACHINES = {62: "amd64", 183: "arm64", 21: "ppc64le", 22: "s390x", 243: "riscv64"}  # ELF's numbers
_MARK = "vllm/__init__.py"
_MAX_FOLDERS = 10_000  # of a search path
_MAX_INTERPRETERS = 100


@dataclass(frozen=True, slots=True)
class Serving:
    """The interpreter and the vLLM that an image serves with.

    Attributes:
        interpreter: path of the Python, as it is called.
        python: its version, as ``3.12``; None if no file has it.
        architecture: of the interpreter's file.
        path: the search path.
        site: folder that holds the `vllm` package.
        package: that package, links followed.
        certain: by the image's files, the folder is on the interpreter's search path.
        followed: the image's command starts this interpreter.
        others: further `vllm` packages in the image.
    """

    interpreter: str
    python: str | None
    architecture: str | None
    path: tuple[str, ...]
    site: str
    package: str
    certain: bool
    followed: bool
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Start:
    """An interpreter, the folder it searches first, and the letters of its options."""

    interpreter: str
    folder: str | None = None
    options: frozenset[str] = frozenset()


def find_serving(config: Config, root: Root) -> Serving:
    """Find the interpreter and vLLM of an image.

    Raises:
        ImageError: it has no Python or no vLLM.
    """
    packages = _packages(root)
    if not packages:
        raise ImageError(f"{config.name} has no vLLM")
    followed = _follow(config, root)
    # Only the command says in which folder a Python starts, and with which options.
    starts = [followed] if followed else [_Start(path) for path in _interpreters(config, root)]
    if not starts:
        raise ImageError(f"{config.name} has no Python; nothing in it can serve vLLM")
    site, start, path = None, starts[0], _search_path(config, root, starts[0])
    for candidate in starts:
        searched = _search_path(config, root, candidate)
        site = next((at for at in searched if root.read(f"{at}/{_MARK}") is not None), None)
        if site is not None:
            start, path = candidate, searched
            break
    chosen = site if site is not None else next(iter(packages.values()))
    served = root.resolve(f"{chosen}/{_MARK}")
    return Serving(
        interpreter=start.interpreter,
        python=_version(root, start.interpreter),
        architecture=_architecture(root, start.interpreter) or config.architecture,
        path=path if site is not None else (*path, chosen),
        site=chosen,
        package=root.resolve(f"{chosen}/vllm") or "",
        certain=site is not None,
        followed=followed is not None,
        others=tuple(
            posixpath.join("/", at, "vllm") for file, at in packages.items() if file != served
        ),
    )


def _packages(root: Root) -> dict[str | None, str]:
    """Return the folder of every `vllm` package, keyed by its first file with links followed."""
    found = [path for path in (*root.files, *root.links) if f"/{path}".endswith(f"/{_MARK}")]
    found += [f"{path}/__init__.py" for path in root.links if f"/{path}".endswith("/vllm")]
    sites = (path.removesuffix(_MARK).rstrip("/") for path in sorted(found))
    return {
        root.resolve(f"{site}/{_MARK}"): site
        for site in sites
        if root.read(f"{site}/{_MARK}") is not None
    }


def _follow(config: Config, root: Root) -> _Start | None:
    """Return the interpreter that the image's command starts; None if that is not certain."""
    words = list(config.command)
    program = _which(config, root, words[0]) if words else None
    if program is not None and not is_interpreter(program):
        words = [*_first_line(root, program), f"/{program}"]
        program = _which(config, root, words[0])
    if program is None or not is_interpreter(program):
        return None
    return _start(config, root, program, words[1:])


def _start(config: Config, root: Root, interpreter: str, arguments: Sequence[str]) -> _Start:
    options: set[str] = set()
    folder: str | None = config.folder
    rest = iter(arguments)
    for word in rest:
        if not word.startswith("-"):
            script = root.resolve(posixpath.join(config.folder, word)) or ""
            folder = posixpath.dirname(script)
            break
        letters = word[1:] if word[1:2] != "-" else ""
        code = re.match(r"[^cmWX]*[cm]", letters)
        options |= set(re.sub(r"[cmWX].*", "", letters))
        if code or word == "-":
            break
        if word == "--check-hash-based-pycs" or letters[-1:] in ("W", "X"):
            next(rest, None)
    if options & {"I", "P"} or (config.environment.get("PYTHONSAFEPATH") and "E" not in options):
        folder = None
    return _Start(interpreter, folder, frozenset(options))


def _which(config: Config, root: Root, command: str) -> str | None:
    searched = config.environment.get("PATH", _DEFAULT_PATH).split(":")
    folders = [""] if "/" in command else searched
    paths = (posixpath.join("/", config.folder, at, command).lstrip("/") for at in folders)
    return next((path for path in paths if root.read(path) is not None), None)


def _first_line(root: Root, script: str) -> list[str]:
    """The interpreter that a script names, and its options."""
    first, _, rest = root.text(script).partition("\n")
    # What installers write where a path is too long for a #! line, or has blanks.
    if long := re.match(r"""'''exec' (["']?)(/[^"'$]+?)\1 "\$0" """, rest):
        return [long[2]]
    words = first[2:].split() if first.startswith("#!") else []
    if words and posixpath.basename(words[0]) == "env":
        words = [word for word in words[1:] if word != "-S"]
    return words


def _interpreters(config: Config, root: Root) -> Iterator[str]:
    """Pythons of the image: those that PATH finds first, then the others by depth."""
    script = _which(config, root, "vllm")
    named = _first_line(root, script)[:1] if script else []
    first = [_which(config, root, name) for name in (*named, "python3", "python")]
    below_bin = (p for p in (*root.files, *root.links) if "/bin/python" in f"/{p}")
    anywhere = (path for path in below_bin if is_interpreter(path) and root.read(path))
    found = [*first, *sorted(anywhere, key=lambda path: (path.count("/"), path))]
    known = dict.fromkeys(path for path in found if path and is_interpreter(path))
    yield from islice(known, _MAX_INTERPRETERS)


def _search_path(config: Config, root: Root, start: _Start) -> tuple[str, ...]:
    folders = islice(_folders(config, root, start), _MAX_FOLDERS)
    resolved = (root.resolve(posixpath.join(config.folder, folder)) for folder in folders)
    # As Python does, without what is not there.
    return tuple(dict.fromkeys(at for at in resolved if at is not None and root.names_in(at)))


def _folders(config: Config, root: Root, start: _Start) -> Iterator[str]:
    """Return the folders that Python puts on ``sys.path``; relative paths stay relative."""
    isolated = start.options & {"E", "I"}
    environment = {} if isolated else config.environment
    if start.folder is not None:
        yield f"/{start.folder}"
    yield from filter(None, environment.get("PYTHONPATH", "").split(":"))
    if "S" in start.options:
        return
    user = environment.get("PYTHONUSERBASE") or f"{_user_home(config, root)}/.local"
    if start.options & {"s", "I"} or environment.get("PYTHONNOUSERSITE"):
        user = ""
    for site in _sites(root, start.interpreter, user):
        yield f"/{site}"
        for name in root.names_in(site):
            if name.endswith(".pth"):
                lines = map(str.strip, root.text(f"{site}/{name}").splitlines())
                # Code in them is not run.
                paths = (e for e in lines if e and not e.startswith(("#", "import ", "import\t")))
                yield from (posixpath.join("/", site, path) for path in paths)


def _sites(root: Root, interpreter: str, user: str) -> Iterator[str]:
    version = _version(root, interpreter)
    settings = root.text(f"{_home(interpreter)}/pyvenv.cfg")
    if settings:
        yield f"{_home(interpreter)}/lib/python{version}/site-packages"
        if not re.search(r"^include-system-site-packages\s*=\s*true", settings, re.M | re.I):
            return
    if user:
        yield f"{user}/lib/python{version}/site-packages"
    base = _base(root, interpreter)
    yield f"{base}/local/lib/python{version}/dist-packages"  # Debian's, for what pip installs
    yield f"{base}/lib/python{version}/site-packages"
    yield f"{base}/lib/python3/dist-packages"
    yield f"{base}/lib/python{version}/dist-packages"


def _user_home(config: Config, root: Root) -> str:
    if home := config.environment.get("HOME"):
        return home
    user = config.user.partition(":")[0] or "0"
    lines = (line.split(":") for line in root.text("etc/passwd").splitlines())
    homes = (fields[5] for fields in lines if len(fields) > 5 and user in (fields[0], fields[2]))
    # Engines take the root folder for a user that the image does not list.
    return next(homes, "/root" if user in ("0", "root") else "/")


def _home(interpreter: str) -> str:
    return posixpath.dirname(posixpath.dirname(interpreter))


def _base(root: Root, interpreter: str) -> str:
    return _home(root.resolve(interpreter) or interpreter)


def _version(root: Root, interpreter: str) -> str | None:
    settings = root.text(f"{_home(interpreter)}/pyvenv.cfg")
    told = re.search(r"^version(?:_info)?\s*=\s*(3\.\d+)", settings, re.MULTILINE)
    told = told or _VERSION.search(root.resolve(interpreter) or "")
    if told is None:
        below = _base(root, interpreter) + "/"
        inside = (_VERSION.search(path) for path in root.files if path.startswith(below))
        told = next((found for found in inside if found), None)
    return told.group(1) if told else None


def _architecture(root: Root, interpreter: str) -> str | None:
    header = root.read(interpreter) or b""
    if header[:4] != b"\x7fELF":
        return None
    return _MACHINES.get(
        int.from_bytes(header[18:20], "big" if header[5:6] == b"\x02" else "little")
    )
