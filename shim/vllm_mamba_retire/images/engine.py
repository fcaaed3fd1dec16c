"""Reads images through the commands of docker or podman.

A container is created, exported and removed, and never started. It is removed too when a signal
ends this process; a container left by a killed process is removed by the next run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import msgspec
import psutil

from .image import Config, ImageError, Root, read_tar

ENGINES = ("docker", "podman")
LABEL = "vllm-mamba-retire"  # on every container created here
_HOST = re.sub(r"[^A-Za-z0-9]", "", os.uname().nodename)
_CHUNK = 1 << 20


class NoEngineError(ImageError):
    """No container engine answers; the message says what to do."""


class NoImageError(ImageError):
    """The engine does not have the image."""


class _Settings(msgspec.Struct, rename="pascal"):
    env: list[str] | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    working_dir: str | None = None
    user: str | None = None


class _Image(msgspec.Struct, rename="pascal"):
    """The fields of ``image inspect`` that are used here."""

    id: str
    architecture: str | None = None
    repo_digests: list[str] | None = None
    config: _Settings | None = None


class Engine:
    """One container engine of this machine."""

    def __init__(self, command: str) -> None:
        self.command = command

    @classmethod
    def find(cls, wanted: str | None = None) -> Engine:
        """Return the engine of this name, or the first that answers.

        Raises:
            NoEngineError: none answers, for example a client without its daemon.
        """
        _end_orphans()
        problems = []
        for command in (wanted,) if wanted else ENGINES:
            if shutil.which(command) is None:
                problems.append(f"{command} is not installed")
                continue
            answer = _run([command, "info"])
            if answer.returncode == 0:
                return cls(command)
            problems.append(f"{command} does not answer ({_last_line(answer.stderr)})")
        raise NoEngineError(f"no container engine: {'; '.join(problems)}")

    def config(self, image: str) -> Config:
        """Return the configuration of a local image.

        Raises:
            ImageError: the engine lacks the image, or its output has an unknown format.
        """
        answer = _run([self.command, "image", "inspect", image])
        if answer.returncode:
            raise NoImageError(
                f"{self.command} has no image {image}; check the name, or fetch it with "
                f"`{self.command} pull {image}`"
            )
        try:
            (about,) = msgspec.json.decode(answer.stdout, type=list[_Image])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ImageError(
                f"`{self.command} image inspect {image}` has an unknown format: {error}"
            ) from error
        settings = about.config or _Settings()
        pairs = (line.partition("=") for line in settings.env or ())
        return Config(
            name=image,
            image_id="sha256:" + about.id.removeprefix("sha256:"),
            digest=next((each.rpartition("@")[2] for each in about.repo_digests or ()), None),
            architecture=about.architecture,
            environment={key: value for key, _, value in pairs},
            command=(*(settings.entrypoint or ()), *(settings.cmd or ())),
            folder=(settings.working_dir or "").strip("/"),
            user=settings.user or "",
        )

    def read(self, image: str) -> tuple[Config, Root]:
        """Export a local image and return the files that decide which vLLM serves.

        Raises:
            ImageError: the engine lacks the image, or it cannot be read.
        """
        config = self.config(image)
        root = Root("".join(config.command[:1]))
        with raising_signals():
            self._remove_leftovers()
            with self._container(image) as container:
                missing = self._export(container, root)
                if missing:
                    self._export(container, root, missing)
        return config, root

    @contextmanager
    def _container(self, image: str) -> Iterator[str]:
        name = f"{LABEL}-{_HOST}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        options = ("--pull=never", "--network=none", f"--label={LABEL}", f"--name={name}")
        try:
            # "none" is never run; an image without a command would be refused otherwise.
            answer = _run([self.command, "create", *options, image, "none"])
            if answer.returncode:
                told = _last_line(answer.stderr)
                raise ImageError(f"{self.command} cannot create a container of {image}: {told}")
            yield name
        finally:
            self._remove(name)

    def _export(
        self, container: str, root: Root, wanted: frozenset[str] = frozenset()
    ) -> frozenset[str]:
        command = [self.command, "export", container]
        with (
            tempfile.TemporaryFile("w+", errors="replace") as log,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as process,
        ):
            assert process.stdout is not None
            try:
                missing = read_tar(root, process.stdout, wanted)
                while process.stdout.read(_CHUNK):
                    pass  # behind the end mark
            except BaseException:
                process.terminate()  # it holds the engine's lock
                raise
            if process.wait():
                log.seek(0)
                raise ImageError(f"{' '.join(command)}: {_last_line(log.read())}")
        return missing

    def _remove_leftovers(self) -> None:
        """Remove containers of processes of this machine that were killed."""
        every = ("ps", "--all", f"--filter=label={LABEL}", "--format={{.Names}}")
        for name in _run([self.command, *every]).stdout.split():
            if _is_left_over(name):
                self._remove(name)

    def _remove(self, name: str) -> None:
        _run([self.command, "rm", "--force", "--volumes", name])


@contextmanager
def raising_signals() -> Iterator[None]:
    """Turn the signals that end this process into `SystemExit`, so that it cleans up first."""

    def stop(number: int, _frame: object) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # a second one must not stop the cleaning up
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    # nohup ignores one of them on purpose.
    taken = [each for each in numbers if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, stop) for each in taken}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _is_left_over(name: str) -> bool:
    """Whether a container's name is that of a process of this machine that has ended."""
    owner = re.fullmatch(rf"{LABEL}-{_HOST}-(\d+)-\w+", name)
    return owner is not None and not psutil.pid_exists(int(owner[1]))


def _end_orphans() -> None:
    """End exports of killed processes: podman's waits for its reader and blocks all of podman."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[1:2] == ["export"] and _is_left_over(words[-1]):
            with contextlib.suppress(psutil.Error):
                process.kill()


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C must not end a removal
    ) as process:
        try:
            out, problem = process.communicate()
        except BaseException:
            process.terminate()  # an engine finishes what it must not leave half done
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, problem)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"
