"""Which spellings of a variable count."""

from __future__ import annotations

import pytest

from vllm_mamba_retire.names import is_true, read_mode


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        *((word, "auto") for word in (None, "", " ", "auto", "AUTO", "on", "1", "True", "yes")),
        *((word, "require") for word in ("require", "Require", " require ")),
        *((word, "off") for word in ("off", "OFF", "0", "false", "No", "off ")),
        *((word, None) for word in ("required", "patch", "2", "o ff")),
    ],
)
def test_each_spelling_of_the_mode(value: str | None, mode: str | None) -> None:
    assert read_mode(value) == mode


@pytest.mark.parametrize("value", ["1", "true", "TRUE", "yes", " on "])
def test_a_switch_is_on(value: str) -> None:
    assert is_true(value)


@pytest.mark.parametrize("value", [None, "", "0", "false", "no", "off", "maybe"])
def test_a_switch_is_off(value: str | None) -> None:
    assert not is_true(value)
