"""The matrix: what it says, and that a bad one is refused with file and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tools.table import schema

from vllm_mamba_retire.releases import Hook, Matrix, MatrixError, Status, load_matrix

ROOT = Path(__file__).parents[2]

_TABLE = """\
schema: 1
fix: {upstream: vllm#1, merged: 2026-09-11, first_release: 0.30.0}
methods: [MambaManager.free]
releases:
  - version: 0.29.0
    status: live
    manager_sha256: HASH
    fingerprints: {MambaManager.free: "50aa7af3c5bdfd38"}
""".replace("HASH", "a" * 64)


def test_the_smallest_matrix_is_read(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(_TABLE)
    (row,) = load_matrix(path).releases
    assert (row.version, row.status, row.hook) == ("0.29.0", Status.LIVE, None)


@pytest.mark.parametrize(
    ("change", "to", "message"),
    [
        ("schema: 1", "schema: 2", "schema: 2 is newer than 1; update this package"),
        ("schema: 1", "schema: 2\nnew: 1", "schema: 2 is newer"),  # and not: unknown field
        ("schema: 1", "schema: 0", "schema: "),
        ("schema: 1\n", "", "top level: Object missing required field `schema`"),
        ("status: live", "status: alive", "releases[0].status: Invalid enum value 'alive'"),
        ("status: live", "state: live", "releases[0]: Object "),
        ("status: live", "status: live\n    new: 1", "releases[0]: Object contains unknown field"),
        ("    status: live\n", "", "releases[0]: Object missing required field `status`"),
        ("version: 0.29.0", "version: 0.29", "releases[0].version: Expected `str`, got `float`"),
        ("version: 0.29.0", "version: v29", "releases[0].version: Expected `str` matching"),
        ("a" * 64, "a" * 63, "releases[0].manager_sha256: Expected `str` matching"),
        ('"50aa7af3c5bdfd38"', "[]", "releases[0].fingerprints[...]: Expected `str`, got `arr"),
        ("[MambaManager.free]", "MambaManager.free", "methods: Expected `array`, got `str`"),
        ("2026-09-11", "2026-09-31", "not valid YAML: day"),
        ("2026-09-11", "soon", "fix.merged: Invalid RFC3339"),
        ("[MambaManager.free]", "[", "not valid YAML: while parsing a flow"),
        (_TABLE, "", "top level: Expected `object`, got `null`"),
        (_TABLE, "- a", "top level: Expected `object`, got `array`"),
        ("status: live", "status: !!python/object/apply:os.getcwd []", "not valid YAML: could not"),
    ],
)
def test_a_bad_matrix_is_refused_by_file_and_field(
    tmp_path: Path, change: str, to: str, message: str
) -> None:
    assert change in _TABLE
    path = tmp_path / "table.yaml"
    path.write_text(_TABLE.replace(change, to))
    with pytest.raises(MatrixError) as caught:
        load_matrix(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


def test_a_missing_matrix_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match=r"none\.yaml: No such file"):
        load_matrix(tmp_path / "none.yaml")


class _NoDuplicates(yaml.SafeLoader):
    """PyYAML takes the last of two equal keys; here that is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(set(keys)) == len(keys), node.start_mark
        return super().construct_mapping(node, deep=deep)


def test_nothing_is_in_the_matrix_twice(matrix: Matrix) -> None:
    text = (ROOT / "compat_matrix.yaml").read_text()
    yaml.load(text, _NoDuplicates)
    with pytest.raises(AssertionError):
        yaml.load(text + "schema: 1\n", _NoDuplicates)
    for names in (
        [row.version for row in matrix.releases],
        [f"{file.series} {file.file}" for file in matrix.patches],
    ):
        assert len(set(names)) == len(names)


def test_every_fingerprinted_method_is_listed(matrix: Matrix) -> None:
    assert {name for row in matrix.releases for name in row.fingerprints} <= set(matrix.methods)


@pytest.mark.parametrize(
    "version", ["0.29.0+cu129", "0.29.0.dev3+gabc", "0.29.0rc1", "0.29.0.post1", "0.29", "v0.29.0"]
)
def test_a_row_is_found_by_the_release_segment(matrix: Matrix, version: str) -> None:
    row = matrix.row_for(version)
    assert row is not None
    assert row.version == "0.29.0"


@pytest.mark.parametrize("version", ["0.29.1rc1", "0.2.9", "not a version", "", None])
def test_another_release_has_no_row(matrix: Matrix, version: str | None) -> None:
    assert matrix.row_for(version) is None


def test_every_row_tells_what_the_runtime_and_the_lanes_need(matrix: Matrix) -> None:
    for row in matrix.releases:
        assert row.wheels, row.version
        assert row.torch.startswith("=="), row.version
        assert row.requires_python, row.version
        assert (row.hook is None) == (row.status is Status.ABSENT), row.version
        assert (row.hook is Hook.OWN) == (row.status is Status.NATIVE), row.version


def test_statuses_follow_each_other_in_the_order_of_history(matrix: Matrix) -> None:
    order = [Status.ABSENT, Status.LATENT, Status.LIVE, Status.NATIVE]
    seen = [order.index(row.status) for row in matrix.releases]
    assert seen == sorted(seen)
    first = next(row for row in matrix.releases if row.status is Status.NATIVE)
    assert first.version == matrix.fix.first_release


def test_no_two_statuses_share_the_same_methods(matrix: Matrix) -> None:
    by_print: dict[tuple[tuple[str, str], ...], Status] = {}
    for row in matrix.releases:
        key = tuple(sorted(row.fingerprints.items()))
        assert by_print.setdefault(key, row.status) is row.status, row.version


def test_the_json_schema_matches_the_structs_and_the_matrix() -> None:
    assert schema.FILE.read_text() == schema.text(), "run python -m tools.table.schema"
    # JSON has no dates: they are text there.
    data = yaml.load((ROOT / "compat_matrix.yaml").read_text(), _DatesAsText)
    jsonschema.validate(data, json.loads(schema.text()))


class _DatesAsText(yaml.SafeLoader):
    """Leaves dates as they are written."""


_DatesAsText.add_constructor("tag:yaml.org,2002:timestamp", lambda _loader, node: node.value)


def test_the_page_on_compatibility_is_that_of_the_table(matrix: Matrix) -> None:
    from tools.docs import compatibility as compat_doc

    assert compat_doc.PAGE.read_text() == compat_doc.page(matrix), (
        "run python -m tools.docs.compatibility"
    )


def test_the_table_that_is_read_is_the_one_of_this_checkout(matrix: Matrix) -> None:
    data = yaml.load((ROOT / "compat_matrix.yaml").read_text(), yaml.BaseLoader)
    assert [row.version for row in matrix.releases] == [row["version"] for row in data["releases"]]
    assert json.dumps(data["methods"]) == json.dumps(list(matrix.methods))


def test_keep_is_marked_where_probe_and_conversation_passed() -> None:
    """A release without these findings was not tested; `nox -s matrix -- --check` runs them."""
    tested = [
        (row, {each.run: each.result for each in row.evidence})
        for row in load_matrix().releases
        if any(each.run == "keep probe" for each in row.evidence)
    ]
    assert {"0.29.0", "0.30.0", "0.34.0"} <= {row.version for row, _ in tested}
    for row, results in tested:
        assert row.status in (Status.LIVE, Status.NATIVE)
        assert results["keep probe"] == "stock plain, kept keeps"
        (hits,) = (result for run, result in results.items() if run.startswith("keep replay"))
        assert hits == "fixed 0, kept 18816"
