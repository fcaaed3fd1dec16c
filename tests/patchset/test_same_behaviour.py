"""The fix on disk, with the package off, against the fix at run time: step for step the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tools.proof.compare import Variant, compare

from tests.patchset.real_trees import ROOT, importable, patch_with_gnu, source_of
from vllm_mamba_retire.replay.cases import read_cases
from vllm_mamba_retire.replay.sides import FIXED, STOCK, replay_all

STEPS = 4000  # operations per release
LENGTH = 200  # operations of a sequence

# What no scheduler does today and `proof` therefore leaves out: tables that are replaced, ranges
# of any kind, ids that end in odd ways.
ODD_CALLS = """
import json, random
from vllm.v1.core import single_type_kv_cache_manager as module
from vllm_mamba_retire.probe import build_manager

chance = random.Random(55450)
manager = build_manager(module, block=4, pool=60, spec=1)
pool, seen = manager.block_pool, []

def fill(request):
    size = chance.randrange(1, 9)
    marks = [chance.random() < 0.6 for _ in range(size)]
    blocks = iter(pool.get_new_blocks(sum(marks)))
    return [next(blocks) if mark else pool.null_block for mark in marks]

for step in range(3000):
    request = chance.choice("abc")
    table = manager.req_to_blocks.get(request)
    act = chance.choice(["range", "range", "range", "skip", "grow", "replace", "end", "state"])
    if table is None or act == "replace":
        # As a path would that forgets to pop the old table first.
        pool.free_blocks([b for b in reversed(table or []) if not b.is_null])
        manager.req_to_blocks[request] = fill(request)
    elif act == "range":
        manager._remove_blocks_in_range(request, chance.randrange(-1, 6), chance.randrange(0, 14))
    elif act == "skip":
        manager.remove_skipped_blocks(request, chance.randrange(0, 4 * len(table) + 1))
    elif act == "grow" and len(table) < 12:
        table.extend(fill(request))
    elif act == "state":
        manager.last_state_block_idx[request] = chance.randrange(len(table))
    elif act == "end":
        manager.last_state_block_idx.pop(request, None)
        manager.free(request)
    seen.append([
        act,
        {r: [b.block_id for b in t] for r, t in sorted(manager.req_to_blocks.items())},
        [b.block_id for b in pool.free_block_queue.get_all_free_blocks()],
        sorted(getattr(manager, "_num_retired_blocks", {}).items()),
    ])
print(json.dumps(seen))
"""


@pytest.fixture
def on_disk(release: str, tmp_path: Path) -> Path:
    """The release with the series applied to its files."""
    tree = importable(release, tmp_path / "tree")
    patch_with_gnu(tree, release)
    return tree


def odd_calls(tree: Path, mode: str) -> list[object]:
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(tree)])
    done = subprocess.run(
        [sys.executable, "-c", "import vllm_mamba_retire" + ODD_CALLS],
        env=os.environ | {"PYTHONPATH": path, "MAMBA_RETIRE": mode, "MAMBA_RETIRE_DIR": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_sequences_of_a_scheduler_give_the_same(release: str, on_disk: Path):
    stock = source_of(release, "wheel")
    result = compare(
        Variant(stock, "patched"),
        Variant(on_disk, "as-is"),
        seed=6,
        steps=STEPS,
        length=LENGTH,
        scope="graft",
    )
    assert result.different == []
    assert result.steps == STEPS
    assert result.counters["states_stock_would_keep"] > 0, "no sequence crossed a gap"


def test_comparison_of_sequences_sees_the_defect(release: str, on_disk: Path):
    stock = Variant(source_of(release, "wheel"), "as-is")
    fixed = Variant(on_disk, "as-is")
    assert compare(stock, fixed, seed=6, steps=2000, length=LENGTH, scope="graft").different


def test_odd_calls_give_the_same(release: str, on_disk: Path, tmp_path: Path):
    stock = importable(release, tmp_path / "stock")
    at_run_time = odd_calls(stock, "auto")
    assert odd_calls(on_disk, "off") == at_run_time
    assert odd_calls(stock, "off") != at_run_time


def test_replays_of_the_field_give_the_same(release: str, on_disk: Path, tmp_path: Path):
    cases = read_cases(ROOT / "tests/cases/field_cases.yaml")
    scenarios = [s for case in cases if case.holds_on(release) for s in case.scenarios]
    stock = importable(release, tmp_path / "stock")
    at_run_time = replay_all(scenarios, FIXED, path=[stock])
    from_disk = replay_all(scenarios, STOCK, path=[on_disk])
    assert {run.verdict for run in at_run_time} == {"patched"}
    assert {run.verdict for run in from_disk} == {"off"}
    assert [run.steps for run in from_disk] == [run.steps for run in at_run_time]
    assert [run.hits for run in from_disk] == [run.hits for run in at_run_time]
