"""What a vLLM release does when it is told nothing, as far as that decides whether states leak.

Read in the releases' own code; `tests/release/test_defaults.py` compares it with each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version


@dataclass(frozen=True, slots=True)
class Defaults:
    """One release's defaults for a hybrid model.

    Attributes:
        prefix_caching: whether prefix caching is on.
        all_mode: whether prefix caching means mode all for `ALL_MODE_ARCHITECTURES`, else align.
        runner: model runner; it decides the lag of pipeline parallelism.
        wide_blocks: whether a block may hold more tokens than a step.
        synchronous_drafters: methods with which asynchronous scheduling is off by default.
    """

    prefix_caching: bool
    all_mode: bool
    runner: str
    wide_blocks: bool
    synchronous_drafters: frozenset[str]


_SYNCHRONOUS = frozenset({"ngram", "medusa", "mlp_speculator", "suffix", "custom_class"})
_BEFORE_028 = _SYNCHRONOUS | {"draft_model"}
_SINCE = (
    ("0.26", Defaults(False, True, "V1", wide_blocks=False, synchronous_drafters=_BEFORE_028)),
    ("0.27", Defaults(False, True, "V1", wide_blocks=True, synchronous_drafters=_BEFORE_028)),
    ("0.28", Defaults(True, False, "V1", wide_blocks=True, synchronous_drafters=_SYNCHRONOUS)),
    ("0.29", Defaults(True, False, "V2", wide_blocks=True, synchronous_drafters=_SYNCHRONOUS)),
)
UNKNOWN = "unknown"  # a drafter's method that its own files decide
# Classes with SupportsMambaPrefixCaching, 0.26 to 0.29.
ALL_MODE_ARCHITECTURES = frozenset(
    {
        "FalconH1ForCausalLM",
        "FalconMambaForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "JambaForCausalLM",
        "Mamba2ForCausalLM",
        "MambaForCausalLM",
        "NemotronHForCausalLM",
        "NemotronHPuzzleForCausalLM",
        "Zamba2ForCausalLM",
    }
)


def defaults_of(version: str | None) -> Defaults | None:
    """Defaults of a release from 0.26 on; None for an unknown version or an older one."""
    if version is None:
        return None
    release = Version(Version(version).base_version)
    found = None
    for since, defaults in _SINCE:
        if release >= Version(since):
            found = defaults
    return found
