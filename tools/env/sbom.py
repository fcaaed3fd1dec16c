"""Writes a CycloneDX document of what is installed with this package.

It is read from an environment with the newest versions of the dependencies. Identical environments
give identical documents, without time and serial number.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from tools.env import provision
from vllm_mamba_retire import __version__

_OWN = "vllm-mamba-retire"


def main() -> int:
    """Write the document; fail if a dependency is missing in it."""
    parser = argparse.ArgumentParser(prog="nox -s sbom --", description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="of the environment to describe")
    parser.add_argument("--out", type=Path, default=provision.ROOT / "dist" / "sbom.cdx.json")
    options = parser.parse_args()
    document = describe(options.python)
    wanted = {canonicalize_name(line.name) for line in provision.requirements_of(_site(), _OWN)}
    if missing := wanted - {canonicalize_name(part["name"]) for part in document["components"]}:
        print(f"left out: {', '.join(sorted(missing))}", file=sys.stderr)
        return 1
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=2) + "\n")
    print(f"{options.out}: {len(document['components'])} components")
    return 0


def describe(python: Path) -> dict[str, Any]:
    """Return the document of an environment, without what this package does not need (pip)."""
    tool = [
        *(sys.executable, "-m", "cyclonedx_py", "environment", str(python)),
        *("--pyproject", str(provision.ROOT / "pyproject.toml"), "--mc-type", "library"),
        *("--output-reproducible", "--validate", "--output-format", "JSON"),
    ]
    document: dict[str, Any] = json.loads(subprocess.check_output(tool))
    own = document["metadata"]["component"]
    own["version"] = __version__  # in pyproject.toml it is dynamic
    below = {entry["ref"]: entry.get("dependsOn", ()) for entry in document["dependencies"]}
    reached: set[str] = set()
    waiting = [own["bom-ref"]]
    while waiting:
        if (reference := waiting.pop()) not in reached:
            reached.add(reference)
            waiting += below[reference]
    document["components"] = [c for c in document["components"] if c["bom-ref"] in reached]
    document["dependencies"] = [d for d in document["dependencies"] if d["ref"] in reached]
    return document


def _site() -> Path:
    """Where this package was imported from, as it is installed."""
    return Path(sys.modules["vllm_mamba_retire"].__path__[0]).parent


if __name__ == "__main__":
    raise SystemExit(main())
