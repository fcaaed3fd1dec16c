"""Stand-in for torchvision, whose wheel does not load beside a CPU build of torch: names only."""

import sys
from importlib.abc import Loader, MetaPathFinder
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


class _Finder(MetaPathFinder, Loader):
    """Finds every submodule."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        ours = fullname.startswith("torchvision.")
        return ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


__version__ = "0.28.0"
sys.meta_path.append(_Finder())
