"""vLLM's own KV connectors with a hybrid model on a CPU: ``python -m tools.engine.connectors``.

One line each: why the release on the path does not start with it, or whether the answers of stock
and patched vLLM are equal, where the second request gets the first one's prompt from the connector.
"""

from __future__ import annotations

import tempfile
from typing import Any

from tools.engine.harness import Action, EngineRun, Workload, run
from vllm_mamba_retire.child import ChildError
from vllm_mamba_retire.replay.sides import FIXED, STOCK

_BYTES = 1 << 28
_PROMPT = ((7, 9_216), (1, 3_000))  # the first part fills eight blocks
_ACTIONS = (
    Action("add", "first", prompt=_PROMPT),
    Action("reset_prefix_cache", at=None),
    Action("add", "second", prompt=_PROMPT, at=None),
)


def transfers(folder: str) -> list[dict[str, Any]]:
    """``kv_transfer_config`` for each connector that needs no other package and no other server."""
    offload = {"cpu_bytes_to_use": _BYTES}
    simple = _transfer("SimpleCPUOffloadConnector", offload)
    return [
        _transfer("ExampleConnector", {"shared_storage_path": folder}),
        _transfer("OffloadingConnector", offload),
        simple,
        _transfer("MultiConnector", {"connectors": [simple]}),
        _transfer("DecodeBenchConnector", {}),
    ]


def _transfer(name: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _outcome(transfer: dict[str, Any]) -> str:
    without_groups = transfer["kv_connector"] == "ExampleConnector"  # it does not know them
    options = (
        ("kv_transfer_config", transfer),
        ("disable_hybrid_kv_cache_manager", without_groups),
    )
    try:
        stock, fixed = (run(Workload(_ACTIONS, options=options), side=s) for s in (STOCK, FIXED))
    except ChildError as error:
        return f"does not run: {_reason(str(error))}"
    same = stock.answers["second"].tokens == fixed.answers["second"].tokens
    return f"runs; answers {'equal' if same else 'DIFFER'}; tokens from it: {_cached(fixed)}"


def _cached(seen: EngineRun) -> int:
    return seen.answers["second"].cached


def _reason(log: str) -> str:
    """The last line that names an error."""
    lines = [line.strip() for line in log.splitlines() if "Error" in line or "Exception" in line]
    return lines[-1] if lines else log.strip().splitlines()[-1]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for transfer in transfers(folder):
            print(f"{transfer['kv_connector']}: {_outcome(transfer)}", flush=True)


if __name__ == "__main__":
    main()
