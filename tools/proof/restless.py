"""Traffic that leaves steps in flight behind: a replay with sessions, aborts, resets, a connector.

Added to the random scenarios of `scenarios`: a lag of 1 to 3, drafts of which another part is
accepted in each step, sessions that append input, aborts, resets of the prefix cache with requests
running, and in every second scenario a connector that loads and saves asynchronously.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import vllm

from tools.proof.scenarios import seeded
from vllm_mamba_retire.replay.scenario import Arrival
from vllm_mamba_retire.replay.scheduler import Replay

_SESSION = 0.3  # chance per request
_ABORT, _RESET, _APPEND = 0.02, 0.01, 0.1  # chances per step


class RestlessReplay(Replay):
    """A replay of one seed; `counts` says how often what was done."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.draw = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.updates: dict[str, list[Any]] = {}  # input still to be appended, by session
        scenario = seeded(seed)
        super().__init__(replace(scenario, lag=max(1, scenario.lag)))

    @property
    def connected(self) -> bool:
        """Whether there is a connector."""
        return bool(self.seed % 2)

    def _configure(self) -> Any:
        from vllm.config import KVTransferConfig

        config = super()._configure()
        if self.connected:
            config.kv_transfer_config = KVTransferConfig(
                kv_connector="AsyncConnector",
                kv_connector_module_path="tools.proof.async_connector",
                kv_role="kv_both",
                kv_connector_extra_config={"seed": self.seed},
            )
        return config

    def _request(self, arrival: Arrival) -> Any:
        # A session that stops with drafts in flight is not consistent in vLLM itself.
        if self.scenario.spec or arrival.prompt < 2 or self.draw.random() > _SESSION:
            return super()._request(arrival)
        half, output = arrival.prompt // 2, -(-arrival.output // 2)
        first, second, end = (
            super(RestlessReplay, self)._request(replace(arrival, prompt=tokens, output=output))
            for tokens in (half, arrival.prompt - half, 1)
        )
        first.resumable = second.resumable = True
        self.updates[arrival.id] = [second, end]
        return first

    def _admit(self) -> None:
        from vllm.v1.request import RequestStatus

        alive = [each for each in self.scheduler.requests.values() if not each.is_finished()]
        if alive and self.draw.random() < _ABORT:
            self.abort(alive.pop(self.draw.randrange(len(alive))))
        if self.scheduler.running and self.draw.random() < _RESET:
            self.reset()
        for request in alive:
            updates = self.updates.get(request.request_id)
            waits = request.status == RequestStatus.WAITING_FOR_STREAMING_REQ
            if updates and (waits or self.draw.random() < _APPEND):
                self.scheduler.add_request(updates.pop(0))
                self.counts["appended"] += 1
        super()._admit()

    def abort(self, request: Any) -> None:
        """The client of a request goes away."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        self.counts["aborted"] += 1

    def reset(self) -> None:
        """Empty the prefix cache; running requests start again."""
        if len(self.in_flight) > 1 and vllm.__version__.startswith("0.26."):
            return  # its scheduler then counts placeholders below zero and stops, also stock
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
        except RuntimeError:  # a load, a save or a waiting session still holds blocks
            self.counts["resets that left blocks"] += 1
        self.counts["resets"] += 1

    def _samples(self, output: Any) -> dict[str, int]:
        most = super()._samples(output)
        return {name: count and self.draw.randint(1, count) for name, count in most.items()}

    def _settle(self, output: Any, samples: dict[str, int]) -> None:
        super()._settle(output, samples)
        if self.connected:
            ended = self.scheduler.connector.step()
            self.counts["loaded"] += len(ended.finished_recving)
            self.counts["saved"] += len(ended.finished_sending)
            self.counts["offers lost"] = self.scheduler.connector.lost_offers
            self.scheduler._update_from_kv_xfer_finished(ended)
