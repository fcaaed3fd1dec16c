"""Patches a pinned vLLM with the upstream fix for Mamba state retirement (vllm#55450).

Importing this package arms the patch: vLLM's manager module is patched at once if it is imported,
else when it gets imported. The import itself loads neither vLLM nor torch.
"""

from __future__ import annotations

import os
import sys

from ._version import __version__
from .names import MANAGER_MODULE, MODE_VARIABLE, read_mode

TYPE_CHECKING = False  # as in typing, which alone would take most of the time of this import
if TYPE_CHECKING:
    from typing import Any

    from .record import Record
    from .verdict import Verdict

__all__ = ["__version__", "activate", "arm", "current", "deactivate"]


def arm() -> None:
    """Patch vLLM's manager now, or as soon as it is imported. Idempotent.

    Raises:
        activation.RequireFailed: ``MAMBA_RETIRE=require`` and vLLM may leak here.
    """
    if is_off():
        return
    if read_mode(os.environ.get(MODE_VARIABLE)) == "require" and "vllm" not in sys.modules:
        from .activation import require_target

        require_target()
    if MANAGER_MODULE in sys.modules:
        activate()
    elif "vllm" in sys.modules:
        _hook_manager_import()
    elif not any(isinstance(finder, _FirstVllmImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FirstVllmImport())


def disarm() -> None:
    """Stop waiting for the first import of vLLM; of no effect once that has begun."""
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _FirstVllmImport)]


def is_off() -> bool:
    """Whether ``MAMBA_RETIRE=off``."""
    return read_mode(os.environ.get(MODE_VARIABLE)) == "off"


def activate() -> Verdict | None:
    """Decide about the imported vLLM and patch it where that is right.

    Returns:
        The verdict; None where vLLM's manager module is not imported yet.

    Raises:
        activation.RequireFailed: ``MAMBA_RETIRE=require`` and vLLM may leak here.
    """
    if MANAGER_MODULE not in sys.modules:
        return None
    from . import activation

    return activation.activate()


def deactivate() -> bool:
    """Remove the patch; vLLM's methods are the identical objects as before.

    Returns:
        Whether the class was patched.

    Raises:
        binding.BindingError: other code replaced our methods since; nothing is changed.
    """
    from . import activation

    return activation.deactivate()


def current() -> Record | None:
    """What was decided in this process; None before vLLM's manager module is imported."""
    from . import activation

    return activation.current()


class _FirstVllmImport:
    """Sets the post-import hook at the first import of vLLM.

    wrapt takes several times longer to import than this whole package may; it is loaded when vLLM
    is, which takes seconds anyway.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "vllm":
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _hook_manager_import()


def _hook_manager_import() -> None:
    try:
        import wrapt

        wrapt.register_post_import_hook(lambda _module: activate(), MANAGER_MODULE)
    except Exception as error:  # a broken wrapt must not break the import of vLLM
        from .activation import report_error

        report_error(error)


arm()
