"""What a process decides about changed trees and about classes that others touch.

Every case is a fresh interpreter. `require` is set throughout: whoever is in doubt stops.
"""

from __future__ import annotations

import compileall
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.children import Child
from tests.detection.sites import LATENT, LIVE, NATIVE, SERIES, Site, apply
from tests.detection.trees import BY_HAND, in_class

MakeSite = Callable[..., Site]

_IMPORT = """
import vllm.v1.core.single_type_kv_cache_manager as module
Manager = module.MambaManager
"""
# So that it is asked after the others came, and not when the module is imported.
_DISARM = "import vllm_mamba_retire; vllm_mamba_retire.disarm()\n"
_ACTIVATE = """
import vllm_mamba_retire
from vllm_mamba_retire import binding, probe
installed = lambda: binding.installation(Manager) is not None
print("VERDICT", vllm_mamba_retire.activate(), flush=True)
"""
_WRAPPER = """
import functools
stock = Manager.__dict__.get("_remove_blocks_in_range") or Manager._remove_blocks_in_range
seen = []
@functools.wraps(stock)
def somebodys(self, *arguments):
    seen.append(arguments)
    return stock(self, *arguments)
Manager._remove_blocks_in_range = somebodys
"""
_FIRST = "import vllm_mamba_retire; vllm_mamba_retire.activate()\n"
_SUBCLASS = """
class Somebodys(Manager):
    def _remove_blocks_in_range(self, request_id, first_block, last_block):
        pass
"""
_LINE = "            self._allocated_block_reqs.discard(request_id)\n"


@pytest.fixture
def decided(child: Child) -> Callable[..., tuple[int, str, str]]:
    """Runs code on a tree: exit status, verdict and everything printed."""

    def run(tree: Site | str, *code: str, **environment: str) -> tuple[int, str, str]:
        path = tree if isinstance(tree, str) else tree.path()
        done = child("".join(code), PYTHONPATH=path, MAMBA_RETIRE="require", **environment)
        lines = [line for line in done.stdout.splitlines() if line.startswith("VERDICT ")]
        verdict = lines[-1].removeprefix("VERDICT ") if lines else ""
        return done.returncode, verdict, done.stdout + done.stderr

    return run


def test_the_fix_by_hand_is_left_as_it_is(site: MakeSite, decided) -> None:
    tree = site(LIVE)
    in_class(BY_HAND)(tree)
    code, verdict, out = decided(tree, _IMPORT, _ACTIVATE, "assert not installed()")
    assert code == 0, out
    assert verdict.startswith("fixed-elsewhere: ")


def test_our_series_on_disk_is_not_patched_again(site: MakeSite, decided) -> None:
    tree = site(LIVE)
    apply(tree, next(SERIES.glob("0001-*.patch")).read_text())
    code, verdict, out = decided(tree, _IMPORT, _ACTIVATE, "assert not installed()")
    assert code == 0, out
    assert verdict.startswith("fixed-elsewhere: ")
    assert f"series v{LIVE}" in verdict


def test_half_a_series_that_breaks_the_class_stops_the_process(site: MakeSite, decided) -> None:
    tree = site(LIVE)
    head, *hunks = next(SERIES.glob("0001-*.patch")).read_text().split("\n@@ ")
    apply(tree, f"{head}\n@@ {hunks[1].rstrip()}\n")
    code, _, out = decided(tree, _IMPORT, _ACTIVATE)
    assert code == 1
    assert "differs from every known release in MambaManager._remove_blocks_in_range" in out


@pytest.mark.parametrize("allowed", [False, True])
def test_drift_is_patched_only_on_request(site: MakeSite, decided, allowed: bool) -> None:
    tree = site(LIVE)
    tree.edit_manager((_LINE, _LINE.replace("request_id", "str(request_id)")))
    wish = {"MAMBA_RETIRE_ALLOW_DRIFT": "1"} if allowed else {}
    proof = "assert installed() and probe.probe(module).retires_across_gap"
    code, verdict, out = decided(tree, _DISARM, _IMPORT, _ACTIVATE, proof, **wish)
    if allowed:
        assert code == 0, out
        assert verdict.startswith("patched: ")
        assert "MAMBA_RETIRE_ALLOW_DRIFT=1" in verdict
    else:
        assert code == 1
        assert "in MambaManager.pop_blocks_for_free" in out


def test_a_wrapper_before_us_on_a_live_release_is_a_conflict(site: MakeSite, decided) -> None:
    code, _, out = decided(site(LIVE), _DISARM, _IMPORT, _WRAPPER, _ACTIVATE)
    assert code == 1
    assert "_remove_blocks_in_range (__main__.somebodys) was replaced" in out


def test_a_wrapper_after_us_that_calls_on_does_no_harm(site: MakeSite, decided) -> None:
    check = """
assert installed() and seen and probe.probe(module).retires_across_gap
try:
    vllm_mamba_retire.deactivate()
except binding.BindingError as error:
    assert "replaced after this patch" in str(error), error
else:
    raise SystemExit("took off somebody's wrapper")
assert Manager._remove_blocks_in_range is somebodys
"""
    code, verdict, out = decided(site(LIVE), _IMPORT, _FIRST, _WRAPPER, _ACTIVATE, check)
    assert code == 0, out
    assert verdict.startswith("patched: ")


def test_a_replacement_after_us_is_not_reported_as_patched(site: MakeSite, decided) -> None:
    replaced = "Manager._remove_blocks_in_range = lambda self, *arguments: None\n"
    code, _, out = decided(site(LIVE), _IMPORT, _FIRST, replaced, _ACTIVATE)
    assert code == 1
    assert "was replaced by other code" in out


def test_subclass_with_its_own_method_is_not_reported_as_patched(site: MakeSite, decided) -> None:
    code, _, out = decided(site(LIVE), _DISARM, _IMPORT, _SUBCLASS, _ACTIVATE)
    assert code == 1
    assert "Somebodys._remove_blocks_in_range overrides a method" in out


def test_a_name_bound_to_a_subclass_is_looked_through(site: MakeSite, decided) -> None:
    rebound = """
class Platforms(Manager):
    pass
module.MambaManager = Platforms
"""
    check = """
assert installed() and "_remove_blocks_in_range" not in vars(Platforms)
assert probe.probe(module, Platforms).retires_across_gap
"""
    code, verdict, out = decided(site(LIVE), _IMPORT, rebound, _ACTIVATE, check)
    assert code == 0, out
    assert verdict.startswith("patched: ")


@pytest.mark.parametrize("touch", [_WRAPPER, _SUBCLASS])
def test_a_native_release_that_others_touch_stays_native(
    site: MakeSite, decided, touch: str
) -> None:
    code, verdict, out = decided(site(NATIVE), _IMPORT, touch, _ACTIVATE, "assert not installed()")
    assert code == 0, out
    assert verdict.startswith("native: ")


def test_a_native_release_that_others_broke_is_not_called_native(site: MakeSite, decided) -> None:
    broken = "del Manager._remove_blocks_in_range\n"
    code, _, out = decided(site(NATIVE), _DISARM, _IMPORT, broken, _ACTIVATE)
    assert code == 1
    assert "(native) behaves differently" in out


def test_a_latent_release_that_others_touch_stays_latent(site: MakeSite, decided) -> None:
    code, verdict, out = decided(site(LATENT), _IMPORT, _WRAPPER, _ACTIVATE)
    assert code == 0, out
    assert verdict.startswith("latent: ")


def test_bytecode_without_source_is_left_alone(site: MakeSite, decided) -> None:
    tree = site(LIVE)
    assert compileall.compile_file(str(tree.manager), legacy=True, quiet=2)
    tree.manager.unlink()
    code, _, out = decided(tree, _IMPORT, _ACTIVATE)
    assert code == 1
    assert "reinstall vLLM with its source files" in out


def test_the_release_itself_is_patched(trees: Path, decided) -> None:
    """The control: the same tree, touched by nobody."""
    path = os.pathsep.join([str(trees / LIVE), os.environ.get("PYTHONPATH", "")])
    code, verdict, out = decided(path, _IMPORT, _ACTIVATE, "assert installed()")
    assert code == 0, out
    assert verdict.startswith("patched: ")
