"""How ``status`` shows the vLLM processes of one machine or of several: text, JSON, Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm_mamba_retire.keep_verdict import KeepState
from vllm_mamba_retire.processes import Node, Survey

from .text import one_line

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = ("pid", "process", "vLLM", "verdict", "freed", "stock keeps")
_KEEP_COLUMNS = ("keep", "kept")  # where the newest states are to be kept


def show(console: Console, nodes: Sequence[Node]) -> None:
    """Print what runs, one line a process, and what is wrong, one sentence each."""
    if any(node.survey.processes for node in nodes):
        console.print(_table(nodes))
    else:
        console.print("No running vLLM process keeps a record.")
    for node, sentence, finding in _sentences(nodes):
        where = f"{node.name}: " if node.name else ""
        line = one_line(f"{'!' if finding else ' '} {where}{sentence}")
        console.print(line, style="red" if finding else None, markup=False, highlight=False)


def as_data(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """For JSON: one entry per node."""
    return [
        {"node": node.name or None, "problem": node.problem, **node.survey.to_data()}
        for node in nodes
    ]


def prometheus(nodes: Sequence[Node]) -> str:
    """In the text format that the node exporter's text-file collector reads."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.registry import Collector

    class Once(Collector):
        def collect(self) -> Iterator[Any]:
            yield from _metrics(nodes)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Once())
    return generate_latest(registry).decode()


def _table(nodes: Sequence[Node]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
    several = len(nodes) > 1
    if several:
        table.add_column("node")
    keeps = any(r.keep.state is not KeepState.OFF for n in nodes for r in n.survey.processes)
    for name in (*_COLUMNS, *(_KEEP_COLUMNS if keeps else ())):
        numeric = name not in ("process", "vLLM", "verdict", "keep")
        table.add_column(name, justify="right" if numeric else "left")
    for node in nodes:
        for record in node.survey.processes:
            counters, kept = record.counters, record.keep_counters
            cells = (
                *([node.name] if several else []),
                record.pid,
                record.role,
                record.vllm or "?",
                record.reason,
                counters.states_freed if counters else "",
                counters.states_stock_would_keep if counters else "",
                *([record.keep.state.value] if keeps else []),
                *([kept.states_still_there if kept else ""] if keeps else []),
            )
            table.add_row(*map(one_line, cells))
    return table


def _sentences(nodes: Sequence[Node]) -> Iterator[tuple[Node, str, bool]]:
    """Sentences below the table: node, sentence, and whether it is a finding."""
    for node in nodes:
        if node.problem is not None:
            yield node, node.problem, True
        for problem in node.survey.problems:
            yield node, problem, True
        for record in node.survey.processes:
            if record.in_doubt:
                yield node, f"pid {record.pid} ({record.role}): {record.verdict}", True
            if record.keep.warns:
                yield node, f"pid {record.pid} ({record.role}): {record.keep}", False
        for core in node.survey.without_record:
            finding = core.finding or core.unseen
            yield node, f"pid {core.pid} (engine core) {core.sentence}", finding


def _metrics(nodes: Sequence[Node]) -> Iterator[Any]:
    from vllm_mamba_retire.prometheus import add, families, gauge

    extra = ("node",) if any(node.name for node in nodes) else ()
    yield from families(
        [
            ({"node": node.name} if extra else {}, record)
            for node in nodes
            for record in node.survey.processes
        ],
        extra,
    )
    unpatched = gauge("engine_cores_unpatched", "Engine cores that should be patched.", extra)
    unseen = gauge(
        "engine_cores_unseen", "Engine cores of other users, which could not be inspected.", extra
    )
    for node in nodes:
        add(unpatched, {"node": node.name}, _unpatched(node.survey))
        add(unseen, {"node": node.name}, sum(core.unseen for core in node.survey.without_record))
    yield from (unpatched, unseen)


def _unpatched(survey: Survey) -> int:
    in_doubt = (record.in_doubt for record in survey.processes if record.role == "engine core")
    return sum(in_doubt) + sum(core.finding for core in survey.without_record)
