"""Downloads vLLM's source archives, which have the tests that no wheel contains.

The registry has them from 0.16.0 on. They are kept in the cache and never committed.
"""

from __future__ import annotations

import os
import tarfile
import tempfile
from pathlib import Path

from tools.env import provision

SOURCES = provision.CACHE / "sources"
_PARTS = ("vllm/", "tests/", "requirements/", "pyproject.toml")

# pip runs an archive's setup.py for its metadata, and vLLM's wants these and an importable torch,
# of which it looks at no more than what is in _TORCH.
_BUILD_TOOLS = (
    "setuptools>=77,<81",
    "setuptools-scm",
    "setuptools-rust",
    "wheel",
    "packaging",
    "jinja2",
)
_TORCH = {
    "__init__.py": "__version__ = '2.13.0'\nclass version:\n    cuda = hip = xpu = None\n",
    "utils/__init__.py": "",
    "utils/cpp_extension.py": "CUDA_HOME = ROCM_HOME = None\n",
}


def source_trees(*versions: str) -> list[Path]:
    """Return the folders of several releases, see `source_tree`."""
    return [source_tree(version) for version in versions]


def source_tree(version: str) -> Path:
    """Return a folder with `vllm/`, `tests/` and the pins of a release, from its source archive.

    Do not put the folder on the path: its `vllm/` would shadow the one under test.
    """
    folder = SOURCES / version
    with provision._lock(f"source-{version}"):
        if folder.exists():
            return folder
        SOURCES.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=SOURCES, prefix=".making-") as making:
            provision.log(f"fetching the sources of vllm {version} (up to 50 MB)")
            archive = _download(version, Path(making))
            with tarfile.open(archive) as opened:
                top = f"vllm-{version}/"
                wanted = tuple(top + part for part in _PARTS)
                members = [m for m in opened.getmembers() if m.name.startswith(wanted)]
                opened.extractall(making, members, filter="data")
            (Path(making) / f"vllm-{version}").rename(folder)
    return folder


def _download(version: str, folder: Path) -> Path:
    python = provision.find_python(provision.PREFERRED_PYTHON)
    if python is None:
        raise provision.ProvisionError(f"no Python {provision.PREFERRED_PYTHON} on this machine")
    tools = provision.environment("archives", python, ["pip", *_BUILD_TOOLS])
    stand_in = folder / "stand-in"
    for name, text in _TORCH.items():
        (stand_in / "torch" / name).parent.mkdir(parents=True, exist_ok=True)
        (stand_in / "torch" / name).write_text(text)
    provision.pip(
        f"fetching the sources of {version}",
        *("download", f"vllm=={version}", f"--dest={folder}", "--no-deps", "--no-cache-dir"),
        *("--no-binary=:all:", "--no-build-isolation"),
        python=str(tools),
        env={
            **os.environ,
            "PYTHONPATH": str(stand_in),
            "VLLM_TARGET_DEVICE": "empty",
            "VLLM_VERSION_OVERRIDE": version,
        },
    )
    (archive,) = folder.glob("vllm-*.tar.gz")
    return archive
