"""What docs/deploy/ offers is valid where it will be read, and looks twice before it serves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from vllm_mamba_retire.releases import Status, load_matrix

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
KUBERNETES = "1.31"  # a version that is in use; the fields are older
CHECK = ["vllm-mamba-retire", "status"]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def pods() -> dict[str, dict[str, Any]]:
    """Every pod that the manifests make."""
    deployment, _ = documents("kubernetes.yaml")
    (ray,) = documents("raycluster.yaml")
    groups = {"head": ray["spec"]["headGroupSpec"], "worker": ray["spec"]["workerGroupSpecs"][0]}
    ray_pods = {name: group["template"]["spec"] for name, group in groups.items()}
    return {"deployment": deployment["spec"]["template"]["spec"], **ray_pods}


@pytest.mark.parametrize("document", documents("kubernetes.yaml"), ids=lambda d: d["kind"])
def test_kubernetes_accepts_it(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", ["head", "worker"])
def test_kubernetes_accepts_the_pods_of_the_ray_cluster(name: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pods()[name]}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_kubernetes_refuses_a_misspelt_field() -> None:
    document = documents("kubernetes.yaml")[0]
    container = document["spec"]["template"]["spec"]["containers"][0]
    container["startupprobe"] = container.pop("startupProbe")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", ["deployment", "head", "worker"])
def test_pod_looks_at_its_own_image_with_its_own_environment(name: str) -> None:
    (check,), (serving,) = pods()[name]["initContainers"], pods()[name]["containers"]
    assert check["command"] == CHECK
    assert (check["image"], check["env"]) == (serving["image"], serving["env"])
    assert {"name": "MAMBA_RETIRE", "value": "require"} in serving["env"]


def test_deployment_keeps_serving_while_it_rolls() -> None:
    deployment, _ = documents("kubernetes.yaml")
    assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    probe = deployment["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    assert probe["exec"]["command"][-1].endswith(f"&& {' '.join(CHECK)}")
    assert (
        probe["periodSeconds"] * probe["failureThreshold"]
        < (deployment["spec"]["progressDeadlineSeconds"])
    )


def test_service_finds_the_pods() -> None:
    deployment, service = documents("kubernetes.yaml")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def compose(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # podman-compose asks for the version of podman first. To read a file it needs no more of it.
    podman = folder / "podman"
    podman.write_text("#!/bin/sh\necho podman version 5.0.0\n")
    podman.chmod(0o755)
    environment["PATH"] = f"{os.environ['PATH']}:{folder}"
    command = [sys.executable, "-m", "podman_compose", "-f", str(DEPLOY / "compose.yaml")]
    return subprocess.run(
        [*command, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_compose_reads_it_and_serves_only_after_the_check(tmp_path: Path) -> None:
    done = compose(tmp_path, "config", MODEL="org/model", IMAGE="local:1")
    services = yaml.safe_load(done.stdout)["services"]
    assert services["check"]["entrypoint"] == CHECK
    condition = services["vllm"]["depends_on"]["check"]["condition"]
    assert condition == "service_completed_successfully"
    assert services["check"]["environment"] == services["vllm"]["environment"]
    assert services["check"]["image"] == services["vllm"]["image"] == "local:1"
    assert services["vllm"]["command"][:2] == ["--model", "org/model"]
    assert services["vllm"]["healthcheck"]["test"][1].endswith(f"&& {' '.join(CHECK)}")


def test_compose_wants_a_model(tmp_path: Path) -> None:
    done = compose(tmp_path, "config")
    assert done.returncode != 0
    assert "name a model" in done.stdout + done.stderr


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A folder with a `ray` that says how it was called and a `status` that can be told to fail."""
    for name, body in {
        "ray": 'echo "$MAMBA_RETIRE: $@"',
        "vllm-mamba-retire": 'exit "${FINDING:-0}"',
    }.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    return tmp_path


def ray_node(node: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(DEPLOY / "ray-node.sh"), *arguments],
        env={"PATH": f"{node}:/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_ray_starts_with_the_variable_set(node: Path) -> None:
    assert ray_node(node, "head").stdout == "require: start --head --port=6379 --block\n"
    other = ray_node(node, "first:6379", MAMBA_RETIRE="off")
    assert other.stdout == "off: start --address=first:6379 --block\n"


def test_ray_does_not_start_on_a_node_that_would_leak(node: Path) -> None:
    done = ray_node(node, "head", FINDING="1")
    assert (done.returncode, done.stdout) == (1, "")


def test_ray_node_wants_to_know_which_node(node: Path) -> None:
    done = ray_node(node)
    assert done.returncode != 0
    assert "head, or the address of the head" in done.stderr


def test_readme_names_every_file_and_no_link_is_broken() -> None:
    readme = (DEPLOY / "README.md").read_text()
    links = set(re.findall(r"\]\(([^)#]+)\)", readme))
    assert {path.name for path in DEPLOY.iterdir()} - {"README.md"} <= links
    assert [link for link in sorted(links) if not (DEPLOY / link).exists()] == []


def test_release_in_the_examples_is_one_that_needs_it() -> None:
    live = {row.version for row in load_matrix().releases if row.status is Status.LIVE}
    texts = (path.read_text() for path in DEPLOY.iterdir() if path.name != "README.md")
    assert {found for text in texts for found in re.findall(r"vllm-mamba:v([\d.]+)", text)} <= live
