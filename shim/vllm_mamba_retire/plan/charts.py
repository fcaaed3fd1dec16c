"""Draws states and blocks of a deployment over the prompt length, by closed form."""

from __future__ import annotations

from pathlib import Path

from vllm_mamba_retire.replay.charts import LOOK, finish, subplots

from .deployment import Deployment

_POINTS = 400


def draw_growth(deployment: Deployment, path: Path) -> None:
    """Write the closed-form chart of a deployment: states and blocks over the prompt length.

    Raises:
        InputError: matplotlib is not installed, or cannot write that format.
    """
    figure, (states, blocks) = subplots()
    geometry = deployment.geometry
    prompts = range(0, deployment.prompt + 1, max(deployment.prompt // _POINTS, 1))
    for side, held in (("stock", geometry.stock_states), ("fixed", geometry.fixed_states)):
        states.plot(prompts, [held(prompt) for prompt in prompts], label=side, **LOOK[side])
        needed = [geometry.pool(prompt, held(prompt)) for prompt in prompts]
        blocks.plot(prompts, needed, label=side, **LOOK[side])
    if deployment.pool is not None:
        blocks.axhline(deployment.pool, color="black", linewidth=0.8, label="pool")
    states.set_ylabel("live states of one request,\nper Mamba group (bound)")
    states.set_title(f"block {deployment.block}, budget {deployment.budget}, lag {deployment.lag}")
    blocks.set_ylabel("blocks needed")
    blocks.set_xlabel("prompt (tokens)")
    finish(figure, path)
