"""Tests this package inside images that serve vLLM, without a GPU and without a network.

``nox -s images`` uses the image of the newest leaking release in compat_matrix.yaml. After ``--``:

--image NAME   a tag from the matrix, or any image that the engine has; may be repeated
--all          every image of the matrix
--engine NAME  docker or podman; by default the one that answers
--pull         fetch missing images (they are large)
--mount A:B    one more folder for the container, read-only (torch for an image without it)
--wheels DIR   wheels for the image's Python; by default they are fetched
--require      exit 1 if an image is skipped, for any reason
--write-back   write the results as evidence into compat_matrix.yaml
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import re
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from tools.env import provision
from tools.env.wheelhouse import wheelhouse

if importlib.util.find_spec("vllm_mamba_retire") is None:  # nox has no environment for itself
    sys.path.insert(0, str(provision.ROOT / "shim"))

from packaging.version import Version

from vllm_mamba_retire import __version__
from vllm_mamba_retire.images.engine import (
    LABEL,
    Engine,
    NoEngineError,
    NoImageError,
    raising_signals,
)
from vllm_mamba_retire.images.image import ImageError
from vllm_mamba_retire.images.inspection import Inspection, inspect
from vllm_mamba_retire.releases import Image, Status, load_matrix

RESULTS = provision.CACHE / "images"
_HOME = "/mamba-retire"
_MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


@dataclass(frozen=True)
class ImageResult:
    """The result of one image.

    Attributes:
        image: name as requested.
        state: ``passed``, ``failed`` or ``skipped``.
        says: why, one sentence.
        data: results of the inspection and of the run in the image.
    """

    image: str
    state: str
    says: str
    data: dict[str, Any] = field(default_factory=dict)


def main(arguments: Sequence[str]) -> list[ImageResult]:
    """Run the images that the arguments name, and write a JSON file of each into `RESULTS`."""
    wish = _parsed(arguments)
    try:
        engine, problem = Engine.find(wish.engine), ""
    except NoEngineError as error:
        engine, problem = None, str(error)
    outcomes = []
    for name in _chosen(wish):
        skipped = ImageResult(name, "skipped", problem)
        outcome = skipped if engine is None else _outcome(name, engine, wish)
        outcomes.append(outcome)
        print(f"{outcome.state}: {outcome.image}: {outcome.says}", flush=True)
        _keep(outcome)
        if wish.write_back and outcome.state == "passed":
            write_back(provision.ROOT / "compat_matrix.yaml", outcome)
    counts = Counter(outcome.state for outcome in outcomes)
    print("images:", ", ".join(f"{counts[s]} {s}" for s in ("passed", "failed", "skipped")))
    return outcomes


def failed(outcomes: Sequence[ImageResult], arguments: Sequence[str]) -> bool:
    """Whether the session must fail."""
    bad = {"failed", "skipped"} if _parsed(arguments).require else {"failed"}
    return any(outcome.state in bad for outcome in outcomes)


def default_image() -> Image:
    """Return the image of the newest leaking release, in its most common variant."""
    matrix = load_matrix()
    live = {row.version for row in matrix.releases if row.status is Status.LIVE}
    newest = [image for image in matrix.images if image.release == max(live, key=Version)]
    return newest[0]


def run_inside(
    engine: Engine, inspection: Inspection, wheels: Path, mounts: Sequence[str]
) -> dict[str, Any]:
    """Install this package into a container and return the results of the image's own Python.

    Args:
        engine: runs the container.
        inspection: the image's inspection from outside.
        wheels: folder of wheels to install this package from.
        mounts: further folders, ``HOST:CONTAINER``.
    """
    version = str(inspection.target.version)
    row = load_matrix().row_for(version)
    folders = [
        f"{wheels}:{_HOME}/wheels",
        f"{provision.ROOT / 'tests'}:{_HOME}/tests",
        f"{Path(__file__).with_name('inside.py')}:{_HOME}/inside.py",
        *mounts,
    ]
    options = [f"--volume={folder}:ro" for folder in folders]
    options += [f"--env=MAMBA_RETIRE_TEST_RELEASE={row.version if row else version}"]
    options += [f"--entrypoint=/{inspection.serving.interpreter}"]
    done = _run(engine, options, inspection.config.name, f"{_HOME}/inside.py")
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": f"ended with {done.returncode}: {(done.stderr or done.stdout)[-2000:]}"}
    return found


def judge(inspection: Inspection, inside: dict[str, Any]) -> str:
    """Return what is wrong in one sentence; empty if nothing is."""
    if "error" in inside:
        return str(inside["error"])
    native = inspection.verdict.reason.value == "native"
    stock, started, tests = inside["stock"], inside["started"], inside["tests"]
    if stock["probe"] != ("retires" if native else "stops at the gap"):
        return f"stock vLLM {stock['probe']}: the control shows nothing"
    if started["probe"] != "retires":
        return f"with this package vLLM {started['probe']} ({started['sentence']})"
    if started["reason"] != inspection.verdict.reason.value:
        return f"from outside {inspection.verdict.reason.value}, from inside {started['reason']}"
    if started["manager"] != str(inspection.target.manager_file):
        return f"{inspection.target.manager_file} was inspected, {started['manager']} serves"
    if inside["verify"]["exit"]:
        return f"verify says {inside['verify']}"
    if tests["failed"] or not tests["tests"]:
        return f"release tests: {tests}"
    return ""


def write_back(table: Path, outcome: ImageResult) -> None:
    """Write a result as evidence of its image into the matrix; comments and order stay.

    Raises:
        ValueError: the matrix has no such image.
    """
    text = table.read_text()
    repository, _, tag = outcome.image.rpartition(":")
    head = f"    repository: {repository}\n    tag: {tag}\n"
    if head not in text:
        raise ValueError(f"{table} has no image {outcome.image}")
    start = text.index(head)
    block = re.compile(r"(?:    .*\n)+").match(text, start)[0]  # type: ignore[index]
    end = start + len(block)
    evidence = (
        f"      - run: nox -s images\n        result: {outcome.says}\n"
        f"        date: {date.today()}\n        package: {__version__}\n"
    )
    block = block.replace("    evidence: []  # untested\n", "")
    if "    evidence:\n" in block:
        block = re.sub(r"(    evidence:\n)(?:      .*\n)*", rf"\g<1>{evidence}", block)
    else:
        block += f"    evidence:\n{evidence}"
    seen = outcome.data["inspected"]
    known = {"python": f'"{seen["python"]}"', "vllm": seen["vllm"]["package"]}
    for name, value in known.items():
        block = block.replace(f"    {name}: null\n", f"    {name}: {value}\n")
    if seen["digest"]:
        block = block.replace("    digest: null\n", f"    digest: {seen['digest']}\n")
    table.write_text(text[:start] + block + text[end:])


def _outcome(name: str, engine: Engine, wish: argparse.Namespace) -> ImageResult:
    try:
        if wish.pull:
            _pull(engine, name)
        inspection = inspect(*engine.read(name))
    except NoImageError as error:
        return ImageResult(name, "skipped", str(error))
    except ImageError as error:
        return ImageResult(name, "failed", str(error))
    if inspection.serving.architecture != _MACHINE:
        says = f"is for {inspection.serving.architecture}, this machine is {_MACHINE}"
        return ImageResult(name, "skipped", says)
    wheels = wish.wheels or wheelhouse(str(inspection.serving.python))
    inside = run_inside(engine, inspection, wheels, wish.mount)
    data = {"inspected": inspection.to_data(), "inside": inside}
    if problem := judge(inspection, inside):
        return ImageResult(name, "failed", problem, data)
    tests = inside["tests"]
    says = (
        f"stock {inside['stock']['probe']}, with this package {inside['started']['reason']}; "
        f"{tests['tests'] - tests['skipped']} release tests passed"
    )
    return ImageResult(name, "passed", says, data)


def _pull(engine: Engine, image: str) -> None:
    done = subprocess.run([engine.command, "pull", image], capture_output=True, text=True)
    if done.returncode:
        raise NoImageError(f"pulling {image} was refused: {done.stderr.strip().splitlines()[-1:]}")


def _run(engine: Engine, options: Sequence[str], *command: str) -> subprocess.CompletedProcess[str]:
    """Run a container to its end, without a network; it is removed when this process ends too."""
    name = f"{LABEL}-{uuid.uuid4().hex[:12]}"
    run = [engine.command, "run", "--rm", f"--name={name}", "--pull=never", "--network=none"]
    with raising_signals():
        try:
            return subprocess.run(
                [*run, f"--label={LABEL}", *options, *command], capture_output=True, text=True
            )
        except BaseException:
            subprocess.run([engine.command, "rm", "--force", name], capture_output=True)
            raise


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("nox -s images --", add_help=False)
    parser.add_argument("--image", action="append", default=[])
    parser.add_argument("--engine")
    parser.add_argument("--mount", action="append", default=[])
    parser.add_argument("--wheels", type=Path)
    for switch in ("--all", "--pull", "--require", "--write-back"):
        parser.add_argument(switch, action="store_true")
    return parser.parse_args(arguments)


def _chosen(wish: argparse.Namespace) -> list[str]:
    table = load_matrix().images
    if wish.all:
        return [_name(image) for image in table]
    # Tags repeat between repositories; the first repository of the table is meant.
    listed = {image.tag: _name(image) for image in reversed(table)}
    return [listed.get(name, name) for name in wish.image or [default_image().tag]]


def _name(image: Image) -> str:
    return f"{image.repository}:{image.tag}"


def _keep(outcome: ImageResult) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", outcome.image)
    about = {"image": outcome.image, "state": outcome.state, "says": outcome.says}
    document = {"schema": 1, **about, "package": __version__, **outcome.data}
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
