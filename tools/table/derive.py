"""Derives the generated fields of a row from the wheels that the registry has for a release."""

from __future__ import annotations

import ast
import hashlib
from typing import Any

from packaging.requirements import Requirement

from tools.env.provision import ProvisionError
from tools.env.registry import builds, open_build
from vllm_mamba_retire.fingerprint import call_basis, fingerprints
from vllm_mamba_retire.releases import Hook, Status

_BASE, _MAMBA = "SingleTypeKVCacheManager", "MambaManager"

Facts = dict[str, Any]


def facts(version: str, methods: tuple[str, ...]) -> Facts:
    """Return every generated field of a release, in the matrix's order.

    Raises:
        ProvisionError: no wheel, or its builds differ in a field that a row has once.
    """
    published = builds("vllm", version)
    if not published:
        raise ProvisionError(f"vllm {version} has no wheel")
    each = {}
    for build in published:
        opened = open_build(build)
        metadata = opened.metadata
        each[build.name] = {
            "requires_python": str(metadata["Requires-Python"]),
            "torch": _torch(metadata.get_all("Requires-Dist") or []),
            "manager_sha256": hashlib.sha256(opened.manager).hexdigest(),
            **_shape(opened.manager.decode(), methods),
            "call_basis": call_basis(opened.callers, "remove_skipped_blocks"),
        }
    first, *others = each.items()
    for name, found in others:
        for field, value in found.items():
            if value != first[1][field]:
                raise ProvisionError(f"{name} differs from {first[0]} in {field}")
    wheels = [{"name": build.name, "sha256": build.sha256} for build in published]
    return {**first[1], "wheels": wheels}


def code_status(source: str) -> Status | None:
    """Return absent or native, from the code; None if only a run can tell live from latent."""
    if "mamba_cache_mode" not in source:
        return Status.ABSENT
    return Status.NATIVE if _hook(_methods(source)) is Hook.OWN else None


def _shape(source: str, methods: tuple[str, ...]) -> Facts:
    shape: Facts = {}
    if code_status(source) is not Status.ABSENT:
        defined = _methods(source)
        shape["hook"] = _hook(defined).value
        popped = f"{_BASE}.pop_blocks_for_free" in defined
        shape["cleanup"] = "pop_blocks_for_free" if popped else "free"
        arguments = defined[f"{_MAMBA}.remove_skipped_blocks"].args.args
        shape["arguments"] = [argument.arg for argument in arguments[2:]]  # self, request_id
    return {**shape, "fingerprints": fingerprints(source, methods)}


def _hook(defined: dict[str, ast.FunctionDef]) -> Hook:
    if f"{_MAMBA}._remove_blocks_in_range" in defined:
        return Hook.OWN
    return Hook.INHERITED if f"{_BASE}._remove_blocks_in_range" in defined else Hook.INLINE


def _methods(source: str) -> dict[str, ast.FunctionDef]:
    return {
        f"{owner.name}.{method.name}": method
        for owner in ast.parse(source).body
        if isinstance(owner, ast.ClassDef)
        for method in owner.body
        if isinstance(method, ast.FunctionDef)
    }


def _torch(lines: list[str]) -> str:
    wanted = [Requirement(line) for line in lines]
    return next((str(line.specifier) for line in wanted if line.name == "torch"), "")
