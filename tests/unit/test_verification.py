"""What a verification adds up to, from what two processes observed."""

from __future__ import annotations

import pytest

from vllm_mamba_retire.evidence import Outcome
from vllm_mamba_retire.keep_probe import KeepOutcome
from vllm_mamba_retire.keep_verdict import OFF, KeepVerdict, kept, unavailable
from vllm_mamba_retire.verdict import Reason, Verdict
from vllm_mamba_retire.verification import LAGS, Observation, Verification, bound

PATCHED = Verdict(Reason.PATCHED, "patched here.")
BOUNDS = tuple(bound(lag) for lag in LAGS)
KEEPS, PLAIN, WRONG = KeepOutcome.KEEPS, KeepOutcome.PLAIN, KeepOutcome.WRONG


def verification(
    keep: KeepVerdict, stock: KeepOutcome | None, patched: KeepOutcome | None, *, leaks: bool = True
) -> Verification:
    before = Observation(PATCHED, outcome=Outcome.STOPS_AT_GAP, peaks=(7, 71, 71), newest=stock)
    fine = Observation(PATCHED, outcome=Outcome.RETIRES, peaks=BOUNDS, keep=keep, newest=patched)
    return Verification(before if leaks else fine, fine)


@pytest.mark.parametrize(
    ("keep", "stock", "patched", "proven"),
    [
        (OFF, None, None, True),
        (kept("newest"), PLAIN, KEEPS, True),
        (kept("newest"), PLAIN, PLAIN, False),
        (kept("newest"), KEEPS, KEEPS, False),
        (kept("newest"), PLAIN, WRONG, False),
        (unavailable("not here"), PLAIN, PLAIN, False),
    ],
)
def test_keeping_is_proven_by_the_probe_before_and_after(
    keep: KeepVerdict, stock: KeepOutcome | None, patched: KeepOutcome | None, proven: bool
) -> None:
    seen = verification(keep, stock, patched)
    assert seen.proven is proven
    assert seen.sentence.startswith("proven: stock keeps" if proven else f"not proven: {keep}")


def test_without_the_retirement_nothing_is_proven() -> None:
    seen = verification(kept("newest"), PLAIN, KEEPS, leaks=False)
    assert not seen.proven
    assert seen.sentence == "not proven: patched here."
