"""A guard for vLLM 0.32 on a CPU, where steps with drafts read their sampling temperatures from uninitialised memory.

`expand_batch_to_tokens` gives each drafted token its request's temperature, top-k and top-p. Its CPU kernel writes to
an int64 copy of the result, which for floats is dropped. So texts drawn at a temperature, and greedy ones beside them,
are wrong with every speculative method, not Graft's alone; `bench/vllm_cpu_sampling.py` shows it.
"""

from __future__ import annotations

from torch import Tensor


def expand(values: Tensor, ends: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """Each request's value [B] for each of its tokens [num_tokens]. ends [B]: where each one's tokens end."""
    replaced = values.masked_fill(values == replace_from, replace_to)
    counts = ends.long().diff(prepend=ends.new_zeros(1).long())
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def guard() -> None:
    """Puts a right `expand_batch_to_tokens` in the place of vLLM's; only on a CPU."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand
