"""Each Dockerfile of ``docker/`` is built for real and what it builds is asked how it behaves.

The session names local stand-ins for the images that they start from (`tools.images.dockerfiles`).
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from vllm_mamba_retire.releases import load_matrix

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docs" / "docker").glob("Dockerfile.*"))
STAND_INS = json.loads(os.environ["MAMBA_RETIRE_TEST_STAND_INS"])
BASE = STAND_INS["vllm"]
BUILDS = {"BASE": BASE, "TOOLS": STAND_INS["tools"], "SITE": STAND_INS["site"]}
MOUNTS = [f"--volume={mount}" for mount in STAND_INS["mounts"]]

# The layout [old, null, committed, in flight] on the image's own manager and pool, as any process
# in it finds them; and what this package says there, if the image has it.
ASK = """
import importlib.util, json
from vllm.plugins import load_general_plugins
load_general_plugins()
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import MambaSpec
spec = MambaSpec(block_size=4, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align")
pool = BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=4)
manager = MambaManager(spec, block_pool=pool, enable_caching=True, kv_cache_group_id=0,
                       scheduler_block_size=4)
old, committed, in_flight = pool.get_new_blocks(3)
manager.req_to_blocks["r"] = [old, pool.null_block, committed, in_flight]
manager.remove_skipped_blocks("r", 12)
verdict = None
if importlib.util.find_spec("vllm_mamba_retire"):
    import vllm_mamba_retire
    verdict = vllm_mamba_retire.activate().reason.value
print(json.dumps({"free": pool.get_num_free_blocks(), "verdict": verdict}))
"""


def podman(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done


@functools.cache
def built(dockerfile: Path) -> str:
    """Build it, with the stand-ins in place of the images that it names; returns the image."""
    name = f"localhost/mamba-retire/example{dockerfile.suffix}"
    used = [key for key in BUILDS if f"ARG {key}" in dockerfile.read_text()]
    podman(
        "build",
        "--network=none",
        "--no-cache",  # a layer is not made anew when only a mounted wheel has changed
        f"--file={dockerfile}",
        f"--tag={name}",
        *(f"--build-arg={key}={BUILDS[key]}" for key in used),
        *MOUNTS,
        str(ROOT),
    )
    return name


def ask(image: str) -> dict[str, object]:
    """What a fresh process in the image does and says."""
    # An image of ours may have an entry point, as the published ones have.
    done = podman("run", "--rm", *MOUNTS, "--entrypoint=python3", image, "-c", ASK)
    return json.loads(done.stdout.splitlines()[-1])


def test_image_they_start_from_keeps_the_old_state():
    assert ask(BASE) == {"free": 4, "verdict": None}


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.suffix)
def test_what_it_builds_frees_the_old_state(dockerfile: Path):
    # Only one that leaves this package in the image patches at run time.
    text = dockerfile.read_text()
    stays = "pip install" in text and "pip uninstall" not in text
    assert ask(built(dockerfile)) == {"free": 5, "verdict": "patched" if stays else None}


def test_pip_image_changes_no_file_of_vllm():
    image = built(ROOT / "docs" / "docker" / "Dockerfile.pip")
    changed = podman("image", "diff", image, BASE).stdout
    assert "mamba_retire" in changed
    assert not re.search(r"^[AC] \S*/vllm/.*\.py$", changed, flags=re.M)


def test_patch_image_differs_in_one_file():
    image = built(ROOT / "docs" / "docker" / "Dockerfile.patch")
    changed = podman("image", "diff", image, BASE).stdout
    files = re.findall(r"^[ACD] (\S+\.[a-z]+)$", changed, flags=re.M)
    assert files == [f"{BUILDS['SITE']}/vllm/v1/core/single_type_kv_cache_manager.py"]


def test_hash_in_the_patch_file_is_the_one_of_the_table():
    text = (ROOT / "docs" / "docker" / "Dockerfile.patch").read_text()
    series, sha256 = (
        str(re.findall(rf"^ARG {a}=(\S+)", text, flags=re.M)[0]) for a in ("SERIES", "SHA256")
    )
    assert (series, sha256) in {(f.series, f.sha256_after) for f in load_matrix().patches}


@pytest.mark.parametrize("name", ["patch", "apply"])
def test_build_stops_on_a_vllm_that_is_not_as_released(name: str, tmp_path: Path):
    changed = tmp_path / "Containerfile"
    manager = f"{BUILDS['SITE']}/vllm/v1/core/single_type_kv_cache_manager.py"
    changed.write_text(f"FROM {BASE}\nRUN echo '# a vendor was here' >> {manager}\n")
    podman("build", "-q", "--network=none", "-t", "localhost/mamba-retire/foreign", str(tmp_path))
    dockerfile = ROOT / "docs" / "docker" / f"Dockerfile.{name}"
    done = podman(
        "build",
        "--network=none",
        "--no-cache",  # a layer is not made anew when only a mounted wheel has changed
        f"--file={dockerfile}",
        "--build-arg=BASE=localhost/mamba-retire/foreign",
        *(f"--build-arg={key}={BUILDS[key]}" for key in ("TOOLS", "SITE") if name == "patch"),
        *MOUNTS,
        str(ROOT),
        check=False,
    )
    assert done.returncode != 0
    assert {"patch": "FAILED", "apply": "refused, nothing was changed"}[name] in (
        done.stdout + done.stderr
    )
