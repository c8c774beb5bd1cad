"""Attention of a verify in SGLang's triton backend, by our kernel. Nothing here imports SGLang.

SGLang verifies with its kernel for prompts, which reads a text from its beginning to its end in one program for each
head, however few the places are: with 64 requests that takes half of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MODULES = "sglang.srt.layers.attention"
_MAX_PLACES = 128
_MAX_HEAD_BYTES = 256  # of a head vector: of longer ones too few keys fit into the shared memory of some GPUs
# The arguments of SGLang's function, and the values of those that our kernel computes without.
_NAMES = (
    *("query", "new_keys", "new_values", "out", "keys", "values", "token_starts", "key_starts", "slots", "mask"),
    *("is_causal", "mask_starts", "most_tokens", "key_scale", "value_scale", "sm_scale", "logit_cap"),
)
_USUAL = {
    "key_scale": 1.0,
    "value_scale": 1.0,
    "skip_prefix_custom_mask": True,
    "sliding_window_size": -1,
    "sinks": None,
    "xai_temperature_len": -1,
    "lse_extend": None,
    "skip_prefix": False,
    "skip_extend": False,
    "page_size": 1,
}


def _attend(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`extend_attention_fwd`. Prompts, which have no mask, and what our kernel does not know are computed as ever."""
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    if len(args) > len(_NAMES) or not _is_ours(given):
        return original(*args, **kwargs)
    from graft.integrations.sglang.kernels import verify_attention  # needs Triton

    query, num_rows = given["query"], len(given["token_starts"]) - 1
    new = (given["new_keys"], given["new_values"], given["out"])
    cached = (given["keys"], given["values"], given["key_starts"][: num_rows + 1], given["slots"])
    scale, cap = given.get("sm_scale") or query.shape[2] ** -0.5, given.get("logit_cap") or 0.0
    return verify_attention(query, *new, *cached, given["mask"], given["mask_starts"], given["most_tokens"], scale, cap)


def _is_ours(given: dict[str, Any]) -> bool:
    """Whether our kernel computes it: trees of one number of places, in full attention over a plain cache."""
    query, keys, num_places = given["query"], given["keys"], given["most_tokens"]
    if given["mask"] is None or num_places > _MAX_PLACES or any(given.get(n, u) != u for n, u in _USUAL.items()):
        return False
    sizes = {tensor.shape[-1] for tensor in (query, given["out"], keys, given["values"])}
    is_plain = keys.dim() == 3 and keys.dtype == query.dtype and len(sizes) == 1
    is_small = query.shape[2] * query.element_size() <= _MAX_HEAD_BYTES
    return is_plain and is_small and len(query) == (len(given["token_starts"]) - 1) * num_places


def _make_state(
    original: Callable[..., Any], backend: Any, max_rows: int, max_tokens: int, *args: Any, **more: Any
) -> None:
    """`init_cuda_graph_state`, with room in the mask for the places behind the longest texts, which SGLang forgets."""
    original(backend, max_rows, max_tokens, *args, **more)
    mask = getattr(backend, "cuda_graph_custom_mask", None)
    if mask is not None:
        backend.cuda_graph_custom_mask = mask.new_zeros(max_tokens * (backend.max_context_len + max_tokens // max_rows))


HOOKS = {
    f"{_MODULES}.triton_ops.extend_attention.extend_attention_fwd": _attend,
    f"{_MODULES}.triton_backend.TritonAttnBackend.init_cuda_graph_state": _make_state,
}
