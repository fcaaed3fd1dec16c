"""Installing into a pinned deployment moves none of its pins. Asks the registry for metadata."""

from __future__ import annotations

import zipfile
from email import message_from_bytes

import pytest
from tools.env.pins import PinsMoveError, added, resolve
from tools.table.rows import releases

from tests.package.distributions import Distributions

LIVE = [row.version for row in releases() if row.status == "live"]


@pytest.fixture(scope="module")
def own(first: Distributions) -> list[str]:
    with zipfile.ZipFile(first.wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(wheel.read(name))
    return [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]


@pytest.fixture(scope="module", params=LIVE)
def pinned(request: pytest.FixtureRequest) -> list[str]:
    found = resolve([f"vllm=={request.param}"])
    assert f"vllm=={request.param}" in found
    return found


def test_no_pin_of_a_live_release_moves(pinned: list[str], own: list[str]) -> None:
    names = {line.partition("==")[0] for line in added(pinned, own)}
    # What vLLM's own requirements do not bring already.
    assert names <= {"wrapt", "unidiff"}


def test_a_requirement_that_would_move_a_pin_is_noticed() -> None:
    pinned = resolve([f"vllm=={LIVE[-1]}"])
    with pytest.raises(PinsMoveError, match="packaging"):
        added(pinned, ["packaging<21"])
