"""What this process knows about itself: the verdict, the versions, the file that serves."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from ._version import __version__
from .keep import KeepCounters
from .keep_verdict import OFF, KeepState, KeepVerdict
from .retirement import Counters
from .target import Target
from .verdict import Verdict


@dataclass(frozen=True, slots=True)
class Record:
    """The state of one process.

    Attributes:
        verdict: what was decided, and why.
        target: the vLLM that serves, or None.
        counters: what retirement did so far; None where nothing is patched.
        keep: whether the newest states are kept.
        keep_counters: what keeping did so far; None where nothing is kept.
        version: of this package.
        pid: process id.
        decided_at: seconds since the epoch.
    """

    verdict: Verdict
    target: Target | None
    counters: Counters | None = None
    keep: KeepVerdict = OFF
    keep_counters: KeepCounters | None = None
    version: str = __version__
    pid: int = field(default_factory=os.getpid)
    decided_at: float = field(default_factory=time.time)

    def line(self) -> str:
        """The one log line of this process."""
        vllm = (
            f"vLLM {self.target.version} at {self.target.manager_file}"
            if self.target
            else "no vLLM"
        )
        keep = "" if self.keep.state is KeepState.OFF else f" {self.keep}"
        return f"vllm-mamba-retire {self.version}: {self.verdict}{keep} ({vllm}, pid {self.pid})"
