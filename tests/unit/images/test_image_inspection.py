"""Which vLLM an image would serve, and what is said about it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.images.image_making import (
    ARM64,
    NATIVE_SOURCE,
    PYTHON,
    SITE,
    SOURCE,
    Entries,
    Link,
    own,
    unpacked,
    vllm,
)
from vllm_mamba_retire.images.config import Config
from vllm_mamba_retire.images.inspection import Inspection, inspect
from vllm_mamba_retire.images.rootfs import read_rootfs
from vllm_mamba_retire.images.tree import ImageError

LOCAL = "usr/local/lib/python3.11/dist-packages"


def looked_at(
    root: Path,
    entries: Entries,
    command: tuple[str, ...] = (),
    folder: str = "",
    **environment: str,
) -> Inspection:
    config = Config("test", environment=environment, command=command, folder=folder)
    return inspect(config, read_rootfs(unpacked(root, entries)))


def test_leaking_release_without_this_package_is_a_finding(tmp_path: Path) -> None:
    found = looked_at(tmp_path, {**PYTHON, **vllm()})
    assert (found.reason, found.finding, found.installed) == ("unpatched", True, None)
    assert "install it in the image" in found.sentence
    data = found.to_data()
    assert data["vllm"]["package"] == f"/{SITE}/vllm"
    assert data["vllm"]["version"] == "0.29.0"
    assert (data["python"], data["architecture"]) == ("3.11", "amd64")


def test_leaking_release_with_this_package_will_be_patched(tmp_path: Path) -> None:
    found = looked_at(tmp_path, {**PYTHON, **vllm(), **own("0.1.0", LOCAL)})
    assert (found.reason, found.finding, found.installed) == ("patched", False, "0.1.0")


def test_native_release_needs_nothing(tmp_path: Path) -> None:
    found = looked_at(tmp_path, {**PYTHON, **vllm("0.30.0", NATIVE_SOURCE)})
    assert (found.reason, found.finding) == ("native", False)


def test_file_decides_not_the_version(tmp_path: Path) -> None:
    changed = SOURCE + b"    # somebody's\n"
    found = looked_at(tmp_path, {**PYTHON, **vllm("0.29.0", changed), **own()})
    assert (found.reason, found.finding) == ("drifted", True)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("MAMBA_RETIRE", "off", "sets MAMBA_RETIRE=off"),
        ("VLLM_PLUGINS", "lora", "sets VLLM_PLUGINS=lora, without mamba_retire"),
        ("VLLM_PLUGINS", "", "without mamba_retire"),
    ],
)
def test_environment_that_keeps_the_patch_out(
    tmp_path: Path, variable: str, value: str, said: str
) -> None:
    found = looked_at(tmp_path, {**PYTHON, **vllm(), **own()}, **{variable: value})
    assert (found.reason, found.finding) == ("unpatched", True)
    assert said in found.sentence


def test_plugin_list_that_names_this_package(tmp_path: Path) -> None:
    entries = {**PYTHON, **vllm(), **own()}
    assert looked_at(tmp_path, entries, VLLM_PLUGINS="a,mamba_retire").reason == "patched"


def test_first_on_the_search_path_serves_and_the_other_is_named(tmp_path: Path) -> None:
    both = {**PYTHON, **vllm("0.30.0", NATIVE_SOURCE), **vllm("0.29.0", site=LOCAL)}
    found = looked_at(tmp_path, both)
    assert (found.target.version, found.serving.others) == ("0.29.0", (f"/{SITE}/vllm",))


def test_pythonpath_comes_first(tmp_path: Path) -> None:
    both = {**PYTHON, **vllm("0.29.0"), **vllm("0.30.0", NATIVE_SOURCE, site="srv/code")}
    found = looked_at(tmp_path, both, folder="srv", PYTHONPATH=":code")
    assert found.target.version == "0.30.0"


def test_folder_that_python_starts_in_comes_before_its_sites(tmp_path: Path) -> None:
    both = {**PYTHON, **vllm("0.30.0", NATIVE_SOURCE), **vllm("0.29.0", site="work")}
    as_module = ("/usr/bin/python3", "-m", "vllm.entrypoints.openai.api_server")
    assert looked_at(tmp_path, both, as_module, "work").target.version == "0.29.0"
    assert looked_at(tmp_path, {}, ("vllm", "serve"), "work").target.version == "0.30.0"


def test_virtual_environment_of_the_vllm_command(tmp_path: Path) -> None:
    site = "opt/venv/lib/python3.12/site-packages"
    entries = {
        **PYTHON,
        **vllm("0.30.0", NATIVE_SOURCE),
        **vllm("0.29.0", site=site),
        "opt/venv/bin/python3": Link("/usr/bin/python3"),
        "opt/venv/pyvenv.cfg": b"home = /usr/bin\nversion = 3.12.3\n",
        "opt/venv/bin/vllm": b"#!/opt/venv/bin/python3\n",
    }
    found = looked_at(tmp_path, entries, PATH="/opt/venv/bin:/usr/bin")
    assert (found.target.version, found.serving.interpreter) == ("0.29.0", "opt/venv/bin/python3")
    assert found.serving.python == "3.12"


def test_editable_installation_through_a_pth_file(tmp_path: Path) -> None:
    entries = {
        **PYTHON,
        **vllm("0.29.0", site="workspace"),
        f"{SITE}/__editable__.vllm.pth": b"# where it is\nimport os\n/workspace\n",
    }
    found = looked_at(tmp_path, entries)
    assert str(found.target.package) == "/workspace/vllm"
    assert found.serving.certain


def test_package_that_is_a_link(tmp_path: Path) -> None:
    entries = {**PYTHON, **vllm("0.29.0", site="srv"), f"{SITE}/vllm": Link("/srv/vllm")}
    found = looked_at(tmp_path, entries)
    assert str(found.target.package) == "/srv/vllm"
    assert found.serving.others == ()


def test_vllm_off_the_search_path_is_a_finding(tmp_path: Path) -> None:
    found = looked_at(tmp_path, {**PYTHON, **vllm("0.30.0", NATIVE_SOURCE, site="srv/x")})
    assert (found.reason, found.serving.certain, found.finding) == ("native", False, True)


def test_several_vllm_off_the_search_path_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"several vLLM trees \(/srv/a/vllm, /srv/b/vllm\)"):
        looked_at(tmp_path, {**PYTHON, **vllm(site="srv/a"), **vllm(site="srv/b")})


def test_image_without_vllm(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="test has no vLLM"):
        looked_at(tmp_path, PYTHON)


def test_image_without_python(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="test has no Python"):
        looked_at(tmp_path, vllm())


def test_vllm_without_its_source(tmp_path: Path) -> None:
    entries = {name: data for name, data in vllm().items() if "single_type" not in name}
    found = looked_at(tmp_path, {**PYTHON, **entries})
    assert (found.reason, found.finding) == ("failed", True)
    assert f"/{SITE}/vllm/v1/core/single_type_kv_cache_manager.py does not exist" in found.sentence


def test_foreign_architecture_is_named(tmp_path: Path) -> None:
    found = looked_at(
        tmp_path, {"usr/bin/python3.11": ARM64, "usr/bin/python3": Link("python3.11"), **vllm()}
    )
    assert found.serving.architecture == "arm64"


def test_link_out_of_an_unpacked_root_is_not_followed_on_this_machine(tmp_path: Path) -> None:
    outside = unpacked(tmp_path / "outside", vllm())
    root = unpacked(tmp_path / "root", {**PYTHON, "usr/lib/python3/x": b""})
    (root / SITE).symlink_to(os.path.relpath(outside / SITE, root / SITE / ".."))
    with pytest.raises(ImageError, match="leads out of the root through a link"):
        inspect(Config("test"), read_rootfs(root))


def test_absolute_link_is_the_images_not_this_machines(tmp_path: Path) -> None:
    outside = unpacked(tmp_path / "outside", vllm())
    root = unpacked(tmp_path / "root", {**PYTHON, "usr/lib/python3/x": b""})
    (root / SITE).symlink_to(outside / SITE)
    with pytest.raises(ImageError, match="has no vLLM"):
        inspect(Config("test"), read_rootfs(root))


def test_no_such_root(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="is not a folder"):
        read_rootfs(tmp_path / "nowhere")


def test_nothing_is_written_into_the_root(tmp_path: Path) -> None:
    root = unpacked(tmp_path, {**PYTHON, **vllm()})
    before = sorted(root.rglob("*"))
    inspect(Config("test"), read_rootfs(root))
    assert sorted(root.rglob("*")) == before
