"""In doubt vLLM stays as it was: one warning, or with ``require`` one sentence and the end."""

from __future__ import annotations

import pytest

from tests.children import Child
from vllm_mamba_retire.releases import Status

pytestmark = pytest.mark.about(Status.LIVE)

MANAGER = "vllm.v1.core.single_type_kv_cache_manager"
CHECK = f"""
import {MANAGER} as module
from vllm_mamba_retire import binding, current, probe
assert binding.installation(module.MambaManager) is None
assert "_remove_blocks_in_range" not in vars(module.MambaManager)
print("REASON", current().verdict.reason.value, flush=True)
"""

# what goes wrong -> (code before the package is imported, reason, a word of the sentence)
TROUBLES = {
    "somebody wrapped a method of the class": (
        f"""
import functools, {MANAGER} as m
stock = m.MambaManager.remove_skipped_blocks
@functools.wraps(stock)
def wrapper(*a, **k): return stock(*a, **k)
m.MambaManager.remove_skipped_blocks = wrapper
""",
        "conflict",
        "remove_skipped_blocks",
    ),
    "somebody replaced a method of the base": (
        f"""
import {MANAGER} as m
m.SingleTypeKVCacheManager._remove_blocks_in_range = lambda self, r, a, b: None
""",
        "conflict",
        "_remove_blocks_in_range",
    ),
    "a subclass overrides our method": (
        f"""
import {MANAGER} as m
class Other(m.MambaManager):
    def pop_blocks_for_free(self, request_id): return super().pop_blocks_for_free(request_id)
""",
        "conflict",
        "Other.pop_blocks_for_free",
    ),
    "the source cannot be read": (
        """
import vllm_mamba_retire.target as t
t._read = lambda path: (None, f"{path} cannot be read (Permission denied)")
""",
        "failed",
        "Permission denied",
    ),
    "the table is missing": (
        """
import pathlib, vllm_mamba_retire.releases as m
m._shipped = lambda: pathlib.Path("nowhere.yaml")
""",
        "failed",
        "nowhere.yaml",
    ),
    "our own code raises": (
        """
import vllm_mamba_retire.activation as a
def bang(*_): raise ZeroDivisionError("a bug of ours")
a.decide = bang
""",
        "failed",
        "a bug of ours",
    ),
    "the patched class does not behave": (
        """
import vllm_mamba_retire.binding as b
b.Retirement.retire = lambda *_, **__: None
""",
        "failed",
        "methods are restored",
    ),
    "the mode is misspelt": (
        "import os; os.environ['MAMBA_RETIRE'] = 'requier'",
        "failed",
        "requier",
    ),
    "wrapt is broken": (
        "import sys; sys.modules['wrapt'] = None",
        "failed",
        "wrapt",
    ),
    "the code is of no known release": (
        """
import vllm_mamba_retire.releases as m
real = m.load_matrix
def load(path=None):
    import msgspec
    table = real(path)
    rows = tuple(r for r in table.releases if r.status.value not in ("live", "native"))
    return msgspec.structs.replace(table, releases=rows)
import vllm_mamba_retire.activation as a
a.load_matrix = load
""",
        "drifted",
        "MAMBA_RETIRE_ALLOW_DRIFT",
    ),
}

# The package is first imported with the mode off, so that the trouble can be set up in its parts.
ARM = "import os; os.environ['MAMBA_RETIRE'] = os.environ.pop('WISH', 'auto')\n"


def script(trouble: str) -> str:
    setup = TROUBLES[trouble][0]
    # A misspelt wish is set by the trouble itself.
    order = [ARM, setup] if "os.environ" in setup else [setup, ARM]
    return "\n".join([*order, "import vllm_mamba_retire as r; r.arm()", f"import {MANAGER}", CHECK])


@pytest.mark.parametrize("trouble", TROUBLES)
def test_auto_leaves_vllm_alone_and_warns_once(trouble: str, child: Child) -> None:
    _, reason, word = TROUBLES[trouble]
    done = child(script(trouble), MAMBA_RETIRE="off")
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"REASON {reason}" in done.stdout
    lines = [x for x in (done.stdout + done.stderr).splitlines() if "vllm-mamba-retire" in x]
    assert len(lines) == 1, lines
    assert "WARNING" in lines[0] or "wrapt" in trouble
    assert word in lines[0]


@pytest.mark.parametrize("trouble", [t for t in TROUBLES if "misspelt" not in t])
def test_require_stops_with_one_sentence(trouble: str, child: Child) -> None:
    word = TROUBLES[trouble][2]
    done = child(script(trouble), MAMBA_RETIRE="off", WISH="require")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("vllm-mamba-retire: MAMBA_RETIRE=require, but ")
    assert word in last
    assert "REASON" not in done.stdout
    assert "Traceback" not in done.stderr


def test_require_is_content_when_the_patch_holds(child: Child) -> None:
    done = child(
        f"import vllm_mamba_retire as r, {MANAGER}; print('REASON', r.current().verdict.reason)",
        MAMBA_RETIRE="require",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "REASON Reason.PATCHED" in done.stdout


def test_code_of_no_known_release_is_patched_on_request(child: Child) -> None:
    setup = TROUBLES["the code is of no known release"][0]
    done = child(
        f"{setup}\n{ARM}\nimport vllm_mamba_retire as r, {MANAGER} as m\nr.arm()\n"
        "from vllm_mamba_retire import probe\nprint(r.current().verdict, probe.probe(m).outcome)",
        MAMBA_RETIRE="off",
        MAMBA_RETIRE_ALLOW_DRIFT="1",
    )
    assert "It matches no known release; MAMBA_RETIRE_ALLOW_DRIFT=1" in done.stdout, done.stderr[
        -3000:
    ]
    assert "Outcome.RETIRES" in done.stdout


def test_deactivate_does_not_remove_what_came_after_us(child: Child) -> None:
    done = child(
        f"""
import vllm_mamba_retire as r, {MANAGER} as m
from vllm_mamba_retire import binding
ours = m.MambaManager.pop_blocks_for_free
def later(self, request_id): return ours(self, request_id)
m.MambaManager.pop_blocks_for_free = later
try:
    r.deactivate()
except binding.BindingError as error:
    print("REFUSED", error)
assert m.MambaManager.pop_blocks_for_free is later
assert binding.installation(m.MambaManager) is not None
"""
    )
    assert "REFUSED" in done.stdout, done.stderr[-3000:]
    assert "later" in done.stdout
