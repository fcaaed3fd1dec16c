"""``status`` on a real release: at once, without importing it, and with an exit code to rely on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from vllm_mamba_retire.releases import Status

if TYPE_CHECKING:
    from tests.children import Child

_STATUS = """
import sys
from vllm_mamba_retire.cli import app
try:
    app({arguments!r})
finally:
    loaded = [name for name in ("torch", "vllm", "wrapt", "ray") if name in sys.modules]
    print("loaded", *loaded, file=sys.stderr)
"""
# A process that vLLM has loaded the package into, and that looks at itself. vLLM logs to stdout.
_ARMED = """
import os, subprocess, sys
out = os.dup(1)
os.dup2(2, 1)
from vllm.plugins import load_general_plugins
load_general_plugins()
import vllm.v1.core.single_type_kv_cache_manager
status = "from vllm_mamba_retire.cli import app; app()"
command = [sys.executable, "-c", status, "status", *{arguments!r}]
sys.exit(subprocess.run(command, stdout=out).returncode)
"""


def status_of(child: Child, *arguments: str, code: str = _STATUS, **environment: str | None) -> Any:
    """Exit code, stdout and stderr."""
    arguments = ("status", *arguments) if code is _STATUS else arguments
    done = child(code.format(arguments=list(arguments)), **environment)
    return done.returncode, done.stdout, done.stderr


def machine(answer: Any) -> int:
    """1 if other work on this machine is a finding."""
    return int(any(core["finding"] for core in answer["nodes"][0]["without_record"]))


def test_it_says_what_the_table_says_and_loads_nothing_heavy(
    child: Child, release: str, status: Status
) -> None:
    code, out, err = status_of(child, "--json")
    answer = json.loads(out)
    assert (answer["schema"], answer["vllm"]["version"]) == (1, release)
    expected = {Status.LIVE: "patched"}.get(status, status.value)
    assert answer["reason"] == expected
    assert code == machine(answer)
    assert err.splitlines()[-1] == "loaded"


def test_the_headline_says_that_nothing_will_be_patched(child: Child, status: Status) -> None:
    _, out, _ = status_of(child, MAMBA_RETIRE="off")
    headline = {Status.LIVE: "will not be patched"}.get(status, status.value)
    assert headline in out.splitlines()


def test_json_and_the_format_of_that_name_are_the_same(child: Child) -> None:
    assert status_of(child, "--json")[:2] == status_of(child, "--format", "json")[:2]


def test_text_is_for_people_and_plain_where_no_terminal_is(
    child: Child, release: str, status: Status
) -> None:
    code, out, _ = status_of(child)
    assert out.startswith(f"vLLM {release}")
    headline = {Status.LIVE: "will be patched when vLLM starts"}.get(status, status.value)
    assert headline in out.splitlines()
    assert "\x1b" not in out
    assert ("!" in out) == bool(code)


@pytest.mark.parametrize(
    ("allowed", "code"), [("mamba_retire", 0), ("other,mamba_retire", 0), ("other", 1), ("", 1)]
)
def test_an_allow_list_without_us_is_a_finding(child: Child, allowed: str, code: int) -> None:
    found, out, _ = status_of(child, "--json", VLLM_PLUGINS=allowed)
    answer = json.loads(out)
    assert bool(answer["left_out"]) == bool(code)
    assert found == max(code, machine(answer))


def test_it_sees_a_process_that_vllm_loaded_the_package_into(child: Child, release: str) -> None:
    code, out, _ = status_of(child, "--json", code=_ARMED)
    (node,) = json.loads(out)["nodes"]
    (entry,) = node["processes"]
    assert entry["vllm"] == release
    assert entry["verdict"]["reason"] == json.loads(out)["reason"]
    assert code == machine(json.loads(out))


def test_prometheus_gets_metrics_and_nothing_else(child: Child) -> None:
    _, out, _ = status_of(child, "--format", "prometheus", code=_ARMED)
    lines = [line for line in out.splitlines() if not line.startswith(("# HELP ", "# TYPE "))]
    assert all(line.startswith("vllm_mamba_retire_") for line in lines)
    assert any(line.startswith("vllm_mamba_retire_info{") for line in lines)


def test_a_process_told_to_do_nothing_keeps_no_record(child: Child) -> None:
    _, out, _ = status_of(child, "--json", code=_ARMED, MAMBA_RETIRE="off")
    assert json.loads(out)["nodes"][0]["processes"] == []


def test_an_error_of_our_own_is_not_taken_for_a_finding(child: Child) -> None:
    done = child(
        "import sys\n"
        "import vllm_mamba_retire.releases as matrix\n"
        "from vllm_mamba_retire.cli import main\n"
        "matrix.load_matrix = lambda: 1 / 0\n"
        "sys.argv = ['vllm-mamba-retire', 'status']\n"
        "main()\n"
    )
    assert done.returncode == 2
    assert "ZeroDivisionError" in done.stderr
