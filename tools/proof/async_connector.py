"""A KV connector without a transport: it says when blocks are loaded and saved, and moves nothing.

vLLM's connector factory loads it by the name of this module. Half of the prompts are found
"elsewhere" up to a block boundary and are loaded asynchronously; half of the requests that end keep
their blocks until they are "saved". Loads and saves take one to three steps.
"""

from __future__ import annotations

import random
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput

_LONGEST = 3  # steps that a transfer takes; a replay is stuck after more without a token


class AsyncConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc,unused-ignore]
    """The scheduler's side; there is no worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.block = vllm_config.cache_config.block_size
        self.draw = random.Random(self._kv_transfer_config.kv_connector_extra_config["seed"])
        self.loading: dict[str, int] = {}  # steps left, by request
        self.saving: dict[str, int] = {}
        self.lost_offers = 0  # states offered for saving whose block has another owner by then

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.pool = gpu_block_pool

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        blocks = (request.num_tokens - 1) // self.block - num_computed_tokens // self.block
        if blocks < 1 or self.draw.random() < 0.5:
            return 0, False
        return self.draw.randint(1, blocks) * self.block, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ARG002
        if num_external_tokens:
            self.loading[request.request_id] = self.draw.randint(1, _LONGEST)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        state = getattr(scheduler_output, "kv_connector_block_state", None)  # >= 0.29
        for offers in state.boundary_state_offloads.values() if state else ():
            for _group, block, _tokens in offers:
                self.lost_offers += self.pool.blocks[block].block_hash is None
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: Any,  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        if request.request_id in self.loading or self.draw.random() < 0.5:
            return False, None
        self.saving[request.request_id] = self.draw.randint(1, _LONGEST)
        return True, None

    def step(self) -> Any:
        """One step passed; returns what ended with it, as a worker reports it."""
        return KVConnectorOutput(
            finished_sending=_ended(self.saving), finished_recving=_ended(self.loading)
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...


def _ended(transfers: dict[str, int]) -> set[str]:
    for request in transfers:
        transfers[request] -= 1
    ended = {request for request, steps in transfers.items() if steps == 0}
    for request in ended:
        del transfers[request]
    return ended
