"""One judge for a tree: what is predicted from disk is what a process decides."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest

from tests.children import Child
from tests.detection.sites import Site, own_path
from tests.detection.trees import TREES
from vllm_mamba_retire.names import MANAGER_MODULE

_PREDICT = """
import json, sys
from vllm_mamba_retire.forecast import predict
from vllm_mamba_retire.releases import load_matrix
from vllm_mamba_retire.target import find_target
verdict = predict(find_target(), load_matrix())
print(json.dumps([verdict.reason.value, verdict.sentence, "vllm" in sys.modules]))
"""
_DECIDE = f"""
import json, vllm_mamba_retire, {MANAGER_MODULE}
verdict = vllm_mamba_retire.current().verdict
print(json.dumps([verdict.reason.value, verdict.sentence]))
"""


@pytest.mark.parametrize("name", TREES)
def test_disk_and_process_come_to_the_same_verdict(
    name: str, site: Callable[..., Site], child: Child
) -> None:
    tree = TREES[name]
    place = site(tree.release)
    tree.change(place)
    path = os.pathsep.join([str(place.folder), own_path()])
    answers = []
    for code in (_PREDICT, _DECIDE):
        done = child(code, PYTHONPATH=path, MAMBA_RETIRE_ALLOW_DRIFT=tree.allow_drift)
        assert done.returncode == 0, done.stderr[-2000:]
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    (disk, sentence, imported), (process, said) = answers
    assert (disk, process) == (tree.reason, tree.reason), (sentence, said)
    assert not imported
    if disk == "patched":
        assert "a process that loads this package patches it" in sentence
        assert "a process" not in said
