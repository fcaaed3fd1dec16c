"""The decision, question by question: a case differs from its neighbour in one piece of evidence.

A case is what was seen on top of a healthy live release, the reason that must come out, and a few
words that the sentence must have.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from vllm_mamba_retire.evidence import Evidence, Outcome
from vllm_mamba_retire.releases import Row, Status
from vllm_mamba_retire.target import Target
from vllm_mamba_retire.verdict import Reason, Verdict, decide

FILE = Path("/site/vllm/v1/core/single_type_kv_cache_manager.py")
TARGET = Target(
    package=Path("/site/vllm"),
    manager_file=FILE,
    version="0.29.0",
    distribution="vllm",
    source="mamba_cache_mode",
    sha256="0",
    problem=None,
)
NO_SOURCE = replace(TARGET, source=None, problem="FILE does not exist")


def row(status: Status) -> Row:
    return Row(version="0.29.0", status=status, fingerprints={}, manager_sha256="0")


LIVE = Evidence(
    target=TARGET,
    loaded_from=str(FILE),
    row=row(Status.LIVE),
    exact=True,
    outcome=Outcome.STOPS_AT_GAP,
)


@dataclass
class Decision:
    name: str
    seen: dict[str, Any]
    reason: Reason
    words: tuple[str, ...] = ()
    base: Evidence = field(default=LIVE)


NATIVE = replace(LIVE, row=row(Status.NATIVE), outcome=Outcome.RETIRES)
UNLISTED = replace(LIVE, row=None, exact=False)
INSTALLED = replace(LIVE, ours_installed=True, outcome=None)

CASES = [
    Decision("live", {}, Reason.PATCHED, ("0.29.0", "retires")),
    Decision("off comes first", {"off": True, "target": None}, Reason.OFF, ("MAMBA_RETIRE=off",)),
    Decision("no vLLM", {"target": None}, Reason.NO_TARGET, ("cannot import vLLM",)),
    Decision("compiled", {"loaded_from": str(FILE.with_suffix(".pyc"))}, Reason.PATCHED),
    Decision(
        "two trees",
        {"loaded_from": "/other/vllm/manager.py"},
        Reason.CONFLICT,
        ("/site/vllm", "/other/vllm/manager.py", "one vLLM"),
    ),
    Decision(
        "two trees, though ours is on",
        {"loaded_from": "/other/manager.py", "ours_installed": True},
        Reason.CONFLICT,
        ("one vLLM",),
    ),
    Decision(
        "only looked at", {"loaded_from": None, "outcome": None}, Reason.PATCHED, ("a process",)
    ),
    # Our patch is on the class.
    Decision("installed", {}, Reason.PATCHED, ("retires",), INSTALLED),
    Decision("installed, no source", {"target": NO_SOURCE}, Reason.PATCHED, (), INSTALLED),
    Decision(
        "installed, wrapped by others",
        {"foreign": "free (x.y)"},
        Reason.CONFLICT,
        ("free (x.y) was replaced",),
        INSTALLED,
    ),
    Decision(
        "installed, wrapped by others, behaves",
        {"foreign": "free (x.y)", "outcome": Outcome.RETIRES},
        Reason.PATCHED,
        (),
        INSTALLED,
    ),
    Decision(
        "installed, overridden below",
        {"subclass": "x.Sub.free"},
        Reason.CONFLICT,
        ("x.Sub.free overrides",),
        INSTALLED,
    ),
    # No source.
    Decision(
        "no source", {"target": NO_SOURCE}, Reason.FAILED, ("FILE does not exist", "reinstall")
    ),
    Decision(
        "older than the manager",
        {"target": replace(NO_SOURCE, predates_align=True)},
        Reason.ABSENT,
        ("older than align mode",),
    ),
    # Patched on disk.
    Decision(
        "series",
        {"series": "v0.29.0", "row": None, "outcome": Outcome.RETIRES},
        Reason.FIXED_ELSEWHERE,
        ("series v0.29.0",),
    ),
    Decision(
        "series, only looked at",
        {"series": "v0.29.0", "row": None, "outcome": None},
        Reason.FIXED_ELSEWHERE,
        ("series v0.29.0",),
    ),
    Decision(
        "series that does not behave",
        {"series": "v0.29.0", "row": None},
        Reason.DRIFTED,
        ("differs",),
    ),
    # A listed release.
    Decision("absent", {"row": row(Status.ABSENT)}, Reason.ABSENT, ("no align mode",)),
    Decision("latent", {"row": row(Status.LATENT)}, Reason.LATENT, ("does not reach",)),
    Decision("native", {}, Reason.NATIVE, ("carries the fix",), NATIVE),
    Decision("native, only looked at", {"outcome": None}, Reason.NATIVE, (), NATIVE),
    Decision("native, wrapped", {"foreign": "free (x.y)"}, Reason.NATIVE, (), NATIVE),
    Decision("native, overridden", {"subclass": "x.Sub.free"}, Reason.NATIVE, (), NATIVE),
    Decision(
        "native that leaks",
        {"outcome": Outcome.STOPS_AT_GAP},
        Reason.FAILED,
        ("native", "stops at the gap"),
        NATIVE,
    ),
    Decision(
        "native that leaks, overridden",
        {"outcome": Outcome.STOPS_AT_GAP, "subclass": "x.Sub.free"},
        Reason.FAILED,
        ("native",),
        NATIVE,
    ),
    Decision(
        "native that leaks, looked at",
        {"outcome": Outcome.WRONG, "loaded_from": None},
        Reason.FAILED,
        ("wrong",),
        NATIVE,
    ),
    Decision("live, wrapped", {"foreign": "free (x.y)"}, Reason.CONFLICT, ("free (x.y) was",)),
    Decision(
        "live, fixed by others",
        {"foreign": "free (x.y)", "outcome": Outcome.RETIRES},
        Reason.FIXED_ELSEWHERE,
        ("free (x.y)",),
    ),
    Decision("live, overridden", {"subclass": "x.Sub.free"}, Reason.CONFLICT, ("x.Sub.free",)),
    Decision(
        "live that behaves",
        {"outcome": Outcome.RETIRES},
        Reason.FIXED_ELSEWHERE,
        ("is fixed by other code",),
    ),
    Decision(
        "live that behaves in part",
        {"outcome": Outcome.WRONG, "exact": False},
        Reason.DRIFTED,
        ("other code in", "wrong", "Remove that change"),
    ),
    Decision("live, wrong", {"outcome": Outcome.WRONG}, Reason.FAILED, ("wrong", "Report")),
    Decision("live, not probed", {"outcome": None}, Reason.FAILED, ("not probed",)),
    # No known release.
    Decision("unlisted", {}, Reason.DRIFTED, ("the methods this patch depends on",), UNLISTED),
    Decision(
        "unlisted, changed methods",
        {"changed": ("A.x", "B.y")},
        Reason.DRIFTED,
        ("A.x, B.y", "MAMBA_RETIRE_ALLOW_DRIFT=1"),
        UNLISTED,
    ),
    Decision(
        "unlisted that behaves",
        {"outcome": Outcome.RETIRES, "drift_allowed": True, "foreign": "free (x.y)"},
        Reason.FIXED_ELSEWHERE,
        ("matches no known release",),
        UNLISTED,
    ),
    Decision(
        "on request",
        {"drift_allowed": True},
        Reason.PATCHED,
        ("matches no known release",),
        UNLISTED,
    ),
    Decision(
        "on request, but it takes other arguments",
        {"drift_allowed": True, "obstacle": "M.m takes (self, x)"},
        Reason.DRIFTED,
        ("cannot take the patch: M.m takes (self, x)",),
        UNLISTED,
    ),
    Decision(
        "on request, only inspected",
        {"drift_allowed": True, "loaded_from": None},
        Reason.PATCHED,
        ("a process that loads this package", "matches no known release"),
        UNLISTED,
    ),
    Decision(
        "on request, but wrong",
        {"drift_allowed": True, "outcome": Outcome.WRONG},
        Reason.DRIFTED,
        (),
        UNLISTED,
    ),
    Decision(
        "on request, but wrapped",
        {"drift_allowed": True, "foreign": "free (x.y)"},
        Reason.CONFLICT,
        ("free (x.y)",),
        UNLISTED,
    ),
    Decision(
        "on request, but overridden",
        {"drift_allowed": True, "subclass": "x.Sub.free"},
        Reason.CONFLICT,
        ("x.Sub.free",),
        UNLISTED,
    ),
    Decision(
        "unlisted without align mode",
        {"target": replace(TARGET, source="no such setting"), "outcome": Outcome.WRONG},
        Reason.ABSENT,
        ("no align mode",),
        UNLISTED,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_reason_and_sentence(case: Decision) -> None:
    verdict = decide(replace(case.base, **case.seen))
    assert verdict.reason is case.reason, verdict
    for words in case.words:
        assert words in verdict.sentence


def test_every_reason_is_reached() -> None:
    assert {case.reason for case in CASES} == set(Reason)


@pytest.mark.parametrize("reason", Reason)
def test_doubt_is_where_vllm_may_leak_although_installed(reason: Reason) -> None:
    doubtful = {Reason.DRIFTED, Reason.CONFLICT, Reason.FAILED, Reason.NO_TARGET}
    assert Verdict(reason, "").in_doubt == (reason in doubtful)


def test_verdict_reads_as_code_and_sentence() -> None:
    assert str(Verdict(Reason.NO_TARGET, "so it is.")) == "no-target: so it is."
