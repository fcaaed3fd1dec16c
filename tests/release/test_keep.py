"""Keeping the newest state on a release's own manager, pool and free queue."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest

from vllm_mamba_retire import activation
from vllm_mamba_retire.keep_probe import KeepOutcome
from vllm_mamba_retire.keep_verdict import KeepState
from vllm_mamba_retire.names import KEEP_VARIABLE
from vllm_mamba_retire.releases import Status
from vllm_mamba_retire.target import find_target
from vllm_mamba_retire.verdict import decide

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


@pytest.mark.parametrize(
    "answers", [["keeps"], ["wrong"], ["plain", "plain"], ["plain", "wrong"], ["no answer"]]
)
def test_a_class_that_answers_otherwise_is_left_as_it_was(
    answers: list[str], module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe answers what the test says, before and after the patch is on."""
    own, given = module.MambaManager, iter(answers)
    seen = activation.inspect_process(find_target(), module)
    methods = dict(vars(own))
    monkeypatch.setenv(KEEP_VARIABLE, "newest")
    monkeypatch.setattr(activation, "probe_keep", lambda *_: (KeepOutcome(next(given)), "a test"))
    verdict = activation._keep(module, own, seen, decide(seen))
    assert verdict.state is KeepState.UNAVAILABLE
    assert dict(vars(own)) == methods
    assert next(given, None) is None, "not asked"
