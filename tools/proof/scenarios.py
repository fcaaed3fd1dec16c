"""Makes random traffic for a release's own scheduler, as scenarios of the replay.

Does not depend on vLLM. Several requests that share prefixes use a pool that is often too small;
lags of 0 to 3, n-gram drafts that are partly rejected, one to three Mamba groups, every retention
setting.
"""

from __future__ import annotations

import random
from dataclasses import replace

from vllm_mamba_retire.replay.scenario import Arrival, Scenario


def seeded(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    draw = random.Random(f"scheduler {seed}")
    block = draw.choice([16, 32])
    arrivals = tuple(
        Arrival(
            id=f"r{number}",
            prompt=draw.randrange(1, 40 * block),
            output=draw.randrange(1, 3 * block),
            at=draw.randrange(30),
            text=f"text {draw.randrange(3)}",
            shared=draw.randrange(30) * block,
        )
        for number in range(draw.randrange(2, 7))
    )
    spec = draw.choice([0, 0, 1, 3])
    ample = Scenario(
        id=f"seed {seed}",
        block=block,
        budget=block * draw.randrange(1, 7) + draw.randrange(block),
        arrivals=arrivals,
        spec=spec,
        drafter="ngram",
        accepted=draw.randrange(spec + 1),
        lag=draw.choice([0, 1, 2, 3]),
        groups=draw.choice([1, 2, 3]),
        retention_interval=draw.choice(["dense", 0, 4 * block]),
    )
    slack = draw.choice([4, 16, 64])
    return replace(ample, pool=ample.least_pool + slack)
