"""From an image's files to a verdict: the same questions as at start-up, asked from outside."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from email.parser import BytesHeaderParser
from pathlib import Path, PurePosixPath
from typing import Any

from vllm_mamba_retire.evidence import collect_evidence
from vllm_mamba_retire.releases import load_matrix
from vllm_mamba_retire.target import Target, read_target
from vllm_mamba_retire.verdict import Reason, Verdict, decide

from .config import Config
from .serving import Serving, find_serving
from .tree import Tree

_PLUGIN = "mamba_retire"


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found in an image.

    Attributes:
        config: what the image says about itself.
        serving: the interpreter and vLLM that it would start.
        target: that vLLM, with its paths as they are in the image.
        verdict: what this package says about it.
        installed: version of this package beside it; None where it is not there.
        obstacles: why nothing would patch a vLLM that needs it, a sentence each.
    """

    config: Config
    serving: Serving
    target: Target
    verdict: Verdict
    installed: str | None
    obstacles: tuple[str, ...]

    @property
    def reason(self) -> str:
        """Reason code, or ``unpatched`` where this vLLM leaks and nothing in the image stops it."""
        return "unpatched" if self.obstacles else self.verdict.reason.value

    @property
    def sentence(self) -> str:
        """Why, for people."""
        return " ".join(self.obstacles) or self.verdict.sentence

    @property
    def finding(self) -> bool:
        """Whether somebody has to do something before this image serves."""
        return bool(self.obstacles) or self.verdict.in_doubt or not self.serving.certain

    def to_data(self) -> dict[str, Any]:
        """As JSON knows it."""
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
            "installed": self.installed,
            "reason": self.reason,
            "sentence": self.sentence,
        }


def inspect(config: Config, tree: Tree) -> Inspection:
    """Decide about the vLLM of an image.

    Raises:
        ImageError: it has no Python or no vLLM, or a link on the way leaves its root.
    """
    serving = find_serving(config, tree)
    target = _target(tree, serving)
    verdict = decide(collect_evidence(target, load_matrix()))
    installed = _installed(tree, serving)
    obstacles = tuple(_obstacles(config, installed)) if verdict.reason is Reason.PATCHED else ()
    return Inspection(config, serving, target, verdict, installed, obstacles)


def _obstacles(config: Config, installed: str | None) -> list[str]:
    found = []
    if installed is None:
        found.append(
            "This vLLM keeps states that lie before a null gap, and vllm-mamba-retire is not "
            "installed beside it; install it in the image, or apply the patch series."
        )
    if config.environment.get("MAMBA_RETIRE") == "off":
        found.append("The image sets MAMBA_RETIRE=off; unset it.")
    allowed = config.environment.get("VLLM_PLUGINS")
    if allowed is not None and _PLUGIN not in allowed.split(","):
        found.append(f"The image sets VLLM_PLUGINS={allowed}, without {_PLUGIN}; add it.")
    return found


def _target(tree: Tree, serving: Serving) -> Target:
    """The vLLM that serves, looked at in a folder of ours."""
    with tempfile.TemporaryDirectory(prefix="mamba-retire-") as work:
        for path, data in _vllm_files(tree, serving):
            ours = Path(work, *path.parts)
            ours.parent.mkdir(parents=True, exist_ok=True)
            ours.write_bytes(data)
        seen = read_target(Path(work, "vllm"))
        package = Path("/", serving.package)
        return replace(
            seen,
            package=package,
            manager_file=package / seen.manager_file.relative_to(seen.package),
            problem=seen.problem and seen.problem.replace(str(seen.package), str(package)),
        )


def _vllm_files(tree: Tree, serving: Serving) -> Iterator[tuple[PurePosixPath, bytes]]:
    """The package and what its distribution says, as they would lie below the site folder."""
    for path, data in tree.files.items():
        if path.startswith(f"{serving.package}/"):
            yield PurePosixPath("vllm", path.removeprefix(f"{serving.package}/")), data
    for folder in tree.names_in(serving.site):
        if folder.startswith("vllm") and folder.endswith("-info"):
            for name in tree.names_in(f"{serving.site}/{folder}"):
                text = tree.read(f"{serving.site}/{folder}/{name}")
                if text is not None:
                    yield PurePosixPath(folder, name), text


def _installed(tree: Tree, serving: Serving) -> str | None:
    for folder in (serving.site, *serving.path):
        for name in tree.names_in(folder):
            if name.startswith("vllm_mamba_retire-") and name.endswith(".dist-info"):
                metadata = tree.read(f"{folder}/{name}/METADATA") or b""
                return str(BytesHeaderParser().parsebytes(metadata)["Version"])
    return None
