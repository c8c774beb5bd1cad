"""Verify attention in SGLang's triton backend by our kernel. Nothing here imports SGLang before it is used.

SGLang verifies with its prefill kernel, in which one program per head reads the whole text, even for few places. With
64 requests that takes half of a step. SGLang also copies the new keys and values first, with two kernels a layer,
because that kernel needs them contiguous. Ours reads them where they are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graft.integrations.sglang import release
from graft.integrations.sglang.fallback import say_once
from graft.integrations.sglang.kernels import verify_attention

_MAX_PLACES = 128
_MAX_HEAD_BYTES = 256  # longest head vector; longer ones do not fit well into the shared memory of some GPUs


def _attend(
    original: Callable[..., Any],
    backend: Any,
    query: Tensor,
    new_keys: Tensor | None,
    new_values: Tensor | None,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    *rest: Any,
    **more: Any,
) -> Any:
    """`forward_extend`: use our kernel for a verify that it supports, and SGLang's own code otherwise."""
    why_not: str | None = "something else"
    if forward_batch.forward_mode.is_target_verify():
        is_plain = all(each is None for each in (*rest, *more.values()))
        has_new = new_keys is not None and new_values is not None
        why_not = _why_not(backend, query, layer) if is_plain and has_new else "sinks or shared keys"
        if why_not is not None:
            say_once(f"SGLang's own kernel does the attention of verify steps, which is slower: {why_not}")
    if why_not is not None:
        return original(backend, query, new_keys, new_values, layer, forward_batch, save_kv_cache, *rest, **more)
    known, pool = backend.forward_metadata, backend.token_to_kv_pool
    if save_kv_cache:
        pool.set_kv_buffer(layer, release.current().write_slots(backend, forward_batch), new_keys, new_values)
    out = getattr(forward_batch, "_attn_output", None)
    out = torch.empty_like(query) if out is None else out
    heads = (-1, layer.tp_q_head_num, layer.qk_head_dim)
    num_rows = len(known.qo_indptr) - 1
    assert new_keys is not None and new_values is not None
    verify_attention(
        *(query.view(heads), new_keys, new_values, out.view(heads)),
        *(pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)),
        *(known.kv_indptr[: num_rows + 1], known.kv_indices, known.custom_mask, known.mask_indptr),
        *(known.max_extend_len, layer.scaling, layer.logit_cap),
    )
    return out


def _why_not(backend: Any, query: Tensor, layer: Any) -> str | None:
    """What our kernel does not support. It needs trees of one size and full attention over a plain cache."""
    known = backend.forward_metadata
    keys = backend.token_to_kv_pool.get_key_buffer(layer.layer_id) if not backend.use_mla else query
    scales = ((layer.k_scale, layer.k_scale_float), (layer.v_scale, layer.v_scale_float))
    head_dim = layer.qk_head_dim
    reasons = {
        "no tree mask": known.custom_mask is None,
        f"more than {_MAX_PLACES} places": known.max_extend_len > _MAX_PLACES,
        "multi-head latent attention": backend.use_mla,
        "the deterministic mode": backend.enable_deterministic,
        "decode context parallelism": backend.dcp_size > 1,
        "a page size above 1": backend.page_size > 1,
        "a sliding window": layer.sliding_window_size not in (None, -1),
        "cross attention": layer.is_cross_attention or layer.attn_type.value != "decoder",
        "another soft cap than tanh": layer.logit_capping_method != "tanh",
        # FP8 weights bring scales of 1.
        "scaled keys or values": any(scale is not None and value != 1.0 for scale, value in scales),
        "scores scaled by length": layer.xai_temperature_len != -1,
        "a KV cache of another type": keys.dim() != 3 or keys.dtype != query.dtype,
        "keys and values of different sizes": not keys.shape[-1] == head_dim == layer.v_head_dim,
        "long heads": head_dim * query.element_size() > _MAX_HEAD_BYTES,
        "trees of several sizes": len(query) != (len(known.qo_indptr) - 1) * known.max_extend_len,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _make_state(
    original: Callable[..., Any], backend: Any, max_rows: int, max_tokens: int, *args: Any, **more: Any
) -> None:
    """`init_cuda_graph_state`: enlarge the mask for the places after the longest texts, which SGLang 0.5.15 omits."""
    original(backend, max_rows, max_tokens, *args, **more)
    mask = getattr(backend, "cuda_graph_custom_mask", None)
    if mask is not None:
        backend.cuda_graph_custom_mask = mask.new_zeros(max_tokens * (backend.max_context_len + max_tokens // max_rows))


HOOKS = {f"{release.TRITON}.forward_extend": _attend, f"{release.TRITON}.init_cuda_graph_state": _make_state}
