"""Compares a case's figures with what its replays gave.

A figure is a number alone (peak states of one request in one Mamba group) or names the property
of `Run` it is for, with ``_at_least`` or ``_at_most`` behind it where it is a bound.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .cases import Case
from .compare import Pair, Side
from .runs import Run
from .scenario import InputError

_MIB = 2**20
_PROPERTIES = (
    "scheduled_tokens",
    "prefill_steps",
    "rollbacks",
    "redone_tokens",
    "peak_states",
    "peak_used",
    "hit_tokens",
)
_RELATIONS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "_at_least": ("at least ", operator.ge),
    "_at_most": ("at most ", operator.le),
    "": ("", operator.eq),
}


def differences(
    case: Case, pairs: Sequence[Pair], sides: Sequence[Side] = ("stock", "fixed")
) -> list[str]:
    """One sentence for each figure of the case that its replays did not give.

    `sides` limits the comparison: a native release never shows what stock did.

    Raises:
        InputError: a figure cannot be read.
    """
    return [
        f"{case.id}, lag {pair.scenario.lag}, pool {pair.scenario.pool or 'roomy'}: {sentence}"
        for pair in pairs
        for sentence in _Comparison(case, pair, sides).differences()
    ]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """One pair of replays against the figures of its case."""

    case: Case
    pair: Pair
    sides: Sequence[Side]

    def differences(self) -> Iterator[str]:
        for name, value in self.case.figures.items():
            if name == "expect":
                yield from self._expect(value)
            elif name == "mib_per_group":
                yield from self._mib(value)
            else:
                yield from self._states_after(int(name.split("_")[1]), value)

    def _expect(self, expect: Mapping[str, Any]) -> Iterator[str]:
        for name, value in expect.items():
            if name.startswith("lag"):
                if name == f"lag{self.pair.scenario.lag}":
                    yield from self._expect(value)
            elif name == "same_with_and_without":
                same = self.pair.stock.steps == self.pair.fixed.steps
                yield from _check("same with and without", same, value)
            else:
                side, suffix = _split(name)
                figures = value if isinstance(value, dict) else {f"peak_states{suffix}": value}
                for run in self._run(side):
                    yield from _check_run(side, run, figures)

    def _mib(self, figures: Mapping[str, Any]) -> Iterator[str]:
        if (block_bytes := self.case.block_bytes) is None:
            raise InputError(f"layout: {self.case.id} has MiB figures and none to get them from.")
        for side, value in figures.items():
            for run in self._run(side):
                held = round(run.peak_states * block_bytes / _MIB, 2)
                yield from _check(f"{side} MiB per group", held, value)

    def _states_after(self, tokens: int, figures: Mapping[str, Any]) -> Iterator[str]:
        for side, value in figures.items():
            for run in self._run(side):
                found = run.states_after(tokens)
                yield from _check(f"{side} states at {tokens} tokens", found, value)

    def _run(self, side: str) -> Iterator[Run]:
        """The replay of a side that is to be compared."""
        if side not in ("stock", "fixed"):
            raise InputError(f"expect: {side}: neither stock nor fixed.")
        if side in self.sides:
            yield getattr(self.pair, side)


def _check_run(side: str, run: Run, figures: Mapping[str, Any]) -> Iterator[str]:
    for name, value in figures.items():
        figure, suffix = _split(name)
        if figure not in _PROPERTIES:
            raise InputError(f"expect: {side}: {name}: unknown figure.")
        yield from _check(f"{side} {figure}", getattr(run, figure), value, suffix)
    if run.stuck is not None:
        yield f"{side}: {run.stuck}"


def _check(what: str, found: Any, expected: Any, suffix: str = "") -> Iterator[str]:
    words, holds = _RELATIONS[suffix]
    if found is None or not holds(found, expected):
        yield f"{what} is {found}, expected {words}{expected}."


def _split(name: str) -> tuple[str, str]:
    suffix = next(suffix for suffix in _RELATIONS if name.endswith(suffix))
    return name.removesuffix(suffix), suffix
