"""A pytest plug-in for vLLM's own tests, run without upstream's conftest and without the hub.

That conftest needs packages that only upstream's test image has. This plug-in has the one fixture
of it that the suite of `tools.proof.upstream_tests` uses, and the list of tests that cannot run on
a CPU without a download: pytest skips those, and the results give the reason.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator

import pytest

_ENGINE = "needs weights and a tokenizer from the hub"
_VISION = "needs a model that imports torchvision, which does not load with a CPU torch"
# By file, or by the model that the test itself names.
_LEFT_OUT_FILES = {"test_scheduler_e2e.py": _ENGINE, "test_reset_prefix_cache_e2e.py": _ENGINE}
_LEFT_OUT_MODELS = {"llava-hf/llava-1.5-7b-hf": _VISION, "Qwen/Qwen2.5-VL-3B-Instruct": _VISION}


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """A `caplog` that captures vLLM's log, which vLLM does not pass to the root logger."""
    vllm = logging.getLogger("vllm")
    vllm.propagate, before = True, vllm.propagate
    yield caplog
    vllm.propagate = before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = _why_left_out(item)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_left_out(item: pytest.Item) -> str | None:
    if item.path.name in _LEFT_OUT_FILES:
        return _LEFT_OUT_FILES[item.path.name]
    test = inspect.getsource(getattr(item, "function", type(item)))
    return next((why for model, why in _LEFT_OUT_MODELS.items() if f'"{model}"' in test), None)
