"""``support``: one text for a bug report, without prompts, secrets or names of hosts and users."""

from __future__ import annotations

import functools
import io
import os
import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_mamba_retire import disarm
from vllm_mamba_retire.names import ALLOW_DRIFT_VARIABLE, KEEP_VARIABLE, MODE_VARIABLE

from .text import safe

if TYPE_CHECKING:
    from vllm_mamba_retire.settings import Settings

_WIDTH = 160
_WORD = re.compile(r"[\w.+-]{1,40}", re.ASCII)
# Others that begin with MAMBA_RETIRE are named without their values.
_VARIABLES = (MODE_VARIABLE, ALLOW_DRIFT_VARIABLE, KEEP_VARIABLE, "MAMBA_RETIRE_DIR")
_VLLM_VARIABLES = ("VLLM_PLUGINS", "VLLM_ENABLE_V1_MULTIPROCESSING")
_DEPENDENCIES = ("msgspec", "packaging", "prometheus-client", "psutil", "wrapt", "torch")


def support(
    log: Annotated[
        Path | None,
        typer.Option(help="Log of a vLLM server, from its start; - is stdin.", show_default=False),
    ] = None,
    host_names: Annotated[
        bool, typer.Option("--host-names", help="Leave paths and names of hosts and users in.")
    ] = False,
) -> None:
    """Print one text for a bug report.

    It holds what status shows, versions, plug-ins, variables of this package and figures from a
    server log. No line of the log is quoted. Read the text before you publish it. Exit 0: printed.
    Exit 2: the log cannot be read.
    """
    disarm()
    from vllm_mamba_retire.forecast import predict
    from vllm_mamba_retire.settings import read_settings

    from .redaction import redact

    here = read_settings(functools.partial(predict, probe=True))
    try:
        lines = [*_about(), *_status(here), *_plugins(), *_variables(), *_log(log)]
    except ValueError as error:
        typer.secho(f"error: {safe(error)}", err=True, fg="red")
        raise typer.Exit(2) from error
    text = "\n".join(lines)
    typer.echo(safe(text if host_names else redact(text)))


def _about() -> Iterator[str]:
    from vllm_mamba_retire import __version__

    yield f"vllm-mamba-retire {__version__}"
    yield f"{platform.system()} {platform.machine()}"
    yield ", ".join(f"{name} {_version(name)}" for name in _DEPENDENCIES)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "missing"


def _status(here: Settings) -> Iterator[str]:
    """What status prints, and why it cannot where it cannot."""
    from rich.console import Console

    from vllm_mamba_retire.processes import Node, Survey, survey

    from .status import show

    try:
        seen = survey(here)
    except ValueError as error:
        seen = Survey(problems=[f"{error}."])
    out = io.StringIO()
    show(Console(file=out, width=_WIDTH, soft_wrap=True, no_color=True), here, [Node(survey=seen)])
    yield from ("", "## status", *(line.rstrip() for line in out.getvalue().splitlines()))


def _plugins() -> Iterator[str]:
    yield from ("", "## vllm.general_plugins")
    for each in distributions():
        for point in each.entry_points:
            if point.group == "vllm.general_plugins":
                yield f"{point.name} ({each.name} {each.version})"


def _variables() -> Iterator[str]:
    yield from ("", "## variables")
    for name, value in sorted(os.environ.items()):
        if name in _VARIABLES or name in _VLLM_VARIABLES:
            yield f"{name}={value}"
        elif name.startswith("MAMBA_RETIRE"):
            yield f"{name} is set; this version does not read it"


def _log(path: Path | None) -> Iterator[str]:
    """Figures of a server log: what is not a number, a switch or one word stays out."""
    if path is None:
        return
    from vllm_mamba_retire.plan.serverlog import read_log

    found = read_log(path)
    figures: dict[str, Any] = {
        **found.settings,
        **{"memory in bytes": found.memory, "blocks": found.blocks, "capacity": found.tokens},
        **{"tokens per request": found.length, "requests at once": found.times},
    }
    yield from ("", "## server log, the last start")
    yield f"verdicts logged: {', '.join(found.verdicts) or 'none'}"
    for name, value in figures.items():
        if value is not None and _WORD.fullmatch(str(value)):
            yield f"{name}: {value}"
