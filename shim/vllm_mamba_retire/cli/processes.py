"""How ``status`` shows the vLLM processes of one machine or of several: text, JSON, Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm_mamba_retire.processes import Node, Survey

if TYPE_CHECKING:
    from rich.console import Console

_METRICS = {
    "states_freed": "States given back to the pool before their request ended.",
    "states_stock_would_keep": "Those of them that stock vLLM would have kept.",
    "calls": "Ranges of blocks looked at.",
    "ranges_clamped": "Ranges that reached past the end of a block table.",
}


def show(console: Console, nodes: Sequence[Node]) -> None:
    """Print what runs, one line a process, and what is wrong, one sentence each."""
    if any(node.survey.entries for node in nodes):
        console.print(_table(nodes))
    else:
        console.print("No running vLLM process keeps a record.")
    for node, sentence, finding in _sentences(nodes):
        where = f"{node.name}: " if node.name else ""
        line = f"{'!' if finding else ' '} {where}{sentence}"
        console.print(line, style="red" if finding else None, markup=False, highlight=False)


def as_data(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """As JSON knows it, a node each."""
    return [
        {"node": node.name or None, "problem": node.problem, **node.survey.to_data()}
        for node in nodes
    ]


def prometheus(nodes: Sequence[Node]) -> str:
    """In the text format that the node exporter's text-file collector reads."""
    return "\n".join(_metrics(nodes)) + "\n"


def _table(nodes: Sequence[Node]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    several = len(nodes) > 1
    if several:
        table.add_column("node")
    for name in ("pid", "process", "vLLM", "verdict", "states freed", "stock would keep"):
        numeric = name not in ("process", "vLLM", "verdict")
        table.add_column(name, justify="right" if numeric else "left")
    for node in nodes:
        for entry in node.survey.entries:
            counters = entry.counters
            table.add_row(
                *([node.name] if several else []),
                str(entry.pid),
                entry.role,
                entry.vllm or "?",
                entry.verdict.reason.value if entry.verdict else "armed",
                str(counters.states_freed) if counters else "",
                str(counters.states_stock_would_keep) if counters else "",
            )
    return table


def _sentences(nodes: Sequence[Node]) -> Iterator[tuple[Node, str, bool]]:
    """What is to be said beyond the table: node, sentence, and whether it is a finding."""
    for node in nodes:
        if node.problem is not None:
            yield node, node.problem, True
        for entry in node.survey.entries:
            if entry.verdict is not None and entry.verdict.in_doubt:
                yield node, f"pid {entry.pid} ({entry.role}): {entry.verdict}", True
        for core in node.survey.silent:
            yield node, f"pid {core.pid} (engine core) {core.sentence}", core.finding


def _metrics(nodes: Sequence[Node]) -> Iterator[str]:
    yield from _head("info", "gauge", "One per vLLM process that keeps a record.")
    for node in nodes:
        for entry in node.survey.entries:
            labels = {
                **_process(node, entry.pid, entry.role),
                "verdict": entry.verdict.reason.value if entry.verdict else "armed",
                "vllm": entry.vllm or "",
                "version": entry.version,
            }
            yield _sample("info", labels, 1)
    for name, meaning in _METRICS.items():
        yield from _head(f"{name}_total", "counter", meaning)
        for node in nodes:
            for entry in node.survey.entries:
                if entry.counters is not None:
                    labels = _process(node, entry.pid, entry.role)
                    yield _sample(f"{name}_total", labels, asdict(entry.counters)[name])
    yield from _head("engine_cores_unpatched", "gauge", "Engine cores that should be patched.")
    for node in nodes:
        yield _sample("engine_cores_unpatched", _node(node), _unpatched(node.survey))


def _unpatched(survey: Survey) -> int:
    doubtful = (
        entry.role == "engine core" and entry.verdict is not None and entry.verdict.in_doubt
        for entry in survey.entries
    )
    return sum(doubtful) + sum(core.finding for core in survey.silent)


def _head(name: str, kind: str, meaning: str) -> Iterator[str]:
    yield f"# HELP vllm_mamba_retire_{name} {meaning}"
    yield f"# TYPE vllm_mamba_retire_{name} {kind}"


def _node(node: Node) -> dict[str, str]:
    return {"node": node.name} if node.name else {}


def _process(node: Node, pid: int, role: str) -> dict[str, str]:
    return {**_node(node), "pid": str(pid), "role": role}


def _sample(name: str, labels: dict[str, str], value: int) -> str:
    inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return (
        f"vllm_mamba_retire_{name}{{{inside}}} {value}"
        if inside
        else (f"vllm_mamba_retire_{name} {value}")
    )


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
