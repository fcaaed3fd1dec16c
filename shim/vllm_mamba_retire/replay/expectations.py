"""Compares a case's expected figures with the results of its replays.

A figure is a plain number (peak states of one request in one Mamba group) or has the name of a
property of `Run`, with the suffix ``_at_least`` or ``_at_most`` for a bound.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .cases import Case
from .runs import Run
from .scenario import InputError
from .sides import SIDES, Comparison

_MIB = 2**20
SIDE_NAMES = tuple(side.name for side in SIDES)
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
    case: Case, comparisons: Sequence[Comparison], sides: Container[str] | None = None
) -> list[str]:
    """Return one sentence for each figure of the case that differs from its replays.

    `sides` limits the check to sides of these names: on a native release, stock has no defect.
    Figures of a side that was not replayed are skipped.

    Raises:
        InputError: a figure cannot be read.
    """
    return [
        f"{case.id}, lag {each.scenario.lag}, pool {each.scenario.pool or 'ample'}: {sentence}"
        for each in comparisons
        for sentence in _CaseCheck(case, each, sides).differences()
    ]


@dataclass(frozen=True, slots=True)
class _CaseCheck:
    """One scenario's replays against the figures of its case."""

    case: Case
    replayed: Comparison
    sides: Container[str] | None

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
                if name == f"lag{self.replayed.scenario.lag}":
                    yield from self._expect(value)
            elif name == "same_with_and_without":
                same = self.replayed.stock.steps == self.replayed.fixed.steps
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
        if side not in SIDE_NAMES:
            raise InputError(f"expect: {side}: none of {', '.join(SIDE_NAMES)}.")
        if side in self.replayed.runs and (self.sides is None or side in self.sides):
            yield self.replayed.runs[side]


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
