"""Runs a session once per version, continues after a failure, and reports failures at the end.

`noxfile.py` declares the sessions; this module does not depend on any of them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import nox
from nox.command import CommandFailed

from tools.env import provision, sources, summary
from tools.table import rows as table


@dataclass
class SessionRun:
    """One run of a session; `version` is a vLLM release, a Python version, or empty."""

    session: nox.Session
    version: str
    arguments: list[str]  # what follows ``--`` behind the versions

    def pytest(
        self,
        *folders: str,
        vllm: Path | None = None,
        python: Path | None = None,
        parallel: bool = False,
        trees: Path = provision.RELEASES,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Run test folders with a vLLM importable; variables name the available releases."""
        results = summary.expect(f"{self.session.name} {self.version}".strip())
        measured = ("-m", "coverage", "run") if provision.COVERAGE else ()
        workers = [f"--numprocesses={min(os.cpu_count() or 1, 4)}"] if parallel else []
        self.python(
            *(*measured, "-m", "pytest", *folders, *workers, f"--junitxml={results}"),
            vllm=vllm,
            python=python,
            MAMBA_RETIRE_TEST_RELEASE=self.version if self.version in table.versions() else "",
            MAMBA_RETIRE_TEST_TREES=str(trees),
            MAMBA_RETIRE_TEST_SOURCES=str(sources.SOURCES),
            COVERAGE_FILE=str(provision.CACHE / "coverage" / "data"),
            **(env or {}),
        )

    def python(
        self, *arguments: str, vllm: Path | None = None, python: Path | None = None, **env: str
    ) -> None:
        """Run Python with this package and a vLLM importable, and ``MAMBA_RETIRE`` unset."""
        path = filter(None, (provision.own_package(), vllm, provision.ROOT))
        self.session.run(
            str(python or provision.shared_environment()),
            *arguments,
            *self.arguments,
            env={"PYTHONPATH": os.pathsep.join(map(str, path)), "MAMBA_RETIRE": None, **env},
            external=True,
        )


def lane(
    every: Sequence[str] = (),
    usual: Iterable[str] = (),
    *,
    default: bool = False,
    tags: Sequence[str] = ("full",),
) -> Callable[[Callable[[SessionRun], None]], None]:
    """Make a session of a function, which runs once per release or Python.

    Args:
        every: versions that may be named after ``--``; ``all`` and ``nox -t full`` take them all.
        usual: those it takes if none is named.
        default: whether a plain ``nox`` runs it.
        tags: ``full`` unless it takes hours, or changes the repository.
    """

    def register(run: Callable[[SessionRun], None]) -> None:
        def session(session: nox.Session) -> None:
            versions, arguments = _named(session, every)
            versions = versions or list(every if FULL else usual) or [""]
            failed, skipped = [], []
            for number, version in enumerate(versions, 1):
                label = f"{session.name} {version}".strip()
                session.log(f"{label}: {number} of {len(versions)}")
                try:
                    with summary.timed(label):
                        run(SessionRun(session, version, arguments))
                except provision.Unavailable as reason:
                    summary.skipped(label, str(reason))
                    skipped.append(str(reason))
                except (provision.ProvisionError, CommandFailed) as error:
                    session.warn(f"{label} failed. {error}")
                    failed.append(label)
            if failed:
                session.error(f"failed: {', '.join(failed)}")
            if len(skipped) == len(versions):
                session.skip(skipped[0])

        session.__doc__ = run.__doc__
        name = run.__name__.replace("_", "-")
        summary.know(name)
        nox.session(name=name, default=default, tags=tags)(session)

    return register


# A tag cannot be read from inside a session.
FULL = any(re.fullmatch(r"(-t|--tags?=?)?full", word) for word in sys.argv)


def _named(session: nox.Session, every: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into the versions that they begin with, and the rest."""
    arguments = list(session.posargs)
    versions: list[str] = []
    if not every and arguments[:1] == ["all"]:  # said to several sessions, some without versions
        return [], arguments[1:]
    while every and arguments and re.fullmatch(r"[a-z]+|[\d.]+", arguments[0]):
        word = arguments.pop(0)
        if word != "all" and word not in every:
            session.error(f"{word} is not one of: all {' '.join(every)}")
        versions += every if word == "all" else [word]
    return versions, arguments
