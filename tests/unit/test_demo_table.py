"""The table of the demonstration, with figures of the size that it measures."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from tools.engine import demo


def test_the_table_of_the_demonstration_fits_into_80_columns() -> None:
    answers = {demo.REQUEST: SimpleNamespace(sha="abcdef0123456789")}
    run: Any = SimpleNamespace(
        vllm="0.29.0",
        block=1152,
        peak=18,
        scheduled=74_567,
        steps=[SimpleNamespace(seconds=12.3)] * 40,
        preemptions=2,
        answers=answers,
    )
    out = io.StringIO()
    Console(file=out, width=80).print(demo.table(dict.fromkeys(demo.CASES, run)))
    text = out.getvalue()
    assert "roll-backs" in text
    assert text.count("80 blocks") == 2
    assert "…" not in text
