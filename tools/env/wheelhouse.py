"""Makes a folder of wheels that installs this package and its tests' tools without a network."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from tools.env import provision


def wheelhouse(python: str) -> Path:
    """Return the wheels for one version of Python (``3.12``) on this machine's architecture.

    This package's own wheel is built each time; the others are fetched once.
    """
    folder = provision.CACHE / "wheelhouses" / python
    wanted = ["pip", *provision.group("test", own=True)]
    stamp = folder / "wanted.txt"
    with provision._lock(f"wheelhouse-{python}"):
        if not stamp.exists() or stamp.read_text() != "\n".join(wanted):
            shutil.rmtree(folder, ignore_errors=True)
            provision.log(f"fetching wheels for Python {python}")
            chosen = (*wanted, f"--dest={folder}", f"--python-version={python}")
            provision.pip("fetching wheels", "download", *chosen, "--only-binary=:all:")
            stamp.write_text("\n".join(wanted))
        for old in folder.glob("vllm_mamba_retire-*.whl"):
            old.unlink()
        shutil.copy(own_wheel(), folder)
    return folder


def own_wheel() -> Path:
    """Build this package's wheel and return its path."""
    folder = provision.CACHE / "wheel"
    with tempfile.TemporaryDirectory() as making:
        build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", making)
        provision.run("building this package", *build, str(provision.ROOT))
        (wheel,) = Path(making).glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, folder))
