"""Keeping the newest state on a release's own manager, pool and free queue."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vllm_mamba_retire.releases import Status

pytestmark = pytest.mark.about(Status.LIVE, Status.NATIVE)

REPORT = """
import vllm.v1.core.single_type_kv_cache_manager as module
import vllm_mamba_retire
from vllm_mamba_retire import binding, keep_binding
from vllm_mamba_retire.keep_probe import probe_keep
record = vllm_mamba_retire.current()
own = module.MambaManager
said = [record.verdict.reason.value, record.keep.state.value, probe_keep(module, own)[0].value]
alone = [binding.uninstall(own, patch) for patch in keep_binding.PATCHES]
said += [any(alone), probe_keep(module, own)[0].value, binding.installation(own) is not None]
print("said", *said)
"""


def said(**variables: str) -> list[str]:
    """Verdicts and what the class does, with keeping and after it alone was removed."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT],
        env={k: v for k, v in os.environ.items() if not k.startswith("MAMBA_RETIRE")} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    line = next((each for each in done.stdout.splitlines() if each.startswith("said ")), "")
    assert line, done.stderr[-2000:]
    return line.split()[1:]


@pytest.mark.parametrize("rule", ["newest", "prompt"])
def test_it_is_kept_and_can_be_removed_alone(rule: str, status: Status) -> None:
    verdict, retires = {Status.LIVE: ("patched", "True")}.get(status, ("native", "False"))
    assert said(MAMBA_RETIRE_KEEP=rule) == [verdict, "on", "keeps", "True", "plain", retires]


def test_without_a_request_the_class_is_as_it_was() -> None:
    assert said()[1:5] == ["off", "plain", "False", "plain"]


def test_an_unknown_rule_keeps_nothing_and_stops_nothing(status: Status) -> None:
    verdict = "patched" if status is Status.LIVE else "native"
    answer = said(MAMBA_RETIRE_KEEP="all", MAMBA_RETIRE="require")
    assert answer[:3] == [verdict, "unavailable", "plain"]
