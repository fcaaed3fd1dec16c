"""``inspect-image`` on real images: what the engine starts is what is judged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_mamba_retire.cli import app
from vllm_mamba_retire.images.engine import LABEL
from vllm_mamba_retire.releases import Matrix

BuildImage = Callable[..., str]
Podman = Callable[..., str]
SITE = "/usr/local/lib/python3.11/dist-packages"
WHERE = "import importlib.util as u; print(u.find_spec('vllm').origin)"
VENV = "/opt/venv/lib/python3.11/site-packages"


def inspected(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["inspect-image", *arguments, "--json"])
    return done.exit_code, json.loads(done.stdout)


def test_live_release(live: str, matrix: Matrix) -> None:
    code, data = inspected(live, "--engine=podman")
    assert (code, data["reason"], data["installed"]) == (1, "unpatched", None)
    row = matrix.row_for("0.29.0")
    assert row is not None
    assert data["vllm"] == {
        "package": f"{SITE}/vllm",
        "version": "0.29.0",
        "distribution": "vllm",
        "manager_sha256": row.manager_sha256,
        "on_search_path": True,
        "others": [],
    }
    assert (data["python"], data["architecture"]) == ("3.11", "amd64")


def test_native_release(native: str) -> None:
    code, data = inspected(native, "--engine=podman")
    assert (code, data["reason"]) == (0, "native")


def test_mounted_root_gives_the_verdict_of_the_engine(live: str, podman: Podman) -> None:
    root = podman("image", "mount", live).strip()
    try:
        _, from_engine = inspected(live, "--engine=podman")
        code, from_root = inspected(f"--rootfs={root}")
    finally:
        podman("image", "unmount", live)
    assert code == 1
    for name in ("architecture", "python", "vllm", "reason"):
        assert from_root[name] == from_engine[name], name


def test_file_deleted_in_a_later_layer_is_gone(live: str, derived: BuildImage) -> None:
    code, data = inspected(derived(f"FROM {live}", f"RUN rm -r {SITE}/vllm/v1/core"))
    assert (code, data["reason"]) == (1, "failed")
    assert "single_type_kv_cache_manager.py does not exist" in data["sentence"]


# Beside the system's vLLM: a virtual environment, a user's site folder, a program's own folder.
OTHERS = (VENV, "/home/app/.local/lib/python3.11/site-packages", "/srv/app")


@pytest.fixture(scope="module", params=["native beside", "live beside"])
def several(
    request: pytest.FixtureRequest,
    live: str,
    native: str,
    podman: Podman,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """An image with a live release for the system and a native one elsewhere, or the reverse."""
    base, other = (native, live) if request.param == "live beside" else (live, native)
    files = [f"{SITE}/vllm/{name}" for name in ("__init__.py", "_version.py")]
    context = tmp_path_factory.mktemp("context")
    (context / "Containerfile").write_text(
        f"FROM {base}\n"
        "RUN python3 -m venv --without-pip /opt/venv && useradd -m -u 1000 app\n"
        + "".join(
            f"COPY --from={other} {' '.join(files)} {at}/vllm/\n"
            f"COPY --from={other} {SITE}/vllm/v1/core {at}/vllm/v1/core\n"
            for at in OTHERS
        )
        + f'RUN echo "{WHERE}" > /srv/app/serve.py && ln -s app/serve.py /srv/start.py\n'
    )
    name = "localhost/mamba-retire/several"
    podman("build", "-q", "--network=none", "--layers=false", "-t", name, str(context))
    yield name
    podman("rmi", "--force", name)


@pytest.mark.parametrize(
    ("lines", "is_other"),
    [
        ((f'ENTRYPOINT ["/opt/venv/bin/python", "-c", "{WHERE}"]',), True),
        (("WORKDIR /srv", 'ENTRYPOINT ["python3", "app/serve.py"]'), True),
        (("WORKDIR /srv", 'ENTRYPOINT ["python3", "start.py"]'), True),
        (("WORKDIR /srv/app", f'ENTRYPOINT ["python3", "-c", "{WHERE}"]'), True),
        (("WORKDIR /srv/app", f'ENTRYPOINT ["python3", "-Ic", "{WHERE}"]'), False),
        (("USER app", f'ENTRYPOINT ["python3", "-c", "{WHERE}"]'), True),
        (("USER app", "ENV PYTHONNOUSERSITE=1", f'CMD ["-c", "{WHERE}"]'), False),
        (("USER 0", f'CMD ["-c", "{WHERE}"]'), False),
        (("ENV HOME=/home/app", f'CMD ["-c", "{WHERE}"]'), True),
        (("ENV PYTHONPATH=/srv/app", f'CMD ["-c", "{WHERE}"]'), True),
    ],
    ids=[
        *("venv", "program", "linked program", "start folder", "isolated", "user", "no user site"),
        *("root", "home", "pythonpath"),
    ],
)
def test_verdict_is_on_the_vllm_that_a_container_imports(
    several: str, derived: BuildImage, podman: Podman, lines: tuple[str, ...], is_other: bool
) -> None:
    image = derived(f"FROM {several}", *lines)
    imported = podman("run", "--rm", image).strip()
    assert imported.startswith(SITE) != is_other  # the case is what it says
    code, data = inspected(image, "--engine=podman")
    assert f"{data['vllm']['package']}/__init__.py" == imported
    expected = {"0.29.0": (1, "unpatched"), "0.30.0": (0, "native")}
    assert (code, data["reason"]) == expected[data["vllm"]["version"]]


def test_command_that_cannot_be_followed(live: str, native: str, derived: BuildImage) -> None:
    second = f"COPY --from={native} {SITE}/vllm /opt/other/vllm"
    command = 'ENTRYPOINT ["sh", "-c", "python3 -m vllm.entrypoints.openai.api_server"]'
    code, data = inspected(derived(f"FROM {live}", second, command), "--engine=podman")
    assert (code, data["reason"]) == (1, "undecided")
    assert "/opt/other/vllm" in data["sentence"]
    assert f"{SITE}/vllm" in data["sentence"]


def test_every_file_of_a_site_folder_is_a_link(live: str, derived: BuildImage) -> None:
    moved = f"mkdir /cache && mv {SITE}/vllm {SITE}/vllm-0.29.0+cpu.dist-info /cache"
    for how in ("--symbolic-link", "--link"):
        # A folder of its own file system layer: podman exports names of one file as hard links.
        image = derived(f"FROM {live}", f"RUN {moved} && cp -r {how} /cache/* {SITE}")
        code, data = inspected(image, "--engine=podman")
        assert (code, data["reason"], data["vllm"]["version"]) == (1, "unpatched", "0.29.0"), how
        assert data["vllm"]["others"] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("after", [0.5, 1.5])
def test_signal_leaves_nothing_behind(
    live: str, podman: Podman, number: signal.Signals, after: float
) -> None:
    code = "from vllm_mamba_retire.cli import main; main()"
    command = [sys.executable, "-c", code, "inspect-image", live, "--engine=podman"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while not podman("ps", "--all", "--quiet", f"--filter=label={LABEL}"):
            assert process.poll() is None
        time.sleep(after)
        process.send_signal(number)
    if number is signal.SIGKILL:
        inspected(live, "--engine=podman")
    assert podman("ps", "--all", "--quiet", f"--filter=label={LABEL}") == ""


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (("FROM localhost/mamba-retire/base",), "has no vLLM"),
        (("FROM {live}", "RUN rm /usr/bin/python3*"), "has no Python"),
        (
            ("FROM {live}", f"RUN rm -r {SITE}/vllm && ln -s ../../../../../../vllm {SITE}/vllm"),
            "has no vLLM",
        ),
    ],
    ids=["no vllm", "no python", "link out of the root"],
)
def test_image_that_cannot_serve(
    live: str, derived: BuildImage, lines: tuple[str, ...], told: str
) -> None:
    code, data = inspected(derived(*(line.format(live=live) for line in lines)), "--engine=podman")
    assert code == 2
    assert told in data["error"]


def test_wrong_name() -> None:
    code, data = inspected("localhost/mamba-retire/vllm:typo", "--engine=podman")
    assert code == 2
    assert "podman has no image localhost/mamba-retire/vllm:typo" in data["error"]
