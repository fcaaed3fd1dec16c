"""Which module of this repository imports which, read from the source text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "vllm_mamba_retire"
# What a vLLM process loads of the package, in the order in which data flows: none of these imports
# one behind it.
KEEP = ("keep", "keep_binding", "keep_probe", "keep_verdict")
LOADED = (
    *("_version", "names", "files", "target", "fingerprint", "releases", "evidence", "verdict"),
    *(
        "retirement",
        "binding",
        "probe",
        *KEEP,
        "identity",
        "records",
        "prometheus",
        "activation",
        "plugin",
    ),
)


def modules() -> dict[str, Path]:
    """Dotted name -> file, of the package, the tools and the tests."""
    found = {}
    for base, top in ((ROOT / "shim", PACKAGE), (ROOT, "tools"), (ROOT, "tests")):
        for path in (base / top).rglob("*.py"):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def graph() -> dict[str, set[str]]:
    """Module -> modules of this repository that it imports, anywhere in its text."""
    known = modules()
    return {
        name: {target for target in _imported(name, path) if target in known} - {name}
        for name, path in known.items()
    }


def _imported(name: str, path: Path) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    known = modules()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            submodules = {f"{base}.{alias.name}" for alias in node.names} & set(known)
            yield from submodules
            if len(submodules) < len(node.names):  # names that the package itself defines
                yield base
