"""Docker or podman, asked through their own commands.

Every container made here is removed again, whatever happens in between. Nothing is pulled unless
`Engine.pull` is called.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from .config import Config
from .tree import ImageError

ENGINES = ("docker", "podman")
LABEL = "vllm-mamba-retire"  # on every container made here
_OPTIONS = ("--pull=never", "--network=none", f"--label={LABEL}")


class NoEngineError(ImageError):
    """There is no container engine that answers."""


class NoImageError(ImageError):
    """The engine does not have the image."""


class Engine:
    """One container engine of this machine."""

    def __init__(self, command: str) -> None:
        self.command = command

    @classmethod
    def find(cls, wanted: str | None = None) -> Engine:
        """The engine of this name, or the first that answers.

        Raises:
            NoEngineError: none does; a client without its daemon does not.
        """
        said = []
        for command in (wanted,) if wanted else ENGINES:
            if shutil.which(command) is None:
                said.append(f"{command} is not installed")
                continue
            answer = _run([command, "info"])
            if answer.returncode == 0:
                return cls(command)
            said.append(f"{command} does not answer ({_last_line(answer.stderr)})")
        raise NoEngineError(f"no container engine: {'; '.join(said)}")

    def config(self, image: str) -> Config:
        """What the engine knows of an image that it has.

        Raises:
            NoImageError: it does not have it.
        """
        answer = _run([self.command, "image", "inspect", image])
        if answer.returncode:
            raise NoImageError(
                f"{self.command} has no image {image}; check the name, or fetch it with "
                f"`{self.command} pull {image}`"
            )
        (about,) = json.loads(answer.stdout)
        digests = about.get("RepoDigests") or [None]
        return Config.of(
            image,
            about,
            image_id="sha256:" + about["Id"].removeprefix("sha256:"),
            digest=digests[0] and digests[0].rpartition("@")[2],
        )

    def pull(self, image: str) -> None:
        """Fetch an image.

        Raises:
            NoImageError: refused or impossible.
        """
        answer = _run([self.command, "pull", image])
        if answer.returncode:
            raise NoImageError(f"pulling {image} was refused: {_last_line(answer.stderr)}")

    @contextmanager
    def container(self, image: str) -> Iterator[str]:
        """A container of the image that is never started, removed at the end.

        Raises:
            ImageError: it cannot be made.
        """
        # The command is never run; an image without one would be refused otherwise.
        command = [self.command, "create", *_OPTIONS, image, "none"]
        answer = _run(command)
        if answer.returncode:
            raise ImageError(f"{' '.join(command)}: {_last_line(answer.stderr)}")
        name = answer.stdout.split()[-1]
        try:
            yield name
        finally:
            _run([self.command, "rm", "--force", "--volumes", name])

    @contextmanager
    def exported(self, container: str) -> Iterator[IO[bytes]]:
        """The container's file system as a tar stream.

        Raises:
            ImageError: the engine failed on the way.
        """
        command = [self.command, "export", container]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                yield process.stdout
            except BaseException:
                process.kill()
                raise
            problem = process.stderr.read().decode("utf-8", "replace")
        if process.returncode:
            raise ImageError(f"{' '.join(command)}: {_last_line(problem)}")

    def run(self, image: str, options: Sequence[str], *command: str) -> Any:
        """Run a container to its end, without a network, and remove it.

        Returns:
            `subprocess.CompletedProcess` with text output.
        """
        name = f"{LABEL}-{uuid.uuid4().hex[:12]}"
        named = [self.command, "run", "--rm", f"--name={name}", *_OPTIONS]
        try:
            return _run([*named, *options, image, *command])
        except BaseException:
            # An interrupted client is killed; its container would run on.
            _run([self.command, "rm", "--force", name])
            raise


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"
