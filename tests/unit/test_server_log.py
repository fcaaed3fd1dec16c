"""Server logs as people have them: framed, wrapped, cut, several starts, other libraries' lines."""

from __future__ import annotations

import io
import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.field_inputs import LOG
from vllm_mamba_retire.plan import serverlog
from vllm_mamba_retire.plan.bounds import Geometry
from vllm_mamba_retire.plan.serverlog import ServerLog, read_log
from vllm_mamba_retire.plan.values import UnreadableError
from vllm_mamba_retire.replay.scenario import InputError

FOLDER = Path(__file__).parents[1] / "cases" / "logs"
NATIVE, PASTED, TWO_BOOTS = (
    (FOLDER / name).read_text() for name in ("native-with-nccl.log", "pasted.md", "two-boots.log")
)
FIRST_BOOT = TWO_BOOTS[: TWO_BOOTS.index("pid=4)", TWO_BOOTS.index("1.84x"))]
FIGURES = {
    "version": "0.27.1",
    "architecture": "Qwen3NextForCausalLM",
    "block": 1600,
    "budget": 8192,
    "prompt": 262_144,
    "spec": 3,
    "drafter": "mtp",
    "asynchronous": True,
    "prefix_caching": True,
    "pipeline": 1,
    "chunk_limit": 4096,
}


def read(text: str) -> ServerLog:
    """What a log with this text tells."""
    return serverlog._digest(list(serverlog._last_start(serverlog._sentences(text))))


def test_a_log_gives_the_figures_it_prints(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(LOG)
    assert read_log(path).settings == FIGURES


def test_only_a_line_of_vllms_own_gives_the_version() -> None:
    assert "NCCL version 2.28.9" in NATIVE
    assert read(NATIVE).settings["version"] == "0.30.0"
    engine = next(line for line in NATIVE.splitlines() if "Initializing" in line)
    assert read(NATIVE.replace(engine, "")).settings["version"] == "0.30.0"


def test_of_two_starts_the_last_counts_alone() -> None:
    log = read(TWO_BOOTS)
    assert "pool" not in log.settings
    assert "chunk_limit" not in log.settings
    assert "asynchronous" not in log.settings
    assert (log.tokens, log.length) == (241_051, 131_072)
    first = read(FIRST_BOOT)
    assert first.settings["pool"] == 150
    assert first.settings["asynchronous"] is False


def test_a_fenced_excerpt_with_wrapped_lines_is_read_in_order() -> None:
    log = read(PASTED)
    assert log.settings["budget"] == 8192
    assert (log.settings["spec"], log.settings["drafter"]) == (7, "dflash")
    assert log.settings["block"] == 1056
    assert log.tokens == 300_000


@pytest.mark.parametrize(
    "line",
    [
        "NCCL version 2.28.9+cuda13.0",
        "INFO: torch version 2.13.0",
        "ray: pipeline_parallel_size=4, max_seq_len=99, num_spec_tokens=9",
        "flashinfer: enable_prefix_caching=False, async_scheduling=False",
        "(APIServer pid=1) INFO 09-02 13:20:00 [logger.py:1] Received request: prompt: 'vLLM says "
        "Setting attention block size to 16 tokens and Asynchronous scheduling is disabled.'",
        "(APIServer pid=1) INFO 09-02 13:20:00 [logger.py:1] Received request: prompt: 'why? INFO "
        "09-02 13:09:07 [scheduler.py:252] Chunked prefill is enabled with "
        "max_num_batched_tokens=16.'",
        "Draft: Chunked prefill is enabled with max_num_batched_tokens=16.",
    ],
)
def test_other_lines_give_no_figure(line: str) -> None:
    assert read(f"{line}\n{LOG}{line}\n").settings == FIGURES


def _json_lines(key: str) -> Callable[[str], str]:
    return lambda line: json.dumps({key: line + "\n", "stream": "stdout"})


FRAMES: dict[str, Callable[[str], str]] = {
    "docker": _json_lines("log"),
    "loki": _json_lines("line"),
    "structured": lambda line: json.dumps({"level": "INFO", "message": line}),
    "cri": lambda line: f"2026-09-02T13:09:06.123456789Z stdout F {line}",
    "docker -t": lambda line: f"2026-09-02T13:09:06.123456789Z {line}",
    "compose": lambda line: f"vllm-server-1  | {line}",
    "compose -t": lambda line: f"vllm-1  | 2026-09-02T13:09:06.123456789Z {line}",
    "kubectl": lambda line: f"[pod/vllm-0/server] {line}",
    "logcli": lambda line: f'2026-09-02T13:09:06Z {{app="vllm", pod="x"}} {line}',
    "swarm": lambda line: f"vllm_server.1.ab12@node-3    | {line}",
    "ray": lambda line: line.replace("(APIServer pid=1)", "(ServeReplica:a:b pid=7, ip=10.0.0.2)"),
    "journal, iso": lambda line: f"2026-09-02T13:09:06+0200 host vllm[77]: {line}",
    "journal": lambda line: f"Sep 02 13:09:06 host vllm[77]: {line}",
    "docker desktop": lambda line: f"2026-09-02 13:09:06.715 | {line}",
    "quoted": lambda line: f"> {line}",
    "coloured": lambda line: line.replace("INFO", "\x1b[32mINFO\x1b[0m"),
    "carriage returns": lambda line: line + "\r",
}


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
@pytest.mark.parametrize("text", [LOG, NATIVE, TWO_BOOTS], ids=["mtp", "native", "two starts"])
def test_what_is_put_before_or_around_a_line_does_not_matter(
    text: str, frame: Callable[[str], str]
) -> None:
    assert read("".join(frame(line) + "\n" for line in text.splitlines())) == read(text)


def test_an_export_of_a_log_viewer_is_read() -> None:
    records = [{"line": line, "timestamp": "1"} for line in LOG.splitlines()]
    assert read(json.dumps(records, indent=2)).settings == FIGURES


@pytest.mark.parametrize("width", [7, 40, 79, 80, 120])
def test_a_line_may_be_wrapped_anywhere(width: int) -> None:
    cut = "\n".join(re.findall(rf".{{1,{width}}}", LOG, re.DOTALL))
    assert read(cut + "\n").settings == FIGURES
    words = "".join(
        re.sub(rf"(.{{1,{width}}}) ", r"\1\n", line) + "\n" for line in LOG.splitlines()
    )
    assert read(words).settings == FIGURES


OBJECTS = {
    "compilation_config": "CompilationConfig(mode=<CompilationMode.VLLM_COMPILE: 3>, "
    "pass_config={'x': None}, splitting_ops=['a', 'b'], inductor_compile_config={}, "
    "hook=<function f at 0x7f>)",
    "kv_transfer_config": "KVTransferConfig(kv_connector='LMCacheConnectorV1', kv_role='kv_both', "
    "kv_connector_extra_config={}, kv_buffer_size=1000000000.0)",
    "attention_config": "AttentionConfig(backend=<AttentionBackendEnum.FLASH_ATTN: 'vllm.v1.x'>)",
    "structured_outputs_config": "StructuredOutputsConfig(backend='auto', parser='qwen3')",
    "kernel_config": "KernelConfig(moe_backend=None)",
    "kv_events_config": "KVEventsConfig(enable_kv_cache_events=True, endpoint='tcp://*:5557')",
    "download_dir": "PosixPath('/a, b}')",
    "limit_mm_per_prompt": "{'image': 1, 'quoted': \"it's {\"}",
}


@pytest.mark.parametrize("name", OBJECTS)
def test_an_argument_may_be_any_object(name: str) -> None:
    text = LOG.replace(
        "{'model_tag'", f"{{'{name}': {OBJECTS[name]}, 'async_scheduling': False, 'model_tag'"
    )
    text = text.replace("Asynchronous scheduling is enabled.", "")
    found = dict(read(text).settings)
    assert found.pop("connector", None) == (
        "LMCacheConnectorV1" if name == "kv_transfer_config" else None
    )
    assert found == {**FIGURES, "asynchronous": False}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("'long_prefill_token_threshold': 4096}", "'long_prefill_token_threshold': 4096"),
        ("'long_prefill_token_threshold': 4096}", "'long_prefill_token_threshold': (4096}"),
        ("'max_num_batched_tokens': 8192", "'max_num_batched_tokens': many"),
        ("'max_num_batched_tokens': 8192", "'max_num_batched_tokens' 8192"),
    ],
)
def test_a_line_of_arguments_that_cannot_be_read_is_an_error(
    tmp_path: Path, old: str, new: str
) -> None:
    path = tmp_path / "server.log"
    path.write_text(LOG.replace(old, new))
    with pytest.raises(InputError, match=r"non-default args|max_num_batched_tokens"):
        read_log(path)


@pytest.mark.parametrize(
    "line",
    [
        "Asynchronous scheduling is disabled.",
        "Async scheduling not supported with ngram-based speculative decoding and will be "
        "disabled.",
        "Async scheduling is not compatible with disable_padded_drafter_batch=True and will be "
        "disabled.",
        "Async scheduling will be disabled because it is not supported with the `ray` distributed "
        "executor backend. ",
        "Async scheduling is disabled for ROCm DeepEP high-throughput DBO because that combination "
        "can corrupt DP+EP generation accuracy.",
    ],
)
def test_asynchronous_scheduling_is_off_where_vllm_says_so(line: str) -> None:
    text = LOG.replace("Asynchronous scheduling is enabled.", line)
    assert read(text).settings["asynchronous"] is False


def test_asynchronous_scheduling_is_off_on_a_cpu() -> None:
    text = LOG.replace("max_seq_len=262144,", "max_seq_len=262144, device_config=cpu,")
    assert read(text).settings["asynchronous"] is False


@pytest.mark.parametrize(
    "line",
    [
        "INFO worker.py:1951 -- Connected to Ray cluster; executor: uni, async_scheduling=False",
        "(raylet) executor distributed_executor_backend='mp'",
    ],
)
def test_the_executor_is_that_of_vllms_own_arguments(line: str) -> None:
    text = LOG.replace("{'model_tag'", "{'distributed_executor_backend': 'ray', 'model_tag'")
    assert read(f"{line}\n{text}{line}\n").settings == {**FIGURES, "executor": "ray"}


def test_a_quantized_caches_block_is_not_the_states_block() -> None:
    line = "(Worker pid=9) INFO 09-02 13:09:41 [interface.py:760] Setting attention block size to "
    more = "2096 tokens so the quantized primary KV page covers the higher-precision padded page.\n"
    assert read(LOG + line + more).settings["block"] == 1600


BY_DEFAULT = "for X by default when prefix caching is enabled"


@pytest.mark.parametrize(
    ("line", "mode", "caching"),
    [
        (f"Mamba cache mode is set to 'align' {BY_DEFAULT}", "align", True),
        (f"Mamba cache mode is set to 'all' {BY_DEFAULT}", "all", True),
        ("Mamba cache mode is set to 'none' when prefix caching is disabled", "none", False),
        (
            "Hybrid or mamba-based model detected without support for prefix caching with Mamba "
            "cache 'all' mode: falling back to 'align' mode.",
            "align",
            True,
        ),
    ],
)  # fmt: skip
def test_the_mode_is_what_vllm_made_of_it(line: str, mode: str, caching: bool) -> None:
    extra = f"(APIServer pid=1) WARNING 09-02 13:09:07 [config.py:612] {line}\n"
    text = LOG.replace(
        "(EngineCore pid=9) INFO 09-02 13:09:39", extra + "(EngineCore pid=9) INFO 09-02 13:09:39"
    )
    text = text.replace("enable_prefix_caching=True", f"enable_prefix_caching={caching}")
    found = read(text).settings
    assert (found["mode"], found["prefix_caching"]) == (mode, caching)


def test_a_configured_block_size_is_that_where_vllm_sets_none() -> None:
    text = re.sub(r".*Setting attention block size.*\n", "", LOG)
    assert "block" not in read(text).settings
    text = text.replace("{'model_tag'", "{'block_size': 4112, 'model_tag'")
    assert read(text).settings["block"] == 4112
    assert (
        read(LOG.replace("{'model_tag'", "{'block_size': 16, 'model_tag'")).settings["block"]
        == 1600
    )


def test_the_pool_comes_from_the_figure_with_most_digits() -> None:
    geometry = Geometry(block=1056, budget=4224, groups=3, attention_groups=1)
    request = 125 + 3 * 2
    for pool in (240, 241, 242):
        tokens = int(pool / request * 131_072)
        log = ServerLog(tokens=tokens, length=131_072, times=1.84, memory=15.35 * 2**30)
        assert log.estimate(geometry) == {"pool": pool, "block_bytes": int(15.35 * 2**30 / pool)}
    assert ServerLog(length=131_072, times=1.84).estimate(geometry) == {"pool": 241}
    assert ServerLog(tokens=9, length=9).estimate(None) == {}


def test_bytes_come_from_the_memory_that_was_asked_for() -> None:
    text = LOG.replace("{'model_tag'", "{'kv_cache_memory_bytes': 4000000, 'model_tag'")
    assert read(text).memory == 4_000_000
    assert read(LOG).memory == pytest.approx(9.17 * 2**30)


def test_a_pool_override_does_not_change_the_bytes_of_a_block() -> None:
    log = read(LOG + "(EngineCore pid=9) INFO 09-02 13:10:02 [kv_cache_utils.py:2116] Overriding "
               "num_gpu_blocks=320 with num_gpu_blocks_override=150\n")  # fmt: skip
    assert log.settings["pool"] == 150
    assert log.estimate(None) == {"pool": 320, "block_bytes": int(9.17 * 2**30 / 320)}


def test_standard_input_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipe:
        buffer = io.BytesIO(LOG.encode())

    monkeypatch.setattr(sys, "stdin", Pipe)
    log = read_log(Path("-"))
    assert log.settings == FIGURES
    assert log.times == 1.0


def test_a_report_with_redacted_names_is_read() -> None:
    text = LOG.replace("pid=", "<HOST>d=").replace("api_utils", "a<HOST>_utils")
    assert "(APIServer <HOST>d=1)" in text
    assert read(text).settings == FIGURES


_FRAMED = st.sampled_from([lambda line: line, *FRAMES.values()])


def _figures(text: str) -> dict[str, Any] | None:
    try:
        log = read(text)
    except (InputError, UnreadableError):
        return None
    sizes = ("blocks", "memory", "tokens", "length", "times")
    return {**log.settings, **{f"log {name}": getattr(log, name) for name in sizes}}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_cut_wrapped_and_framed_log_tells_the_same_or_less(data: st.DataObject) -> None:
    text, starts = data.draw(
        st.sampled_from([(LOG, [LOG]), (NATIVE, [NATIVE]), (TWO_BOOTS, [FIRST_BOOT, TWO_BOOTS])])
    )
    begin = data.draw(st.integers(0, len(text)))
    text = text[begin : data.draw(st.integers(begin, len(text)))]
    # Not at the end: what a line break ends there cannot be told from a whole line.
    places = data.draw(st.sets(st.integers(0, max(len(text) - 1, 0)), max_size=20))
    bounds = [0, *sorted(places), len(text)]
    lines = "\n".join(text[a:b] for a, b in itertools.pairwise(bounds)).split("\n")
    found = _figures("\n".join(map(data.draw(_FRAMED), lines))) or {}
    assert any(
        all(value in (None, whole.get(name)) for name, value in found.items())
        for whole in map(_figures, starts)
        if whole is not None
    ), found
