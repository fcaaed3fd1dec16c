"""Reads a deployment's settings out of the log of a vLLM server.

Only vLLM's own sentences count, each from its first word on, so that neither another library's
line nor a logged prompt can give a figure. White space does not count: a line may be wrapped
anywhere. Of several starts in one log the last counts, alone.
"""

from __future__ import annotations

import json
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from vllm_mamba_retire.replay.scenario import InputError

from .arguments import drafting, settings_from
from .bounds import Geometry
from .values import UnreadableError, read_dictionary, read_fields

_GIB = 2**30
_TEXT_KEYS = ("log", "message", "msg", "line", "text", "textPayload", "MESSAGE", "body")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# What container engines, log shippers and people put before a line; a line may have several.
_FRAME = re.compile(
    r"\s*(?:"
    r"\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-]\d\d:?\d\d)?\s+(?:std(?:out|err) [FP] |\| )?"  # CRI
    r"|[\w./@-]+\s+\|\s"  # docker compose, docker service
    r"|\[pod/[^\]]+\]\s"  # kubectl logs --prefix
    r"|\{[\w.]+=\"[^}]*\}\s+"  # logcli
    r"|(?:\w{3} +\d+ [\d:]{8} )?\S+ [^\s\[]+\[\d+\]:\s"  # journalctl
    r"|>\s"  # quoted in a report
    r")"
)
# Reports have names redacted, also by halves: "(APIServer <HOST>d=1)", "a<HOST>_utils.py".
_PROCESS = re.compile(r"(?:\([A-Za-z][^()=]*d=\d+[^()]*\))+")
_HEADER = re.compile(
    rf"(?P<process>(?:{_PROCESS.pattern})?)(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)"
    r"(?P<time>\d\d-\d\d\d\d:\d\d:\d\d)\[[^\[\]:]+\.py:\d+\]"
)
_REQUEST = re.compile(r"(?:Receivedrequest|Request\S+details)")  # quotes what users say

_COUNT = r"(\d[\d,]*)"
# Sentences of vLLM 0.26 to 0.34 without their white space -> settings. Each says where it ends.
_SENTENCES: tuple[tuple[str, str], ...] = (
    ("version", r"[▀▄█]*▀▄▀█version([\w.+!-]+?)(?:█▄█▀.*)?$"),
    ("version", r"vLLM(?:API)?serverversion([\w.+!-]+?)(?:,servingmodel.*)?$"),
    ("engine", r"InitializingaV1LLMengine\(v([^()]+)\)withconfig:(.*)"),
    ("arguments", r"non-defaultargs:(.*)"),
    ("verdict", r"vllm-mamba-retire[\w.+]+:([a-z-]+):"),
    ("architecture", r"Resolvedarchitecture:(\w+)$"),
    ("prompt", rf"Usingmaxmodellen{_COUNT}$"),
    ("budget", rf"Chunkedprefillisenabledwithmax_num_batched_tokens={_COUNT}\."),
    ("scheduled", rf"max_num_scheduled_tokensissetto{_COUNT}basedonthespeculative"),
    ("mode", r"Mambacachemodeissetto'(\w+)'"),
    ("mode", r"HybridormambabasedmodeldetectedwithoutsupportforprefixcachingwithMambacache"
             r"'all'mode:fallingbackto'(align)'mode"),
    ("mode", r"Hybridormamba-basedmodeldetectedwithoutsupportforprefixcachingwithMambacache"
             r"'all'mode:fallingbackto'(align)'mode"),
    ("asynchronous", r"Asynchronousschedulingis(enabled|disabled)\."),
    ("asynchronous", r"Asyncscheduling.*?(willbedisabled|isdisabled)"),
    ("runner", r"Using(V2)ModelRunner"),
    ("block", rf"(?:\[XPU\])?Settingattentionblocksizeto{_COUNT}tokens(?!sothequantized)"),
    ("override", rf"Overridingnum_gpu_blocks={_COUNT}withnum_gpu_blocks_override={_COUNT}$"),
    ("memory", r"AvailableKVcachememory:(\d+\.?\d*)GiB"),
    ("capacity", rf"(?:GPU|CPU|XPU)KVcachesize:{_COUNT}tokens(?:,Maximumconcurrencyfor{_COUNT}"
                 r"tokensperrequest:\d)?"),
    ("concurrency", rf"Maximumconcurrencyfor{_COUNT}tokensperrequest:(\d+\.\d\d)x"),
)  # fmt: skip
_PATTERNS = tuple((name, re.compile(pattern)) for name, pattern in _SENTENCES)
_BEGINS = re.compile("|".join(f"(?:{pattern.rstrip('$')})" for _, pattern in _SENTENCES))
# Stages of a start. A sentence of an earlier stage after one of a later begins another start.
_STAGES = {
    **{"version": 0, "arguments": 1, "engine": 3},
    **dict.fromkeys(("architecture", "prompt", "budget", "mode"), 2),
    **dict.fromkeys(("block", "override", "memory", "capacity", "concurrency"), 4),
}
_ENGINE_PROCESSES = ("(EngineCore", "(Worker", "(RayWorker")
_NUMBERS = ("prompt", "budget", "scheduled", "block")
_WORDS = ("version", "architecture", "mode", "runner")
_FIRST_COUNTS = ("architecture", "prompt")  # a drafter's own follow the model's


@dataclass(frozen=True, slots=True)
class _Sentence:
    name: str
    groups: tuple[str, ...]
    time: str
    process: str


@dataclass(frozen=True, slots=True)
class ServerLog:
    """What the last start in a log tells.

    Attributes:
        settings: by the names of `deployment.SETTINGS`.
        blocks: blocks that the memory holds, where the log has the number itself.
        memory: bytes for the KV cache.
        tokens: capacity of the pool in tokens, by vLLM's own count.
        length: the tokens per request that `tokens` was counted for.
        times: `tokens` over `length`, rounded to two digits.
        verdicts: reason codes that this package logged.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    blocks: int | None = None
    memory: float | None = None
    tokens: int | None = None
    length: int | None = None
    times: float | None = None
    verdicts: tuple[str, ...] = ()

    def estimate(self, geometry: Geometry | None) -> dict[str, Any]:
        """Pool and bytes of a block, worked out of the figures that have most digits.

        Args:
            geometry: the deployment's; None where its groups or its block are not known.
        """
        blocks = self.blocks
        if blocks is None and geometry is not None and self.length:
            request = geometry.request_blocks(self.length, geometry.reserved_states(self.length))
            if self.tokens:  # vLLM cut the fraction off
                blocks = -(-self.tokens * request // self.length)
            elif self.times:
                blocks = round(self.times * request)
        found = {"pool": blocks}
        if blocks and self.memory:
            found["block_bytes"] = int(self.memory / blocks)
        return {name: value for name, value in found.items() if value}


def read_log(path: Path) -> ServerLog:
    """Read a server's log, once; ``-`` is standard input.

    Raises:
        InputError: it cannot be read, or a line of arguments in it cannot.
    """
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise InputError(f"log: {path}: {error.strerror}.") from None
    try:
        return _digest(list(_last_start(_sentences(data.decode(errors="replace")))))
    except UnreadableError as error:
        raise InputError(
            f"log: {path}: the line 'non-default args' cannot be read: {error}."
        ) from None


def _sentences(text: str) -> list[_Sentence]:
    """vLLM's sentences in the order of the log; in that of time where it is a fenced excerpt."""
    lines = ["".join(line.split()) for line in _unframed(text)]
    squeezed = "".join(lines)
    starts = [0, *accumulate(map(len, lines))]
    found = sorted(_entries(squeezed, starts))
    ends = [*(start for start, *_ in found[1:]), len(squeezed)]
    sentences = []
    for (_, at, time, process), end in zip(found, ends, strict=False):
        # The last entry may be cut: a sentence that ends with its line does not count there.
        message = squeezed[at:end] + ("" if end < len(squeezed) or text.endswith("\n") else "?")
        for name, pattern in _PATTERNS:
            if (match := pattern.match(message)) is not None:
                groups = tuple(group or "" for group in match.groups())
                sentences.append(_Sentence(name, groups, time, process))
                break
    if "```" in text:
        sentences.sort(key=lambda sentence: sentence.time)
    return sentences


def _entries(squeezed: str, starts: list[int]) -> Iterator[tuple[int, int, str, str]]:
    """Where entries begin and their messages, with time and process as far as they are there."""
    headers: list[re.Match[str]] = []
    for header in _HEADER.finditer(squeezed):
        before = headers[-1].end() if headers else 0
        same_line = bisect_right(starts, before) == bisect_right(starts, header.start())
        if not (headers and same_line and _REQUEST.match(squeezed, before)):
            headers.append(header)
    for header in headers:
        yield header.start(), header.end(), header["time"], header["process"]
    begins = [header.start() for header in headers]
    for start in dict.fromkeys(starts):
        place = bisect_right(begins, start) - 1
        if place >= 0 and headers[place].end() > start:
            continue  # this line begins with a header, or a header was wrapped here
        process = _PROCESS.match(squeezed, start)
        at = process.end() if process else start
        if process or _BEGINS.match(squeezed, at):
            yield start, at, "", process[0] if process else ""


def _unframed(text: str) -> Iterator[str]:
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if isinstance(document, list):  # an export of a log viewer
        for each in document:
            yield from _unframed("\n".join(_texts(each)))
        return
    for line in _COLOUR.sub("", text).splitlines():
        if line.lstrip().startswith("{"):
            try:
                texts = list(_texts(json.loads(line)))
            except ValueError:
                texts = []
            if texts:
                for each in texts:
                    yield from _unframed(each)
                continue
        while (frame := _FRAME.match(line)) is not None:
            line = line[frame.end() :]
        yield line


def _texts(record: Any) -> Iterator[str]:
    if isinstance(record, str):
        yield record
    elif isinstance(record, dict):
        for key in _TEXT_KEYS:
            if isinstance(record.get(key), str):
                yield record[key]
                return


def _last_start(sentences: list[_Sentence]) -> Iterator[_Sentence]:
    first, stage, engines = 0, 0, set[str]()
    for place, sentence in enumerate(sentences):
        own = _STAGES.get(sentence.name)
        if own is None or (own < 3 and sentence.process.startswith(_ENGINE_PROCESSES)):
            continue  # an engine's process may repeat what its server printed
        backward = own <= 1 <= stage or own < 3 <= stage
        if backward or (own == 3 and sentence.process in engines):
            first, stage, engines = place, own, set()
        if own == 3:
            engines.add(sentence.process)
        stage = max(stage, own)
    # What stands before the first sign of a start is the end of an earlier one.
    return iter(sentences[first:])


def _digest(sentences: list[_Sentence]) -> ServerLog:
    said: dict[str, tuple[str, ...]] = {}
    for sentence in sentences:
        if sentence.name not in _FIRST_COUNTS or sentence.name not in said:
            said[sentence.name] = sentence.groups
    settings = _settings(said)
    length = (said.get("concurrency") or said.get("capacity", ("", ""))[1:])[0]
    memory = settings.pop("kv_memory_bytes", None)
    if memory is None and "memory" in said:
        memory = float(said["memory"][0]) * _GIB
    return ServerLog(
        settings,
        blocks=_count(said["override"][0]) if "override" in said else None,
        memory=memory,
        tokens=_count(said["capacity"][0]) if "capacity" in said else None,
        length=_count(length) if length else settings.get("prompt"),
        times=float(said["concurrency"][1]) if "concurrency" in said else None,
        verdicts=tuple(dict.fromkeys(s.groups[0] for s in sentences if s.name == "verdict")),
    )


def _settings(said: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    settings: dict[str, Any] = _arguments(said) if "arguments" in said else {}
    settings |= {name: _count(said[name][0]) for name in _NUMBERS if name in said}
    settings |= {name: said[name][0] for name in _WORDS if name in said}
    if "mode" in said:
        settings["prefix_caching"] = said["mode"][0] != "none"
    if "asynchronous" in said:
        settings["asynchronous"] = said["asynchronous"][0] == "enabled"
    if "override" in said:
        settings["pool"] = _count(said["override"][1])
    return settings | (_engine(*said["engine"]) if "engine" in said else {})


def _arguments(said: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Settings from the line of arguments, less those that a later line may correct."""
    settings = settings_from(read_dictionary(said["arguments"][0]))
    settings.pop("pool", None)  # vLLM prints an override when it comes to it
    if not said.keys() & {"memory", "capacity", "concurrency"}:
        settings.pop("block", None)  # the alignment with the states may be still to come
    if settings.get("mode") == "all" and "engine" not in said:
        del settings["mode"]  # or a fall-back to align
    return settings


def _engine(version: str, text: str) -> dict[str, Any]:
    fields = read_fields(text)
    settings: dict[str, Any] = {"version": version}
    for name, setting in (("max_seq_len", "prompt"), ("pipeline_parallel_size", "pipeline")):
        if isinstance(fields.get(name), int):
            settings[setting] = fields[name]
    if isinstance(fields.get("enable_prefix_caching"), bool):
        settings["prefix_caching"] = fields["enable_prefix_caching"]
    if fields.get("device_config") == "cpu":
        settings["asynchronous"] = False  # the platform turns it off after the line about it
    if "speculative_config" in fields:
        settings |= drafting(fields["speculative_config"]) or {"spec": 0}
    return settings


def _count(text: str) -> int:
    return int(text.replace(",", ""))
