"""What docs/from-a-file-patch.md says of patched files is what `status` says of them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.children import Child
from tests.detection.sites import Site, own_path
from tests.detection.trees import TREES

_PAGE = Path(__file__).parents[2] / "docs" / "from-a-file-patch.md"
_ROW = re.compile(r'^\| (?P<file>[^|]+) \| `(?P<headline>[^`]+)`: "(?P<sentence>[^"]+)" \|', re.M)
# Each row's first words, and the tree that it is about.
_TREES = {
    "this package's own series": "our series",
    "a `sed` that found no anchor": "live",
    "the upstream change": "fix by hand",
    "`break` replaced by": "fix in the base class",
    "half a change": "half: no clean-up",
}


def test_every_row_of_the_page_is_tried() -> None:
    rows = [row["file"] for row in _ROW.finditer(_PAGE.read_text())]
    assert len(rows) == len(_TREES)
    assert all(row.startswith(known) for row, known in zip(rows, _TREES, strict=True))


@pytest.mark.parametrize("file", _TREES)
def test_status_says_what_the_page_quotes(
    file: str, site: Callable[..., Site], child: Child
) -> None:
    tree = TREES[_TREES[file]]
    place = site(tree.release)
    tree.change(place)
    path = os.pathsep.join([str(place.folder), own_path()])
    done = child("from vllm_mamba_retire.cli import app; app(['status'])", PYTHONPATH=path)
    printed = " ".join(done.stdout.split())
    row = next(row for row in _ROW.finditer(_PAGE.read_text()) if row["file"].startswith(file))
    assert row["headline"] in printed
    assert row["sentence"] in printed
