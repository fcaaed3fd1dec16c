"""Case files replayed once per session: a child process costs more than all replays in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from vllm_mamba_retire.replay.cases import Case, read_cases
from vllm_mamba_retire.replay.sides import Comparison, compare

Replays = dict[str, list[Comparison]]

_FOLDER = Path(__file__).parents[1] / "cases"
FIELD = read_cases(_FOLDER / "field_cases.yaml")
PREFIX_CACHE = tuple(
    case for name in ("prefix_cache", "next_turn") for case in read_cases(_FOLDER / f"{name}.yaml")
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`field_case`, `prefix_case` and `any_case` stand for each case of their files."""
    cases: dict[str, tuple[Case, ...]] = {
        "field_case": FIELD,
        "prefix_case": PREFIX_CACHE,
        "any_case": FIELD + PREFIX_CACHE,
    }
    for name in cases.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(name, cases[name], ids=lambda case: case.id)


@pytest.fixture(scope="session")
def replays() -> Replays:
    """Replays of every case on every side, by its id."""
    cases = FIELD + PREFIX_CACHE
    pairs = iter(compare([scenario for case in cases for scenario in case.scenarios]))
    return {case.id: [next(pairs) for _ in case.scenarios] for case in cases}


@pytest.fixture(scope="session")
def stays_stuck(release: str) -> bool:
    """Whether a request that outgrows the pool by one state is rolled back for ever.

    From 0.33.0 on a drafter costs a hit none of its blocks, so that a request which was rolled
    back finds its last state again and gets to its end.
    """
    return Version(release) < Version("0.33")
