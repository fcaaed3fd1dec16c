"""Runs the matrix's checks on a release's own code and prints the results as JSON.

``python -m tools.table.behaviour`` in an environment with vLLM's requirements, this package and one
release on the path. Every figure is measured in child processes, stock and patched.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from vllm_mamba_retire.child import ChildError
from vllm_mamba_retire.names import KEEP_VARIABLE
from vllm_mamba_retire.replay.runs import Run
from vllm_mamba_retire.replay.scenario import Arrival, Scenario
from vllm_mamba_retire.replay.sides import FIXED, KEPT, SIDES, Side, compare, replay_all
from vllm_mamba_retire.verdict import Reason
from vllm_mamba_retire.verification import BLOCK, BUDGET, LAGS, PROMPT, SPEC, Observation, look

DOES_NOT_RUN = "does not run"  # the start of such a result
_SPECS, _LAGS = (0, 2), (1, 2)
_CHUNK_BLOCK, _CHUNK_BUDGET, _TOKENS = 1568, 4096, 60_000  # tokens; a chunk spans two blocks
_MANAGER = (
    f"manager replay, peak: block {BLOCK}, budget {BUDGET}, {PROMPT} tokens, {SPEC} spec, "
    f"lag {'/'.join(map(str, LAGS))}"
)
_SCHEDULER = (
    f"scheduler replay, peak: block {_CHUNK_BLOCK}, budget {_CHUNK_BUDGET}, {_TOKENS} tokens, "
    f"{{spec}} spec, lag {'/'.join(map(str, _LAGS))}"
)
_RULE = KEPT.environment[KEEP_VARIABLE]
# Four prompts pass while a conversation's answer is generated; then comes its next turn.
_CONVERSATION = Scenario(
    "next turn",
    block=_CHUNK_BLOCK,
    budget=_CHUNK_BUDGET,
    arrivals=(
        Arrival("first", 20_000, 60),
        *(Arrival(f"p{n}", 20_000, after=f"p{n - 1}" if n else None, at=10) for n in range(4)),
        Arrival("next", 22_000, after="first", text="first"),
    ),
    pool=50,
    retention_interval="dense",
)
_HITS = (
    f"keep replay, hits: block {_CHUNK_BLOCK}, budget {_CHUNK_BUDGET}, next turn after 20000 "
    f"tokens, pool {_CONVERSATION.pool}, lag 1"
)


def main() -> None:
    stock = look("off", _RULE)
    reason = stock.verdict.reason
    if reason is Reason.ABSENT:
        return _answer([("configuration", "no mamba_cache_mode")])
    kept = look("auto", _RULE) if reason in (Reason.PATCHED, Reason.NATIVE) else None
    # It is live: what the patch makes of it.
    sides = [stock, kept] if kept and reason is Reason.PATCHED else [stock]
    return _answer(
        [
            ("probe", _told([_probed(side) for side in sides])),
            (_MANAGER, _told(["/".join(map(str, side.peaks)) or _probed(side) for side in sides])),
            *scheduler(SIDES[: len(sides)]),
            *(_keep(stock, kept) if kept else ()),
        ]
    )


def _keep(stock: Observation, kept: Observation) -> list[tuple[str, str]]:
    """Check whether the newest state can be kept: the probe, and hits of the next turn."""
    probed = [side.newest.value if side.newest else _probed(side) for side in (stock, kept)]
    try:
        (replayed,) = compare([_CONVERSATION], (FIXED, KEPT))
        hits = f"fixed {replayed.fixed.hit_tokens}, kept {replayed.kept.hit_tokens}"
    except ChildError as error:
        hits = f"{DOES_NOT_RUN} ({_reason(error.log)})"
    return [("keep probe", "stock {}, kept {}".format(*probed)), (_HITS, hits)]


def _probed(seen: Observation) -> str:
    return seen.outcome.value if seen.outcome else f"{DOES_NOT_RUN} ({seen.problem})"


def _answer(findings: list[tuple[str, str]]) -> None:
    print(json.dumps(findings))


def _told(results: list[str]) -> str:
    return results[0] if len(results) == 1 else "stock {}, patched {}".format(*results)


def scheduler(sides: Sequence[Side], specs: Sequence[int] = _SPECS) -> list[tuple[str, str]]:
    """Return peak states through the release's own scheduler, as check and result.

    Args:
        sides: stock, and patched if that differs.
        specs: speculative blocks, a check each.
    """
    told: dict[int, list[str]] = {spec: [] for spec in specs}
    for side in sides:
        for spec, peaks in zip(specs, _replays(side, specs), strict=True):
            told[spec].append(peaks)
    return [(_SCHEDULER.format(spec=spec), _told(results)) for spec, results in told.items()]


def _replays(side: Side, specs: Sequence[int]) -> list[str]:
    """Return peaks by `specs`, from one child process if that works."""
    try:
        runs = replay_all([_scenario(spec, lag) for spec in specs for lag in _LAGS], side)
    except ChildError:
        return [_replay(spec, side) for spec in specs]
    return [_peaks(runs[at : at + len(_LAGS)]) for at in range(0, len(runs), len(_LAGS))]


def _replay(spec: int, side: Side) -> str:
    try:
        return _peaks(replay_all([_scenario(spec, lag) for lag in _LAGS], side))
    except ChildError as error:
        return f"{DOES_NOT_RUN} ({_reason(error.log)})"


def _reason(log: str) -> str:
    """Return the error's sentence from a traceback, without the link that pydantic adds."""
    lines = [line.strip() for line in log.strip().splitlines()]
    said = [line for line in lines if line.startswith("Assertion failed, ")]
    return said[-1].removeprefix("Assertion failed, ").split(" [type=")[0] if said else lines[-1]


def _scenario(spec: int, lag: int) -> Scenario:
    return Scenario(
        f"{spec} spec, lag {lag}",
        block=_CHUNK_BLOCK,
        budget=_CHUNK_BUDGET,
        arrivals=(Arrival("r", _TOKENS),),
        spec=spec,
        lag=lag,
    )


def _peaks(runs: list[Run]) -> str:
    return "/".join(run.stuck or str(run.peak_states) for run in runs)


if __name__ == "__main__":
    main()
