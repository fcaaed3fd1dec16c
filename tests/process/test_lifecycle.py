"""One patch and one verdict, however and how often the package is reached; each in a fresh process.

Every snippet asserts inside the process that it is about, so a patch that did not apply fails it.
"""

from __future__ import annotations

import subprocess

import pytest

from tests.children import Child
from vllm_mamba_retire.releases import Status

LOOK = """
import sys
def look():
    import vllm.v1.core.single_type_kv_cache_manager as module
    from vllm_mamba_retire import binding, probe
    installed = binding.installation(module.MambaManager) is not None
    outcome = probe.probe(module).outcome.name
    return f"{installed} {outcome}"
"""
PATCHED, STOCK = "True RETIRES", "False STOPS_AT_GAP"
MANAGER = "vllm.v1.core.single_type_kv_cache_manager"

WAYS = {
    "package first": f"import vllm_mamba_retire, {MANAGER}",
    "vllm first": f"import {MANAGER}, vllm_mamba_retire",
    "vllm package first, manager last": f"import vllm, vllm_mamba_retire, {MANAGER}",
    "twice": f"import vllm_mamba_retire as r, {MANAGER}; r.arm(); r.arm(); r.activate()",
    "armed twice before": f"import vllm_mamba_retire as r; r.arm(); r.arm(); import {MANAGER}",
    "plugin first": f"from vllm_mamba_retire.plugin import register; register(); import {MANAGER}",
    "plugin last": f"import {MANAGER}; from vllm_mamba_retire.plugin import register; register()",
    "vllm's plugin loader": (
        f"import vllm.plugins; vllm.plugins.load_general_plugins(); import {MANAGER}"
    ),
    "vllm's plugin loader, manager first": (
        f"import {MANAGER}, vllm.plugins; vllm.plugins.load_general_plugins()"
    ),
    "on, off, on": (
        f"import vllm_mamba_retire as r, {MANAGER}; assert r.deactivate(); r.activate()"
    ),
    "reloaded": f"import importlib, vllm_mamba_retire as r, {MANAGER}; importlib.reload(r)",
    "a second copy": (
        f"import sys, vllm_mamba_retire, {MANAGER}\n"
        "first = [n for n in sys.modules if n.startswith('vllm_mamba_retire')]\n"
        "for name in first: del sys.modules[name]\n"
        "import vllm_mamba_retire as second\n"
        "assert second.current().verdict.reason.value == 'patched'\n"
        "assert second.deactivate() and second.activate()"
    ),
    "two threads arm": (
        f"import threading, {MANAGER}\n"
        "def go():\n import vllm_mamba_retire as r\n r.arm()\n"
        "threads = [threading.Thread(target=go) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]"
    ),
    "another thread imports the manager": (
        "import importlib, sys, threading, time\n"
        f"thread = threading.Thread(target=importlib.import_module, args=({MANAGER!r},))\n"
        "thread.start()\n"
        f"while {MANAGER!r} not in sys.modules: time.sleep(0.001)\n"
        "import vllm_mamba_retire as r; thread.join()"
    ),
    "two threads import the manager": (
        "import threading, importlib, vllm_mamba_retire\n"
        f"threads = [threading.Thread(target=importlib.import_module, args=({MANAGER!r},))"
        " for _ in range(4)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]"
    ),
}


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The log lines of this package in a process that must have ended well."""
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (done.stdout + done.stderr).splitlines()
    return [line for line in lines if "vllm-mamba-retire" in line]


@pytest.mark.about(Status.LIVE)
@pytest.mark.parametrize("way", WAYS)
def test_patched_once_and_said_once(way: str, child: Child, release: str) -> None:
    done = child(f"{LOOK}\n{WAYS[way]}\nprint('LOOK', look(), flush=True)")
    lines = said(done)
    assert f"LOOK {PATCHED}" in done.stdout
    assert len(lines) == {"on, off, on": 2, "a second copy": 3}.get(way, 1), lines
    for expected in ("patched", f"vLLM {release}", "single_type_kv_cache_manager.py"):
        assert expected in lines[0]


@pytest.mark.about(Status.LIVE)
def test_stock_without_the_package_shows_the_defect(child: Child) -> None:
    done = child(f"{LOOK}\nprint(look())", MAMBA_RETIRE="off")
    assert STOCK in done.stdout, done.stderr[-3000:]
    assert said(done) == []


@pytest.mark.about(Status.LATENT, Status.NATIVE, Status.ABSENT)
def test_other_releases_keep_their_objects(child: Child, status: Status) -> None:
    done = child(
        f"""
import logging, sys
logging.basicConfig(level="INFO", stream=sys.stdout)  # from 0.31 on only serving sets it up
import {MANAGER} as module
names = [n for c in module.MambaManager.__mro__ for n in vars(c)]
before = {{n: getattr(module.MambaManager, n) for n in names}}
own = dict(vars(module.MambaManager))
import vllm_mamba_retire as r
assert r.current().verdict.reason.value == {status.value!r}, r.current()
assert dict(vars(module.MambaManager)) == own
assert all(getattr(module.MambaManager, n) is before[n] for n in ("free", "remove_skipped_blocks"))
"""
    )
    (line,) = said(done)
    assert status.value in line


@pytest.mark.about(Status.LIVE)
def test_deactivate_restores_the_identical_objects(child: Child) -> None:
    done = child(
        f"""
import {MANAGER} as module
own = dict(vars(module.MambaManager))
base = dict(vars(module.SingleTypeKVCacheManager))
import vllm_mamba_retire as r
assert dict(vars(module.MambaManager)) != own
assert r.deactivate() and not r.deactivate()
now = dict(vars(module.MambaManager))
assert set(now) == set(own)
assert all(now[name] is own[name] for name in own)
assert "_remove_blocks_in_range" not in now
assert all(vars(module.SingleTypeKVCacheManager)[name] is base[name] for name in base)
"""
    )
    said(done)


@pytest.mark.about(Status.LIVE)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_are_patched_once(method: str, child: Child) -> None:
    """A forked child inherits the patch; a spawned one gets it from vLLM's plugin loader."""
    done = child(
        f"""
{LOOK}
def work(queue):
    import vllm.plugins
    vllm.plugins.load_general_plugins()
    queue.put(look())
if __name__ == "__main__":
    import multiprocessing, vllm_mamba_retire, {MANAGER}
    context = multiprocessing.get_context({method!r})
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print("LOOK", queue.get(timeout=120), flush=True)
    process.join()
"""
        if method == "fork"
        else f"""
import multiprocessing, pathlib, sys
pathlib.Path("worker.py").write_text({(LOOK + WORKER)!r})
sys.path.insert(0, ".")
import worker
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=worker.work, args=(queue,))
    process.start()
    print("LOOK", queue.get(timeout=120), flush=True)
    process.join()
"""
    )
    said(done)
    assert f"LOOK {PATCHED}" in done.stdout


WORKER = """
def work(queue):
    import vllm.plugins
    vllm.plugins.load_general_plugins()
    queue.put(look())
"""


def test_import_alone_loads_neither_vllm_nor_torch(child: Child) -> None:
    done = child(
        "import sys, vllm_mamba_retire\n"
        "assert not {'vllm', 'torch', 'wrapt', 'yaml'} & set(sys.modules), sorted(sys.modules)"
    )
    assert said(done) == []
