"""Stand-in for torchvision, whose wheel does not load beside a CPU build of torch: names only."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Name(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})


class _Finder:
    """Finds every submodule."""

    def find_spec(self, name: str, _path: Any, _target: Any = None) -> Any:
        return ModuleSpec(name, self, is_package=True) if name.startswith("torchvision.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, _module: ModuleType) -> None:
        pass


__version__ = "0.28.0"
sys.meta_path.append(_Finder())
