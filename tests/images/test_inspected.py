"""``inspect-image`` on real images: three ways to the same verdict, and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_mamba_retire.cli import app
from vllm_mamba_retire.releases import Matrix

Build = Callable[..., str]
Podman = Callable[..., str]
SITE = "/usr/local/lib/python3.11/dist-packages"


def looked_at(*arguments: str) -> tuple[int, dict[str, object]]:
    done = CliRunner().invoke(app, ["inspect-image", *arguments, "--json"])
    return done.exit_code, json.loads(done.stdout)


def test_live_release(live: str, matrix: Matrix) -> None:
    code, data = looked_at(live, "--engine=podman")
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
    code, data = looked_at(native, "--engine=podman")
    assert (code, data["reason"]) == (0, "native")


@pytest.mark.parametrize("kind", ["docker-archive", "oci-archive"])
def test_archive_says_what_the_engine_says(
    native: str, podman: Podman, tmp_path: Path, kind: str
) -> None:
    tar = tmp_path / "image.tar"
    podman("save", "--quiet", f"--format={kind}", f"--output={tar}", native)
    _, from_engine = looked_at(native, "--engine=podman")
    code, from_tar = looked_at(f"--tar={tar}")
    assert code == 0
    for name in ("image_id", "architecture", "python", "vllm", "reason", "sentence"):
        assert from_tar[name] == from_engine[name], name


def test_mounted_root_says_what_the_engine_says(live: str, podman: Podman) -> None:
    root = podman("image", "mount", live).strip()
    try:
        _, from_engine = looked_at(live, "--engine=podman")
        code, from_root = looked_at(f"--rootfs={root}")
    finally:
        podman("image", "unmount", live)
    assert code == 1
    for name in ("architecture", "python", "vllm", "reason"):
        assert from_root[name] == from_engine[name], name


def test_file_deleted_in_a_later_layer_is_gone(
    live: str, derived: Build, podman: Podman, tmp_path: Path
) -> None:
    # A layer of its own, so that the archive has a whiteout and the file below it.
    image = derived(f"FROM {live}", f"RUN rm -r {SITE}/vllm/v1/core")
    tar = tmp_path / "image.tar"
    podman("save", "--quiet", f"--output={tar}", image)
    code, data = looked_at(f"--tar={tar}")
    assert (code, data["reason"]) == (1, "failed")
    assert "single_type_kv_cache_manager.py does not exist" in str(data["sentence"])


def test_two_vllm_in_one_image(live: str, native: str, derived: Build) -> None:
    second = f"COPY --from={native} {SITE}/vllm /opt/other/vllm"
    image = derived(f"FROM {live}", second)
    _, data = looked_at(image, "--engine=podman")
    assert data["reason"] == "unpatched"
    assert data["vllm"]["others"] == ["/opt/other/vllm"]  # type: ignore[index]
    image = derived(f"FROM {live}", second, "ENV PYTHONPATH=/opt/other")
    _, data = looked_at(image, "--engine=podman")
    assert data["reason"] == "native"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (("FROM localhost/mamba-retire/base",), "has no vLLM"),
        (("FROM {live}", "RUN rm /usr/bin/python3*"), "has no Python"),
        (
            ("FROM {live}", f"RUN rm -r {SITE}/vllm && ln -s ../../../../../../vllm {SITE}/vllm"),
            "leads out of the root through a link",
        ),
    ],
    ids=["no vllm", "no python", "link out of the root"],
)
def test_image_that_cannot_serve(
    live: str, derived: Build, lines: tuple[str, ...], said: str
) -> None:
    code, data = looked_at(derived(*(line.format(live=live) for line in lines)))
    assert code == 2
    assert said in str(data["error"])


def test_wrong_name() -> None:
    code, data = looked_at("localhost/mamba-retire/vllm:typo", "--engine=podman")
    assert code == 2
    assert "podman has no image localhost/mamba-retire/vllm:typo" in str(data["error"])
