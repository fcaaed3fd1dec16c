"""Real trees of a release that a test may change."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import vllm_mamba_retire
from vllm_mamba_retire.target import MANAGER_FILE

LIVE, LATENT, NATIVE = "0.29.0", "0.25.1", "0.30.0"
SERIES = Path(__file__).parents[2] / "patches" / f"v{LIVE}"
_VERSION_FILE = Path("_version.py")


@dataclass(frozen=True)
class Site:
    """A folder as it stands on the path, with one vLLM in it."""

    folder: Path

    @property
    def package(self) -> Path:
        return self.folder / "vllm"

    @property
    def manager(self) -> Path:
        return self.package / MANAGER_FILE

    def edit(self, file: Path, *changes: tuple[str, str]) -> None:
        """Replace text in a file, every occurrence; each must be there."""
        text = (self.package / file).read_text()
        for before, after in changes:
            assert before in text, f"{file} has no {before!r}"
            text = text.replace(before, after)
        self.write(file, text)

    def write(self, file: Path, text: str | bytes) -> None:
        path = self.package / file
        path.unlink()  # it may share its bytes with the release's own tree
        path.write_bytes(text.encode() if isinstance(text, str) else text)

    def edit_manager(self, *changes: tuple[str, str]) -> None:
        self.edit(MANAGER_FILE, *changes)

    def write_manager(self, text: str | bytes) -> None:
        self.write(MANAGER_FILE, text)

    def call_itself(self, version: str) -> None:
        """Change the version in the code and in the metadata's folder name."""
        (metadata,) = self.folder.glob("vllm-*.dist-info")
        old = metadata.name.removeprefix("vllm-").split("+")[0].removesuffix(".dist-info")
        self.edit(_VERSION_FILE, (f"'{old}'", f"'{version}'"))

    def path(self) -> str:
        """``PYTHONPATH`` with this vLLM first."""
        return os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])


def copied(release: Path, folder: Path) -> Site:
    """A tree whose files share their bytes with the release's until they are changed."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(release, folder, copy_function=_link, ignore=ignore)
    return Site(folder)


def apply(tree: Site, patch: str) -> None:
    """With GNU patch, which refuses what does not fit to the line."""
    data = tree.manager.read_bytes()
    tree.write_manager(data)  # not the file that the release's own tree links to
    command = ["patch", "-p1", "--fuzz=0", "--no-backup-if-mismatch", "-d", str(tree.folder)]
    done = subprocess.run(command, input=patch, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert tree.manager.read_bytes() != data


def own_path() -> str:
    """Where this package comes from, and nothing else of the session's path."""
    return str(Path(vllm_mamba_retire.__file__).parents[1])


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
