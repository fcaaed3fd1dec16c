"""A small release with a small series for it, as a tree on disk: no vLLM needed."""

from __future__ import annotations

import datetime
import difflib
from pathlib import Path

from vllm_mamba_retire.patchset import FILE, sha256
from vllm_mamba_retire.releases import Fix, Matrix, PatchedFile, Row, Status

RELEASED = "a = 1\nb = 2\nc = 3\nd = 4\ne = 5\nf = 6\ng = 7\n"
PATCHED = "a = 1\nb = 2\nb2 = 20\nc = 3\nd = 4\ne = 5\nf = 60\nf2 = 61\ng = 7\n"
HALVES = (
    RELEASED.replace("b = 2\n", "b = 2\nb2 = 20\n"),
    RELEASED.replace("f = 6\n", "f = 60\nf2 = 61\n"),
)


def make_series(folder: Path) -> PatchedFile:
    """Write the series below `folder`; returns its entry of the matrix."""
    diff = difflib.unified_diff(
        RELEASED.splitlines(keepends=True),
        PATCHED.splitlines(keepends=True),
        f"a/{FILE}",
        f"b/{FILE}",
        n=1,
    )
    (folder / "v0.29.0").mkdir(parents=True)
    (folder / "v0.29.0/0001-part.patch").write_text("Description: it\n---\n" + "".join(diff))
    (folder / "v0.29.0/series").write_text("0001-part.patch\n")
    before, after = (sha256(text.encode()) for text in (RELEASED, PATCHED))
    return PatchedFile("0.29.0", str(FILE), "v0.29.0", before, after)


def make_matrix(entry: PatchedFile) -> Matrix:
    """A matrix with the release of the series, and a fixed one."""
    rows = tuple(
        Row(version, status, {}, "")
        for version, status in [("0.29.0", Status.LIVE), ("0.30.0", Status.NATIVE)]
    )
    fix = Fix("vllm#55450", datetime.date(2026, 9, 11), "0.30.0")
    return Matrix(schema=1, fix=fix, methods=(), releases=rows, patches=(entry,))


def make_site(root: Path, text: str = RELEASED, version: str = "0.29.0") -> Path:
    """Write a tree; returns its root."""
    (root / FILE).parent.mkdir(parents=True)
    (root / FILE).write_text(text)
    (root / "vllm/_version.py").write_text(f"version = '{version}'\n")
    return root


def everything(root: Path) -> dict[str, bytes]:
    """Every file below the root, with its bytes."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}
