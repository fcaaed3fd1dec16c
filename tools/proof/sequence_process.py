"""Runs sequences on one release: ``python -m tools.proof.sequence_process SIDE``.

It reads jobs and writes answers as JSON lines. A process uses one release in one way, because vLLM
and the patch are fixed for the life of a process.

Sides: ``patched`` (this package must patch the release), ``as-is`` (stock, native, or patched on
disk), ``graft`` (the release with the method of another release's source file, see `graft`).
"""

from __future__ import annotations

import hashlib
import json
import marshal
import os
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

from tools.proof.sequences import Sequence, batches

_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
_MARSHAL = 2  # the last format whose bytes do not depend on who else holds an object


def main(side: str, native_source: str = "") -> None:
    out = _claim_stdout()
    os.environ.update(_ENVIRONMENT)
    _prepare(side, native_source)
    _answer(out, ready=_version())
    for line in sys.stdin:
        job = json.loads(line)
        if "seed" in job:
            for seed, sequence in batches(**job):
                _answer(out, seed=seed, **run(sequence))
        else:
            _answer(out, **run(Sequence.from_data(job["sequence"]), trace=True))
        _answer(out, done=True, counters=_counters())
    # Interpreter shutdown runs vLLM's exit handlers, seconds of work for nothing.
    os._exit(0)


def run(sequence: Sequence, trace: bool = False) -> dict[str, Any]:
    """Run a sequence.

    Returns:
        ``digest`` over the snapshots after every step; ``error``, if vLLM raised one, which ends
        the sequence; ``steps``, their number, or with `trace` the snapshot of each.
    """
    from tools.proof.traffic import Traffic

    world = Traffic(sequence.geometry)
    digest = hashlib.blake2b(digest_size=16)
    steps: list[Any] = []
    error = None
    for operation in sequence.operations:
        try:
            seen: tuple[Any, ...] = (world.do(operation), world.snapshot())
        except Exception as raised:
            where = traceback.extract_tb(raised.__traceback__)[-1]
            error = f"{type(raised).__name__} in {where.name}: {raised or where.line}"
            seen = (error, ())
        digest.update(marshal.dumps(seen, _MARSHAL))
        if trace:
            steps.append(_readable(*seen))
        if error is not None:
            break
    done = steps if trace else len(sequence.operations)
    return {"digest": digest.hexdigest(), "error": error, "steps": done}


def _readable(answer: str, snapshot: tuple[Any, ...]) -> dict[str, Any]:
    if not snapshot:
        return {"answer": answer}
    tables, references, free, hashes = snapshot
    return {
        "answer": answer,
        "tables": [dict(group) for group in tables],
        "references": references,
        "free": free,
        "hashes": {number: bytes(key)[:4].hex() for number, key in enumerate(hashes) if key},
    }


def _prepare(side: str, native_source: str) -> None:
    from vllm.v1.core import single_type_kv_cache_manager as module

    import vllm_mamba_retire

    if side == "patched":
        verdict = vllm_mamba_retire.activate()
        if verdict is None or verdict.reason.value != "patched":
            sys.exit(f"not patched: {verdict}")
    elif side == "graft":
        from tools.proof.native_method import graft

        graft(module, Path(native_source))


def _version() -> str:
    import vllm

    return str(vllm.__version__)


def _counters() -> dict[str, int]:
    from dataclasses import asdict

    from vllm_mamba_retire import current

    record = current()
    return asdict(record.counters) if record and record.counters else {}


def _answer(out: TextIO, **data: Any) -> None:
    print(json.dumps(data), file=out, flush=True)


def _claim_stdout() -> TextIO:
    """Return the real stdout for answers only; redirect what vLLM prints to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


if __name__ == "__main__":
    main(*sys.argv[1:])
