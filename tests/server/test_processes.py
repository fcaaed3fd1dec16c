"""However vLLM starts its processes: one truthful record each, and no engine core overlooked."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import vllm_mamba_retire
from tests.server.servers import ENGINE, Running, Server, eventually, prompt
from vllm_mamba_retire.releases import Status
from vllm_mamba_retire.verdict import Reason

# An application that makes an engine, serves one prompt and waits.
_APPLICATION = """
import json, sys

def main():
    from vllm import LLM, SamplingParams
    llm = LLM(**json.loads(sys.argv[1]))
    sampling = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
    llm.generate({"prompt_token_ids": json.loads(sys.argv[2])}, sampling, use_tqdm=False)
    open("ready", "w").close()
    sys.stdin.read()

if __name__ == "__main__":
    main()
"""
_PROMPT = prompt(5, 12_000)  # spans gaps, so that there is something to count


class Application(Running):
    """vLLM as a library, in a program of the user's."""

    def __init__(self, folder: Path, *, harness: bool = True, **rest: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.ready = folder / "ready"
        script = folder / "application.py"
        script.write_text(_APPLICATION)
        options = {**ENGINE, "load_format": "seeded" if harness else "dummy"}
        command = [sys.executable, str(script), json.dumps(options), json.dumps(_PROMPT)]
        super().__init__(command, folder, harness=harness, **rest)

    def wait(self) -> Application:
        """Until its engine has answered."""
        eventually(lambda: self.alive() and self.ready.exists(), "the engine answers")
        return self


@pytest.fixture
def needs_the_fix(status: Status) -> bool:
    return status is Status.LIVE


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_separate_engine_core_has_its_own_record_and_counters(
    tmp_path: Path, needs_the_fix: bool, method: str
) -> None:
    with Application(
        tmp_path, VLLM_ENABLE_V1_MULTIPROCESSING="1", HARNESS_START_METHOD=method
    ) as running:
        running.wait()
        roles = {"main", "engine core", "worker"}
        entries = eventually(
            lambda: len(running.entries()) == len(roles) and running.entries(), "three records"
        )
        by_role = {entry.role: entry for entry in entries}
        assert set(by_role) == roles
        assert by_role["main"].pid == running.process.pid
        assert by_role["engine core"].verdict == by_role["main"].verdict
        if needs_the_fix:
            assert by_role["main"].counters.calls == 0
            freed = eventually(
                lambda: max(
                    e.counters.states_freed if e.counters else 0 for e in running.entries()
                ),
                "counters are written",
            )
            assert freed > 0
        assert not running.survey().finding


def test_an_in_process_engine_core_has_one_record(tmp_path: Path, needs_the_fix: bool) -> None:
    with Application(tmp_path, VLLM_ENABLE_V1_MULTIPROCESSING="0") as running:
        running.wait()
        engine = eventually(
            lambda: next((e for e in running.entries() if e.pid == running.process.pid), None),
            "the application keeps a record",
        )
        assert engine.role == "engine core"
        assert {entry.role for entry in running.entries()} <= {"engine core", "worker"}
        assert engine.verdict.reason is (Reason.PATCHED if needs_the_fix else Reason.NATIVE)


@pytest.mark.parametrize("multiprocessing", ["0", "1"])
def test_an_engine_core_that_vllm_plugins_leaves_out_is_found(
    tmp_path: Path, needs_the_fix: bool, multiprocessing: str
) -> None:
    with Application(
        tmp_path,
        harness=False,
        VLLM_PLUGINS="lora_filesystem_resolver",
        VLLM_ENABLE_V1_MULTIPROCESSING=multiprocessing,
    ) as running:
        running.wait()
        seen = running.survey()
        assert seen.processes == []
        (core,) = seen.without_record
        assert core.vllm == os.environ["MAMBA_RETIRE_TEST_RELEASE"]
        assert core.finding == needs_the_fix
        assert ("VLLM_PLUGINS=lora_filesystem_resolver" in core.sentence) == needs_the_fix


def test_an_engine_core_started_before_the_install_is_found(
    tmp_path: Path, needs_the_fix: bool
) -> None:
    package = Path(vllm_mamba_retire.__file__).parent
    folders = os.environ["PYTHONPATH"].split(os.pathsep)
    site = tmp_path / "site of the server"
    site.mkdir()
    path = os.pathsep.join([str(site), *(f for f in folders if Path(f) != package.parent)])
    with Application(tmp_path / "run", harness=False, path=path) as running:
        running.wait()
        for folder in (package, *package.parent.glob(f"{package.name}-*.dist-info")):
            shutil.copytree(folder, site / folder.name)
        seen = running.survey(path=path)
        assert seen.processes == []
        (core,) = seen.without_record
        assert core.finding == needs_the_fix
        assert ("before this package was installed" in core.sentence) == needs_the_fix


def test_a_record_in_another_folder_is_a_finding(tmp_path: Path, needs_the_fix: bool) -> None:
    with Application(tmp_path) as running:
        running.wait()
        assert running.survey().without_record == []
        (core,) = running.survey(records=tmp_path / "elsewhere").without_record
        assert core.finding == needs_the_fix
        assert ("MAMBA_RETIRE_DIR" in core.sentence) == needs_the_fix


def test_vllm_serves_where_the_folder_cannot_be_written(tmp_path: Path) -> None:
    with Application(tmp_path, MAMBA_RETIRE_DIR="/proc/nowhere") as running:
        running.wait()
        assert "keeps no record of this process" in running.log.read_text(errors="replace")
        assert running.entries() == []


def test_data_parallel_ranks_have_a_record_each(tmp_path: Path, needs_the_fix: bool) -> None:
    """Started only: the worker of this model fails on its first request with two ranks on a CPU,
    on stock vLLM too."""
    with Server(tmp_path, "--data-parallel-size=2", module=True) as server:
        server.wait()
        cores = [entry for entry in server.entries() if entry.role == "engine core"]
        assert len({core.pid for core in cores}) == 2
        reason = Reason.PATCHED if needs_the_fix else Reason.NATIVE
        assert {core.verdict.reason for core in cores if core.verdict} == {reason}
        assert not server.survey().finding


def test_several_api_servers_serve_the_metrics_of_a_process_once(
    tmp_path: Path, needs_the_fix: bool
) -> None:
    """vLLM then serves no registry of a process but the files that its processes write."""
    with Server(tmp_path, "--api-server-count=2") as server:
        server.wait()
        server.complete(_PROMPT)
        by_role = {
            role: [e.pid for e in server.entries() if e.role == role]
            for role in ("main", "API server", "engine core", "worker")
        }
        assert [len(pids) for pids in by_role.values()] == [1, 2, 1, 1]
        verdict = "patched" if needs_the_fix else "native"
        (core,) = by_role["engine core"]
        name = "vllm_mamba_retire_states_freed_total"

        def freed() -> list[float]:
            found = [s for s in server.own_metrics() if s.name == name]
            return [s.value for s in found if s.labels["pid"] == str(core)]

        if needs_the_fix:
            (record,) = eventually(
                lambda: [e for e in server.entries() if e.counters and e.counters.states_freed],
                "the record of the engine core counts",
            )
            eventually(lambda: record.counters.states_freed in freed(), f"{name} is served")
        # Each answer may come from the other API server.
        for _ in range(6):
            shown = eventually(server.own_metrics, "the metrics are served")
            counted = {
                (s.labels["role"], s.labels["verdict"]): s.value
                for s in shown
                if s.name == "vllm_mamba_retire_info" and s.value
            }
            assert counted == {
                ("main", verdict): 1,
                ("API server", verdict): 2,
                ("engine core", verdict): 1,
                ("worker", "armed"): 1,
            }
            assert len({(s.name, *sorted(s.labels.items())) for s in shown}) == len(shown)
