"""Builds images without pulling any: Debian, Python and a real vLLM release.

They do not contain torch and vLLM's other requirements: these are mounted into a folder that a .pth
file in the image names. The images are kept in a store of their own in the cache.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools.env import provision, wheelhouse

STORE = provision.CACHE / "containers"
SUITE = "bookworm"  # its Python is `provision.PREFERRED_PYTHON`
BASE = "localhost/mamba-retire/base"
_SITE = f"usr/local/lib/python{provision.PREFERRED_PYTHON}/dist-packages"
_DEPENDENCIES = "/dependencies"
_NEEDED = ("debootstrap", "podman", "runc", "apt-get")

# Spelled out, because the limits that podman would raise may not be raised in a sandbox.
_CONTAINERS = """
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]
netns = "none"
"""
_STORAGE = f"""
[storage]
driver = "overlay"
graphroot = "{STORE}/images"
runroot = "{STORE}/run"
"""


@dataclass(frozen=True)
class Local:
    """The images for tests.

    Attributes:
        images: release -> name.
        mount: folder that the containers need, as ``--mount`` of `tools.images.rollout` takes it.
    """

    images: dict[str, str]
    mount: str


def for_tests() -> dict[str, str]:
    """Return the environment variables that name the images for tests/images."""
    local = make((provision.ENGINE, provision.NATIVE))
    return {
        "MAMBA_RETIRE_TEST_LIVE_IMAGE": local.images[provision.ENGINE],
        "MAMBA_RETIRE_TEST_NATIVE_IMAGE": local.images[provision.NATIVE],
        "MAMBA_RETIRE_TEST_MOUNT": local.mount,
        "MAMBA_RETIRE_TEST_WHEELS": str(wheelhouse.wheelhouse(provision.PREFERRED_PYTHON)),
    }


def make(versions: tuple[str, ...]) -> Local:
    """Return an image for each release; make those that are missing.

    Afterwards podman uses our store and limits, in this process and its children.

    Raises:
        Unavailable: this machine cannot make images.
    """
    if os.geteuid() != 0:
        raise provision.Unavailable("images are made as root")
    if absent := [name for name in _NEEDED if shutil.which(name) is None]:
        raise provision.Unavailable(f"not installed: {', '.join(absent)}")
    STORE.mkdir(parents=True, exist_ok=True)
    files = {"CONTAINERS_CONF": _CONTAINERS, "CONTAINERS_STORAGE_CONF": _STORAGE}
    for name, text in files.items():
        path = STORE / f"{name.lower()}.conf"
        path.write_text(text)
        os.environ[name] = str(path)
    with provision._lock("containers"):
        if not _there(BASE):
            _make_base()
        images = {version: _make_image(version) for version in versions}
    # .../environments/shared/bin/python -> its packages, but not this machine's vLLM
    home = provision.shared_environment().parents[1]
    packages = home / "lib" / f"python{provision.PREFERRED_PYTHON}" / "site-packages"
    return Local(images, f"{packages}:{_DEPENDENCIES}")


def _make_base() -> None:
    mirror = _run("apt-get", "indextargets", "--format=$(SITE)", "Created-By: Packages").split()[0]
    print(f"making {BASE}: Debian {SUITE} with Python", flush=True)
    with tempfile.TemporaryDirectory(dir=STORE) as making:
        root = Path(making, "root")
        _run("debootstrap", "--variant=minbase", "--include=python3", SUITE, str(root), mirror)
        shutil.rmtree(root / "var/cache/apt")
        tar = Path(making, "root.tar")
        _run("tar", "-C", str(root), "-cf", str(tar), ".")
        _run("podman", "import", str(tar), BASE)


def _make_image(version: str) -> str:
    name = f"localhost/mamba-retire/vllm:v{version}"
    if _there(name):
        return name
    print(f"making {name}", flush=True)
    tree = provision.release(version)
    with tempfile.TemporaryDirectory(dir=STORE) as making:
        # An empty folder in the image becomes the place of the mount.
        Path(making, "light-lane.pth").write_text(f"{_DEPENDENCIES}\n")
        Path(making, "Containerfile").write_text(
            f"FROM {BASE}\nCOPY light-lane.pth /{_SITE}/\n"
            f"COPY --from=release . /{_SITE}/\nENTRYPOINT ['python3']\n".replace("'", '"')
        )
        _run(
            "podman",
            "build",
            "-q",
            "--network=none",
            "-t",
            name,
            f"--build-context=release={tree}",
            making,
        )
    return name


def _there(image: str) -> bool:
    return subprocess.run(["podman", "image", "exists", image], check=False).returncode == 0


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise provision.ProvisionError(f"{' '.join(command)} failed\n{tail}")
    return done.stdout
