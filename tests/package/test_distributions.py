"""What is published: the same bytes from every machine, complete, and nothing that is not meant."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message

import pytest
import yaml
from packaging.requirements import Requirement

from tests.package.distributions import ROOT, Distributions
from vllm_mamba_retire import __version__

INFO = f"vllm_mamba_retire-{__version__}.dist-info"


@pytest.fixture(scope="module")
def members(first: Distributions) -> set[str]:
    with zipfile.ZipFile(first.wheel) as wheel:
        return set(wheel.namelist())


@pytest.fixture(scope="module")
def metadata(first: Distributions) -> Message:
    with zipfile.ZipFile(first.wheel) as wheel:
        return message_from_bytes(wheel.read(f"{INFO}/METADATA"))


@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_two_builds_are_the_same_to_the_byte(
    kind: str, first: Distributions, second: Distributions
) -> None:
    one, other = getattr(first, kind), getattr(second, kind)
    assert one.name == other.name
    assert one.read_bytes() == other.read_bytes()


def test_wheel_has_every_file_of_the_package_and_of_the_series(members: set[str]) -> None:
    package, patches = ROOT / "shim/vllm_mamba_retire", ROOT / "patches"
    ours = {
        f"vllm_mamba_retire/{path.relative_to(package).as_posix()}"
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    series = {
        f"vllm_mamba_retire/patches/{path.relative_to(patches).as_posix()}"
        for path in patches.rglob("*")
        if path.is_file()
    }
    table = {f"vllm_mamba_retire/{path.name}" for path in ROOT.glob("compat_matrix.*")}
    inside = {name for name in members if not name.startswith(INFO)}
    assert "vllm_mamba_retire/py.typed" in ours
    assert "vllm_mamba_retire/compat_matrix.yaml" in table
    assert inside == ours | series | table


def test_wheel_has_a_series_for_every_live_release(members: set[str]) -> None:
    table = yaml.safe_load((ROOT / "compat_matrix.yaml").read_text())
    live = [row["version"] for row in table["releases"] if row["status"] == "live"]
    assert live
    for version in live:
        assert f"vllm_mamba_retire/patches/v{version}/series" in members


def test_wheel_brings_one_top_level_package_and_no_tests(members: set[str]) -> None:
    assert {name.split("/")[0] for name in members} == {"vllm_mamba_retire", INFO}
    assert not [name for name in members if "test_" in name and name.endswith(".py")]


def test_wheel_runs_on_every_platform_and_is_pure(first: Distributions) -> None:
    assert first.wheel.name == f"vllm_mamba_retire-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(first.wheel) as wheel:
        assert b"Root-Is-Purelib: true" in wheel.read(f"{INFO}/WHEEL")


def test_wheel_is_found_by_vllm_and_brings_the_command(first: Distributions) -> None:
    with zipfile.ZipFile(first.wheel) as wheel:
        assert wheel.read(f"{INFO}/entry_points.txt").decode().split("\n\n") == [
            "[console_scripts]\nvllm-mamba-retire = vllm_mamba_retire.cli:main",
            "[vllm.general_plugins]\nmamba_retire = vllm_mamba_retire.plugin:register\n",
        ]


def test_source_archive_can_run_its_own_sessions(first: Distributions) -> None:
    with tarfile.open(first.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for wanted in (
        *("noxfile.py", "tools/env/provision.py", "tests/unit/test_arm.py", "compat_matrix.yaml"),
        *("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "mkdocs.yml"),
    ):
        assert wanted in names, wanted
    assert not [name for name in names if name.endswith(".pyc") or ".cache/" in name]


def test_metadata_is_complete(metadata: Message) -> None:
    assert metadata["Name"] == "vllm-mamba-retire"
    assert metadata["Version"] == __version__
    for field in ("Summary", "License-Expression", "Keywords", "Description-Content-Type"):
        assert metadata[field], field
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.10"
    pythons = [line for line in metadata.get_all("Classifier") if re.search(r":: 3\.\d+$", line)]
    assert [line.rsplit(" ", 1)[1] for line in pythons] == [f"3.{n}" for n in range(10, 15)]


def test_every_requirement_has_a_lower_bound_and_no_upper_one(metadata: Message) -> None:
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    assert requirements
    for requirement in requirements:
        assert [spec.operator for spec in requirement.specifier] == [">="], str(requirement)


def test_page_on_the_registry_renders(first: Distributions) -> None:
    files = (str(first.sdist), str(first.wheel))
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
