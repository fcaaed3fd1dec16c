"""Rules of the source, tests included: imports flow one way, names of tests are short."""

from __future__ import annotations

import graphlib
import re

import pytest

from tests.imports import LOADED, PACKAGE, ROOT, graph, modules

IMPORTS = graph()


def test_no_import_goes_in_a_circle() -> None:
    sorter = graphlib.TopologicalSorter(IMPORTS)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_circle_would_be_found() -> None:
    changed = {**IMPORTS, f"{PACKAGE}.names": {f"{PACKAGE}.activation"}}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(changed).prepare()


def test_what_vllm_loads_imports_only_what_comes_before_it() -> None:
    order = [f"{PACKAGE}.{name}" for name in LOADED]
    for index, name in enumerate(order):
        known = {PACKAGE} if name.endswith(".plugin") else set()
        assert IMPORTS[name] <= {*order[:index], *known}, name
    assert IMPORTS[PACKAGE] <= set(order)


@pytest.mark.parametrize(
    ("folder", "never"),
    [
        (PACKAGE, ("tools", "tests")),
        ("tools", ("tests",)),
        (f"{PACKAGE}.child", (f"{PACKAGE}.cli", f"{PACKAGE}.plan", f"{PACKAGE}.replay")),
        (f"{PACKAGE}.replay", (f"{PACKAGE}.cli", f"{PACKAGE}.plan")),
        (f"{PACKAGE}.plan", (f"{PACKAGE}.cli",)),
    ],
)
def test_no_import_points_up(folder: str, never: tuple[str, ...]) -> None:
    for name, imported in IMPORTS.items():
        if is_below(name, folder):
            above = {target for target in imported if any(is_below(target, n) for n in never)}
            assert not above, name


def test_no_test_imports_a_test_or_a_conftest() -> None:
    for name, imported in IMPORTS.items():
        if name.startswith("tests."):
            leaves = {target.rpartition(".")[2] for target in imported}
            assert not {leaf for leaf in leaves if leaf.startswith(("test_", "conftest"))}, name


def test_the_graph_knows_every_module() -> None:
    names = modules()
    assert {f"{PACKAGE}.{name}" for name in LOADED} <= set(names)
    assert f"{PACKAGE}.activation" in IMPORTS[PACKAGE]
    assert f"{PACKAGE}.evidence" in IMPORTS[f"{PACKAGE}.verdict"]
    assert "tests.imports" in IMPORTS["tests.unit.test_import_graph"]


def test_names_of_tests_fit_on_a_line() -> None:
    paths = [*modules().values(), *(ROOT / "patches").rglob("*.patch")]
    names = [name for path in paths for name in re.findall(r"def (test_\w+)", path.read_text())]
    assert "test_names_of_tests_fit_on_a_line" in names
    assert not [name for name in names if len(name) > 60]


def is_below(name: str, folder: str) -> bool:
    return name == folder or name.startswith(f"{folder}.")
