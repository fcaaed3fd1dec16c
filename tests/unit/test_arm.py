"""Arming without vLLM: it costs nothing, breaks nothing, and only ``require`` insists."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.children import Child
from tests.imports import LOADED, PACKAGE, ROOT

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
    (core / "single_type_kv_cache_manager.py").write_text(
        "import sys\nvars(sys.modules['__main__']).get('during', lambda: None)()\n"
        "class MambaManager: pass\n"
    )
    (core.parents[1] / "_version.py").write_text("__version__ = version = '0.12.0'\n")
    return str(tmp_path / "lib")


MANAGER = "vllm.v1.core.single_type_kv_cache_manager"
IMPORT = f"import vllm_mamba_retire as r, {MANAGER} as m\n"
VERDICT = "print(r.current().verdict.reason.value)\n"
BROKEN = "sys.modules['vllm_mamba_retire.evidence'] = None\n"
# What vLLM does with an error of a plug-in that it imports.
LOADER = """
try:
    from vllm_mamba_retire.plugin import register
    register()
except Exception as error:
    print('swallowed', error)
"""
WAYS = [IMPORT, f"import {MANAGER}\n{LOADER}", f"{LOADER}import {MANAGER}"]


@pytest.fixture
def on_path(child: Child, stand_in: str) -> Child:
    """Runs code where the stand-in is on the path; ``during`` is called in the manager's body."""

    def run(code: str, **environment: str | None) -> CompletedProcess[str]:
        return child(f"import sys; sys.path.insert(0, {stand_in!r})\n{code}", **environment)

    return run


def test_hook_reaches_a_manager_that_is_imported_later(on_path: Child) -> None:
    done = on_path(f"{IMPORT}print(r.current().verdict)")
    assert done.stdout.startswith("absent: "), done.stderr
    assert "0.12.0" in done.stdout


def test_broken_wrapt_breaks_no_import_of_vllm(on_path: Child) -> None:
    code = f"sys.modules['wrapt'] = None\n{IMPORT}{VERDICT}"
    done = on_path(code)
    assert done.stdout == "failed\n", done.stderr
    stopped = on_path(code, MAMBA_RETIRE="require")
    assert stopped.returncode == 1
    assert "wrapt" in stopped.stderr.splitlines()[-1]


@pytest.mark.parametrize("way", WAYS)
def test_a_broken_part_of_ours_breaks_no_import_of_vllm(on_path: Child, way: str) -> None:
    done = on_path(f"{BROKEN}{way}\nprint('MambaManager' in vars(sys.modules[{MANAGER!r}]))")
    assert done.stdout == "True\n", done.stderr
    (line,) = done.stderr.splitlines()
    assert "evidence" in line
    assert "Reinstall this package" in line


@pytest.mark.parametrize("way", WAYS)
def test_require_stops_with_a_broken_part_of_ours(on_path: Child, way: str) -> None:
    done = on_path(f"{BROKEN}{way}\nprint('went on')", MAMBA_RETIRE="require")
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("vllm-mamba-retire: MAMBA_RETIRE=require, but ")
    assert "evidence" in last


@pytest.mark.parametrize(
    "broken",
    [
        "sys.modules['wrapt'] = None\n",
        f"open(sys.path[0] + '/{MANAGER.replace('.', '/')}.py', 'a').write('# mamba_cache_mode')\n",
    ],
)
def test_a_refusal_holds_for_the_next_import_too(on_path: Child, broken: str) -> None:
    attempt = f"try:\n    import {MANAGER}\nexcept SystemExit as refusal:\n    print(refusal)\n"
    ours = attempt.replace(f"import {MANAGER}", "import vllm_mamba_retire")
    done = on_path(f"{ours}{broken}{attempt}{attempt}", MAMBA_RETIRE="require")
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout + done.stderr
    assert lines[0] == lines[1]


def test_another_products_hook_on_vllm_is_not_left_out(on_path: Child) -> None:
    code = """
import vllm_mamba_retire as r
class Other:
    def find_spec(self, name, path=None, target=None):
        if name == "vllm":
            print("asked")
sys.meta_path.insert(1, Other())
import vllm
"""
    assert on_path(code).stdout == "asked\n"


def test_a_manager_imported_by_another_thread_is_waited_for(on_path: Child) -> None:
    code = f"""
import importlib, threading, time
begun = threading.Event()
def during():
    begun.set()
    time.sleep(0.5)
threading.Thread(target=importlib.import_module, args=({MANAGER!r},)).start()
begun.wait()
import vllm_mamba_retire as r
{VERDICT}"""
    done = on_path(code, MAMBA_RETIRE="require")
    assert done.stdout == "absent\n", done.stderr


def test_a_manager_imported_by_this_thread_is_decided_later(
    on_path: Child,
) -> None:
    code = f"""
import time
def during():
    import vllm, vllm_mamba_retire
    assert vllm_mamba_retire.current() is None
import {MANAGER}, vllm_mamba_retire as r
end = time.time() + 10
while r.current() is None and time.time() < end:
    time.sleep(0.01)
{VERDICT}"""
    done = on_path(code)
    assert done.stdout == "absent\n", done.stderr


def test_an_import_of_vllm_that_fails_is_vllms_error(on_path: Child) -> None:
    code = f"""
def during():
    raise KeyError("vLLM's own")
import vllm_mamba_retire as r
try:
    import {MANAGER}
except KeyError as error:
    print(error)
print(r.current())
"""
    assert on_path(code).stdout.splitlines() == ['"vLLM\'s own"', "None"]


@pytest.mark.parametrize(
    "again",
    [
        "import importlib; importlib.reload(r)\n",
        "for name in [n for n in sys.modules if n.startswith('vllm_mamba_retire')]:\n"
        "    del sys.modules[name]\nimport vllm_mamba_retire as r\n",
    ],
)
def test_a_package_imported_twice_watches_once_and_decides(on_path: Child, again: str) -> None:
    code = (
        "import vllm_mamba_retire as r\nn = len(sys.meta_path)\n"
        f"{again}print(len(sys.meta_path) - n)\nimport {MANAGER}\n"
        f"import vllm_mamba_retire as r; r.activate()\n{VERDICT}"
    )
    done = on_path(code)
    assert done.stdout == "0\nabsent\n", done.stderr


def test_a_vllm_process_loads_only_the_listed_modules(on_path: Child) -> None:
    loaded = f"sorted(n for n in sys.modules if n.startswith('{PACKAGE}.'))"
    done = on_path(f"from {PACKAGE}.plugin import register\nregister()\n{IMPORT}print(*{loaded})")
    here = set(LOADED) - {"prometheus"}  # the API server's process loads it, too
    assert done.stdout.split() == sorted(f"{PACKAGE}.{name}" for name in here), done.stderr


def test_the_python_page_lists_the_public_names(child: Child) -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    listed = page.split(f"::: {PACKAGE}\n")[1].split("members: [")[1].split("]")[0]
    done = child(f"import {PACKAGE} as r; print(*sorted(set(r.__all__) - {{'__version__'}}))")
    assert done.stdout.split() == listed.split(", ")


@pytest.mark.parametrize("mode", ["", " Auto ", "1"])
def test_an_empty_mode_is_the_default(on_path: Child, mode: str) -> None:
    assert on_path(IMPORT + VERDICT, MAMBA_RETIRE=mode).stdout == "absent\n"
