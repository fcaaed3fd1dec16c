"""Measures what this package adds to a scrape of vLLM's ``/metrics``.

Starts as many processes with a record as a large server has, and scrapes a registry that has only
this package's collector. Prints milliseconds of CPU (median), and their ratio to a scrape with one
process. Nothing is asserted.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

from prometheus_client import REGISTRY, generate_latest

from vllm_mamba_retire import prometheus

PROCESSES = (1, 16)
AIM = 5  # ms, with the most processes
TIMES = 200
_PROCESS = """
import sys
from vllm_mamba_retire import records
from vllm_mamba_retire.retirement import Counters
from vllm_mamba_retire.verdict import Reason, Verdict
verdict = Verdict(Reason.PATCHED, "vLLM 0.29.0 retires across null gaps.")
records.keep(records.Record.of(verdict, None, Counters(calls=9, states_freed=7)))
print("kept", flush=True)
sys.stdin.read()
"""


def measure(processes: int) -> float:
    """Return CPU milliseconds of a scrape with this many processes, the median of `TIMES`."""
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen([sys.executable, "-c", _PROCESS], stdin=pipe, stdout=pipe)
        for _ in range(processes)
    ]
    try:
        for one in started:
            assert one.stdout is not None
            assert one.stdout.readline() == b"kept\n"
        costs = []
        for _ in range(TIMES):
            before = time.process_time()
            text = generate_latest(REGISTRY)
            costs.append(1000 * (time.process_time() - before))
        assert text.count(b"vllm_mamba_retire_info{") == processes
        return statistics.median(costs)
    finally:
        for one in started:
            one.communicate()


def main() -> None:
    for collector in list(REGISTRY._collector_to_names):  # prometheus-client's own
        REGISTRY.unregister(collector)
    prometheus.expose()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MAMBA_RETIRE_DIR"] = folder
        costs = [measure(processes) for processes in PROCESSES]
    for processes, cost in zip(PROCESSES, costs, strict=True):
        aim = f" (aim: below {AIM} ms)" if processes == PROCESSES[-1] else ""
        print(f"{processes:>3} processes: {cost:.2f} ms{aim}")
    print(f"cost of {PROCESSES[-1]} processes over that of one: {costs[-1] / costs[0]:.1f}")


if __name__ == "__main__":
    main()
