"""Queries the package registry through its ordinary clients: uv for lists, pip for files.

No address is configured here: uv and pip have theirs, and a file's address is only passed on.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from email import message_from_bytes
from email.message import Message
from pathlib import Path

from tools.env.provision import CACHE, PREFERRED_PYTHON, ProvisionError
from vllm_mamba_retire.target import CALLER_FILES, MANAGER_FILE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OPENED = CACHE / "opened"
_FILES = (MANAGER_FILE, *CALLER_FILES)


@dataclass(frozen=True)
class Build:
    """One published wheel; a release may have several, for platforms and as rebuilds."""

    name: str
    sha256: str
    url: str

    @property
    def platform(self) -> str:
        """Platform tag, as in ``manylinux_2_28_x86_64``."""
        return self.name.removesuffix(".whl").split("-")[-1]

    @property
    def preference(self) -> tuple[bool, bool, str]:
        """Sort key for the builds of a release: what pip installs on x86-64 comes first."""
        tags = self.name.split("-")
        return ("x86_64" not in self.platform, len(tags) == 5, self.name)


@dataclass(frozen=True)
class Opened:
    """The files of a wheel that the matrix describes.

    Attributes:
        manager: the manager file.
        callers: the files that call it, as text.
        metadata: of the distribution.
    """

    manager: bytes
    callers: list[str]
    metadata: Message


def versions(name: str) -> list[str]:
    """Return every published version of a distribution, newest first."""
    listed = _run(sys.executable, "-m", "pip", "index", "versions", name)
    found = re.search(r"^Available versions: (.+)$", listed, re.MULTILINE)
    if found is None:
        raise ProvisionError(f"pip lists no versions of {name}:\n{listed}")
    return found.group(1).split(", ")


def builds(name: str, version: str) -> list[Build]:
    """Return every published wheel of one version; what pip installs on x86-64 comes first."""
    lock = _run(
        *(sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--no-deps"),
        *("--universal", "--format=pylock.toml", f"--python-version={PREFERRED_PYTHON}"),
        stdin=f"{name}=={version}",
    )
    (package,) = tomllib.loads(lock)["packages"]
    found = [
        Build(wheel["url"].rsplit("/", 1)[1], wheel["hashes"]["sha256"], wheel["url"])
        for wheel in package.get("wheels", ())
    ]
    return sorted(found, key=lambda build: build.preference)


def open_build(build: Build) -> Opened:
    """Fetch a wheel, check its hash, and keep only the sources and metadata that are used."""
    folder = OPENED / f"{build.sha256}-{len(_FILES)}"
    if not folder.exists():
        OPENED.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=OPENED, prefix=".making-") as making:
            kept = Path(making) / "kept"
            kept.mkdir()
            with zipfile.ZipFile(_fetch(build, Path(making))) as wheel:
                (metadata,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
                (kept / "METADATA").write_bytes(wheel.read(metadata))
                for file in _FILES:
                    (kept / file.name).write_bytes(wheel.read(f"vllm/{file.as_posix()}"))
            kept.rename(folder)
    return Opened(
        manager=(folder / MANAGER_FILE.name).read_bytes(),
        callers=[(folder / file.name).read_text("utf-8") for file in CALLER_FILES],
        metadata=message_from_bytes((folder / "METADATA").read_bytes()),
    )


def _fetch(build: Build, folder: Path) -> Path:
    # The wheel may be for another machine; pip takes it when told so.
    _run(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"),
        *("--only-binary=:all:", f"--platform={build.platform}", f"--dest={folder}", build.url),
    )
    wheel = folder / build.name
    digest = hashlib.sha256()
    with wheel.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    found = digest.hexdigest()
    if found != build.sha256:
        raise ProvisionError(f"{build.name} has sha256 {found}, the registry says {build.sha256}")
    return wheel


def _run(*command: str, stdin: str = "") -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ProvisionError(f"{' '.join(command)} failed:\n{done.stderr or done.stdout}")
    return done.stdout
