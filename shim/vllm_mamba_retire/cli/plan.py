"""``plan``: is a server affected, what does it cost, what would help.

Gathers what is known of the server and shows the answer, which is `replay.planner`'s.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from vllm_mamba_retire.plan.deployment import Deployment
    from vllm_mamba_retire.plan.planner import Plan, SidePlan
    from vllm_mamba_retire.releases import Status

SCHEMA = 1
_GIB = 2**30
Number = int | None


def plan(
    serve: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- VLLM SERVE FLAGS]",
            help="Flags as for vllm serve; a pasted 'vllm serve MODEL ...' is fine too.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Model folder or config.json, local.", show_default=False)
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="Log of a vLLM server, from its start.", show_default=False)
    ] = None,
    block: Annotated[Number, typer.Option(help="Mamba block size, in tokens.")] = None,
    budget: Annotated[Number, typer.Option(help="max_num_batched_tokens.")] = None,
    prompt: Annotated[
        Number, typer.Option(help="Longest prompt, in tokens; by default the server's limit.")
    ] = None,
    spec: Annotated[Number, typer.Option(help="Draft tokens.")] = None,
    lag: Annotated[Number, typer.Option(help="Steps in flight; async scheduling has 1.")] = None,
    groups: Annotated[Number, typer.Option(help="Mamba groups.")] = None,
    attention_groups: Annotated[Number, typer.Option(help="Attention groups.")] = None,
    block_bytes: Annotated[Number, typer.Option(help="Bytes of a pool block on a GPU.")] = None,
    pool: Annotated[Number, typer.Option(help="num_gpu_blocks.")] = None,
    kv_memory: Annotated[
        float | None, typer.Option(help="GiB for the KV cache on a GPU, instead of --pool.")
    ] = None,
    version: Annotated[
        str | None, typer.Option("--vllm-version", help="vLLM release of the server.")
    ] = None,
    with_replay: Annotated[
        bool, typer.Option("--replay/--no-replay", help="Take the peaks from a replay if I can.")
    ] = True,
    chart: Annotated[
        Path | None, typer.Option(help="Draw states and blocks over the prompt length here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine output on stdout.")] = False,
) -> None:
    """Tell whether a server is affected, what that costs, and which settings would help.

    From a model and its flags (vLLM derives the rest), a server's log, or figures given here,
    which overrule the others. Without vLLM, block and bytes have to be given.

    Exit 0: not affected. Exit 1: affected. Exit 2: bad input.
    """
    from .replay import usage_errors

    given = {
        "block": block,
        "budget": budget,
        "prompt": prompt,
        "spec": spec,
        "lag": lag,
        "groups": groups,
        "attention_groups": attention_groups,
        "block_bytes": block_bytes,
        "pool": pool,
        "version": version,
    }
    with usage_errors():
        from vllm_mamba_retire.plan.planner import plan as make_plan

        deployment = _gather(given, model, list(serve or ()), log, kv_memory)
        status = _status(deployment)
        replayed = _replayed(deployment) if with_replay else None
        answer = make_plan(deployment, status, replayed)
        if chart is not None:
            from vllm_mamba_retire.plan.charts import draw_growth

            draw_growth(deployment, chart)
    if as_json:
        typer.echo(json.dumps(_document(deployment, answer), indent=2))
    else:
        _show(deployment, answer)
    raise typer.Exit(1 if answer.affected else 0)


def _gather(
    given: dict[str, Any],
    model: Path | None,
    flags: list[str],
    log: Path | None,
    kv_memory: float | None,
) -> Deployment:
    from vllm_mamba_retire.plan.deployment import settle
    from vllm_mamba_retire.plan.model import read_model
    from vllm_mamba_retire.plan.serverlog import estimate_pool, read_log
    from vllm_mamba_retire.replay.scenario import InputError

    sources: dict[str, dict[str, Any]] = {"given": given}
    model, flags = _unpasted(model, flags)
    if flags and model is None:
        raise InputError("model: serving flags need a model; give --model.")
    if log is not None:
        sources["log"] = read_log(log)
    if model is not None:
        sources["vLLM"], sources["vLLM's default without a GPU"] = read_model(model, flags)
    deployment = settle(sources)
    if log is not None:
        sources["estimate from the log"] = estimate_pool(log, asdict(deployment))
    if kv_memory is not None:
        if deployment.block_bytes is None:
            raise InputError("kv_memory: blocks cannot be counted; give --block-bytes.")
        given["pool"] = int(kv_memory * _GIB / deployment.block_bytes)
    return settle(sources)


def _unpasted(model: Path | None, flags: list[str]) -> tuple[Path | None, list[str]]:
    """Take a pasted ``vllm serve MODEL --flags`` apart."""
    if flags[:2] == ["vllm", "serve"]:
        flags = flags[2:]
    if flags and not flags[0].startswith("-"):
        return model or Path(flags[0]), flags[1:]
    if "--model" in flags[:-1]:
        at = flags.index("--model")
        return model or Path(flags[at + 1]), flags[:at] + flags[at + 2 :]
    return model, flags


def _status(deployment: Deployment) -> Status | None:
    from packaging.version import InvalidVersion, Version

    from vllm_mamba_retire.releases import load_matrix
    from vllm_mamba_retire.replay.scenario import InputError

    if deployment.version is None:
        return None
    try:
        Version(deployment.version)
    except InvalidVersion:
        raise InputError(f"vllm_version: {deployment.version!r} is no version.") from None
    row = load_matrix().row_for(deployment.version)
    return row.status if row is not None else None


def _replayed(deployment: Deployment) -> tuple[int, int] | None:
    """Peak states stock and fixed from the installed vLLM, if it is the server's release."""
    from vllm_mamba_retire.replay.scenario import Arrival, Scenario
    from vllm_mamba_retire.replay.sides import compare, replayable
    from vllm_mamba_retire.target import find_target

    target = find_target()
    if not deployment.align or target is None or target.version is None:
        return None
    if deployment.version not in (None, target.version) or not replayable(target.version):
        return None
    geometry = deployment.geometry
    (pair,) = compare(
        [
            Scenario(
                "plan",
                deployment.block,
                geometry.budget,
                (Arrival("longest", deployment.prompt),),
                spec=deployment.spec,
                lag=deployment.lag,
                groups=deployment.groups,
            )
        ]
    )
    return pair.stock.peak_states, pair.fixed.peak_states


def _document(deployment: Deployment, answer: Plan) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "deployment": {
            field.name: {
                "value": getattr(deployment, field.name),
                "from": deployment.origins[field.name],
            }
            for field in fields(deployment)
            if field.name != "origins"
        },
        **asdict(answer),
    }


def _show(deployment: Deployment, answer: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    console.print(answer.reason, highlight=False)
    table = Table(title="One longest request", title_justify="left")
    for name in ("", "stock", "fixed"):
        table.add_column(name, justify="right" if name else "left")
    for label, stock, fixed in _rows(answer.stock, answer.fixed):
        table.add_row(label, stock, fixed)
    console.print(table)
    for remedy in answer.remedies:
        console.print(f"Without the fix, {remedy.setting}: {remedy.cost}.", highlight=False)
    console.print(f"Taken from: {_origins(deployment)}.", highlight=False)
    if answer.stock.measured == "closed form":
        console.print(
            "Estimates: states by closed form, at most 2 too many on the stock side.",
            highlight=False,
        )
    console.print("Estimates: longest prompt and concurrency, by closed form.", highlight=False)


def _rows(stock: SidePlan, fixed: SidePlan) -> Sequence[tuple[str, str, str]]:
    labels = {
        "states": "peak states per Mamba group",
        "mib": "their size, MiB of all groups",
        "smallest_pool": "smallest pool without a roll-back, blocks",
        "longest_prompt": "longest prompt in this pool, tokens",
        "concurrency": "such requests at once in this pool",
    }
    return [
        (label, _text(getattr(stock, name)), _text(getattr(fixed, name)))
        for name, label in labels.items()
    ]


def _text(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _origins(deployment: Deployment) -> str:
    return "; ".join(
        f"{name} {getattr(deployment, name)} ({origin})"
        for name, origin in deployment.origins.items()
    )
