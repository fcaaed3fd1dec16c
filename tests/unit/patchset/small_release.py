"""A small release, a small series for it, and trees made of them: no vLLM needed."""

from __future__ import annotations

import datetime
import difflib
from dataclasses import dataclass
from pathlib import Path

from vllm_mamba_retire.patchset.operations import Known
from vllm_mamba_retire.patchset.series import sha256, shipped_series
from vllm_mamba_retire.releases import Fix, Matrix, PatchedFile, Row, Status

MANAGER = "vllm/v1/core/single_type_kv_cache_manager.py"
HELPER = "vllm/v1/core/helper.py"
TEST = "tests/v1/core/test_new.py"
RELEASED = {
    MANAGER: "a = 1\nb = 2\nc = 3\nd = 4\ne = 5\nf = 6\ng = 7\n",
    HELPER: "x = 1\ny = 2\nz = 3\n",
}
PATCHED = {
    MANAGER: "a = 1\nb = 2\nb2 = 20\nc = 3\nd = 4\ne = 5\nf = 60\nf2 = 61\ng = 7\n",
    HELPER: "x = 1\ny = 2\nyy = 22\nz = 3\n",
    TEST: "def test_it():\n    assert True\n",
}


def make_series(folder: Path, patched: dict[str, str]) -> None:
    """Write a series of one patch per file."""
    folder.mkdir(parents=True)
    names = []
    for number, (path, after) in enumerate(patched.items(), 1):
        before = RELEASED.get(path)
        diff = difflib.unified_diff(
            (before or "").splitlines(keepends=True),
            after.splitlines(keepends=True),
            "/dev/null" if before is None else f"a/{path}",
            f"b/{path}",
            n=1,
        )
        name = f"000{number}-part.patch"
        (folder / name).write_text("Description: a part\n---\n" + "".join(diff))
        names.append(name)
    (folder / "series").write_text("# in this order\n" + "\n".join(names) + "\n")


def known(folder: Path, patched: dict[str, str] = PATCHED) -> Known:
    """The table and the series of release 0.29.0, made in `folder`."""
    make_series(folder / "v0.29.0", patched)
    files = (
        PatchedFile(
            "0.29.0",
            path,
            "v0.29.0",
            sha256(RELEASED[path].encode()) if path in RELEASED else None,
            sha256(after.encode()),
        )
        for path, after in patched.items()
    )
    rows = tuple(
        Row(version, status, {}, "")
        for version, status in [("0.29.0", Status.LIVE), ("0.30.0", Status.NATIVE)]
    )
    fix = Fix("vllm#55450", datetime.date(2026, 9, 11), "0.30.0")
    matrix = Matrix(schema=1, fix=fix, methods=(), releases=rows, patches=tuple(files))
    return Known(matrix, shipped_series(matrix, folder))


@dataclass
class Checkout:
    """A tree as a source checkout has it, with room for the tests."""

    root: Path

    def write(self, path: str, text: str) -> None:
        """Put a file into the tree."""
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def read(self, *paths: str) -> dict[str, str]:
        """Those of the files that exist."""
        return {p: (self.root / p).read_text() for p in paths if (self.root / p).exists()}

    def everything(self) -> dict[str, bytes]:
        """Every file below the root, with its bytes."""
        files = (path for path in self.root.rglob("*") if path.is_file())
        return {str(path.relative_to(self.root)): path.read_bytes() for path in files}
