"""What a geometry costs, in closed form: no vLLM, no replay.

Estimates for planning. `scheduler` gives the exact figures; tests hold the two together.
"""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 2**20


def mib(blocks: int, block_bytes: int) -> float:
    """Size of `blocks` pool blocks in MiB."""
    return blocks * block_bytes / _MIB


def ceil_div(value: int, by: int) -> int:
    """Smallest number of `by` that covers `value`."""
    return -(-value // by)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What decides how many states a request holds.

    Attributes:
        block: Mamba (= aligned attention) block size, in tokens.
        budget: ``max_num_batched_tokens``.
        spec: ``num_speculative_blocks``.
        lag: chunks scheduled but not yet settled.
        groups: Mamba groups that share the pool.
        attention_groups: attention groups that share it, each with a block for every block of text.
        checkpoints: ``num_prefill_checkpoint_blocks`` (0.29 and later).
        mode: ``mamba_cache_mode``: align, all or none.
    """

    block: int
    budget: int
    spec: int = 0
    lag: int = 1
    groups: int = 1
    attention_groups: int = 1
    checkpoints: int = 0
    mode: str = "align"

    @property
    def stride(self) -> int:
        """Tokens of a full prefill chunk: as many whole blocks as the budget holds."""
        return max(self.budget // self.block, 1) * self.block

    @property
    def leaks(self) -> bool:
        """Whether states stay behind a null gap: chunks over two blocks or more, one in flight."""
        return self.mode == "align" and self.stride >= 2 * self.block and self.lag >= 1

    def fixed_states(self, tokens: int) -> int:
        """Most states of one request per Mamba group after a prefill of `tokens`, with the fix.

        Speculative blocks, the previous and the current state, one per chunk in flight
        (vllm#55450), one per checkpoint block. Without align mode one state for the whole request
        (none) or one per block (all), beside the speculative blocks.
        """
        if self.mode == "none":
            return self.spec + 1
        if self.mode == "all":
            return self.spec + ceil_div(tokens, self.block)
        return min(
            self.spec + 2 + self.lag + self.checkpoints, self.spec + ceil_div(tokens, self.block)
        )

    def stock_states(self, tokens: int) -> int:
        """The same without the fix: one more per chunk that was ever computed.

        The last chunk is cut at the last block boundary of the prompt, and once more a block
        before it where a drafter gives up the last cached block, hence the two.
        """
        if not self.leaks:
            return self.fixed_states(tokens)
        chunks = tokens // self.stride + 2
        return min(
            max(self.spec + chunks, self.fixed_states(tokens)),
            self.spec + ceil_div(tokens, self.block),
        )

    def reserved_states(self, tokens: int) -> int:
        """States that vLLM's own capacity lines count for a request, per Mamba group."""
        if self.mode == "align":
            return self.spec + 2 + self.checkpoints
        return self.fixed_states(tokens)

    def request_blocks(self, tokens: int, states: int) -> int:
        """Pool blocks of one request of `tokens` that holds `states` per Mamba group."""
        return self.attention_groups * ceil_div(tokens, self.block) + self.groups * states

    def pool(self, tokens: int, states: int, requests: int = 1) -> int:
        """Blocks (``num_gpu_blocks``, the null block included) for `requests` such requests."""
        return requests * self.request_blocks(tokens, states) + 1

    def longest_prompt(self, pool: int, *, fixed: bool) -> int:
        """Largest prompt in tokens, in whole blocks, that one request can prefill in `pool`
        blocks without being rolled back; 0 if none."""
        low, high = 0, pool
        while low < high:
            middle = (low + high + 1) // 2
            if self.pool(middle * self.block, self._states(middle * self.block, fixed)) <= pool:
                low = middle
            else:
                high = middle - 1
        return low * self.block

    def concurrency(self, pool: int, tokens: int, *, fixed: bool) -> int:
        """Requests of `tokens` that fit into `pool` blocks at their worst moment all together."""
        return (pool - 1) // self.request_blocks(tokens, self._states(tokens, fixed))

    def prompts_until_evicted(self, pool: int, tokens: int) -> int:
        """Prompts of `tokens`, one after the other, that evict a state which a request of the same
        length left in the free queue, while it decodes; with the fix.

        Each takes a block per block of text and attention group, and a state per chunk and Mamba
        group, from the front of the queue; those it gives back go behind the state.
        """
        held = self.request_blocks(tokens, self.fixed_states(tokens))
        taken = self.request_blocks(tokens, ceil_div(tokens, self.stride))
        return ceil_div(pool - 1 - held, taken)

    def _states(self, tokens: int, fixed: bool) -> int:
        return self.fixed_states(tokens) if fixed else self.stock_states(tokens)
