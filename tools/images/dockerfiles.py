"""Makes local stand-ins for the base images of the Dockerfiles in ``docs/docker/``.

The vLLM image is one of `local_images` with pip added, as in published images; the one with GNU
patch is the same Debian with this machine's ``patch`` copied in.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools.env import provision
from tools.env.wheelhouse import wheelhouse
from tools.images import local_images

_VLLM = "localhost/mamba-retire/with-pip:v{version}"
_TOOLS = "localhost/mamba-retire/with-patch"


@dataclass(frozen=True)
class StandIns:
    """The images for a test of the Dockerfiles.

    Attributes:
        vllm: image with a release, python3 and pip.
        tools: image with GNU patch.
        site: folder of the release in it.
        mounts: folders to mount, as podman's ``--volume`` takes them: torch and vLLM's other
            requirements, and wheels from which pip installs this package without a network.
    """

    vllm: str
    tools: str
    site: str
    mounts: tuple[str, ...]


def stand_ins(version: str) -> StandIns:
    """Return the images; make those that are missing."""
    local = local_images.make((version,))
    wheels = f"{wheelhouse(provision.PREFERRED_PYTHON)}:/wheels:ro"
    vllm, tools = _VLLM.format(version=version), _TOOLS
    _build(vllm, f"FROM {local.images[version]}\n{_PIP}", ("--volume", wheels))
    patch = shutil.which("patch")
    if patch is None:
        raise provision.ProvisionError("not installed: patch")
    _build(tools, f"FROM {local_images.BASE}\nCOPY --chmod=755 patch /usr/bin/patch\n", (), patch)
    site = f"/usr/local/lib/python{provision.PREFERRED_PYTHON}/dist-packages"
    return StandIns(vllm, tools, site, (f"{local.mount}:ro", wheels))


# Debian keeps pip from its own folders; the published images have no such mark. There is no network
# in a build here: pip finds this package where its wheels are mounted.
_PIP = """
RUN rm -f /usr/lib/python3*/EXTERNALLY-MANAGED \
 && python3 $(ls /wheels/pip-*.whl)/pip install --no-index --find-links=/wheels pip \
 && printf '[global]\\nno-index = true\\nfind-links = /wheels\\n' > /etc/pip.conf
"""


def _build(name: str, text: str, options: tuple[str, ...], *files: str) -> None:
    with tempfile.TemporaryDirectory(dir=local_images.STORE) as context:
        for file in files:
            shutil.copy(file, context)
        Path(context, "Containerfile").write_text(text)
        local_images._run("podman", "build", "-q", "--network=none", *options, "-t", name, context)
