"""Which vLLM an image would serve, told from its files alone.

The interpreter is the one that the `vllm` command names, else the Python found first on the
image's PATH. Its search path is rebuilt from PYTHONPATH, its site folders and the .pth files in
them, as far as these are plain paths: code in them is not run.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .config import Config
from .tree import ImageError, Tree, is_interpreter

_PYTHON_NAMES = ("python3", "python")
_VERSION = re.compile(r"python(3\.\d+)")
_MACHINES = {62: "amd64", 183: "arm64", 21: "ppc64le", 22: "s390x", 243: "riscv64"}  # ELF's numbers
_MARK = "vllm/__init__.py"


@dataclass(frozen=True, slots=True)
class Serving:
    """What starts when the image serves.

    Attributes:
        interpreter: path of the Python, as it is called.
        python: its version, as ``3.12``; None where no file tells.
        architecture: of the interpreter's file.
        site: folder of the search path that holds the `vllm` package.
        package: that package, links followed.
        certain: the folder is on the interpreter's search path, as far as files tell.
        others: further `vllm` packages in the image.
        path: the search path.
    """

    interpreter: str
    python: str | None
    architecture: str | None
    site: str
    package: str
    certain: bool
    others: tuple[str, ...]
    path: tuple[str, ...]


def find_serving(config: Config, tree: Tree) -> Serving:
    """The interpreter and vLLM of an image.

    Raises:
        ImageError: it has no Python, no vLLM, or several and no way to tell which.
    """
    interpreter = _interpreter(config, tree)
    if interpreter is None:
        raise ImageError(f"{config.name} has no Python; nothing in it can serve vLLM")
    version = _version(tree, interpreter)
    path = tuple(dict.fromkeys(_search_path(config, tree, interpreter, version)))
    on_path = next((folder for folder in path if tree.read(f"{folder}/{_MARK}") is not None), None)
    packages = sorted(found for found in tree.files if f"/{found}".endswith(f"/{_MARK}"))
    sites = [found.removesuffix(_MARK).rstrip("/") for found in packages]
    if not sites:
        raise ImageError(f"{config.name} has no vLLM")
    if on_path is None and len(sites) > 1:
        listed = ", ".join(f"/{site}/vllm" for site in sites)
        raise ImageError(
            f"{config.name} has several vLLM trees ({listed}), and none is on the search path of "
            f"/{interpreter}"
        )
    site = sites[0] if on_path is None else on_path
    package = tree.resolve(f"{site}/vllm")
    return Serving(
        interpreter=interpreter,
        python=version,
        architecture=_architecture(tree, interpreter) or config.architecture,
        site=site,
        package=package,
        certain=on_path is not None,
        others=tuple(f"/{other}/vllm" for other in sites if f"{other}/vllm" != package),
        path=path,
    )


def _interpreter(config: Config, tree: Tree) -> str | None:
    for folder in config.path:
        # The first line of the script that serves names its interpreter.
        first = tree.text(f"{folder}/vllm").partition("\n")[0]
        named = first.removeprefix("#!").split()[:1] if first.startswith("#!/") else []
        if named and tree.read(named[0]) is not None and is_interpreter(named[0]):
            return named[0].strip("/")
    at = (f"{folder}/{name}" for folder in config.path for name in _PYTHON_NAMES)
    on_path = next((path for path in at if tree.read(path) is not None), None)
    if on_path is not None:
        return on_path
    anywhere = [path for path in (*tree.files, *tree.links) if is_interpreter(path)]
    return min(anywhere, key=lambda path: (path.count("/"), path), default=None)


def _version(tree: Tree, interpreter: str) -> str | None:
    settings = tree.text(_home(interpreter) + "/pyvenv.cfg")
    told = re.search(r"^version(?:_info)?\s*=\s*(3\.\d+)", settings, re.MULTILINE)
    told = told or _VERSION.search(tree.resolve(interpreter))
    if told is None:
        below = _home(tree.resolve(interpreter)) + "/"
        inside = (_VERSION.search(path) for path in tree.files if path.startswith(below))
        told = next((found for found in inside if found), None)
    return told.group(1) if told else None


def _search_path(
    config: Config, tree: Tree, interpreter: str, version: str | None
) -> Iterator[str]:
    if config.command[:1] and is_interpreter(f"bin/{posixpath.basename(config.command[0])}"):
        yield config.folder  # `python -m` looks where it starts
    for folder in config.environment.get("PYTHONPATH", "").split(":"):
        if folder:
            yield posixpath.normpath(posixpath.join("/", config.folder, folder)).strip("/")
    for site in _sites(tree, interpreter, version):
        yield site
        for name in sorted(tree.names_in(site)):
            if name.endswith(".pth"):
                yield from _pth_folders(tree, site, name)


def _pth_folders(tree: Tree, site: str, name: str) -> Iterator[str]:
    for line in tree.text(f"{site}/{name}").splitlines():
        entry = line.strip()
        if entry and not entry.startswith(("#", "import ", "import\t")):
            yield posixpath.normpath(posixpath.join("/", site, entry)).strip("/")


def _sites(tree: Tree, interpreter: str, version: str | None) -> Iterator[str]:
    settings = tree.text(_home(interpreter) + "/pyvenv.cfg")
    if settings:
        yield f"{_home(interpreter)}/lib/python{version}/site-packages"
        if not re.search(r"^include-system-site-packages\s*=\s*true", settings, re.MULTILINE):
            return
    home = _home(tree.resolve(interpreter))
    yield f"root/.local/lib/python{version}/site-packages"
    yield f"{home}/local/lib/python{version}/dist-packages"  # Debian's, for what pip installs
    yield f"{home}/lib/python{version}/site-packages"
    yield f"{home}/lib/python3/dist-packages"
    yield f"{home}/lib/python{version}/dist-packages"


def _home(interpreter: str) -> str:
    return posixpath.dirname(posixpath.dirname(interpreter))


def _architecture(tree: Tree, interpreter: str) -> str | None:
    header = tree.read(interpreter) or b""
    if header[:4] != b"\x7fELF":
        return None
    order = "big" if header[5] == 2 else "little"
    return _MACHINES.get(int.from_bytes(header[18:20], order))  # type: ignore[arg-type]
