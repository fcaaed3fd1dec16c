"""The series that this package ships, against its table and the rules for it."""

from __future__ import annotations

import datetime
import re
import shutil
from pathlib import Path

import pytest

from vllm_mamba_retire.patchset.series import Series, SeriesError, shipped_series
from vllm_mamba_retire.releases import Status, load_matrix

ROOT = Path(__file__).parents[3]
PATCHES = ROOT / "patches"
MATRIX = load_matrix(ROOT / "compat_matrix.yaml")
SERIES = shipped_series(MATRIX, PATCHES)
LIVE = [row for row in MATRIX.releases if row.status is Status.LIVE]

every_series = pytest.mark.parametrize("series", SERIES, ids=lambda series: series.name)


def header(text: str) -> dict[str, str]:
    """The fields of a DEP-3 header, continuation lines joined."""
    head = text.split("\n---\n")[0]
    fields = re.split(r"^(?=[A-Z][A-Za-z-]*: )", head, flags=re.M)
    return dict(field.split(": ", 1) for field in fields if field)


def test_every_live_release_has_a_series_and_no_other_has():
    assert [series.release for series in SERIES] == [row.version for row in LIVE]
    assert sorted(path.name for path in PATCHES.glob("v*")) == sorted(s.name for s in SERIES)


def test_the_series_starts_from_the_file_the_table_knows():
    for row, series in zip(LIVE, SERIES, strict=True):
        assert series.code.before == row.manager_sha256


@every_series
def test_the_first_patch_is_the_fix_and_the_second_its_tests(series: Series):
    fix, tests = series.changes
    assert (fix.patch[:5], fix.is_test, fix.diff.creates) == ("0001-", False, False)
    assert (tests.patch[:5], tests.is_test, tests.diff.creates) == ("0002-", True, True)


@every_series
def test_no_file_lies_beside_the_series(series: Series):
    names = {path.name for path in (PATCHES / series.name).iterdir()}
    assert names == {"series", *(change.patch for change in series.changes)}


@every_series
def test_headers_are_dep_3(series: Series):
    for change in series.changes:
        fields = header(change.text)
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
def test_the_fix_names_its_base_and_its_result(series: Series):
    text = header(series.code.text)["Description"]
    assert f"vLLM {series.release}, commit " in text
    assert series.code.before in text
    assert series.code.after in text


@every_series
def test_context_is_one_line_on_each_side(series: Series):
    # git and GNU patch take unequal context for the start or end of the file.
    for hunk in re.split(r"^@@.*@@\n", series.code.text, flags=re.M)[1:]:
        lines = hunk.splitlines()
        assert lines[0].startswith(" ")
        assert lines[1].startswith("+")
        assert lines[-1].startswith(" ")
        assert lines[-2].startswith("+")


@every_series
def test_patches_are_not_in_the_format_of_git(series: Series):
    # Below the top of a checkout `git apply` passes over such a patch's files and exits 0.
    assert not [c.patch for c in series.changes if re.search(r"^diff --git ", c.text, flags=re.M)]


@every_series
def test_nothing_is_removed_from_vllm(series: Series):
    body = series.code.text.split("\n---\n", 1)[1]
    assert not [line for line in body.splitlines() if re.match(r"-(?!--)", line)]


def test_readme_names_the_wheels_of_the_table():
    text = (PATCHES / "README.md").read_text()
    for row, series in zip(LIVE, SERIES, strict=True):
        (line,) = (line for line in text.splitlines() if line.startswith(f"| `{series.name}` |"))
        _, _, commit, name, digest, _ = (cell.strip(" `") for cell in line.split("|"))
        assert f"commit {commit}" in series.code.text
        assert (name, digest) in {(wheel.name, wheel.sha256) for wheel in row.wheels}


def test_a_series_whose_line_ends_were_changed_is_read_all_the_same(tmp_path: Path):
    copy = tmp_path / "patches"
    shutil.copytree(PATCHES, copy)
    for path in copy.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert [s.code.diff for s in shipped_series(MATRIX, copy)] == [s.code.diff for s in SERIES]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "series").unlink(), "series: .*No such file"),
        (lambda f: (f / "series").write_text(""), "no patch for "),
        (lambda f: (f / "series").write_text("0003-none.patch\n"), "0003-none.patch: .*No such"),
        (lambda f: next(f.glob("0001*")).write_text("nothing"), "0001-.*only changes or adds"),
    ],
)
def test_a_spoiled_series_is_an_error_that_names_the_file(tmp_path: Path, spoil, message: str):
    copy = tmp_path / "patches"
    shutil.copytree(PATCHES, copy)
    spoil(copy / "v0.28.0")
    with pytest.raises(SeriesError, match=f"v0.28.0.*{message}"):
        shipped_series(MATRIX, copy)
