"""Arming without vLLM: it costs nothing, breaks nothing, and only ``require`` insists."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.children import Child

HEAVY = "{'vllm', 'torch', 'wrapt', 'yaml', 'packaging', 'typer', 'rich', 'dataclasses', 'typing'}"


def test_import_loads_nothing_heavy(child: Child) -> None:
    done = child(
        "import sys; before = set(sys.modules); import vllm_mamba_retire\n"
        f"print(sorted({HEAVY} & (set(sys.modules) - before)))"
    )
    assert done.stdout == "[]\n", done.stderr


def test_off_does_not_even_watch_imports(child: Child) -> None:
    code = (
        "import sys; n = len(sys.meta_path); import vllm_mamba_retire\n"
        "print(len(sys.meta_path) - n)"
    )
    assert child(code, MAMBA_RETIRE="off").stdout == "0\n"
    assert child(code).stdout == "1\n"


def test_armed_twice_watches_once(child: Child) -> None:
    code = (
        "import sys; n = len(sys.meta_path); import vllm_mamba_retire as r; r.arm(); r.arm()\n"
        "print(len(sys.meta_path) - n)"
    )
    assert child(code).stdout == "1\n"


def test_without_vllm_nothing_happens(child: Child) -> None:
    done = child("import vllm_mamba_retire as r; print(r.activate(), r.current(), r.deactivate())")
    assert done.stdout == "None None False\n"
    assert done.stderr == ""


def test_require_without_vllm_stops_with_one_sentence(child: Child) -> None:
    done = child("import vllm_mamba_retire; print('went on')", MAMBA_RETIRE="require")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("vllm-mamba-retire: MAMBA_RETIRE=require, but ")
    assert "install this package into the environment that serves" in done.stderr


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    """A ``vllm`` on the path whose manager module holds a class of another shape."""
    core = tmp_path / "lib" / "vllm" / "v1" / "core"
    core.mkdir(parents=True)
    for folder in (core, core.parent, core.parent.parent):
        (folder / "__init__.py").touch()
    (core / "single_type_kv_cache_manager.py").write_text("class MambaManager: pass\n")
    (core.parents[1] / "_version.py").write_text("__version__ = version = '0.12.0'\n")
    return str(tmp_path / "lib")


IMPORT = "import vllm_mamba_retire as r, vllm.v1.core.single_type_kv_cache_manager as m\n"


def test_hook_reaches_a_manager_that_is_imported_later(child: Child, stand_in: str) -> None:
    done = child(
        f"import sys; sys.path.insert(0, {stand_in!r})\n{IMPORT}print(r.current().verdict)"
    )
    assert done.stdout.startswith("absent: "), done.stderr
    assert "0.12.0" in done.stdout


def test_broken_wrapt_breaks_no_import_of_vllm(child: Child, stand_in: str) -> None:
    code = (
        f"import sys; sys.path.insert(0, {stand_in!r}); sys.modules['wrapt'] = None\n"
        f"{IMPORT}print(r.current().verdict.reason.value)"
    )
    done = child(code)
    assert done.stdout == "failed\n", done.stderr
    stopped = child(code, MAMBA_RETIRE="require")
    assert stopped.returncode == 1
    assert "wrapt" in stopped.stderr.splitlines()[-1]
