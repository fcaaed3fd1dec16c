"""The series that this package ships, against its matrix and the rules for it."""

from __future__ import annotations

import datetime
import re
import shutil
from pathlib import Path

import pytest

from vllm_mamba_retire import patchset
from vllm_mamba_retire.patchset import FILE, read_hunks
from vllm_mamba_retire.releases import PatchedFile, Status, load_matrix

ROOT = Path(__file__).parents[3]
PATCHES = ROOT / "patches"
NAME = "0001-retire-mamba-states-across-null-gaps.patch"
MATRIX = load_matrix(ROOT / "compat_matrix.yaml")
LIVE = [row for row in MATRIX.releases if row.status is Status.LIVE]
TESTS = PATCHES / "tests/mamba-state-retirement.patch"
EVERY_PATCH = [TESTS, *(PATCHES / entry.series / NAME for entry in MATRIX.patches)]

every_series = pytest.mark.parametrize("entry", MATRIX.patches, ids=lambda entry: entry.series)
every_patch = pytest.mark.parametrize("patch", EVERY_PATCH, ids=lambda path: path.parent.name)


def fix_of(entry: PatchedFile) -> str:
    return (PATCHES / entry.series / NAME).read_text()


def header(text: str) -> dict[str, str]:
    """The fields of a DEP-3 header, continuation lines joined."""
    head = text.split("\n---\n")[0]
    fields = re.split(r"^(?=[A-Z][A-Za-z-]*: )", head, flags=re.M)
    return dict(field.split(": ", 1) for field in fields if field)


def test_every_live_release_has_a_series_and_no_other_has():
    assert [entry.release for entry in MATRIX.patches] == [row.version for row in LIVE]
    assert sorted(path.name for path in PATCHES.glob("v*")) == [e.series for e in MATRIX.patches]


def test_series_starts_from_the_file_that_the_matrix_lists():
    for row, entry in zip(LIVE, MATRIX.patches, strict=True):
        assert (entry.sha256_before, entry.file) == (row.manager_sha256, str(FILE))


@every_series
def test_series_is_one_patch_and_nothing_else(entry: PatchedFile):
    folder = PATCHES / entry.series
    assert {path.name for path in folder.iterdir()} == {"series", NAME}
    assert (folder / "series").read_text() == f"{NAME}\n"


@every_patch
def test_headers_are_dep_3(patch: Path):
    fields = header(patch.read_text())
    assert set(fields) == {
        "Description",
        "Origin",
        "Bug",
        "Applied-Upstream",
        "Author",
        "Last-Update",
    }
    assert fields["Origin"].startswith("backport, https://")
    assert "/vllm/pull/55450" in fields["Origin"]
    assert fields["Applied-Upstream"].startswith(MATRIX.fix.first_release)
    assert "Deviations from the upstream change" in fields["Description"]
    datetime.date.fromisoformat(fields["Last-Update"].strip())


@every_series
def test_fix_names_its_base_and_its_result(entry: PatchedFile):
    text = header(fix_of(entry))["Description"]
    assert f"vLLM {entry.release}, commit " in text
    assert entry.sha256_before in text
    assert entry.sha256_after in text


@every_series
def test_context_is_one_line_on_each_side(entry: PatchedFile):
    # git and GNU patch take unequal context for the start or end of the file.
    for hunk in re.split(r"^@@.*@@\n", fix_of(entry), flags=re.M)[1:]:
        lines = hunk.splitlines()
        assert lines[0].startswith(" ")
        assert lines[1].startswith("+")
        assert lines[-1].startswith(" ")
        assert lines[-2].startswith("+")


@every_patch
def test_patches_are_not_in_the_format_of_git(patch: Path):
    # Below the top of a checkout `git apply` passes over such a patch's files and exits 0.
    assert not re.search(r"^diff --git ", patch.read_text(), flags=re.M)


@every_series
def test_nothing_is_removed_from_vllm(entry: PatchedFile):
    body = fix_of(entry).split("\n---\n", 1)[1]
    assert not [line for line in body.splitlines() if re.match(r"-(?!--)", line)]


def test_readme_names_the_wheels_of_the_matrix():
    text = (PATCHES / "README.md").read_text()
    for row, entry in zip(LIVE, MATRIX.patches, strict=True):
        (line,) = (line for line in text.splitlines() if line.startswith(f"| `{entry.series}` |"))
        _, _, commit, name, digest, _ = (cell.strip(" `") for cell in line.split("|"))
        assert f"commit {commit}" in fix_of(entry)
        assert (name, digest) in {(wheel.name, wheel.sha256) for wheel in row.wheels}


def test_series_with_other_line_endings_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    as_shipped = [read_hunks(entry) for entry in MATRIX.patches]
    copy = tmp_path / "patches"
    shutil.copytree(PATCHES, copy)
    for path in copy.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    monkeypatch.setattr(patchset, "series_folder", lambda: copy)
    assert [read_hunks(entry) for entry in MATRIX.patches] == as_shipped
