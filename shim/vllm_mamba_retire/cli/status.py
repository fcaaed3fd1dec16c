"""``status``: shows the verdict on the installed vLLM and on every running vLLM process.

Imports neither vLLM nor torch, and takes a fraction of a second. If the files alone cannot decide,
a child process imports vLLM's manager and runs the probe.
"""

from __future__ import annotations

import functools
import json
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_mamba_retire import disarm
from vllm_mamba_retire.names import KEEP_VARIABLE, MODE_VARIABLE, read_mode
from vllm_mamba_retire.verdict import Reason

from .text import one_line, safe

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_mamba_retire.processes import Node
    from vllm_mamba_retire.settings import Settings

SCHEMA = 1


class Format(str, Enum):
    """Formats of the output."""

    TEXT = "text"
    JSON = "json"
    PROMETHEUS = "prometheus"


def status(
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="prometheus: running processes, for the node exporter's text-file collector.",
        ),
    ] = Format.TEXT,
    as_json: Annotated[bool, typer.Option("--json", help="Short for --format json.")] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Query every node of the Ray cluster (RAY_ADDRESS).")
    ] = False,
    no_probe: Annotated[
        bool,
        typer.Option(
            "--no-probe",
            help="Decide by the files alone; run no child process that imports vLLM.",
        ),
    ] = False,
) -> None:
    """Show the verdict on the installed and the running vLLM.

    Exit 0: patched, native or nothing to fix. Exit 1: a finding, such as an engine core that
    should be patched and is not. Exit 2: it cannot be decided.
    """
    # Nothing here imports vLLM, and looking for it must not load what waits for its import.
    disarm()
    from vllm_mamba_retire.forecast import predict
    from vllm_mamba_retire.settings import read_settings

    here = read_settings(functools.partial(predict, probe=not no_probe))
    nodes = _nodes(ray, here)
    if as_json or form is Format.JSON:
        typer.echo(json.dumps(_as_data(here, nodes), indent=2))
    elif form is Format.PROMETHEUS:
        from .processes import prometheus

        typer.echo(prometheus(nodes), nl=False)
    else:
        from rich.console import Console

        show(Console(soft_wrap=True), here, nodes)
    if here.finding or any(node.finding for node in nodes):
        raise typer.Exit(1)
    raise typer.Exit(2 if any(node.survey.unseen for node in nodes) else 0)


def _nodes(ray: bool, here: Settings) -> list[Node]:
    from vllm_mamba_retire.processes import Node, survey

    if not ray:
        try:
            return [Node(survey=survey(here))]
        except ValueError as error:
            raise _error(error) from error
    from vllm_mamba_retire.ray_cluster import RayError, survey_cluster

    try:
        return survey_cluster()
    except RayError as error:
        raise _error(error) from error


def _error(error: Exception) -> typer.Exit:
    typer.secho(f"error: {safe(error)}", err=True, fg="red")
    return typer.Exit(2)


def _as_data(here: Settings, nodes: list[Node]) -> dict[str, Any]:
    from vllm_mamba_retire import __version__

    from .processes import as_data

    target, row = here.target, here.row
    return {
        "schema": SCHEMA,
        "version": __version__,
        "interpreter": here.interpreter,
        "python": here.python,
        "mode": here.mode,
        "keep": here.keep,
        "reason": here.verdict.reason.value,
        "sentence": here.verdict.sentence,
        "left_out": here.obstacle,
        "vllm": target
        and {
            "version": target.version,
            "distribution": target.distribution,
            "package": str(target.package),
            "manager_file": str(target.manager_file),
            "manager_sha256": target.sha256,
            "problem": target.problem,
            "shadowed": [str(path) for path in here.shadowed],
        },
        "table": row
        and {
            "version": row.version,
            "status": row.status.value,
            "as_published": target is not None and target.sha256 == row.manager_sha256,
            "hook": row.hook and row.hook.value,
            "evidence": [{"run": each.run, "result": each.result} for each in row.evidence],
        },
        "products": [
            {
                "distribution": each.product.distribution,
                "version": each.version,
                "does": each.product.does,
            }
            for each in here.products
        ],
        "nodes": as_data(nodes),
    }


def show(console: Console, here: Settings, nodes: list[Node]) -> None:
    """Print the verdict on this interpreter's vLLM, and then what runs.

    Args:
        console: where to.
        here: this interpreter's settings.
        nodes: the machines that were looked at.
    """
    from .processes import show as show_processes

    def say(text: str, style: str | None = None) -> None:
        console.print(one_line(text), style=style, markup=False, highlight=False)

    if (target := here.target) is not None:
        say(f"vLLM {target.version} ({target.distribution}) at {target.package}")
        say(f"  manager file: sha256 {target.sha256 or 'unknown'}{_as_listed(here)}")
    say(f"  interpreter: {here.interpreter}, Python {here.python}")
    for path in here.shadowed:
        say(f"  not used: {path}, later on the path")
    for each in here.products:
        say(f"  also here: {each.product.distribution} {each.version}, which")
        say(f"    {each.product.does}")
    if here.mode != "auto":
        say(f"  {MODE_VARIABLE}={here.mode}")
    if here.keep != "none":
        say(f"  {KEEP_VARIABLE}={here.keep}")
    say(_headline(here), style="red" if here.finding else "green")
    say(f"  {here.verdict.sentence}")
    if here.obstacle is not None:
        say(f"! {here.obstacle}", style="red")
    show_processes(console, nodes)


def _headline(here: Settings) -> str:
    """The verdict in the future tense: nothing of this vLLM runs yet."""
    if here.verdict.reason is not Reason.PATCHED:
        return str(here.verdict.reason.value)
    off = read_mode(here.mode) == "off"
    return "will not be patched" if off or here.obstacle else "will be patched when vLLM starts"


def _as_listed(here: Settings) -> str:
    """How the manager file relates to the release that the version names."""
    if here.row is None:
        return ", version not in the matrix"
    published = here.target is not None and here.target.sha256 == here.row.manager_sha256
    relation = "as published" if published else "not as published"
    return f", {relation} in {here.row.version} ({here.row.status.value})"
