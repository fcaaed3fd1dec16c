"""The on-disk series on real vLLM trees: the Python files of the wheels, and source archives.

``MAMBA_RETIRE_TEST_RELEASE`` says which release, ``MAMBA_RETIRE_TEST_TREES`` and
``MAMBA_RETIRE_TEST_SOURCES`` name the folders that hold one folder per release. Nothing in them is
changed; what a test changes is a copy of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from vllm_mamba_retire.patchset import FILE
from vllm_mamba_retire.releases import PatchedFile, load_matrix

MANAGER = str(FILE)
MATRIX = load_matrix()
RELEASE = os.environ["MAMBA_RETIRE_TEST_RELEASE"]
ROOT = Path(__file__).parents[2]

TESTS = ROOT / "patches/tests/mamba-state-retirement.patch"

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


def series_for(release: str) -> PatchedFile:
    """What the matrix says of a release's series."""
    return next(entry for entry in MATRIX.patches if entry.release == release)


def fix_for(release: str) -> Path:
    """The only patch of a release's series."""
    (patch,) = (ROOT / "patches" / series_for(release).series).glob("*.patch")
    return patch


def source_of(release: str, kind: str) -> Path:
    """A pristine tree of a release: from its ``wheel`` or its source ``archive``."""
    variable = {"wheel": "MAMBA_RETIRE_TEST_TREES", "archive": "MAMBA_RETIRE_TEST_SOURCES"}[kind]
    return Path(os.environ[variable]) / release


def files_only(release: str, folder: Path, kind: str = "wheel") -> Path:
    """A tree with no more than the files that the series and the detection look at."""
    for name in (MANAGER, "vllm/_version.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source_of(release, kind) / name, folder / name)
    return folder


def importable(release: str, folder: Path, kind: str = "wheel") -> Path:
    """A tree that can be imported: the manager file is a copy, all others are links."""
    source = source_of(release, kind)
    shutil.copytree(
        source / "vllm",
        folder / "vllm",
        copy_function=os.symlink,
        ignore=lambda _, names: [name for name in names if Path(MANAGER).stem in name],
    )
    shutil.copyfile(source / MANAGER, folder / MANAGER)
    # vLLM chooses its platform by the version of its distribution.
    about = folder / f"vllm-{release}+cpu.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
    return folder


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and bytes of every file of a tree that is no link."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {
        str(path.relative_to(folder)): (path.stat().st_mode, path.read_bytes()) for path in files
    }


def patch_with_gnu(tree: Path, release: str, *options: str) -> None:
    """Apply the fix as an image builder does without this package."""
    with fix_for(release).open() as patch:
        subprocess.run(
            ["patch", "-s", "-p1", "--fuzz=0", "-d", tree, *options], stdin=patch, check=True
        )
