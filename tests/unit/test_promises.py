"""What SECURITY.md says the package never does, held against its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.imports import ROOT

PACKAGE = ROOT / "shim" / "vllm_mamba_retire"
NETWORK = {"aiohttp", "ftplib", "http", "httpx", "requests", "smtplib", "socket", "urllib3"}
LOADERS_OF_CODE = {"dill", "marshal", "pickle", "shelve"}
CALLS = {"compile", "eval", "exec"}


def _trees() -> Iterator[tuple[str, ast.Module]]:
    paths = sorted(PACKAGE.rglob("*.py"))
    assert paths
    for path in paths:
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _importing(roots: set[str], tree: ast.Module) -> set[str]:
    names = {name.split(".")[0] for name in _imported(tree)}
    if any(name.startswith("urllib.request") for name in _imported(tree)):
        names.add("urllib3")
    return names & roots


def test_only_the_question_to_ray_may_open_a_connection() -> None:
    assert {name for name, tree in _trees() if _importing(NETWORK, tree)} == {"ray_cluster.py"}


def test_only_the_probe_of_apply_runs_text_and_no_pickle_loads() -> None:
    for name, tree in _trees():
        assert not _importing(LOADERS_OF_CODE, tree), name
        called = {
            node.func.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert called & CALLS == ({"compile", "exec"} if name == "patchset.py" else set()), name


def test_yaml_is_read_with_the_safe_loader_only() -> None:
    used = {
        (name, node.attr)
        for name, tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "yaml"
    }
    loading = {attribute for _, attribute in used if "oad" in attribute}
    assert loading == {"SafeLoader", "load", "safe_load", "safe_load_all"}, used
    # The one `load` names its loader, libyaml's safe one or the other.
    assert {name for name, attribute in used if attribute == "load"} == {"releases.py"}
    assert '"CSafeLoader", yaml.SafeLoader)' in (PACKAGE / "releases.py").read_text()


def test_no_shell_is_started() -> None:
    for path in sorted(Path(PACKAGE).rglob("*.py")):
        text = path.read_text()
        assert "shell=True" not in text, path
        assert "os.system" not in text, path
