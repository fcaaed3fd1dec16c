"""What an image says about itself: its id, its platform and how it starts."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def this_architecture() -> str:
    """The architecture of this machine, as images name it."""
    return _MACHINES.get(platform.machine(), platform.machine())


@dataclass(frozen=True, slots=True)
class Config:
    """An image's configuration, as far as it decides which vLLM serves.

    Attributes:
        name: what it was asked for by.
        image_id: digest of its configuration; None for a bare root file system.
        digest: of its manifest, where known.
        architecture: as images name it; None for a bare root file system.
        environment: variables that its processes start with.
        command: entry point and arguments.
        folder: where its processes start, relative to the root.
    """

    name: str
    image_id: str | None = None
    digest: str | None = None
    architecture: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    folder: str = ""

    @classmethod
    def of(cls, name: str, data: Mapping[str, Any], **known: str | None) -> Config:
        """From an OCI image configuration, or from what ``image inspect`` prints: they agree."""
        settings = data.get("config") or data.get("Config") or {}
        pairs = (line.partition("=") for line in settings.get("Env") or ())
        return cls(
            name=name,
            architecture=data.get("architecture") or data.get("Architecture"),
            environment={key: value for key, _, value in pairs},
            command=(*(settings.get("Entrypoint") or ()), *(settings.get("Cmd") or ())),
            folder=(settings.get("WorkingDir") or "").strip("/"),
            **known,
        )

    @property
    def path(self) -> list[str]:
        """Folders in which commands are looked for, relative to the root."""
        return [part.strip("/") for part in self.environment.get("PATH", _DEFAULT_PATH).split(":")]
