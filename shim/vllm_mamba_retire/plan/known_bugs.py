"""Other upstream defects that a deployment's settings or counters point at; this fix changes none.

`docs/not-this-bug.md` is the longer list.
"""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version

from .deployment import Deployment


def hints(deployment: Deployment, affected: bool | None, preemptions: int | None) -> Iterator[str]:
    """One sentence for each, with its upstream number.

    Args:
        deployment: the server.
        affected: whether it is affected by the defect that this package fixes.
        preemptions: how many requests it has rolled back, where that is known.
    """
    version = Version(deployment.version) if deployment.version else None
    if deployment.connector is not None:
        late = version is None or version < Version("0.29")
        yield (
            f"Warning: a KV connector is configured ({deployment.connector}). "
            + (
                "Before vLLM 0.29.0 a connector can read align states late, which gives wrong "
                "output (vllm#51358), with and without this fix."
                if late and deployment.align
                else "States that are retired are no longer there for it; compare its hits."
            )
        )
    if not deployment.align:
        return
    if deployment.drafter == "mtp" and deployment.lag:
        yield (
            "If output is wrong, this looks like another bug: MTP with align and async scheduling "
            "(vllm#53912, vllm#53919, vllm#50021)."
        )
    if deployment.drafter in ("dflash", "dspark") and (
        version is None or version < Version("0.33")
    ):
        yield (
            f"If prefix hits are too few, this looks like another bug: {deployment.drafter} is "
            "taken for EAGLE before vLLM 0.33.0 (vllm#53505, vllm#57110)."
        )
    if preemptions and affected is False:
        number = (
            "admission counts blocks twice (vllm#57050)"
            if version == Version("0.30.0")
            else "frees are deferred (vllm#49674, vllm#49675)"
        )
        yield (
            f"{preemptions} preemptions since the start: the pool is too small, or this looks like "
            f"another bug: {number}."
        )
