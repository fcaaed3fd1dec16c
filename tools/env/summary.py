"""Prints a report at the end of a run: times, totals, what was skipped and why."""

from __future__ import annotations

import os
import re
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.env.provision import CACHE

_known: list[str] = []
_skipped: list[tuple[str, str]] = []
_seconds: dict[str, tuple[float, float]] = {}  # by the clock, and of all processors
_results: dict[str, Path] = {}


def know(session: str) -> None:
    """Register a session, so that the report can name those that did not run."""
    _known.append(session)


def skipped(run: str, reason: str) -> None:
    """Register a run, ``unit 3.14``, that was skipped."""
    _skipped.append((run, reason))


@contextmanager
def timed(run: str) -> Iterator[None]:
    """Measure how long a run takes, also if it fails."""
    clock, work = time.monotonic(), _work()
    try:
        yield
    finally:
        _seconds[run] = time.monotonic() - clock, _work() - work


def expect(run: str) -> Path:
    """Return the path of the JUnit file that pytest must write in a run."""
    results = CACHE / "results" / f"{re.sub(r'[^a-z0-9.]+', '-', run)}.xml"
    results.unlink(missing_ok=True)
    _results[run] = results
    return results


def close() -> None:
    """Print the report; nothing if no session ran."""
    if not _seconds:
        return
    total: Counter[str] = Counter()
    for run, (clock, work) in _seconds.items():
        path = _results.get(run)
        suites = ET.parse(path).getroot().findall("testsuite") if path and path.exists() else []
        counts = sum((_counts(suite) for suite in suites), Counter[str]())
        total += counts
        _skipped.extend(found for suite in suites for found in _left_out(suite))
        passed = _words(counts) if suites else ""
        print(f"{run:24} {clock:5.0f} s ({work:4.0f} s of processors)  {passed}".rstrip())
    for what, reason in _skipped:
        print(f"skipped {what}: {reason}")
    ran = {run.partition(" ")[0] for run in _seconds}
    if left := [session for session in _known if session not in ran]:
        print(f"not run: {', '.join(left)} (nox -s NAME, or nox -t full)")
    print(f"{_words(total)} in {sum(clock for clock, _ in _seconds.values()):.0f} s", flush=True)


def _work() -> float:
    """Return the CPU seconds that the child processes have taken so far."""
    times = os.times()
    return times.children_user + times.children_system


def _counts(suite: ET.Element) -> Counter[str]:
    number = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    bad = number["failures"] + number["errors"]
    passed = number["tests"] - bad - number["skipped"]
    return Counter(passed=passed, failed=bad, skipped=number["skipped"])


def _words(counts: Counter[str]) -> str:
    failed, passed = counts["failed"], counts["passed"]
    return f"{passed} passed, {failed} failed, {counts['skipped']} skipped"


def _left_out(suite: ET.Element) -> Iterator[tuple[str, str]]:
    for case in suite.iter("testcase"):
        if (why := case.find("skipped")) is not None:
            yield f"{case.get('classname')}::{case.get('name')}", why.get("message", "")
