"""The binding on a stand-in class: what goes on, what comes off, and who else is on the class."""

from __future__ import annotations

import functools
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_mamba_retire import binding


class Block:
    def __init__(self, null: bool = False) -> None:
        self.is_null = null


class Pool:
    def __init__(self) -> None:
        self.freed: list[Block] = []

    def free_blocks(self, blocks: Any) -> None:
        self.freed.extend(blocks)


def hierarchy(own_pop: bool = True) -> tuple[Any, Any]:
    """Classes shaped like vLLM's: the hook is on the base, the clean-up on the base or on both."""

    class Base:
        mamba_cache_mode = "align"

        def __init__(self) -> None:
            self._null_block = Block(null=True)
            self.block_pool = Pool()
            self.req_to_blocks: dict[str, list[Block]] = {}
            self.last_state_block_idx: dict[str, int] = {}
            self.calls: list[tuple[Any, ...]] = []

        def _remove_blocks_in_range(
            self, request_id: str, first_block: int, last_block: int
        ) -> None:
            self.calls.append(("base range", request_id, first_block, last_block))

        def pop_blocks_for_free(self, request_id: str) -> list[Block]:
            self.calls.append(("base pop", request_id))
            return self.req_to_blocks.pop(request_id, [])

    class MambaManager(Base):
        pass

    def pop_blocks_for_free(self: Any, request_id: str) -> list[Block]:
        self.calls.append(("own pop", request_id))
        return list(Base.pop_blocks_for_free(self, request_id))

    if own_pop:
        MambaManager.pop_blocks_for_free = pop_blocks_for_free  # type: ignore[method-assign]
    return Base, MambaManager


def with_table(manager_class: Any, nulls: str = ".-..") -> Any:
    manager = manager_class()
    manager.req_to_blocks["r"] = [manager._null_block if mark == "-" else Block() for mark in nulls]
    return manager


def test_installed_twice_is_one_installation() -> None:
    _, manager_class = hierarchy()
    done = binding.install(manager_class)
    after = dict(vars(manager_class))
    assert binding.install(manager_class) is done
    assert dict(vars(manager_class)) == after


def test_installation_is_of_the_very_class() -> None:
    _, manager_class = hierarchy()
    done = binding.install(manager_class)
    subclass = type("Sub", (manager_class,), {})
    assert binding.installation(manager_class) is done
    assert binding.installation(subclass) is None


def test_a_mark_of_another_make_is_no_installation() -> None:
    _, manager_class = hierarchy()
    manager_class.__mamba_retire__ = "something else"
    assert binding.installation(manager_class) is None


@pytest.mark.parametrize("own_pop", [True, False])
def test_taken_off_every_object_is_the_one_from_before(own_pop: bool) -> None:
    _, manager_class = hierarchy(own_pop)
    before = dict(vars(manager_class))
    binding.install(manager_class)
    assert binding.uninstall(manager_class)
    assert dict(vars(manager_class)) == before
    assert not binding.uninstall(manager_class)


def test_taken_off_live_managers_hold_what_they_held_before() -> None:
    _, manager_class = hierarchy()
    manager = with_table(manager_class)
    before = set(vars(manager))
    binding.install(manager_class)
    manager._remove_blocks_in_range("r", 0, 2)
    assert set(vars(manager)) - before
    binding.uninstall(manager_class)
    assert set(vars(manager)) == before
    binding.install(manager_class)
    manager._remove_blocks_in_range("r", 0, 3)
    assert manager._num_retired_blocks == {"r": 3}


@pytest.mark.parametrize("name", binding.RETIREMENT.methods)
def test_nothing_is_taken_off_when_somebody_came_after(name: str) -> None:
    _, manager_class = hierarchy()
    binding.install(manager_class)

    def theirs(self: Any) -> None: ...

    setattr(manager_class, name, theirs)
    after = dict(vars(manager_class))
    with pytest.raises(binding.BindingError, match=f"{name} was replaced .*theirs"):
        binding.uninstall(manager_class)
    assert dict(vars(manager_class)) == after


def test_a_class_without_the_methods_is_refused_untouched() -> None:
    bare = type("MambaManager", (), {})
    before = dict(vars(bare))
    with pytest.raises(binding.BindingError, match=r"MambaManager has no pop_blocks_for_free"):
        binding.install(bare)
    assert dict(vars(bare)) == before


@pytest.mark.parametrize(
    "theirs",
    [
        lambda self, request_id, first_block, last_block, reason="": None,
        lambda self, request_id, first_block: None,
        lambda self, *blocks: None,
    ],
)
def test_a_method_with_another_signature_is_refused_untouched(theirs: Any) -> None:
    _, manager_class = hierarchy()
    manager_class._remove_blocks_in_range = theirs
    before = dict(vars(manager_class))
    with pytest.raises(binding.BindingError, match=r"_remove_blocks_in_range takes \(self, "):
        binding.install(manager_class)
    assert dict(vars(manager_class)) == before


def test_a_method_of_ours_that_is_not_in_force_is_named() -> None:
    base, manager_class = hierarchy()
    binding.install(manager_class)
    assert binding.displaced_method(manager_class) is None
    ours = manager_class._remove_blocks_in_range
    del manager_class._remove_blocks_in_range
    assert binding.displaced_method(manager_class) == (
        f"_remove_blocks_in_range ({__name__}.{base.__qualname__}._remove_blocks_in_range)"
    )
    manager_class._remove_blocks_in_range = functools.wraps(ours)(lambda *args: ours(*args))
    assert "<lambda>" in str(binding.displaced_method(manager_class))


def test_another_copy_of_this_package_can_take_the_patch_off() -> None:
    _, manager_class = hierarchy()
    before = dict(vars(manager_class))
    done = binding.install(manager_class)
    spec = importlib.util.find_spec(binding.__name__)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    assert copy.Installation is not binding.Installation
    assert copy.installation(manager_class) is done
    assert copy.uninstall(manager_class)
    assert dict(vars(manager_class)) == before


def test_an_exempt_manager_is_not_counted() -> None:
    _, manager_class = hierarchy()
    done = binding.install(manager_class)
    manager = with_table(manager_class)
    binding.exempt(manager)
    manager._remove_blocks_in_range("r", 0, 2)
    assert len(manager.block_pool.freed) == 1
    assert done.counters.calls == 0


@pytest.mark.parametrize(
    ("own_pop", "calls"), [(True, ["own pop", "base pop"]), (False, ["base pop"])]
)
def test_the_end_of_a_request_goes_on_to_vllm_and_forgets(own_pop: bool, calls: list[str]) -> None:
    _, manager_class = hierarchy(own_pop)
    binding.install(manager_class)
    manager = with_table(manager_class)
    table = list(manager.req_to_blocks["r"])
    manager._remove_blocks_in_range("r", 0, 2)
    assert manager._num_retired_blocks == {"r": 2}
    popped = manager.pop_blocks_for_free("r")
    assert [call[0] for call in manager.calls] == calls
    assert popped == [manager._null_block, manager._null_block, *table[2:]]
    assert manager._num_retired_blocks == {}
    assert manager._mamba_retirement.tables == {}


def test_the_range_goes_to_the_retirement_and_not_to_the_base() -> None:
    _, manager_class = hierarchy()
    done = binding.install(manager_class)
    manager = with_table(manager_class)
    first = manager.req_to_blocks["r"][0]
    manager._remove_blocks_in_range("r", 0, 2)
    assert manager.block_pool.freed == [first]
    assert manager.calls == []
    assert done.counters.calls == 1
    manager._remove_blocks_in_range("unknown", 0, 2)
    assert done.counters.calls == 1
    assert manager._num_retired_blocks == {"r": 2}


def test_a_state_that_stock_frees_too_is_not_counted_as_kept() -> None:
    _, manager_class = hierarchy()
    done = binding.install(manager_class)
    manager = with_table(manager_class)
    manager.last_state_block_idx["r"] = 0
    manager._remove_blocks_in_range("r", 0, 2)
    assert (done.counters.states_freed, done.counters.states_stock_would_keep) == (1, 0)


def test_other_modes_are_vllms() -> None:
    _, manager_class = hierarchy()
    done = binding.install(manager_class)
    manager = with_table(manager_class)
    manager.mamba_cache_mode = "all"
    manager._remove_blocks_in_range("r", 1, 2)
    assert manager.calls == [("base range", "r", 1, 2)]
    assert done.counters.calls == 0


def test_methods_are_named_as_vllms_and_known_as_ours() -> None:
    _, manager_class = hierarchy()
    binding.install(manager_class)
    for name in binding.RETIREMENT.methods:
        method = vars(manager_class)[name]
        assert method.__qualname__ == f"{manager_class.__qualname__}.{name}"
        assert binding.is_ours(method)


def test_a_wrapper_around_ours_is_not_ours() -> None:
    _, manager_class = hierarchy()
    ours = binding.install(manager_class).after[binding.REMOVE_RANGE]

    @functools.wraps(ours)
    def wrapper(*args: Any) -> Any:
        return ours(*args)

    def stranger() -> None: ...

    answers = SimpleNamespace(**{"__mamba_retire__": True})
    assert not binding.is_ours(wrapper)
    assert not binding.is_ours(stranger)
    assert not binding.is_ours(answers)


def test_vllms_own_class_is_found_behind_a_rebound_name() -> None:
    base, manager_class = hierarchy()
    subclass = type("AscendMambaManager", (manager_class,), {"__module__": "ascend"})
    namesake = type("MambaManager", (manager_class,), {"__module__": "ascend"})
    assert binding.defining_class(subclass, __name__) is manager_class
    assert binding.defining_class(namesake, __name__) is manager_class
    assert binding.defining_class(base, __name__) is base


def test_foreign_methods_are_named_with_whose_they_are() -> None:
    base, manager_class = hierarchy()
    names = ("missing", *binding.RETIREMENT.methods)
    assert binding.foreign_method(manager_class, names, __file__) is None
    binding.install(manager_class)
    assert binding.foreign_method(manager_class, names, __file__) is None
    base.pop_blocks_for_free = functools.partialmethod(max)
    assert binding.foreign_method(base, names, __file__) == (
        "pop_blocks_for_free (functools.partialmethod)"
    )
    base.pop_blocks_for_free = functools.update_wrapper
    assert binding.foreign_method(base, names, __file__) == (
        "pop_blocks_for_free (functools.update_wrapper)"
    )


def test_what_answers_for_our_code_is_foreign() -> None:
    """An object wrapper forwards even ``__code__`` to what it wraps."""
    _, manager_class = hierarchy()

    class Wrapper:
        def __init__(self, wrapped: Any) -> None:
            self.__code__ = wrapped.__code__

    manager_class.pop_blocks_for_free = Wrapper(vars(manager_class)["pop_blocks_for_free"])
    found = binding.foreign_method(manager_class, ("pop_blocks_for_free",), __file__)
    assert found == f"pop_blocks_for_free ({__name__}.{Wrapper.__qualname__})"


def test_overriding_subclasses_are_found_at_any_depth() -> None:
    _, manager_class = hierarchy()
    middle = type("Middle", (manager_class,), {"other": None, "__module__": "them"})
    deep = type("Deep", (middle,), {"pop_blocks_for_free": None, "__module__": "them"})
    assert list(binding.overriding_subclasses(manager_class)) == ["them.Deep.pop_blocks_for_free"]
    assert deep.__mro__[1] is middle


def test_a_method_that_names_no_module_is_described_by_its_type() -> None:
    nameless = SimpleNamespace(__module__=None)
    assert binding.describe(nameless) == "types.SimpleNamespace"


def test_a_method_is_described_by_the_code_that_runs() -> None:
    @functools.wraps(Pool.free_blocks)
    def wrapper(self: Pool, blocks: Any) -> None: ...

    assert binding.describe(Pool.free_blocks) == f"{__name__}.Pool.free_blocks"
    assert binding.describe(wrapper) == f"{__name__}.wrapper"
    assert binding.describe(len) == "builtins.len"  # has no attributes of its own to look through
    assert binding.describe(SimpleNamespace(__wrapped__=Pool.free_blocks)) == (
        "types.SimpleNamespace"
    )
