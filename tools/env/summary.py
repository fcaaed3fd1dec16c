"""What a whole run did: totals over its pytest runs, and what was left out and why."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

_skipped: list[tuple[str, str]] = []
_results: list[Path] = []


def skipped(session: str, reason: str) -> None:
    """Remember a session that did not run."""
    _skipped.append((session, reason))


def expect(results: Path) -> None:
    """Remember a JUnit file that a pytest run is about to write."""
    results.unlink(missing_ok=True)
    _results.append(results)


def close() -> None:
    """Print the report; prints nothing for a run without tests."""
    suites = [suite for path in _results if path.exists() for suite in _suites(path)]
    for what, reason in (*_skipped, *_left_out(suites)):
        print(f"skipped {what}: {reason}")
    if not suites:
        return
    tests, bad, left_out = (
        sum(int(suite.get(name, 0)) for suite in suites for name in names)
        for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
    print(f"{tests - bad - left_out} passed, {bad} failed, {left_out} skipped", flush=True)


def _left_out(suites: list[ET.Element]) -> Iterator[tuple[str, str]]:
    for suite in suites:
        for case in suite.iter("testcase"):
            if (why := case.find("skipped")) is not None:
                yield f"{case.get('classname')}::{case.get('name')}", why.get("message", "")


def _suites(path: Path) -> list[ET.Element]:
    return ET.parse(path).getroot().findall("testsuite")
