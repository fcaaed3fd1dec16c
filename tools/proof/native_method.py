"""Installs 0.30.0's own retirement method on an older release, for comparison.

Apart from retirement, older releases differ from 0.30.0 in what sparse retention keeps, in partial
tails and more. There the patch is compared with the upstream method on the older release's code:
both must be equal in every step. The text of the method is read from an installed 0.30.0 when a
comparison runs; it is not kept here.
"""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType
from typing import Any

_CLASS = "MambaManager"
_METHOD = "_remove_blocks_in_range"


def graft(module: ModuleType, native_source: Path) -> None:
    """Give `MambaManager`, in align mode, the method of another release.

    Args:
        module: the imported ``single_type_kv_cache_manager``.
        native_source: that file of the release whose method is wanted.
    """
    own: Any = getattr(module, _CLASS)
    # Indented as it stands in its class; its `super()` is for other modes than align and unused.
    namespace = dict(vars(module))
    exec(f"class Source:\n{_method_text(native_source)}\n", namespace)
    setattr(own, _METHOD, vars(namespace["Source"])[_METHOD])
    own.__init__ = _with_watermarks(own.__init__)
    own.pop_blocks_for_free = _forgetting(own.pop_blocks_for_free)


def _method_text(source: Path) -> str:
    text = source.read_text()
    (owner,) = (
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == _CLASS
    )
    (method,) = (
        node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == _METHOD
    )
    lines = text.splitlines()[method.lineno - 1 : method.end_lineno]
    return "\n".join(lines)


def _with_watermarks(init: Any) -> Any:
    def with_watermarks(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._num_retired_blocks = {}

    return with_watermarks


def _forgetting(pop: Any) -> Any:
    def pop_blocks_for_free(self: Any, request_id: str) -> Any:
        self._num_retired_blocks.pop(request_id, None)
        return pop(self, request_id)

    return pop_blocks_for_free
