"""The looks that docs/deploy/ makes before and while it serves, run in a container."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
MOUNTS = (
    f"--volume={os.environ['MAMBA_RETIRE_TEST_MOUNT']}:ro",
    f"--volume={os.environ['MAMBA_RETIRE_TEST_WHEELS']}:/wheels:ro",
)
INSTALL = (
    "RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 $(echo /wheels/pip-*.whl)/pip install --no-index"
    " --find-links=/wheels vllm-mamba-retire"
)
# The manager is imported as vLLM's processes do it; what comes of it is the last line.
START = (
    "from vllm.plugins import load_general_plugins; load_general_plugins();"
    "import vllm.v1.core.single_type_kv_cache_manager, vllm_mamba_retire as m;"
    "print(m.current().verdict.reason.value if m.current() else None)"
)

Podman = Callable[..., str]
RunCommand = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module", params=["live", "native"])
def image(
    request: pytest.FixtureRequest, podman: Podman, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A release with this package installed by pip, as docs/docker/Dockerfile.pip does it."""
    base = request.getfixturevalue(request.param)
    context = tmp_path_factory.mktemp("context")
    (context / "Containerfile").write_text(f"FROM {base}\n{INSTALL}\n")
    name = f"localhost/mamba-retire/rolled-out:{request.param}"
    podman("build", "-q", "--network=none", "-t", name, MOUNTS[1], str(context))
    yield name
    podman("rmi", "--force", name)


@pytest.fixture
def run(image: str) -> RunCommand:
    def in_container(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *("podman", "run", "--rm", "--network=none", MOUNTS[0]),
                *(f"--env={name}={value}" for name, value in environment.items()),
                *(f"--entrypoint={command[0]}", image, *command[1:]),
            ],
            capture_output=True,
            text=True,
            check=False,
        )

    return in_container


def pod() -> dict[str, Any]:
    deployment = next(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def environment() -> dict[str, str]:
    return {pair["name"]: pair["value"] for pair in pod()["containers"][0]["env"]}


def test_look_at_the_image_is_fine(run: RunCommand, image: str) -> None:
    done = run(pod()["initContainers"][0]["command"], **environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("native" if "native" in image else "patched") in done.stdout


def test_look_at_the_image_finds_a_plugin_list_without_us(run: RunCommand) -> None:
    done = run(pod()["initContainers"][0]["command"], **environment(), VLLM_PLUGINS="lora")
    assert done.returncode == 1
    assert "VLLM_PLUGINS=lora does not list this package" in done.stdout


def test_startup_probe_fails_until_the_server_answers(run: RunCommand) -> None:
    command = list(pod()["containers"][0]["startupProbe"]["exec"]["command"])
    assert run(command, **environment()).returncode != 0
    serving = (
        "python3 -m http.server -b 127.0.0.1 8000 -d /tmp/w & mkdir -p /tmp/w/health; sleep 3;"
    )
    command[-1] = f"{serving} {command[-1]}"
    done = run(command, **environment())
    assert done.returncode == 0, done.stdout + done.stderr


def test_fresh_process_is_patched_by_the_installed_package(run: RunCommand, image: str) -> None:
    done = run(["python3", "-c", START], **environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ("native" if "native" in image else "patched")


def test_backing_out_by_environment(run: RunCommand) -> None:
    done = run(["python3", "-c", START], MAMBA_RETIRE="off")
    assert done.stdout.splitlines()[-1] == "None"
