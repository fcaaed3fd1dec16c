"""``plan``: tells whether a server is affected, what it costs, and what helps.

Collects the figures of the server and shows the plan that `plan.planner` makes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from vllm_mamba_retire.plan.command import Command
    from vllm_mamba_retire.plan.deployment import Deployment
    from vllm_mamba_retire.plan.planner import Plan, Replayed, SidePlan

SCHEMA = 1
_GIB = 2**30
Number = int | None


def plan(
    serve: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND]",
            help="A pasted 'vllm serve MODEL ...' or 'docker run ...', the flags alone, "
            "a compose file or a Kubernetes manifest.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Local model folder or config.json.", show_default=False)
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(help="Log of a vLLM server, from its start; - is stdin.", show_default=False),
    ] = None,
    metrics: Annotated[
        Path | None,
        typer.Option(help="Saved /metrics of the server; - is stdin.", show_default=False),
    ] = None,
    block: Annotated[Number, typer.Option(help="Mamba block size, in tokens.")] = None,
    budget: Annotated[Number, typer.Option(help="Tokens per step: max_num_batched_tokens.")] = None,
    prompt: Annotated[
        Number, typer.Option(help="Longest prompt, in tokens. Default: the server's limit.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Longest requests at the same time.", min=1)] = 1,
    spec: Annotated[Number, typer.Option(help="Draft tokens per step.")] = None,
    lag: Annotated[Number, typer.Option(help="Steps in flight; async scheduling has 1.")] = None,
    mode: Annotated[
        str | None,
        typer.Option("--mamba-cache-mode", help="align, all or none.", show_default=False),
    ] = None,
    groups: Annotated[Number, typer.Option(help="Mamba groups.")] = None,
    attention_groups: Annotated[Number, typer.Option(help="Attention groups.")] = None,
    block_bytes: Annotated[Number, typer.Option(help="Bytes of a pool block on a GPU.")] = None,
    pool: Annotated[Number, typer.Option(help="Blocks in the pool: num_gpu_blocks.")] = None,
    kv_memory: Annotated[
        float | None, typer.Option(help="GiB for the KV cache on a GPU, instead of --pool.")
    ] = None,
    version: Annotated[
        str | None, typer.Option("--vllm-version", help="vLLM release of the server.")
    ] = None,
    with_replay: Annotated[
        bool,
        typer.Option(
            "--replay/--no-replay",
            help="Measure by replay if the server's vLLM is installed here.",
        ),
    ] = True,
    chart: Annotated[
        Path | None,
        typer.Option(help="Draw states and blocks over the prompt length."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell whether a server is affected, and what helps.

    Takes a server's log or /metrics, the command that starts it, a model, or figures as options.
    Options override the other sources.

    Exit 0: not affected. Exit 1: affected. Exit 2: bad input, or it cannot be decided.
    """
    from .replay import usage_errors

    given = {
        "block": block,
        "budget": budget,
        "prompt": prompt,
        "spec": spec,
        "lag": lag,
        "mode": mode,
        "groups": groups,
        "attention_groups": attention_groups,
        "block_bytes": block_bytes,
        "pool": pool,
        "version": version,
    }
    with usage_errors():
        from vllm_mamba_retire.plan import known_bugs, planner
        from vllm_mamba_retire.plan.metrics import read_metrics
        from vllm_mamba_retire.releases import load_matrix

        sources: dict[str, dict[str, Any]] = {"given": given}
        preemptions = None
        if metrics is not None:
            sources["metrics"], preemptions = read_metrics(metrics)
        deployment = _deployment(
            sources, log=log, command=_command(serve or ()), model=model, kv_memory=kv_memory
        )
        status = planner.status_of(deployment.version, load_matrix())
        planner.judge(deployment, status)  # before a replay takes its time
        replayed = _replayed(deployment, requests) if with_replay else None
        answer = planner.plan(deployment, status, replayed, requests)
        hints = list(known_bugs.hints(deployment, answer.affected, preemptions))
        if (advice := planner.keep_advice(deployment, status)) is not None:
            hints.append(advice)
        if chart is not None:
            from vllm_mamba_retire.plan.charts import draw_growth

            draw_growth(deployment, chart)
    if as_json:
        typer.echo(json.dumps(_document(deployment, answer, hints), indent=2))
    else:
        _show(deployment, answer, hints, requests)
    raise typer.Exit({True: 1, False: 0, None: 2}[answer.affected])


def _command(words: Sequence[str]) -> Command | None:
    from vllm_mamba_retire.plan.command import read_command, read_file

    if len(words) == 1 and (Path(words[0]).is_file() or Path(words[0]).suffix in (".yaml", ".yml")):
        return read_file(Path(words[0]))
    return read_command(words) if words else None


def _deployment(
    sources: dict[str, dict[str, Any]],
    *,
    log: Path | None,
    command: Command | None,
    model: Path | None,
    kv_memory: float | None,
) -> Deployment:
    """Put together what is given, in this order: figures, metrics, log, command, model."""
    from vllm_mamba_retire.plan.deployment import merge_sources
    from vllm_mamba_retire.plan.model import find_model, read_model
    from vllm_mamba_retire.plan.serverlog import read_log
    from vllm_mamba_retire.replay.scenario import InputError

    read = read_log(log) if log is not None else None
    if read is not None:
        sources["log"] = dict(read.settings)
    if command is not None:
        sources["command"] = command.settings
        model = model or find_model(command.model)
    if model is not None:
        sources.update(read_model(model, command.flags if command else ()))
    deployment = merge_sources(sources)
    if read is not None:
        counted = deployment.block is not None and deployment.budget is not None
        geometry = deployment.geometry if counted and deployment.grouped else None
        sources["estimate from the log"] = read.estimate(geometry)
        deployment = merge_sources(sources)
    if kv_memory is not None:
        if deployment.block_bytes is None:
            raise InputError("kv_memory: blocks cannot be counted; give --block-bytes.")
        sources["given"]["pool"] = int(kv_memory * _GIB / deployment.block_bytes)
        deployment = merge_sources(sources)
    return deployment


def _replayed(deployment: Deployment, requests: int) -> tuple[Replayed, Replayed] | None:
    """Stock and fixed on the installed vLLM, if it is the server's release."""
    from vllm_mamba_retire.plan.planner import Replayed
    from vllm_mamba_retire.replay.scenario import Arrival, InputError, Scenario
    from vllm_mamba_retire.replay.sides import compare, replayable
    from vllm_mamba_retire.target import find_target

    target = find_target()
    if target is None or target.version is None or not deployment.align or deployment.missing:
        return None
    if deployment.version not in (None, target.version) or not replayable(target.version):
        return None
    geometry, prompt = deployment.geometry, deployment.prompt
    if geometry.budget < geometry.block:
        return None
    assert prompt is not None

    def scenario(name: str, pool: int | None, arrivals: int) -> Scenario:
        return Scenario(
            name,
            geometry.block,
            geometry.budget,
            tuple(Arrival(f"longest {number}", prompt) for number in range(arrivals)),
            spec=deployment.spec,
            lag=deployment.lag,
            groups=deployment.groups or 1,
            pool=pool,
        )

    scenarios = [scenario("peak", None, 1)]
    if deployment.pool is not None and deployment.grouped and deployment.attention_groups == 1:
        with suppress(InputError):  # the longest prompt does not fit into this pool at all
            scenarios.append(scenario("own pool", deployment.pool, requests))
    peak, *own = compare(scenarios)
    return tuple(  # type: ignore[return-value]
        Replayed(
            getattr(peak, side).peak_states,
            getattr(own[0], side).rollbacks if own else None,
            getattr(own[0], side).redone_tokens if own else None,
        )
        for side in ("stock", "fixed")
    )


def _document(deployment: Deployment, answer: Plan, hints: Sequence[str]) -> dict[str, Any]:
    figures = {
        field.name: {
            "value": getattr(deployment, field.name),
            "from": deployment.origins[field.name],
        }
        for field in fields(deployment)
        if field.name != "origins"
    }
    figures["align"] = {"value": deployment.align, "from": deployment.origins["mode"]}
    return {"schema": SCHEMA, "deployment": figures, **asdict(answer), "hints": list(hints)}


def _show(deployment: Deployment, answer: Plan, hints: Sequence[str], requests: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from .text import safe

    console = Console(soft_wrap=True, markup=False, highlight=False, emoji=False)
    console.print(safe(answer.reason))
    rows = _rows(answer.stock, answer.fixed, requests)
    if rows:
        title = "One longest request" if requests == 1 else f"{requests} of the longest request"
        table = Table(title=title, title_justify="left")
        for name in ("", "stock", "fixed"):
            table.add_column(name, justify="right" if name else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if not deployment.missing and not deployment.grouped:
        console.print(
            "Pools and sizes are not counted: give --groups and --attention-groups, or --model."
        )
    for remedy in answer.remedies:
        console.print(f"Without the fix, {remedy.setting}: {remedy.cost}.")
    for hint in hints:
        console.print(safe(hint))
    console.print(safe(f"Taken from: {_origins(deployment)}."))
    if answer.stock.states is not None and answer.stock.measured == "closed form":
        console.print("Estimates: states by closed form, at most 2 too many on the stock side.")
    if answer.stock.longest_prompt is not None:
        console.print("Estimates: longest prompt and concurrency, by closed form.")


def _rows(stock: SidePlan, fixed: SidePlan, requests: int) -> list[tuple[str, str, str]]:
    """The rows that have something to tell."""
    at_once = "" if requests == 1 else f" of {requests}"
    labels = {
        "states": "peak states per Mamba group",
        "mib": "their size, MiB of all groups",
        "smallest_pool": f"smallest pool without a roll-back{at_once}, blocks",
        "longest_prompt": "longest prompt in this pool, tokens",
        "concurrency": "such requests at once in this pool",
        "rollbacks": f"roll-backs{at_once} in this pool",
        "redone": "tokens computed again there",
    }
    return [
        (label, f"{getattr(stock, name):,}", f"{getattr(fixed, name):,}")
        for name, label in labels.items()
        if getattr(stock, name) is not None and getattr(fixed, name) is not None
    ]


def _origins(deployment: Deployment) -> str:
    return "; ".join(
        f"{name} {getattr(deployment, name)} ({origin})"
        for name, origin in deployment.origins.items()
        if getattr(deployment, name) is not None
    )
