"""Decides about the vLLM of an image from its files, as a process in the image would."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_mamba_retire.evidence import collect_evidence
from vllm_mamba_retire.keep_verdict import KeepVerdict
from vllm_mamba_retire.releases import load_matrix
from vllm_mamba_retire.settings import Installed, find_installed, judge_keep, obstacle
from vllm_mamba_retire.target import MANAGER_FILE, Target, read_target
from vllm_mamba_retire.verdict import Reason, Verdict, decide

from .image import METADATA_FILES, MODULE_FILES, VLLM_FILES, Config, Root
from .serving import Serving, find_serving


@dataclass(frozen=True, slots=True)
class Inspection:
    """The result for an image.

    Attributes:
        config: the image's configuration.
        serving: the interpreter and vLLM that it would start.
        target: that vLLM, with its paths in the image.
        verdict: the verdict on it.
        installed: this package's installation in that interpreter.
        obstacle: why the process would not patch a vLLM that needs it; None if it would.
        keep: whether the process would keep the newest states.
    """

    config: Config
    serving: Serving
    target: Target
    verdict: Verdict
    installed: Installed
    obstacle: str | None
    keep: KeepVerdict

    @property
    def reason(self) -> str:
        """The verdict's code; ``undecided`` if the serving vLLM is unknown, ``unpatched`` if it
        leaks and the image does not patch it.
        """
        if self._undecided:
            return "undecided"
        return "unpatched" if self.obstacle else self.verdict.reason.value

    @property
    def sentence(self) -> str:
        """The result and what to do, in one or more sentences."""
        if self._undecided:
            trees = ", ".join([str(self.target.package), *self.serving.others])
            return (
                f"The image has several vLLM ({trees}), and its command does not determine which "
                "one serves; remove the others, or start the Python that serves by its path."
            )
        if self.obstacle:
            return f"vLLM {self.target.version} leaks and is not patched: {self.obstacle}"
        if not self.serving.certain:
            return (
                f"{self.target.package} is not on the search path of /{self.serving.interpreter}. "
                f"{self.verdict.sentence}"
            )
        return self.verdict.sentence

    @property
    def finding(self) -> bool:
        """Whether the image may leak when it serves, or does not do what its settings request."""
        return (
            self._undecided
            or bool(self.obstacle)
            or self.verdict.in_doubt
            or not self.serving.certain
            or self.keep.warns
        )

    @property
    def _undecided(self) -> bool:
        told = self.serving.followed and self.serving.certain
        return bool(self.serving.others) and not told

    def to_data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "image": self.config.name,
            "image_id": self.config.image_id,
            "digest": self.config.digest,
            "architecture": self.serving.architecture,
            "interpreter": f"/{self.serving.interpreter}",
            "python": self.serving.python,
            "vllm": {
                "package": str(self.target.package),
                "version": self.target.version,
                "distribution": self.target.distribution,
                "manager_sha256": self.target.sha256,
                "on_search_path": self.serving.certain,
                "others": list(self.serving.others),
            },
            "installed": self.installed.version,
            "reason": self.reason,
            "sentence": self.sentence,
            "keep": {"state": self.keep.state.value, "sentence": self.keep.sentence},
        }


def inspect(config: Config, root: Root) -> Inspection:
    """Decide about the vLLM of an image.

    Raises:
        ImageError: it has no Python or no vLLM, or its source cannot be parsed.
    """
    serving = find_serving(config, root)
    with tempfile.TemporaryDirectory(prefix="mamba-retire-") as work:
        # The search path again, in folders that the code of a vLLM process can read.
        path = {folder: Path(work, str(number)) for number, folder in enumerate(serving.path)}
        for folder, copy in path.items():
            for file, data in _files(root, folder):
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                (copy / file).write_bytes(data)
        ours = path[serving.site] / "vllm"
        seen = read_target(ours)
        evidence = collect_evidence(seen, load_matrix())
        verdict = decide(evidence)
        installed = find_installed([str(folder) for folder in path.values()])
    # Paths as they are in the image.
    package = Path("/", serving.package)
    target = replace(seen, package=package, manager_file=package / MANAGER_FILE)
    verdict = replace(verdict, sentence=verdict.sentence.replace(str(ours), str(package)))
    leaks = verdict.reason is Reason.PATCHED
    problem = obstacle(config.environment, installed) if leaks else None
    keep = judge_keep(config.environment, installed, verdict, evidence)
    return Inspection(config, serving, target, verdict, installed, problem, keep)


def _files(root: Root, folder: str) -> Iterator[tuple[str, bytes]]:
    """Return the kept files of one folder of the search path, by relative path."""
    described = [name for name in root.names_in(folder) if name.startswith("vllm")]
    for file in (
        *(f"vllm/{name}" for name in VLLM_FILES),
        *MODULE_FILES,
        *(f"{name}/{file}" for name in described for file in METADATA_FILES),
    ):
        data = root.read(f"{folder}/{file}")
        if data is not None:
            yield file, data
