"""Every node of a Ray cluster is asked, whatever is on it, by one command on one of them.

Two nodes on one machine: two raylets, each with a folder of records of its own. The processes that
keep records are Ray actors, as vLLM's multi-node executor starts them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import vllm_mamba_retire
from vllm_mamba_retire.processes import Node, Survey
from vllm_mamba_retire.verdict import Reason

_STATUS = 'from vllm_mamba_retire.cli import app; app(["status", "--ray", "--json"])'
_PATH = os.environ["PYTHONPATH"].split(os.pathsep)
_WITHOUT_PACKAGE = os.pathsep.join(
    folder for folder in _PATH if Path(folder) != Path(vllm_mamba_retire.__file__).parents[1]
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    def options(name: str) -> dict[str, Any]:
        folder = str(tmp_path_factory.mktemp(name))
        return {"num_cpus": 1, "env_vars": {"MAMBA_RETIRE_DIR": folder}}

    started = Cluster(initialize_head=True, head_node_args=options("first"))
    started.add_node(**options("second"))
    started.wait_for_nodes()
    yield started
    started.shutdown()


@pytest.fixture(scope="module")
def actors(cluster: Cluster) -> Iterator[list[int]]:
    """Pids of an actor on each node, which take all the CPUs there are."""

    # Named as vLLM names its own. Defined here it travels by value: the nodes lack this file.
    class RayWorkerWrapper:
        def __init__(self, manager: bool) -> None:
            from vllm.plugins import load_general_plugins

            load_general_plugins()
            if manager:
                import vllm.v1.core.single_type_kv_cache_manager  # noqa: F401

        def pid(self) -> int:
            return os.getpid()

    ray.init(address=cluster.address, log_to_driver=False)
    try:
        nodes = [node["NodeID"] for node in ray.nodes()]
        actors = [
            ray.remote(RayWorkerWrapper).options(num_cpus=1, scheduling_strategy=on(node)).remote(m)
            for node, m in zip(nodes, (True, False), strict=True)
        ]
        yield ray.get([actor.pid.remote() for actor in actors])  # they live as long as this
    finally:
        ray.shutdown()


def on(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node, soft=False)


def status(address: str, code: str = _STATUS) -> subprocess.CompletedProcess[str]:
    """``status --ray --json`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def ask(cluster: Cluster) -> list[Node]:
    """What `status` says of each node."""
    answer = status(cluster.address)
    assert answer.returncode in (0, 1), answer.stderr
    nodes = json.loads(answer.stdout)["nodes"]
    found = [Node(data["node"], Survey.from_data(data), data["problem"]) for data in nodes]
    assert answer.returncode == int(any(node.finding for node in found))
    return found


def test_every_node_tells_of_its_own_processes(cluster: Cluster, actors: list[int]) -> None:
    nodes = ask(cluster)
    assert len({node.name for node in nodes}) == 2
    assert [node.problem for node in nodes] == [None, None]
    assert sorted(e.pid for node in nodes for e in node.survey.processes) == sorted(actors)
    assert [len(node.survey.processes) for node in nodes] == [1, 1]


def test_an_actor_is_a_worker_with_its_own_verdict(cluster: Cluster, actors: list[int]) -> None:
    entries = {e.pid: e for node in ask(cluster) for e in node.survey.processes}
    assert {entry.role for entry in entries.values()} == {"worker"}
    assert entries[actors[0]].verdict.reason is Reason.PATCHED
    assert entries[actors[1]].verdict is None


def test_node_without_the_package_is_reported_others_answer(
    cluster: Cluster, actors: list[int]
) -> None:
    cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": _WITHOUT_PACKAGE})
    cluster.wait_for_nodes()
    nodes = ask(cluster)
    assert len(nodes) == 3
    (problem,) = (node.problem for node in nodes if node.problem)
    assert "not installed" in problem
    assert sum(len(node.survey.processes) for node in nodes) == len(actors)
    assert [node.problem is not None for node in nodes].count(True) == 1
    assert all(node.finding for node in nodes if node.problem)


def test_without_a_cluster_the_question_cannot_be_answered() -> None:
    answer = status("127.0.0.1:1")
    assert answer.returncode == 2
    assert "no Ray cluster answers" in answer.stderr


def test_without_ray_the_error_says_what_to_install() -> None:
    answer = status("127.0.0.1:1", 'import sys; sys.modules["ray"] = None\n' + _STATUS)
    assert answer.returncode == 2
    assert "pip install 'vllm-mamba-retire[ray]'" in answer.stderr
