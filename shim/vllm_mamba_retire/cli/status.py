"""``status``: is the vLLM here fixed, and what did each running vLLM process decide?

Imports neither vLLM nor torch, and answers in a fraction of a second.
"""

from __future__ import annotations

import json
import os
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_mamba_retire import disarm

if TYPE_CHECKING:
    from vllm_mamba_retire.processes import Node
    from vllm_mamba_retire.target import Target
    from vllm_mamba_retire.verdict import Verdict

SCHEMA = 1


class Format(str, Enum):
    """How to answer."""

    TEXT = "text"
    JSON = "json"
    PROMETHEUS = "prometheus"


def status(
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="prometheus: for the node exporter's text-file collector, processes only.",
        ),
    ] = Format.TEXT,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Ask every node of the Ray cluster (RAY_ADDRESS).")
    ] = False,
) -> None:
    """Tell whether the vLLM here is fixed, and what each running vLLM process decided.

    Exit 0: patched, native or nothing to fix. Exit 1: a finding, such as an engine core that runs
    unpatched and should not. Exit 2: the question cannot be answered.
    """
    # Nothing here imports vLLM, and looking for it must not load what waits for its import.
    disarm()
    target, verdict = _here()
    nodes = _nodes(ray)
    left_out = _left_out()
    if as_json or form is Format.JSON:
        typer.echo(json.dumps(_as_data(target, verdict, left_out, nodes), indent=2))
    elif form is Format.PROMETHEUS:
        from .processes import prometheus

        typer.echo(prometheus(nodes), nl=False)
    else:
        _show(target, verdict, left_out, nodes)
    finding = verdict.in_doubt or left_out is not None or any(node.finding for node in nodes)
    raise typer.Exit(1 if finding else 0)


def _here() -> tuple[Target | None, Verdict]:
    """The vLLM that this interpreter would serve, and what would be decided about it."""
    from vllm_mamba_retire.inspection import sight
    from vllm_mamba_retire.matrix import load_matrix
    from vllm_mamba_retire.target import find_target
    from vllm_mamba_retire.verdict import Mode, decide

    target = find_target()
    return target, decide(sight(Mode.AUTO, target, load_matrix()))


def _left_out() -> str | None:
    """Why a vLLM started from this environment would run without this package."""
    from vllm_mamba_retire.processes import PLUGIN

    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None or PLUGIN in allowed.split(","):
        return None
    return f"VLLM_PLUGINS={allowed} leaves this package out; add {PLUGIN}."


def _nodes(ray: bool) -> list[Node]:
    from vllm_mamba_retire.processes import Node, survey

    if not ray:
        return [Node(survey=survey())]
    from vllm_mamba_retire.ray_cluster import RayError, survey_cluster

    try:
        return survey_cluster()
    except RayError as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        raise typer.Exit(2) from error


def _as_data(
    target: Target | None, verdict: Verdict, left_out: str | None, nodes: list[Node]
) -> dict[str, Any]:
    from vllm_mamba_retire import __version__

    from .processes import as_data

    return {
        "schema": SCHEMA,
        "version": __version__,
        "reason": verdict.reason.value,
        "sentence": verdict.sentence,
        "left_out": left_out,
        "vllm": target
        and {
            "version": target.version,
            "distribution": target.distribution,
            "package": str(target.package),
            "manager_sha256": target.sha256,
        },
        "nodes": as_data(nodes),
    }


def _show(target: Target | None, verdict: Verdict, left_out: str | None, nodes: list[Node]) -> None:
    from rich.console import Console

    from .processes import show

    console = Console(soft_wrap=True, highlight=False)
    if target is not None:
        console.print(f"vLLM {target.version} ({target.distribution}) at {target.package}")
    colour = "red" if verdict.in_doubt else "green"
    console.print(f"[{colour}]{verdict.reason.value}[/{colour}]: {verdict.sentence}")
    if left_out is not None:
        console.print(f"[red]![/red] {left_out}")
    show(console, nodes)
