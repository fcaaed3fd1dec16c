"""What is said of a release that the table lacks, judged on the table's own rows."""

from __future__ import annotations

import pytest
from tools.table.watch import Change, judge

from tests.package.distributions import ROOT
from vllm_mamba_retire.releases import Matrix, Row, Status, load_matrix

METHOD = "MambaManager._remove_blocks_in_range"


@pytest.fixture(scope="module")
def table() -> Matrix:
    return load_matrix(ROOT / "compat_matrix.yaml")


@pytest.fixture(scope="module")
def newest(table: Matrix) -> Row:
    assert table.releases[-1].status is Status.NATIVE
    return table.releases[-1]


def test_release_with_known_methods_is_unchanged(table: Matrix, newest: Row) -> None:
    news = judge("99.0.0", newest.fingerprints, True, table, table.releases)
    assert news.outcome is Change.UNCHANGED
    assert newest.version in news.says


def test_changed_method_of_a_release_is_named(table: Matrix, newest: Row) -> None:
    changed = {**newest.fingerprints, METHOD: "0" * 16}
    news = judge("99.0.0", changed, True, table, table.releases)
    assert (news.outcome, news.says) == (Change.CHANGED, f"since {newest.version}: {METHOD}")


def test_new_release_with_a_live_releases_methods_lost_the_fix(table: Matrix) -> None:
    live = [row for row in table.releases if row.status is Status.LIVE][-1]
    news = judge("99.0.0", live.fingerprints, False, table, table.releases)
    assert news.outcome is Change.FIX_MISSING


def test_late_release_of_a_live_line_is_no_loss(table: Matrix) -> None:
    live = [row for row in table.releases if row.status is Status.LIVE][-1]
    news = judge("0.29.1", live.fingerprints, False, table, table.releases)
    assert news.outcome is Change.UNCHANGED
    assert "live" in news.says
