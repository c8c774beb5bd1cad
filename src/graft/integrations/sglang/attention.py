"""Attention of a verify in SGLang's triton backend, by our kernel. Nothing here imports SGLang.

SGLang verifies with its kernel for prompts, which reads a text from its beginning to its end in one program for each
head, however few the places are: with 64 requests that takes half of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_FUNCTION = "sglang.srt.layers.attention.triton_ops.extend_attention.extend_attention_fwd"
_MAX_PLACES = 128
# Arguments of SGLang's function that our kernel computes without, each with the value that says so.
_USUAL = {
    "sliding_window_size": -1,
    "sinks": None,
    "xai_temperature_len": -1,
    "lse_extend": None,
    "skip_prefix": False,
    "skip_extend": False,
    "page_size": 1,
    "skip_prefix_custom_mask": True,
}


def _attend(
    original: Callable[..., Any],
    query: Any,
    new_keys: Any,
    new_values: Any,
    out: Any,
    keys: Any,
    values: Any,
    token_starts: Any,
    key_starts: Any,
    slots: Any,
    mask: Any,
    is_causal: bool,
    mask_starts: Any,
    most_tokens: int,
    key_scale: float,
    value_scale: float,
    scale: float | None = None,
    logit_cap: float = 0.0,
    **more: Any,
) -> Any:
    """`extend_attention_fwd`. Prompts, which have no mask, and what our kernel does not know are computed as ever."""
    num_rows = len(token_starts) - 1
    is_usual = all(more.get(name, usual) == usual for name, usual in _USUAL.items())
    is_tree = mask is not None and len(query) == num_rows * most_tokens and most_tokens <= _MAX_PLACES
    is_plain = keys.dim() == 3 and query.dtype == keys.dtype and key_scale == value_scale == 1.0
    is_plain = is_plain and query.shape[2] == out.shape[2] == keys.shape[2] == values.shape[2]
    if not (is_tree and is_usual and is_plain):
        given = (query, new_keys, new_values, out, keys, values, token_starts, key_starts, slots, mask, is_causal)
        rest = (mask_starts, most_tokens, key_scale, value_scale, scale, logit_cap)
        return original(*given, *rest, **more)
    from graft.integrations.sglang.kernels import verify_attention  # needs Triton

    cached = (keys, values, key_starts[: num_rows + 1], slots)
    scale = scale or query.shape[2] ** -0.5
    return verify_attention(
        query, new_keys, new_values, out, *cached, mask, mask_starts, most_tokens, scale, logit_cap or 0.0
    )


HOOKS = {_FUNCTION: _attend}
