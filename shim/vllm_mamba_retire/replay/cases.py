"""Reads YAML case files: one entry per reported geometry, with the figures expected of it.

A case becomes one scenario per lag and pool that it names. Every error names the file, the case and
the field. This module does not interpret the figures; `expectations` compares them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from .scenario import ARRIVAL_FIELDS, SCENARIO_FIELDS, Arrival, InputError, Scenario

_FIGURE = re.compile(r"expect|mib_per_group|at_[0-9]+_tokens")
_LAG = re.compile(r"lag([0-9]+)")
_SHARED = ("prompt", "output")  # given at the case for its only request
_OWN = ("source", "releases", "requests", "layout")
_KNOWN = frozenset({*SCENARIO_FIELDS, *_SHARED, *_OWN} - {"arrivals"})


@dataclass(frozen=True, slots=True)
class Case:
    """One entry of a case file.

    Attributes:
        id: name.
        source: where the geometry was reported.
        releases: vLLM releases that its figures hold for.
        scenarios: what to replay; none if the entry has no prompt.
        figures: the expected figures as written in the file.
        block_bytes: size of one block of the shared pool in bytes; None without a layout.
    """

    id: str
    source: str = ""
    releases: SpecifierSet = field(default_factory=SpecifierSet)
    scenarios: tuple[Scenario, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    block_bytes: int | None = None

    def holds_on(self, release: str) -> bool:
        """Whether its figures are for this vLLM release."""
        return self.releases.contains(release, prereleases=True)


def read_cases(path: Path) -> tuple[Case, ...]:
    """Read a case file.

    Raises:
        InputError: it cannot be read, or an entry is invalid.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: no readable YAML: {reason}") from None
    if not isinstance(document, dict) or not isinstance(document.get("cases"), list):
        raise InputError(f"{path}: cases: there has to be a list of that name at the top.")
    cases = tuple(
        _read_case(path, place, entry) for place, entry in enumerate(document["cases"], start=1)
    )
    for case in cases:
        if sum(other.id == case.id for other in cases) > 1:
            raise InputError(f"{path}: id: {case.id} is used twice.")
    return cases


def _read_case(path: Path, place: int, entry: Any) -> Case:
    name = entry.get("id", f"number {place}") if isinstance(entry, dict) else f"number {place}"
    try:
        return _to_case(_mapping("case", entry))
    except InputError as error:
        raise InputError(f"{path}: case {name}: {error}") from None


def _to_case(entry: Mapping[str, Any]) -> Case:
    figures = {name: value for name, value in entry.items() if _FIGURE.fullmatch(name)}
    _no_others(entry, _KNOWN | figures.keys())
    for name in ("id", "block", "budget"):
        if name not in entry:
            raise InputError(f"{name}: missing.")
    try:
        releases = SpecifierSet(str(entry.get("releases", "")))
    except InvalidSpecifier:
        raise InputError(f"releases: {entry['releases']!r} is no version specifier.") from None
    return Case(
        id=str(entry["id"]),
        source=str(entry.get("source", "")),
        releases=releases,
        scenarios=tuple(_scenarios(entry, _lags(entry, figures))),
        figures=figures,
        block_bytes=_block_bytes(entry),
    )


def _scenarios(entry: Mapping[str, Any], lags: tuple[int, ...]) -> Iterator[Scenario]:
    arrivals = _arrivals(entry)
    if not arrivals:
        return
    given = {name: value for name, value in entry.items() if name in SCENARIO_FIELDS}
    for lag in lags:
        for pool in _pools(entry.get("pool")):
            yield Scenario(**{**given, "lag": lag, "pool": pool, "arrivals": arrivals})


def _arrivals(entry: Mapping[str, Any]) -> tuple[Arrival, ...]:
    if "requests" not in entry:
        if "prompt" not in entry:
            return ()
        return (Arrival("request", **{name: entry[name] for name in _SHARED if name in entry}),)
    if any(name in entry for name in _SHARED):
        raise InputError("requests: give prompt and output with each request, not beside them.")
    if not isinstance(entry["requests"], list) or not entry["requests"]:
        raise InputError("requests: there is no list of them.")
    return tuple(
        _arrival(place, request) for place, request in enumerate(entry["requests"], start=1)
    )


def _arrival(place: int, request: Any) -> Arrival:
    given = {"id": str(place), **_mapping("requests", request)}
    _no_others(given, frozenset(ARRIVAL_FIELDS))
    if "prompt" not in given:
        raise InputError(f"requests: {given['id']} has no prompt.")
    return Arrival(**given)


def _lags(entry: Mapping[str, Any], figures: Mapping[str, Any]) -> tuple[int, ...]:
    """The case's lag, or else every lag that it has figures for."""
    if "lag" in entry:
        return (entry["lag"],)
    named = filter(None, map(_LAG.fullmatch, map(str, _mapping("expect", figures.get("expect")))))
    return tuple(int(match[1]) for match in named) or (1,)


def _pools(pool: Any) -> tuple[int | None, ...]:
    if not isinstance(pool, list):
        return (pool,)
    if len(pool) != 2 or not all(isinstance(end, int) for end in pool) or pool[0] > pool[1]:
        raise InputError(f"pool: {pool} is neither a number of blocks nor [least, most].")
    return tuple(range(pool[0], pool[1] + 1))


def _block_bytes(entry: Mapping[str, Any]) -> int | None:
    """Bytes of a pool block: every slot holds a block of tokens for one layer of each group."""
    slots = entry.get("layout")
    if slots is None:
        return None
    try:
        per_token = sum(slot["layers"] * slot["bytes_per_token"] for slot in slots)
    except (TypeError, KeyError):
        raise InputError("layout: not a list of {layers, bytes_per_token}.") from None
    return int(entry["block"] * per_token)


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if value is None and name == "expect":
        return {}
    if not isinstance(value, dict):
        raise InputError(f"{name}: {value!r} is not a mapping.")
    return value


def _no_others(entry: Mapping[str, Any], known: frozenset[str]) -> None:
    for name in entry:
        if name not in known:
            raise InputError(f"{name}: unknown field.")
