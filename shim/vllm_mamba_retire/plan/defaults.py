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
    """

    prefix_caching: bool
    all_mode: bool
    runner: str
    wide_blocks: bool


_SINCE = (
    ("0.26", Defaults(prefix_caching=False, all_mode=True, runner="V1", wide_blocks=False)),
    ("0.27", Defaults(prefix_caching=False, all_mode=True, runner="V1", wide_blocks=True)),
    ("0.28", Defaults(prefix_caching=True, all_mode=False, runner="V1", wide_blocks=True)),
    ("0.29", Defaults(prefix_caching=True, all_mode=False, runner="V2", wide_blocks=True)),
)
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
# Drafters with which asynchronous scheduling is off unless it is asked for, 0.26 to 0.29.
SYNCHRONOUS_DRAFTERS = frozenset({"ngram", "medusa", "mlp_speculator", "suffix", "custom_class"})


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
