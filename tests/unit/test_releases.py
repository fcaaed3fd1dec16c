"""The table: what it says, and that a bad one is refused with file, line and field."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

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
_ROW = _TABLE.partition("releases:\n")[2]


@pytest.fixture
def refused(tmp_path: Path):
    """What is said about a table, without the folder it lies in."""

    def ask(text: str) -> str:
        path = tmp_path / "table.yaml"
        path.write_text(text)
        with pytest.raises(MatrixError) as caught:
            load_matrix(path)
        return str(caught.value).removeprefix(f"{tmp_path}/")

    return ask


def test_the_smallest_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(_TABLE)
    (row,) = load_matrix(path).releases
    assert (row.version, row.status, row.hook) == ("0.29.0", Status.LIVE, None)


@pytest.mark.parametrize(
    ("change", "to", "message"),
    [
        ("schema: 1", "schema: 2", "table.yaml:1: schema: 2 is not the known schema 1; update"),
        ("schema: 1\n", "", "table.yaml:1: schema is missing"),
        ("status: live", "status: alive", "table.yaml:6: releases[0].status: 'alive' is not abs"),
        ("status: live", "state: live", "table.yaml:6: releases[0].state: unknown key"),
        ("    status: live\n", "", "table.yaml:5: releases[0]: status is missing"),
        ("version: 0.29.0", "version: 0.29", "table.yaml:5: releases[0].version: 0.29 is not te"),
        ("version: 0.29.0", "version: v29", "table.yaml:5: releases[0].version: 'v29' does not"),
        ("a" * 64, "a" * 63, "table.yaml:7: releases[0].manager_sha256: "),
        ('"50aa7af3c5bdfd38"', "[]", "table.yaml:8: releases[0].fingerprints.MambaManager.free: "),
        ("{MambaManager.free: ", "{MambaManager.f: ", "table.yaml:5: releases[0]: MambaManager.f "),
        ("[MambaManager.free]", "MambaManager.free", "table.yaml:3: methods: is not a list"),
        ("2026-09-11", "2026-09-31", "table.yaml:2: fix.merged: '2026-09-31' is not a date"),
        ("[MambaManager.free]", "[", "table.yaml:5: did not find expected node"),
    ],
)
def test_a_bad_table_is_refused_by_line_and_field(refused, change, to, message) -> None:
    assert change in _TABLE
    assert refused(_TABLE.replace(change, to)).startswith(message)


def test_a_row_that_is_there_twice_is_refused_at_the_second(refused) -> None:
    assert refused(_TABLE + _ROW).startswith("table.yaml:9: releases[1]: 0.29.0 is there twice")


def test_a_key_that_is_there_twice_is_refused(refused) -> None:
    text = _TABLE.replace("status: live", "status: live\n    status: native")
    assert refused(text) == "table.yaml:7: releases[0].status: is there twice"


def test_a_newer_table_is_refused_for_that_and_not_for_what_is_new_in_it(refused) -> None:
    assert "update this package" in refused(_TABLE.replace("schema: 1", "schema: 2\nnew: 1"))


@pytest.mark.parametrize("text", ["", "[]", "- a", "a"])
def test_something_else_than_a_mapping_is_refused(refused, text: str) -> None:
    assert "top level is not a mapping" in refused(text)


def test_a_missing_table_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match=r"none\.yaml: No such file"):
        load_matrix(tmp_path / "none.yaml")


def test_nothing_in_a_table_is_executed(refused) -> None:
    text = _TABLE.replace("status: live", "status: !!python/object/apply:os.getcwd []")
    assert "releases[0].status" in refused(text)


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


def test_the_json_schema_is_that_of_the_dataclasses_and_holds_for_the_table() -> None:
    from tools.table import schema

    assert schema.FILE.read_text() == schema.text(), "run python -m tools.table.schema"
    # JSON has no dates: they are text there.
    data = yaml.load((ROOT / "compat_matrix.yaml").read_text(), yaml.BaseLoader)
    jsonschema.validate({**data, "schema": 1}, _without_null(schema.schema()))


def _without_null(node):
    """BaseLoader reads null as text."""
    if isinstance(node, dict):
        if "anyOf" in node:
            return {"anyOf": [*node["anyOf"], {"const": "null"}]}
        return {key: _without_null(value) for key, value in node.items()}
    return [_without_null(item) for item in node] if isinstance(node, list) else node


def test_the_page_on_compatibility_is_that_of_the_table(matrix: Matrix) -> None:
    from tools.docs import compatibility as compat_doc

    assert compat_doc.PAGE.read_text() == compat_doc.page(matrix), (
        "run python -m tools.docs.compatibility"
    )


def test_the_table_that_is_read_is_the_one_of_this_checkout(matrix: Matrix) -> None:
    data = yaml.load((ROOT / "compat_matrix.yaml").read_text(), yaml.BaseLoader)
    assert [row.version for row in matrix.releases] == [row["version"] for row in data["releases"]]
    assert json.dumps(data["methods"]) == json.dumps(list(matrix.methods))
