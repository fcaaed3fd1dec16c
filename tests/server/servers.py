"""Starts vLLM in processes of its own, with the package installed beside it and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from tools.engine.harness import MODELS

from tests import children
from vllm_mamba_retire import records
from vllm_mamba_retire.processes import Survey

BUDGET = 2560  # tokens
BLOCKS = 80  # room for a prompt of 40,000 tokens, not for the states that stock vLLM keeps
PATIENCE = 600  # seconds for anything that a busy machine of two cores has to do
ENGINE = {
    "model": str(MODELS["qwen3_next"]),
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "mamba_ssm_cache_dtype": "float32",
    "mamba_cache_mode": "align",
    "enable_prefix_caching": True,
    "max_model_len": 65_536,
    "max_num_batched_tokens": BUDGET,
    "num_gpu_blocks_override": BLOCKS,
}
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every engine on this machine takes the same core
}
_ASK_STATUS = """
import json
from vllm_mamba_retire.processes import survey
print(json.dumps(survey().to_data()))
"""


def prompt(seed: int, tokens: int = 40_000) -> list[int]:
    """Token ids that no other seed gives."""
    return random.Random(seed).choices(range(2, 512), k=tokens)


def eventually(condition: Callable[[], object], what: str) -> Any:
    """What `condition` returns as soon as that is true."""
    return children.eventually(condition, what, PATIENCE)


def install_metadata(site: Path, name: str, version: str) -> Path:
    """Metadata of a distribution; `site` goes on the path."""
    about = site / f"{name}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return about


def install_harness(site: Path) -> None:
    """Make `harness_plugin` a plug-in of the vLLM that has `site` on its path."""
    about = install_metadata(site, "harness_plugin", "0")
    entry = "[vllm.general_plugins]\nharness = harness_plugin:register\n"
    (about / "entry_points.txt").write_text(entry)
    (site / "harness_plugin.py").write_text(
        Path(__file__).with_name("harness_plugin.py").read_text()
    )


class Running:
    """Some vLLM in processes of its own, with a folder for their records.

    Args:
        command: what to start.
        folder: for logs, records and the harness.
        harness: False leaves the harness out: the path has what a user's has.
        path: folders to import from, before vLLM's; by default all that the test has.
        environment: variables to set; None unsets one.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        *,
        harness: bool = True,
        path: str | None = None,
        **environment: str | None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log.txt"
        self.records = folder / "records"
        path = os.environ["PYTHONPATH"] if path is None else path
        if harness:
            install_harness(folder / "site")
            # Behind the package: vLLM loads plug-ins in the order of the path.
            path = os.pathsep.join([path, str(folder / "site")])
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MAMBA_", "VLLM_"))}
        asked = {"PYTHONPATH": path, "MAMBA_RETIRE_DIR": str(self.records), **environment}
        merged = {**inherited, **_ENVIRONMENT, **asked}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in merged.items() if value is not None},
                cwd=folder,
            )

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        """End whatever is left, children first told by their parent."""
        family = self.family()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.wait()

    def family(self) -> list[psutil.Process]:
        """The process and all below it."""
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def alive(self) -> bool:
        """Whether it runs; an early end is an error that shows what it printed."""
        assert self.process.poll() is None, self.log.read_text(errors="replace")[-6000:]
        return True

    def entries(self) -> list[records.Record]:
        """Records of its processes that are alive."""
        return records.read(self.records).records

    def survey(self, *, path: str | None = None, records: Path | None = None) -> Survey:
        """What a command sees that is run beside it."""
        answer = subprocess.run(
            [sys.executable, "-c", _ASK_STATUS],
            env={
                **os.environ,
                "MAMBA_RETIRE_DIR": str(records or self.records),
                "PYTHONPATH": path or os.environ["PYTHONPATH"],
            },
            capture_output=True,
            text=True,
            check=True,
        )
        seen = Survey.from_data(json.loads(answer.stdout))
        # Other work on this machine is not this test's.
        own = {one.pid for one in self.family()}
        return Survey(
            [entry for entry in seen.processes if entry.pid in own],
            [core for core in seen.without_record if core.pid in own],
        )


class Server(Running):
    """``vllm serve``, or ``python -m vllm.entrypoints.openai.api_server``."""

    def __init__(self, folder: Path, *options: str, module: bool = False, **rest: Any) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        if module:
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        else:
            command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
            # The command reads the metadata of `vllm`; the CPU build is named `vllm-cpu`.
            release = os.environ["MAMBA_RETIRE_TEST_RELEASE"]
            install_metadata(folder / "vllm", "vllm", f"{release}+cpu")
            path = rest.get("path") or os.environ["PYTHONPATH"]
            rest["path"] = os.pathsep.join([path, str(folder / "vllm")])
        command += ["--host=127.0.0.1", f"--port={self.port}", "--served-model-name=tiny"]
        command += ["--load-format=seeded" if rest.get("harness", True) else "--load-format=dummy"]
        for name, value in ENGINE.items():
            flag = "--" + name.replace("_", "-")
            command += [flag] if value is True else [flag, str(value)]
        super().__init__([*command, *options], folder, **rest)
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> Server:
        """Until it serves."""

        def healthy() -> bool:
            self.alive()
            with contextlib.suppress(OSError):
                return urllib.request.urlopen(f"{self.url}/health", timeout=5).status == 200
            return False

        eventually(healthy, "the server comes up")
        return self

    def complete(self, tokens: Sequence[int], output: int = 8) -> list[int]:
        """The generated token ids."""
        answer = self.client.completions.create(**self._request(tokens, output))
        return list(answer.choices[0].token_ids)

    def stream(self, tokens: Sequence[int], output: int = 8) -> Iterator[list[int]]:
        """The generated token ids as they come."""
        for event in self.client.completions.create(stream=True, **self._request(tokens, output)):
            yield list(getattr(event.choices[0], "token_ids", None) or ())

    def _request(self, tokens: Sequence[int], output: int) -> dict[str, Any]:
        return {
            "model": "tiny",
            "prompt": list(tokens),
            "max_tokens": output,
            "temperature": 0,
            "extra_body": {"ignore_eos": True, "return_token_ids": True},
        }

    def hang_up(self, tokens: Sequence[int], started: Callable[[], object]) -> None:
        """Ask, and cut the connection with a reset once `started` is true, answer unread."""
        body = json.dumps(self._request(tokens, 8) | {"stream": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(head.encode() + body)
            eventually(started, "the request is being computed")
            reset = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # linger for 0 seconds
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)

    def scrape(self) -> list[Sample]:
        """``/metrics``, as prometheus-client reads it."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE).read().decode()
        return [s for family in text_string_to_metric_families(text) for s in family.samples]

    def own_metrics(self) -> list[Sample]:
        """Those of this package."""
        return [s for s in self.scrape() if s.name.startswith("vllm_mamba_retire_")]

    def metric(self, name: str) -> float:
        """The sum of a metric of vLLM over its labels."""
        return sum(sample.value for sample in self.scrape() if sample.name == f"vllm:{name}")

    def idle(self) -> bool:
        """Whether nothing runs and no block is in use."""
        return self.metric("num_requests_running") == 0 == self.metric("kv_cache_usage_perc")

    def computing(self) -> bool:
        """Whether blocks are in use."""
        return self.metric("kv_cache_usage_perc") > 0.1

    @contextlib.contextmanager
    def sampled(self, name: str) -> Iterator[list[float]]:
        """A metric, sampled as long as the context is open."""
        samples: list[float] = []
        over = threading.Event()

        def sample() -> None:
            while not over.wait(0.05):
                samples.append(self.metric(name))

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            yield samples
        finally:
            over.set()
            sampler.join()

    def terminate(self) -> bool:
        """SIGTERM, as an orchestrator sends it."""
        self.process.send_signal(signal.SIGTERM)
        return True
