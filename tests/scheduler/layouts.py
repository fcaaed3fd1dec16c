"""A child process that derives several layouts in one import of vLLM."""

from __future__ import annotations

from typing import Any

from vllm_mamba_retire import child
from vllm_mamba_retire.plan import layout


def derive_all(requests: list[dict[str, Any]], report: Any) -> list[Any]:
    """A layout, or the sentence of the refusal, for each request."""
    answers: list[Any] = []
    for request in requests:
        try:
            answers.append(layout.derive(request, report))
        except child.RefusalError as refusal:
            answers.append(str(refusal))
    return answers


if __name__ == "__main__":
    child.answer(derive_all)
