"""The verdict on an image is the one that a process in it would come to."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.images.image_making import (
    ARM64,
    PYTHON,
    SITE,
    SOURCE,
    VLLM,
    Docker,
    Entries,
    Link,
    native,
    own,
    tarred,
    vllm,
)

LOCAL = "usr/local/lib/python3.11/dist-packages"
PATCHED: dict[str, Any] = {**PYTHON, **vllm(), **own(site=LOCAL)}


def inspected(docker: Docker, entries: Entries, *environment: str) -> tuple[int, dict[str, Any]]:
    docker.image(tarred(entries), Cmd=["python3", "-m", "vllm"], Env=environment)
    return docker.inspected()


def without(entries: Entries, *parts: str) -> Entries:
    """The entries whose path has none of the parts."""
    return {name: data for name, data in entries.items() if not any(p in name for p in parts)}


def test_leaking_release_without_this_package_is_a_finding(docker: Docker) -> None:
    code, data = inspected(docker, {**PYTHON, **vllm()})
    assert (code, data["reason"], data["installed"]) == (1, "unpatched", None)
    assert "vLLM 0.29.0 leaks" in data["sentence"]
    assert data["vllm"]["package"] == f"/{SITE}/vllm"
    assert data["vllm"]["version"] == "0.29.0"
    assert (data["python"], data["architecture"]) == ("3.11", "amd64")
    assert (data["image_id"], data["digest"]) == ("sha256:ab", "sha256:cd")


def test_leaking_release_with_this_package_will_be_patched(docker: Docker) -> None:
    code, data = inspected(docker, PATCHED)
    assert (code, data["reason"], data["installed"]) == (0, "patched", "0.1.0")


def test_native_release_needs_nothing(docker: Docker) -> None:
    code, data = inspected(docker, {**PYTHON, **native()}, "MAMBA_RETIRE=off", "VLLM_PLUGINS=")
    assert (code, data["reason"]) == (0, "native")


def test_file_decides_not_the_version(docker: Docker) -> None:
    changed = SOURCE + b"    # somebody's\n"
    code, data = inspected(docker, {**PATCHED, **vllm(source=changed)})
    assert (code, data["reason"]) == (1, "drifted")


@pytest.mark.parametrize("value", ["off", "OFF", "0", "false", " no ", "of"])
def test_mode_that_leaves_vllm_as_it_is(docker: Docker, value: str) -> None:
    code, data = inspected(docker, PATCHED, f"MAMBA_RETIRE={value}")
    assert (code, data["reason"]) == (1, "unpatched")
    assert f"MAMBA_RETIRE={value}" in data["sentence"]


@pytest.mark.parametrize("value", ["", "on", "1", "auto", "AUTO", "require", "Require"])
def test_mode_that_patches(docker: Docker, value: str) -> None:
    code, data = inspected(docker, PATCHED, f"MAMBA_RETIRE={value}")
    assert (code, data["reason"]) == (0, "patched")


@pytest.mark.parametrize(
    ("value", "code"), [("lora", 1), ("", 1), ("a,mamba_retire", 0)], ids=["other", "none", "ours"]
)
def test_list_of_plugins(docker: Docker, value: str, code: int) -> None:
    found, data = inspected(docker, PATCHED, f"VLLM_PLUGINS={value}")
    assert (found, data["reason"]) == (code, "unpatched" if code else "patched")
    assert f"VLLM_PLUGINS={value}" in data["sentence"] or not code


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        (["wrapt"], "wrapt cannot be imported"),
        (["yaml"], "yaml cannot be imported"),
        (["entry_points.txt"], "no entry point"),
        (["vllm_mamba_retire/"], "vllm_mamba_retire cannot be imported"),
        (["vllm_mamba_retire-0.1.0"], "is not installed"),
    ],
    ids=["no wrapt", "no yaml", "no entry points", "metadata only", "no metadata"],
)
def test_installation_that_a_process_cannot_use(
    docker: Docker, missing: list[str], told: str
) -> None:
    code, data = inspected(docker, without(PATCHED, *missing))
    assert (code, data["reason"]) == (1, "unpatched")
    assert told in data["sentence"]


def test_installation_for_another_interpreter_does_not_count(docker: Docker) -> None:
    elsewhere = own(site="opt/venv/lib/python3.11/site-packages")
    code, data = inspected(docker, {**PYTHON, **vllm(), **elsewhere})
    assert (code, data["installed"]) == (1, None)


def test_package_that_is_a_link(docker: Docker) -> None:
    entries = {**PYTHON, **native("srv"), VLLM: Link("/srv/vllm")}
    code, data = inspected(docker, entries)
    assert (code, data["vllm"]["package"], data["vllm"]["others"]) == (0, "/srv/vllm", [])


def test_vllm_without_its_source(docker: Docker) -> None:
    code, data = inspected(docker, without(PATCHED, "single_type"))
    assert (code, data["reason"]) == (1, "failed")
    assert f"/{VLLM}/v1/core/single_type_kv_cache_manager.py does not exist" in data["sentence"]


def test_source_that_no_parser_takes(docker: Docker) -> None:
    deep = b"x = " + b"-" * 100_000 + b"1\n"
    code, data = inspected(docker, {**PATCHED, **vllm(source=deep)})
    assert (code, data["reason"]) == (1, "failed")
    assert "single_type_kv_cache_manager.py does not parse" in data["sentence"]


def test_foreign_architecture_is_named(docker: Docker) -> None:
    entries = {**PATCHED, "usr/bin/python3.11": ARM64}
    assert inspected(docker, entries)[1]["architecture"] == "arm64"
    code, data = docker.inspected("--architecture=amd64")
    assert (code, data["error"]) == (2, "vllm:test is for arm64, not for amd64")


NATIVE = {**PYTHON, **native(), **own(site=LOCAL)}


@pytest.mark.parametrize(
    ("entries", "environment", "state", "told"),
    [
        (PATCHED, [], "off", "MAMBA_RETIRE_KEEP is not set"),
        (PATCHED, ["MAMBA_RETIRE_KEEP=newest"], "on", "of a running request is evicted last"),
        (NATIVE, ["MAMBA_RETIRE_KEEP=Prompt"], "on", "of the prompt of a running request"),
        (NATIVE, ["MAMBA_RETIRE_KEEP=all"], "unavailable", "MAMBA_RETIRE_KEEP=all is not none"),
        (NATIVE, ["MAMBA_RETIRE_KEEP=newest", "MAMBA_RETIRE=off"], "off", "MAMBA_RETIRE=off"),
        (
            NATIVE,
            ["MAMBA_RETIRE_KEEP=newest", "VLLM_PLUGINS=lora"],
            "unavailable",
            "add mamba_retire; no state is kept",
        ),
        (
            without(NATIVE, "vllm_mamba_retire-"),
            ["MAMBA_RETIRE_KEEP=newest"],
            "unavailable",
            "is not installed beside vLLM",
        ),
    ],
)
def test_whether_states_will_be_kept(
    docker: Docker, entries: Entries, environment: list[str], state: str, told: str
) -> None:
    code, data = inspected(docker, entries, *environment)
    assert (code, data["keep"]["state"]) == (int(state == "unavailable"), state)
    assert told in data["keep"]["sentence"]


def test_keeping_needs_methods_of_a_known_release(docker: Docker) -> None:
    changed = {**PATCHED, **vllm(source=SOURCE + b"    # changed\n")}
    _, data = inspected(docker, changed, "MAMBA_RETIRE_KEEP=newest")
    assert (data["reason"], data["keep"]["state"]) == ("drifted", "unavailable")
    assert "(drifted here)" in data["keep"]["sentence"]
