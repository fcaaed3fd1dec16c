"""Makes Prometheus metrics of the vLLM processes from their records.

In the API server's process they are added to vLLM's own ``/metrics``; ``status --format
prometheus`` uses the same code.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, values
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from . import identity, records
from .records import Record

_PREFIX = "vllm_mamba_retire_"
_PROCESS = ("pid", "role")
_INFO = (*_PROCESS, "verdict", "keep", "vllm", "version")
# Fields of a record that hold counters -> name of each counter in them -> what it counts.
_COUNTERS = {
    "counters": {
        "states_freed": "States returned to the pool before their request ended.",
        "states_stock_would_keep": "Those of them that stock vLLM would have kept.",
        "calls": "Ranges of blocks handled.",
        "ranges_clamped": "Ranges that reached past the end of a block table.",
    },
    "keep_counters": {
        "states_refreshed": "Times that a state was moved to the end of the free queue.",
        "states_still_there": "States that were still cached when their request ended.",
    },
}
_MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

_logger = logging.getLogger("vllm.mamba_retire")


def families(
    found: Iterable[tuple[dict[str, str], Record]], extra: tuple[str, ...] = ()
) -> Iterator[Metric]:
    """Return the metric families of some processes.

    Args:
        found: record of each process, with the values of the further labels.
        extra: names of the further labels.
    """
    processes = [
        ({"pid": str(record.pid), "role": record.role, **labels}, record)
        for labels, record in found
    ]
    info = gauge("info", "vLLM processes that keep a record.", (*extra, *_INFO))
    for labels, record in processes:
        vllm = record.vllm or ""
        decided = {"verdict": record.reason, "keep": record.keep.state.value}
        add(info, {**labels, **decided, "vllm": vllm, "version": record.version}, 1)
    yield info
    for field, names in _COUNTERS.items():
        for name, meaning in names.items():
            total = CounterMetricFamily(_PREFIX + name, meaning, labels=(*extra, *_PROCESS))
            for labels, record in processes:
                if (counters := getattr(record, field)) is not None:
                    add(total, labels, getattr(counters, name))
            yield total


def gauge(name: str, meaning: str, labels: tuple[str, ...] = ()) -> GaugeMetricFamily:
    """An empty gauge of this package."""
    return GaugeMetricFamily(_PREFIX + name, meaning, labels=labels)


def add(family: Any, labels: dict[str, str], value: float) -> None:
    """Add a sample; a label that `labels` lacks is empty, which means absent to Prometheus."""
    family.add_metric([labels.get(name, "") for name in family._labelnames], value)


class _ServerCollector(Collector):
    """Collects the metrics of this API server's processes."""

    def describe(self) -> Iterable[Metric]:
        """Without samples, so that the registry refuses a second collector of the same names."""
        return families([])

    def collect(self) -> Iterable[Metric]:
        """Collect the metrics; raises nothing, an error here would break vLLM's own metrics."""
        try:
            return list(families(({}, record) for record in _own_processes()))
        except Exception as error:
            _logger.debug("vllm-mamba-retire has no metrics: %r", error)
            return []


class _Export:
    """Writes the metrics into ``PROMETHEUS_MULTIPROC_DIR``, which several API servers share.

    vLLM then serves the sums that prometheus-client computes from the files in that folder instead
    of a process's registry. Only one API server writes, so that no counter is added twice.

    Attributes:
        metrics: name -> names of the labels, and the metric that writes to the files.
        written: name and label values -> the value last written.
    """

    def __init__(self) -> None:
        self.metrics = {family.name: _shared(family) for family in families([])}
        self.written: dict[tuple[str, tuple[str, ...]], float] = {}

    def update(self) -> None:
        """Write what has changed; a verdict that no process has any more becomes 0."""
        now: dict[tuple[str, tuple[str, ...]], float] = dict.fromkeys(self.written, 0)
        for family in families(({}, record) for record in _own_processes()):
            names, _ = self.metrics[family.name]
            for sample in family.samples:
                key = family.name, tuple(sample.labels[name] for name in names)
                now[key] = now.get(key, 0) + sample.value
        for key, value in now.items():
            _, metric = self.metrics[key[0]]
            before = self.written.get(key, 0)
            if isinstance(metric, Gauge):
                metric.labels(*key[1]).set(value)
            else:
                value = max(value, before)  # nothing is taken back when a process ends
                metric.labels(*key[1]).inc(value - before)
            self.written[key] = value

    def follow(self) -> None:
        """Update every few seconds until this process ends."""
        while True:
            try:
                self.update()
            except Exception as error:
                _logger.debug("vllm-mamba-retire has no metrics: %r", error)
            time.sleep(records.REFRESH_SECONDS)


def _shared(family: Any) -> tuple[list[str], Counter | Gauge]:
    labels = list(family._labelnames)
    if family.type != "gauge":
        return labels, Counter(family.name, family.documentation, labels)
    # In these files the label `pid` of a gauge is prometheus-client's own, so that processes of one
    # role and verdict are counted together. The mode makes it the value of the process that writes.
    labels.remove("pid")
    return labels, Gauge(family.name, family.documentation, labels, multiprocess_mode="max")


def expose() -> None:
    """Add the metrics of this server's processes to vLLM's ``/metrics``. Idempotent.

    vLLM serves prometheus-client's default registry. With ``PROMETHEUS_MULTIPROC_DIR``, which vLLM
    sets for several API servers, it serves what each process writes into that folder.
    """
    try:
        if _MULTIPROCESS_VARIABLE not in os.environ:
            REGISTRY.register(_ServerCollector())
        elif _is_first_server() and values.ValueClass is not values.MutexValue:
            # Else prometheus-client was imported before the variable was set, and writes no files.
            export = _Export()
            threading.Thread(target=export.follow, name="mamba-retire-metrics", daemon=True).start()
    except ValueError as error:  # it is there already
        _logger.debug("vllm-mamba-retire: %s", error)


def _is_first_server() -> bool:
    """Whether this is the only API server, or the first of several."""
    name = multiprocessing.current_process().name
    return identity.role_of(name) != "API server" or name.endswith("_0")


def _own_processes() -> Iterator[Record]:
    """Records of this server's processes.

    They were started by this process, or, with several API servers, by the one that started it.
    """
    server = os.getpid()
    if identity.role_of(multiprocessing.current_process().name) == "API server":
        server = os.getppid()
    for record in records.read(*records.folder()).records:
        pid: int | None = record.pid
        while pid and pid != server:
            pid = identity.parent(pid)
        if pid:
            yield record
