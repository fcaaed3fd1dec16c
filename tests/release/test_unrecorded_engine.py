"""An engine core that keeps no record is found, and judged by the vLLM that it serves.

The process is a stand-in: it carries vLLM's title and maps a library beside a copy of the release's
own files, which is all that can be seen of an engine core from outside. The server lane does the
same with real ones. This package is beside that vLLM, unless a test removes it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm.v1.core import single_type_kv_cache_manager

from vllm_mamba_retire import processes
from vllm_mamba_retire.processes import UnrecordedEngine
from vllm_mamba_retire.releases import Status
from vllm_mamba_retire.target import CALLER_FILES, MANAGER_FILE

_STAND_IN = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    library = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print("mapped", flush=True)
sys.stdin.read()
"""
Judge = Callable[..., list[UnrecordedEngine]]


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """A vLLM with the files that tell the release, and a library."""
    package = tmp_path / "a site" / "vllm"
    original = Path(str(single_type_kv_cache_manager.__file__)).parents[2]
    (package / CALLER_FILES[-1]).parent.mkdir(parents=True)
    for name in (MANAGER_FILE, *CALLER_FILES, Path("_version.py")):
        shutil.copy(original / name, package / name)
    (package / "_C.abi3.so").write_bytes(b"library")
    install(package.parent)
    return package


def install(site: Path) -> None:
    """What pip leaves of this package, as far as it is read from outside."""
    (site / "vllm_mamba_retire").mkdir()
    for name in ("__init__.py", "plugin.py"):
        (site / "vllm_mamba_retire" / name).touch()
    metadata = site / "vllm_mamba_retire-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: vllm-mamba-retire\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nmamba_retire = vllm_mamba_retire.plugin:register\n"
    )


@pytest.fixture
def judge(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    """Starts a stand-in and gives what a survey finds of it."""
    monkeypatch.setenv("MAMBA_RETIRE_DIR", str(tmp_path / "records"))
    running: list[subprocess.Popen[str]] = []

    def start(title: str = "VLLM::EngineCore", **environment: str) -> list[UnrecordedEngine]:
        process = subprocess.Popen(
            [title, "-c", _STAND_IN, str(served / "_C.abi3.so")],
            executable=sys.executable,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": "/usr/bin", **environment},
        )
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "mapped\n"
        return processes_of(process.pid)

    yield start
    for process in running:
        process.communicate()


def processes_of(pid: int) -> list[UnrecordedEngine]:
    return [core for core in processes.survey().without_record if core.pid == pid]


@pytest.mark.parametrize(
    "title",
    ["VLLM::EngineCore", "VLLM::EngineCore_DP1", "ray::DPEngineCoreActor", "my::EngineCore"],
)
def test_an_engine_core_is_found_by_its_title(
    judge: Judge, served: Path, release: str, status: Status, title: str
) -> None:
    (core,) = judge(title)
    assert (core.vllm, core.package) == (release, str(served))
    assert core.finding == (status is Status.LIVE)
    assert ("needs no patch" in core.sentence) == (status is not Status.LIVE)


@pytest.mark.parametrize("title", ["VLLM::Worker", "VLLM::APIServer_0", "python", "EngineCore"])
def test_other_processes_are_not_taken_for_one(judge: Judge, title: str) -> None:
    assert judge(title) == []


def test_an_in_process_engine_core_is_found_by_its_loaded_files(
    judge: Judge,
) -> None:
    assert len(judge("python", VLLM_ENABLE_V1_MULTIPROCESSING="0")) == 1


@pytest.mark.about(Status.LIVE)
@pytest.mark.parametrize(
    ("environment", "finding", "says"),
    [
        ({"MAMBA_RETIRE": "off"}, False, "MAMBA_RETIRE=off"),
        ({"VLLM_PLUGINS": "other"}, True, "VLLM_PLUGINS=other"),
        ({"VLLM_PLUGINS": ""}, True, "VLLM_PLUGINS="),
        ({"MAMBA_RETIRE": "OFF"}, False, "MAMBA_RETIRE=OFF"),
        ({"MAMBA_RETIRE": "maybe"}, True, "is not auto, require or off"),
        ({"VLLM_PLUGINS": "other,mamba_retire"}, True, "MAMBA_RETIRE_DIR"),
        ({}, True, "MAMBA_RETIRE_DIR"),
    ],
)
def test_the_sentence_says_why(
    judge: Judge, environment: dict[str, str], finding: bool, says: str
) -> None:
    (core,) = judge(**environment)
    assert core.finding == finding
    assert says in core.sentence


@pytest.mark.about(Status.LIVE)
def test_a_process_older_than_the_install_is_recognised(judge: Judge, served: Path) -> None:
    (before,) = judge()
    assert "before this package was installed" not in before.sentence
    time.sleep(0.1)  # a process's start is known to a hundredth of a second
    for path in (served.parent / "vllm_mamba_retire").iterdir():
        path.chmod(0o600)
    (after,) = processes_of(before.pid)
    assert "before this package was installed" in after.sentence


@pytest.mark.about(Status.LIVE)
def test_a_vllm_without_the_package_names_where_to_install_it(judge: Judge, served: Path) -> None:
    shutil.rmtree(served.parent / "vllm_mamba_retire-0.1.0.dist-info")
    (core,) = judge()
    assert core.finding
    assert "not installed beside vLLM" in core.sentence


def test_a_vllm_changed_after_the_start_is_not_what_runs(
    judge: Judge, served: Path, release: str, status: Status
) -> None:
    """An upgrade or the series on disk, without a restart: the old code still runs."""
    (before,) = judge()
    assert before.finding == (status is Status.LIVE)
    time.sleep(0.1)
    if status is Status.LIVE:
        command = [sys.executable, "-c", "from vllm_mamba_retire.cli import main; main()"]
        command += ["apply", "--yes", "--no-probe", f"--target={served.parent}"]
        subprocess.run(command, check=True, capture_output=True)
    else:
        (served / MANAGER_FILE).chmod(0o600)
    (after,) = processes_of(before.pid)
    assert after.finding
    assert "changed on disk; restart it" in after.sentence


@pytest.mark.about(Status.LIVE)
def test_code_that_the_table_does_not_know_is_a_finding(judge: Judge, served: Path) -> None:
    manager = served / MANAGER_FILE
    manager.write_text(manager.read_text().replace("def _remove_blocks_in_range", "def _other"))
    (core,) = judge()
    assert core.finding


def test_an_engine_core_whose_vllm_cannot_be_seen_is_a_finding(judge: Judge, served: Path) -> None:
    (served / MANAGER_FILE).unlink()
    (core,) = judge()
    assert core.finding
    assert "cannot be seen" in core.sentence
