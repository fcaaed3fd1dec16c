"""Prometheus metrics of the vLLM processes, from their records.

In the API server's process they are part of vLLM's own ``/metrics``; ``status --format prometheus``
makes them from the same code.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from . import records
from .records import Record

_PREFIX = "vllm_mamba_retire_"
_PROCESS = ("pid", "role")
_INFO = (*_PROCESS, "verdict", "vllm", "version")
# Field of `Counters` -> what it counts.
_COUNTERS = {
    "states_freed": "States given back to the pool before their request ended.",
    "states_stock_would_keep": "Those of them that stock vLLM would have kept.",
    "calls": "Ranges of blocks looked at.",
    "ranges_clamped": "Ranges that reached past the end of a block table.",
}

_logger = logging.getLogger("vllm.mamba_retire")


def families(
    found: Iterable[tuple[dict[str, str], Record]], extra: tuple[str, ...] = ()
) -> Iterator[Metric]:
    """The metrics of some processes.

    Args:
        found: record of each process, with further labels of its own.
        extra: names of the further labels.
    """
    processes = [
        ({"pid": str(record.pid), "role": record.role, **labels}, record)
        for labels, record in found
    ]
    info = gauge("info", "One per vLLM process that keeps a record.", (*extra, *_INFO))
    for labels, record in processes:
        vllm = record.vllm or ""
        own = {**labels, "verdict": record.reason, "vllm": vllm, "version": record.version}
        add(info, own, 1)
    yield info
    for field, meaning in _COUNTERS.items():
        total = CounterMetricFamily(_PREFIX + field, meaning, labels=(*extra, *_PROCESS))
        for labels, record in processes:
            if record.counters is not None:
                add(total, labels, getattr(record.counters, field))
        yield total


def gauge(name: str, meaning: str, labels: tuple[str, ...] = ()) -> GaugeMetricFamily:
    """An empty gauge of this package."""
    return GaugeMetricFamily(_PREFIX + name, meaning, labels=labels)


def add(family: Any, labels: dict[str, str], value: float) -> None:
    """Add a sample; a label that `labels` lacks is empty, which Prometheus takes for absent."""
    family.add_metric([labels.get(name, "") for name in family._labelnames], value)


class _ServerCollector(Collector):
    """The processes of the server that this process is the API server of."""

    def describe(self) -> Iterable[Metric]:
        """Without samples, so that the registry refuses a second collector of the same names."""
        return families([])

    def collect(self) -> Iterable[Metric]:
        """Raises nothing: an error here would take vLLM's own metrics along."""
        try:
            return list(families(({}, record) for record in _own_processes()))
        except Exception as error:
            _logger.debug("vllm-mamba-retire has no metrics: %r", error)
            return []


def expose() -> None:
    """Add the metrics of this server's processes to vLLM's ``/metrics``. Idempotent.

    vLLM serves prometheus-client's default registry, unless ``PROMETHEUS_MULTIPROC_DIR`` is set, as
    it is with several API servers: then nothing is added, and `status` is the way to the figures.
    """
    try:
        REGISTRY.register(_ServerCollector())
    except ValueError as error:  # it is there already
        _logger.debug("vllm-mamba-retire: %s", error)


def _own_processes() -> Iterator[Record]:
    """Records of this process and of those that it started."""
    for record in records.read(*records.folder()).records:
        pid: int | None = record.pid
        while pid and pid != os.getpid():
            pid = records.parent(pid)
        if pid:
            yield record
