"""Real trees, copied from a release and then changed as people change them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_mamba_retire.evidence import collect_evidence
from vllm_mamba_retire.releases import Matrix
from vllm_mamba_retire.target import MANAGER_FILE, read_target
from vllm_mamba_retire.verdict import Verdict, decide

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
        path = self.package / file
        text = path.read_text()
        for before, after in changes:
            assert before in text, f"{file} has no {before!r}"
            text = text.replace(before, after)
        path.unlink()  # it may share its bytes with the release's own tree
        path.write_text(text)

    def edit_manager(self, *changes: tuple[str, str]) -> None:
        self.edit(MANAGER_FILE, *changes)

    def call_itself(self, version: str) -> None:
        """Change the version in the code and in the metadata's folder name."""
        (metadata,) = self.folder.glob("vllm-*.dist-info")
        old = metadata.name.removeprefix("vllm-").split("+")[0].removesuffix(".dist-info")
        self.edit(_VERSION_FILE, (f"'{old}'", f"'{version}'"))

    def path(self) -> str:
        """``PYTHONPATH`` with this vLLM first."""
        return os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])


@pytest.fixture
def site(tmp_path: Path, trees: Path) -> Callable[[str], Site]:
    """Makes a tree of a release that a test may change."""

    def make(version: str, name: str = "site") -> Site:
        folder = tmp_path / name
        shutil.copytree(
            trees / version,
            folder,
            copy_function=_link,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        return Site(folder)

    return make


@pytest.fixture
def seen(matrix: Matrix) -> Callable[[Site], Verdict]:
    """The verdict on a tree that nobody imported."""

    def look(site: Site) -> Verdict:
        return decide(collect_evidence(read_target(site.package), matrix))

    return look


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
