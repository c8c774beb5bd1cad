"""Verify attention in SGLang's triton backend by our kernel. Nothing here imports SGLang before it is used.

SGLang verifies with its prefill kernel, in which one program per head reads the whole text, even for few places. With
64 requests that takes half of a step. SGLang also copies the new keys and values first, with two kernels a layer,
because that kernel needs them contiguous. Ours reads them where they are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MODULE = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
_MAX_PLACES = 128
_MAX_HEAD_BYTES = 256  # of a head vector; longer ones do not fit well into the shared memory of some GPUs


def _attend(
    original: Callable[..., Any],
    backend: Any,
    query: Tensor,
    new_keys: Tensor | None,
    new_values: Tensor | None,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    sinks: Any = None,
) -> Any:
    """`forward_extend`: use our kernel for a verify that it supports, and SGLang's own code otherwise."""
    if (
        new_keys is None
        or new_values is None
        or sinks is not None
        or not forward_batch.forward_mode.is_target_verify()
        or not _is_ours(backend, query, layer)
    ):
        return original(backend, query, new_keys, new_values, layer, forward_batch, save_kv_cache, sinks)
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    from graft.integrations.sglang.kernels import verify_attention  # needs Triton

    known, pool = backend.forward_metadata, backend.token_to_kv_pool
    if save_kv_cache:
        physical = known.out_cache_loc_full_physical
        slots = KVWriteLoc(forward_batch.out_cache_loc, known.swa_out_cache_loc, full_loc=physical)
        pool.set_kv_buffer(layer, slots, new_keys, new_values)
    out = getattr(forward_batch, "_attn_output", None)
    out = torch.empty_like(query) if out is None else out
    heads = (-1, layer.tp_q_head_num, layer.qk_head_dim)
    num_rows = len(known.qo_indptr) - 1
    verify_attention(
        *(query.view(heads), new_keys, new_values, out.view(heads)),
        *(pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)),
        *(known.kv_indptr[: num_rows + 1], known.kv_indices, known.custom_mask, known.mask_indptr),
        *(known.max_extend_len, layer.scaling, layer.logit_cap),
    )
    return out


def _is_ours(backend: Any, query: Tensor, layer: Any) -> bool:
    """Whether our kernel supports it: trees with the same number of places, full attention over a plain cache."""
    known, num_places = backend.forward_metadata, backend.forward_metadata.max_extend_len
    if known.custom_mask is None or num_places > _MAX_PLACES:
        return False
    if backend.use_mla or backend.enable_deterministic or backend.dcp_size > 1 or backend.page_size > 1:
        return False
    is_full = layer.sliding_window_size in (None, -1) and not layer.is_cross_attention
    is_usual = layer.attn_type.value == "decoder" and layer.logit_capping_method == "tanh"
    scales = ((layer.k_scale, layer.k_scale_float), (layer.v_scale, layer.v_scale_float))
    is_scaled = any(scale is not None and value != 1.0 for scale, value in scales)  # FP8 weights bring scales of 1
    is_plain = not is_scaled and layer.xai_temperature_len == -1
    if not (is_full and is_usual and is_plain):
        return False
    keys = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)
    is_same = keys.dim() == 3 and keys.dtype == query.dtype and keys.shape[2] == layer.qk_head_dim == layer.v_head_dim
    is_small = layer.qk_head_dim * query.element_size() <= _MAX_HEAD_BYTES
    return is_same and is_small and len(query) == (len(known.qo_indptr) - 1) * num_places


def _make_state(
    original: Callable[..., Any], backend: Any, max_rows: int, max_tokens: int, *args: Any, **more: Any
) -> None:
    """`init_cuda_graph_state`: enlarge the mask for the places after the longest texts, which SGLang omits."""
    original(backend, max_rows, max_tokens, *args, **more)
    mask = getattr(backend, "cuda_graph_custom_mask", None)
    if mask is not None:
        backend.cuda_graph_custom_mask = mask.new_zeros(max_tokens * (backend.max_context_len + max_tokens // max_rows))


HOOKS = {f"{_MODULE}.forward_extend": _attend, f"{_MODULE}.init_cuda_graph_state": _make_state}
