"""Resolves requirements to the newest, or the oldest, versions that they allow.

It queries the registry for metadata through uv; it downloads no package and installs nothing. It
shows whether this package can be installed beside a pinned vLLM without moving a pin.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tools.env import provision
from tools.env.provision import ProvisionError

# What the public images of the live releases run.
SERVING_PYTHON = "3.12"
_PLATFORM = "x86_64-manylinux_2_35"
_OPTIONS = ("--quiet", "--no-header", "--no-annotate", "--no-emit-index-url", "--no-build")


class PinsMoveError(Exception):
    """The pins cannot all be kept; the message is the resolver's."""


def resolve(
    requirements: Sequence[str], python: str = SERVING_PYTHON, *, lowest: bool = False
) -> list[str]:
    """Return every distribution, ``name==version``, that the requirements resolve to.

    Args:
        requirements: as pip takes them.
        python: for this version (``3.12``), on Linux; from wheels only.
        lowest: take the oldest allowed versions of the distributions named in `requirements`.
    """
    resolution = "lowest-direct" if lowest else "highest"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "uv", "pip", "compile", "-", *_OPTIONS),
            *(f"--python-version={python}", f"--python-platform={_PLATFORM}"),
            f"--resolution={resolution}",
        ],
        input="\n".join(requirements),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ProvisionError(f"resolving failed:\n{done.stderr}")
    return done.stdout.split()


def added(pinned: Sequence[str], wanted: Iterable[str]) -> list[str]:
    """Return what installing `wanted` adds to an environment of `pinned` distributions.

    Raises:
        PinsMoveError: it cannot be installed with every pin kept.
    """
    try:
        resolved = resolve([*pinned, *wanted])
    except ProvisionError as error:
        raise PinsMoveError(str(error)) from error
    return sorted(set(resolved) - set(pinned))


def edge_environment(edge: str, python: str) -> Path:
    """Make an environment with the ``lowest`` or ``newest`` dependencies that are allowed."""
    pinned = resolve(_own({"charts"}), python, lowest=edge == "lowest")
    # Behind the tools, so that what these require does not raise a lowest version again.
    return provision.environment(edge, _interpreter(python), provision.group("test"), pinned)


def dependencies_environment() -> Path:
    """Make an environment with this package's dependencies only."""
    python = provision.PREFERRED_PYTHON
    return provision.environment("sbom", _interpreter(python), resolve(_own(), python))


def _own(extras: Iterable[str] = ()) -> list[str]:
    site = provision.own_package()
    return [str(line) for line in provision.requirements_of(site, "vllm-mamba-retire", extras)]


def _interpreter(python: str) -> str:
    return provision.find_python(python) or provision.THIS_PYTHON
