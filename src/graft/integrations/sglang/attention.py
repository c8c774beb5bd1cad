"""Few rows for SGLang's triton attention of a verify. Nothing here imports SGLang.

Its kernel for several tokens of a request is made for prompts: on a Hopper GPU it computes 128 rows for every head of
every request, though a tree has a few dozen places and a step without trees one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

_MODULE = "sglang.srt.layers.attention.triton_ops.extend_attention"
_MASK, _MOST_TOKENS = 9, 12  # places of the mask and of the most tokens of a request among its function's arguments
_LEAST_ROWS = 16  # of a matrix product in Triton
_WARPS = 4  # of a program with few rows

_most_tokens: ContextVar[int | None] = ContextVar("graft_most_tokens", default=None)


def _attend(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`extend_attention_fwd`, which asks for block sizes. Prompts, which have no mask, are computed as ever."""
    token = _most_tokens.set(int(args[_MOST_TOKENS]) if args[_MASK] is not None else None)
    try:
        return original(*args, **kwargs)
    finally:
        _most_tokens.reset(token)


def _block_sizes(original: Callable[..., Any], *args: Any) -> Any:
    """`_get_block_sizes_for_extend_attention`: with no more rows than there are tokens."""
    sizes, most = original(*args), _most_tokens.get()
    *widths, num_rows, num_columns, num_warps = sizes
    needed = max(1 << (most - 1).bit_length(), _LEAST_ROWS) if most else num_rows
    return (*widths, needed, num_columns, min(num_warps, _WARPS)) if needed < num_rows else sizes


HOOKS = {
    f"{_MODULE}.extend_attention_fwd": _attend,
    f"{_MODULE}._get_block_sizes_for_extend_attention": _block_sizes,
}
