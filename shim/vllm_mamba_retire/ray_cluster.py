"""Queries every node of a running Ray cluster for the vLLM processes on it.

For vLLM's multi-node executor. It connects as a Ray driver does: to the local cluster, or to the
one that ``RAY_ADDRESS`` names. Ray is imported only when `survey_cluster` is called.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
from typing import Any
from urllib.parse import urlsplit

from .processes import Node, Survey

_NOT_INSTALLED = "vllm-mamba-retire is not installed in the environment that Ray runs in there."


class RayError(Exception):
    """The cluster cannot be queried; the message says what to do."""


def survey_cluster(patience: float = 60.0) -> list[Node]:
    """Query every node that is alive.

    Args:
        patience: seconds to wait for the answers of all nodes together.

    Raises:
        RayError: Ray is not installed, or no cluster answers.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise RayError("Ray is not installed; pip install 'vllm-mamba-retire[ray]'") from error
    try:
        _check_address()
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError) as error:
        raise RayError(f"no Ray cluster answers: {error}") from error
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        asked = {_query(ray, node["NodeID"]): node for node in nodes}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=patience)
        return [_node(ray, node, answer, answer in answered) for answer, node in asked.items()]
    finally:
        ray.shutdown()


def _check_address() -> None:
    """Connect to the address first: without a listener, Ray itself waits for minutes."""
    address = os.environ.get("RAY_ADDRESS", "")
    named = urlsplit(address if "://" in address else f"//{address}")
    if named.hostname and named.port:
        socket.create_connection((named.hostname, named.port), timeout=10).close()


def _query(ray: Any, node_id: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Defined here, a function travels by value: a node without this package can still say so.
    def collect() -> dict[str, Any] | None:
        try:
            from vllm_mamba_retire.processes import survey
        except ImportError:
            return None
        return survey().to_data()

    there = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    # No CPU asked for: vLLM may have taken all of them.
    return (
        ray.remote(collect).options(scheduling_strategy=there, num_cpus=0, max_retries=0).remote()
    )


def _node(ray: Any, node: dict[str, Any], answer: Any, answered: bool) -> Node:
    name = f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"
    if not answered:
        return Node(name, problem="did not answer in time.")
    try:
        data = ray.get(answer)
    except Exception as error:  # whatever went wrong there, the other nodes' answers count
        return Node(name, problem=f"could not be queried: {type(error).__name__}: {error}")
    if data is None:
        return Node(name, problem=_NOT_INSTALLED)
    return Node(name, Survey.from_data(data))
