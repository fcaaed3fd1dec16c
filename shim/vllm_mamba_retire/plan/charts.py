"""Draws states and blocks of a deployment over the prompt length, by closed form."""

from __future__ import annotations

from pathlib import Path

from vllm_mamba_retire.replay.drawing import LOOK, finish, subplots
from vllm_mamba_retire.replay.scenario import InputError

from .deployment import Deployment

_POINTS = 400


def draw_growth(deployment: Deployment, path: Path) -> None:
    """Write the closed-form chart of a deployment: states and blocks over the prompt length.

    Raises:
        InputError: a figure is missing, matplotlib is not installed, or cannot write that format.
    """
    if deployment.missing:
        raise InputError(f"chart: not known: give {', '.join(deployment.missing)}.")
    figure, (states, blocks) = subplots()
    geometry, prompt = deployment.geometry, deployment.prompt
    assert prompt is not None
    prompts = range(0, prompt + 1, max(prompt // _POINTS, 1))
    for side, held in (("stock", geometry.stock_states), ("fixed", geometry.fixed_states)):
        states.plot(prompts, [held(tokens) for tokens in prompts], label=side, **LOOK[side])
        needed = [geometry.pool(tokens, held(tokens)) for tokens in prompts]
        blocks.plot(prompts, needed, label=side, **LOOK[side])
    if deployment.pool is not None:
        blocks.axhline(deployment.pool, color="black", linewidth=0.8, label="pool")
    states.set_ylabel("live states of one request,\nper Mamba group (bound)")
    states.set_title(f"block {deployment.block}, budget {deployment.budget}, lag {deployment.lag}")
    blocks.set_ylabel("blocks needed")
    blocks.set_xlabel("prompt (tokens)")
    finish(figure, path)
