"""The published proof is complete, and the page says what its data says and of which version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from tools.proof import page as report

from vllm_mamba_retire import __version__
from vllm_mamba_retire.releases import Matrix, Status

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def data() -> Any:
    return json.loads((DOCS / "data" / "proof.json").read_text())


def test_the_proof_is_of_a_version_up_to_this_one(data: Any) -> None:
    """It takes hours, so it is renewed before a release that changes the patch, not by a bump."""
    assert Version(data["version"]) <= Version(__version__)
    assert f"version {data['version']} of this package" in report.render(data)


def test_the_page_is_written_from_the_data(data: Any) -> None:
    assert (DOCS / "proof.md").read_text() == report.render(data)


def test_every_live_release_was_compared_and_nothing_differed(data: Any, matrix: Matrix) -> None:
    live = {row.version for row in matrix.releases if row.status is Status.LIVE}
    assert {release["release"] for release in data["differential"]} == live
    for release in data["differential"]:
        for done in release["comparisons"]:
            assert done["different"] == []
            assert done["counters"]["states_stock_would_keep"] > 0


def test_every_surviving_mutant_is_explained(data: Any) -> None:
    for part in ("mutants", "disk-mutants"):
        fates = data[part]["mutants"] if data[part] else []
        assert all(fate["killed_by"] or fate["excuse"] for fate in fates)


def test_vllms_own_tests_found_no_fault(data: Any) -> None:
    assert data["upstream"]
    assert all(done["faults"] == [] for done in data["upstream"])


def test_tests_left_out_are_counted_under_their_reason() -> None:
    side = {"passed": 7, "ran": 10, "native tests passed": 7, "native tests": 7}
    done = {"release": "0.0.1", "stock": side, "patched": side, "faults": []}
    done["left out"] = {"wants a GPU": 2, "wants a model": 1}
    nothing = {"version": "1.0", "differential": [], "mutants": None, "disk-mutants": None}
    page = report.render(
        {**nothing, "soak": None, "upstream": [done, {**done, "release": "0.0.2"}]}
    )
    assert "| wants a GPU | 0.0.1: 2, 0.0.2: 2 |" in page
    assert "| wants a model | 0.0.1: 1, 0.0.2: 1 |" in page


def test_runs_of_different_versions_are_not_mixed(tmp_path: Path) -> None:
    for number, version in enumerate(("1.0", "2.0")):
        (tmp_path / f"upstream-0.{number}.json").write_text(json.dumps({"version": version}))
    with pytest.raises(SystemExit, match=r"1\.0.*2\.0"):
        report.collect(tmp_path)
