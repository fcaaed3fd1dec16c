"""Runs a sequence on the `KVCacheManager` of the vLLM imported in this process.

This module stands in for the scheduler: chunk ends of align mode, steps in flight, rejected drafts,
preemption. States are retired by the methods that vLLM's class has when it runs; this module does
not depend on which fix that is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tools.proof.sequences import OPERATIONS, ManagerShape, Operation
from vllm_mamba_retire.probe import call_known

_IDS = 8
_TEXTS = 3
_LONGEST = 14  # blocks of a prompt
_MAX_TOKENS = 40  # blocks of a request, output included
_OWN = 1 << 20  # token ids above are a request's own
_CHUNK = 5  # most blocks of a prefill chunk

Snapshot = tuple[Any, ...]


@dataclass(slots=True)
class Client:
    """A request with its steps in flight, as ``(tokens, draft tokens)``, oldest first."""

    request: Any
    in_flight: deque[tuple[int, int]] = field(default_factory=deque)

    @property
    def processed(self) -> int:
        """Tokens whose steps are settled."""
        request = self.request
        return int(max(0, request.num_computed_tokens - request.num_in_flight_tokens))


class Traffic:
    """One manager with its requests."""

    def __init__(self, geometry: ManagerShape) -> None:
        self.geometry = geometry
        self.cache = _build_cache(geometry)
        self.pool = self.cache.block_pool
        self.managers = self.cache.coordinator.single_type_managers
        self.mamba = self.managers[: geometry.groups]
        self.hasher = _hasher(geometry.hash_block)
        self.running: dict[str, Client] = {}
        self.preempted: dict[str, Client] = {}
        self.popped: deque[list[Any]] = deque()
        self.born = 0
        self.carry_out = {name: getattr(self, f"_{name.replace(' ', '_')}") for name in OPERATIONS}

    def do(self, operation: Operation) -> str:
        """Run one operation and return its result in a word."""
        name, a, b, c = operation
        answer: str = self.carry_out[name](a, b, c)
        return answer

    def snapshot(self) -> Snapshot:
        """Return everything that must be equal: tables, references, free queue, hashes.

        Blocks are given by their number in the pool; the null block is 0.
        """
        pool = self.pool
        return (
            tuple(
                tuple(
                    (request, tuple([block.block_id for block in table]))
                    for request, table in sorted(manager.req_to_blocks.items())
                )
                for manager in self.managers
            ),
            tuple([block.ref_cnt for block in pool.blocks[1:]]),
            tuple([block.block_id for block in pool.free_block_queue.get_all_free_blocks()]),
            tuple([block.block_hash for block in pool.blocks]),
        )

    def finish_all(self) -> None:
        """End every request and free everything."""
        self._step(0, 0, 0)
        for client in self.running.values():
            self.cache.free(client.request)
        self.running.clear()
        while self.popped:
            self.pool.free_blocks(reversed(self.popped.popleft()))

    def _pick(self, clients: dict[str, Client], number: int) -> Client | None:
        names = list(clients)
        return clients[names[number % len(names)]] if names else None

    def _admit(self, a: int, b: int, c: int) -> str:
        name = f"r{a % _IDS}"
        if name in self.running or name in self.preempted:
            return "busy"
        block = self.geometry.block
        length = 1 + c * _LONGEST * block // 64
        shared = b // _TEXTS * block * _LONGEST // 20
        self.born += 1
        text = range((b % _TEXTS) * (_OWN // 4), (b % _TEXTS) * (_OWN // 4) + min(shared, length))
        own = range(_OWN * (1 + self.born), _OWN * (1 + self.born) + length - len(text))
        client = Client(_request(name, [*text, *own], self.hasher))
        return self._start(client, a)

    def _resume(self, a: int, b: int, c: int) -> str:
        client = self._pick(self.preempted, a)
        return self._start(client, b) if client else "nobody"

    def _start(self, client: Client, number: int) -> str:
        """Schedule the first chunk of a waiting request: prefix-cache hit, then allocation."""
        request = client.request
        blocks, hit, *rest = self.cache.get_computed_blocks(request)
        if rest and hasattr(request, "shared_prefix_boundary"):
            request.shared_prefix_boundary = rest[0]
        tokens = self._chunk_tokens(request, hit, number)
        if self._allocate(client, tokens, hit, blocks) is None:
            return "no room"
        self.preempted.pop(request.request_id, None)
        self.running[request.request_id] = client
        return f"hit {hit}"

    def _chunk(self, a: int, b: int, c: int) -> str:
        client = self._pick(self.running, a)
        if client is None:
            return "nobody"
        if len(client.in_flight) > self.geometry.lag:
            return "queue full"
        request = client.request
        start, spec = request.num_computed_tokens, self.geometry.spec
        if start >= _MAX_TOKENS * self.geometry.block:
            return "long enough"
        if start < max(request.num_prompt_tokens, request.num_tokens - 1):
            return self._allocate(client, self._chunk_tokens(request, start, b)) or "no room"
        drafts = min(spec, b % (spec + 1))
        return self._allocate(client, 1 + drafts, drafts=drafts) or "no room"

    def _chunk_tokens(self, request: Any, start: int, number: int) -> int:
        """Return the tokens of the next prefill chunk, cut as align mode cuts it."""
        block, fine = self.geometry.block, self.geometry.hash_block
        end = max(request.num_prompt_tokens, request.num_tokens - 1, start + 1)
        last = request.num_tokens // block * block
        if self.geometry.eagle:
            last = max(0, last - block)
        stops = [(start // block + 1 + number % _CHUNK) * block, end]
        if start < last:
            stops.append(last)
        tail = request.num_prompt_tokens // fine * fine
        if fine < block and start < tail:
            stops.append(tail)
        return int(min(stops)) - start

    def _allocate(
        self, client: Client, tokens: int, hit: int = 0, blocks: Any = None, drafts: int = 0
    ) -> str | None:
        request = client.request
        given = self.cache.allocate_slots(
            request,
            tokens,
            num_new_computed_tokens=hit,
            new_computed_blocks=blocks,
            num_lookahead_tokens=self.geometry.spec if self.geometry.eagle else 0,
        )
        if given is None:
            return None
        request.num_computed_tokens += hit + tokens
        request.num_in_flight_tokens += tokens
        client.in_flight.append((tokens, drafts))
        return "given " + " ".join(str(len(group)) for group in given.blocks)

    def _settle(self, a: int, b: int, c: int) -> str:
        client = self._pick(self.running, a)
        if client is None or not client.in_flight:
            return "nothing in flight"
        request = client.request
        tokens, drafts = client.in_flight.popleft()
        request.num_in_flight_tokens -= tokens
        accepted = b % (drafts + 1)
        request.num_computed_tokens -= drafts - accepted
        if client.processed < request.num_tokens:
            return "chunk done"
        for index in range(1 + accepted):
            request.append_output_token_ids(_OWN * 1000 + request.num_tokens * _IDS + index)
        return f"accepted {accepted}"

    def _retire(self, a: int, b: int, c: int) -> str:
        client = self._pick(self.running, a)
        if client is None:
            return "nobody"
        self.cache.remove_skipped_blocks(client.request.request_id, client.processed)
        return "retired"

    def _finish(self, a: int, b: int, c: int) -> str:
        client = self._pick(self.running, a)
        if client is None:
            return "nobody"
        del self.running[client.request.request_id]
        self.cache.free(client.request)
        return "finished"

    def _preempt(self, a: int, b: int, c: int) -> str:
        client = self._pick(self.running, a)
        if client is None:
            return "nobody"
        request = client.request
        del self.running[request.request_id]
        self.cache.free(request)
        request.num_computed_tokens = request.num_in_flight_tokens = 0
        client.in_flight.clear()
        self.preempted[request.request_id] = client
        return "preempted"

    def _roll_back(self, a: int, b: int, c: int) -> str:
        client = self._pick(self.running, a)
        if client is None or client.in_flight:
            return "nobody"
        request, block = client.request, self.geometry.block
        request.num_computed_tokens -= min(1 + b % (2 * block), request.num_computed_tokens)
        return "rolled back"

    def _pop(self, a: int, b: int, c: int) -> str:
        client = self._pick(self.running, a)
        if client is None:
            return "nobody"
        del self.running[client.request.request_id]
        self.popped.append(self.cache.pop_blocks_for_free(client.request))
        return "popped"

    def _free_popped(self, a: int, b: int, c: int) -> str:
        if not self.popped:
            return "nothing"
        self.pool.free_blocks(reversed(self.popped.popleft()))
        return "freed"

    def _step(self, a: int, b: int, c: int) -> str:
        # The worker has made the copies by then, and the scheduler gives their blocks back.
        _, retained = self.cache.take_kv_cache_block_copies()
        self.pool.free_blocks(retained)
        self.cache.new_step_starts()
        return "step"

    def _reset(self, a: int, b: int, c: int) -> str:
        return str(self.cache.reset_prefix_cache())


def _request(name: str, tokens: list[int], hasher: Any) -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1 << 20, ignore_eos=True),
        pooling_params=None,
        block_hasher=hasher,
    )


def _hasher(hash_block: int) -> Any:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(hash_block, sha256)


def _build_cache(geometry: ManagerShape) -> Any:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
    )

    state = MambaSpec(
        block_size=geometry.block,
        shapes=((1,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        num_speculative_blocks=geometry.spec,
    )
    attention = FullAttentionSpec(
        block_size=geometry.block, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    groups = [KVCacheGroupSpec([f"mamba {index}"], state) for index in range(geometry.groups)]
    cache = call_known(
        KVCacheManager,
        kv_cache_config=KVCacheConfig(
            num_blocks=geometry.pool,
            kv_cache_tensors=[],
            kv_cache_groups=[*groups, KVCacheGroupSpec(["attention"], attention)],
        ),
        max_model_len=1 << 16,
        scheduler_block_size=geometry.block,
        hash_block_size=geometry.hash_block,
        enable_caching=True,
        use_eagle=geometry.eagle,
        log_stats=False,
    )
    # An environment variable up to 0.28, a field of the configuration from 0.29 on.
    cache.coordinator.retention_interval = geometry.retention
    return cache
