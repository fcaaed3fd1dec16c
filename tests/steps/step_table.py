"""Upstream's end-to-end step table, driven through a release's own scheduler without a GPU.

``python step_table.py FILE``: FILE is ``tests/v1/e2e/general/test_mamba_prefix_cache.py`` of some
release's source archive. Only the table is taken out of it, when this runs. Upstream checks it on
a GPU around `allocate_slots`, and so does this; the copies of states between blocks, which need a
model runner, are left out. Prints JSON: how many steps were compared, and where they differ.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_mamba_retire.replay.scenario import Arrival, Scenario
from vllm_mamba_retire.replay.scheduler import replay

_TABLE = ("StepAction", "TestConfig", "get_mamba_prefix_cache_step_configs")
_CONSTANTS = ("BLOCK_SIZE", "num_speculative_tokens")
_BUDGET = 3072  # tokens, as upstream's engine has it


def main() -> None:
    table = _read_table(Path(sys.argv[1]))
    steps, differences = 0, []
    for mode in ("sync", "async"):
        cases = table["get_mamba_prefix_cache_step_configs"](mode == "async")
        for name, case in cases.items():
            seen = _drive(name, case, mode, table)
            steps += len(case.step_actions)
            differences += [
                {"mode": mode, "case": name, **difference} for difference in _compare(case, seen)
            ]
    print(json.dumps({"steps": steps, "differences": differences}))


@dataclass
class StepStates:
    """One scheduled step: tokens, and per block of the Mamba table whether it holds a state."""

    tokens: int
    held: list[int]


def _read_table(path: Path) -> dict[str, Any]:
    """The definitions that make up the table, and nothing that wants a GPU."""
    tree = ast.parse(path.read_text(), str(path))
    tree.body = [node for node in tree.body if _name(node) in (*_TABLE, *_CONSTANTS)]
    found: dict[str, Any] = {"dataclass": dataclass}
    exec(compile(tree, str(path), "exec"), found)
    return found


def _name(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return getattr(node, "name", None)


def _drive(name: str, case: Any, mode: str, table: dict[str, Any]) -> list[StepStates]:
    """What the release's scheduler does with one case of the table."""
    seen: list[StepStates] = []
    with _observed(seen):
        replay(
            Scenario(
                id=name,
                block=table["BLOCK_SIZE"],
                budget=_BUDGET,
                arrivals=(Arrival(name, case.num_prompt_tokens, case.num_generated_tokens),),
                spec=table["num_speculative_tokens"],
                accepted=case.num_accepted_tokens - 1,
                lag=1 if mode == "async" else 0,
            )
        )
    return seen


class _observed:  # noqa: N801
    """Looks at the first Mamba group's table after every allocation, where upstream looks too."""

    def __init__(self, seen: list[StepStates]) -> None:
        self.seen = seen

    def __enter__(self) -> None:
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        self.owner, self.original = KVCacheManager, KVCacheManager.allocate_slots
        seen, original = self.seen, self.original

        def allocate_slots(
            manager: Any, request: Any, tokens: int, *rest: Any, **named: Any
        ) -> Any:
            result = original(manager, request, tokens, *rest, **named)
            table = manager.coordinator.single_type_managers[0].req_to_blocks[request.request_id]
            seen.append(StepStates(tokens, [int(not block.is_null) for block in table]))
            return result

        self.owner.allocate_slots = allocate_slots

    def __exit__(self, *exception: object) -> None:
        self.owner.allocate_slots = self.original


def _compare(case: Any, seen: list[StepStates]) -> Iterator[dict[str, Any]]:
    for index, action in enumerate(case.step_actions):
        expected = StepStates(action.num_scheduled_tokens, action.kv_cache_block_ids)
        got = seen[index] if index < len(seen) else None
        if got != expected:
            yield {
                "step": index,
                "last": index == len(case.step_actions) - 1,
                "expected": [expected.tokens, expected.held],
                "got": [got.tokens, got.held] if got else None,
            }


if __name__ == "__main__":
    main()
