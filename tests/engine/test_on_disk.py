"""The fix on disk in a real engine, the run-time patch off: the same run, step by step."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tools.engine.harness import EngineRun, Workload, run

from tests.engine.workloads import LONG, LONG_TIGHT, OUTPUT, Measure
from vllm_mamba_retire.releases import Status
from vllm_mamba_retire.replay.sides import STOCK
from vllm_mamba_retire.target import MANAGER_FILE

pytestmark = pytest.mark.about(Status.LIVE)


@pytest.fixture(scope="module")
def on_disk(release: str, trees: Path, tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """The release with the series applied to its files."""
    site = tmp_path_factory.mktemp("on-disk") / release
    manager = site / "vllm" / MANAGER_FILE
    shutil.copytree(
        trees / release,
        site,
        copy_function=os.symlink,
        ignore=lambda _, names: [name for name in names if name.startswith(manager.stem)],
    )
    shutil.copyfile(trees / release / "vllm" / MANAGER_FILE, manager)
    path = os.environ["PYTHONPATH"].replace(str(trees / release), str(site))
    subprocess.run(
        [
            *(sys.executable, "-c", "from vllm_mamba_retire.cli import main; main()"),
            *("apply", "--yes", "--target", str(site)),
        ],
        env=os.environ | {"PYTHONPATH": path},
        check=True,
    )
    return lambda workload: run(workload, side=STOCK, path=[site])


def seen(measured: EngineRun) -> list[tuple[object, ...]]:
    """What each step scheduled and held, without the time it took."""
    return [(s.tokens, s.used, s.states, s.preempted) for s in measured.steps]


@pytest.mark.parametrize("workload", [LONG, LONG_TIGHT], ids=["ample", "tight"])
def test_each_step_is_that_of_the_run_time_patch(
    workload: Workload, on_disk: Measure, patched: Measure, stock: Measure
) -> None:
    ours = on_disk(workload)
    assert ours.verdict == "off"
    assert seen(ours) == seen(patched(workload))
    assert seen(ours) != seen(stock(workload))
    assert ours.nothing_left
    assert len(ours.answers["long"].tokens) == OUTPUT
    assert ours.answers["long"].tokens == patched(workload).answers["long"].tokens
