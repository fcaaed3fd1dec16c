"""The planner's table of defaults, against the release's own code."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import get_args

import pytest
from vllm import envs
from vllm.config import speculative
from vllm.config.vllm import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import config as model_config
from vllm.model_executor.models import registry
from vllm.v1.executor.abstract import Executor

from vllm_mamba_retire.plan.defaults import (
    ALL_MODE_ARCHITECTURES,
    defaults_of,
)
from vllm_mamba_retire.releases import Status

pytestmark = pytest.mark.about(Status.LIVE)


def test_prefix_caching_for_hybrid_models(release: str) -> None:
    source = inspect.getsource(EngineArgs._set_default_chunked_prefill_and_prefix_caching_args)
    defaults = defaults_of(release)
    assert defaults is not None
    assert ("not model_config.is_hybrid" in source) is not defaults.prefix_caching


def test_the_mode_with_prefix_caching(release: str) -> None:
    source = inspect.getsource(model_config.MambaModelConfig.verify_and_update_config)
    defaults = defaults_of(release)
    assert defaults is not None
    picks = '"all" if model_config.supports_mamba_prefix_caching else "align"' in source
    assert picks is defaults.all_mode


def test_a_block_over_the_budget(release: str) -> None:
    source = inspect.getsource(VllmConfig)
    defaults = defaults_of(release)
    assert defaults is not None
    asserts = "block_size <= self.scheduler_config.max_num_batched_tokens" in source
    assert asserts is not defaults.wide_blocks


def test_the_model_runner(release: str) -> None:
    source = inspect.getsource(VllmConfig.use_v2_model_runner.fget)
    defaults = defaults_of(release)
    assert defaults is not None
    assert ("_is_default_v2_model_runner_model" in source) is (defaults.runner == "V1")


def test_drafters_without_asynchronous_scheduling(release: str) -> None:
    by_default = inspect.getsource(VllmConfig).partition("async_scheduling is None")[2]
    allowed = {
        *_literals(speculative.EagleModelTypes),
        *_literals(speculative.NgramGPUTypes),
        *re.findall(r'speculative_config.method != "(\w+)"', by_default.partition("_ht_dbo")[0]),
    }
    defaults = defaults_of(release)
    assert defaults is not None
    methods = _literals(speculative.SpeculativeMethod)
    assert methods - allowed == defaults.synchronous_drafters
    assert {method for method in methods if method.endswith("_mtp")} <= allowed


@pytest.mark.parametrize("backend", ["mp", "uni", "ray", "external_launcher"])
def test_executors_without_asynchronous_scheduling(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, expected in (("1", True), ("0", backend != "ray")):
        monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", value)
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(distributed_executor_backend=backend)
        )
        assert Executor.get_class(config).supports_async_scheduling() is expected
    monkeypatch.delenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND")
    assert envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND is True


def test_architectures_that_support_mode_all() -> None:
    modules = {
        name: source
        for name, (module, _) in registry._TEXT_GENERATION_MODELS.items()
        if (source := _source(module)) is not None
    }
    found = {
        name
        for name, source in modules.items()
        if _declares(source, registry._TEXT_GENERATION_MODELS[name][1])
    }
    assert found == ALL_MODE_ARCHITECTURES


def _literals(annotation: object) -> set[str]:
    return {
        text
        for each in get_args(annotation)
        for text in ([each] if isinstance(each, str) else _literals(each))
    }


def _source(module: str) -> str | None:
    from pathlib import Path

    path = Path(registry.__file__).with_name(f"{module}.py")
    return path.read_text() if path.exists() else None


def _declares(source: str, class_name: str) -> bool:
    """Whether a class has SupportsMambaPrefixCaching among its bases."""
    head = source.partition(f"class {class_name}(")[2].partition(":\n")[0]
    return "SupportsMambaPrefixCaching" in head
