"""What is particular to SGLang 0.5.23, written from its source and not yet run on a GPU. It does not import SGLang."""

from typing import Any

from graft.integrations.sglang.release import DRAFT, OUTER, SAMPLER, SPEC, TREE, TRITON, WALK_PARAMETERS

WALK = "sglang.kernels.ops.speculative.spec_tree.verify_tree_greedy_func"
COMPACT = f"{SPEC}.eagle_worker_common._finalize_accept_tree_path"

SIGNATURES = {
    WALK: WALK_PARAMETERS,
    COMPACT: "batch accept_index accept_lens predict logits_output bs token_to_kv_pool_allocator num_draft_tokens",
    f"{SPEC}.eagle_utils.build_tree_kernel_efficient": f"{TREE} tree_mask_mode tree_mask_buf fill_prefix_mask",
    f"{SPEC}.eagle_utils.eagle_sample": "verify_input batch logits_output grammar_mask uno_target_max_top_k "
    "watermark_state watermark_full_mask",
    f"{DRAFT}.draft": "self batch with_topology",
    f"{DRAFT}._draft_extend_for_prefill": "self batch target_hidden_states next_token_ids mm_input_embeds kv_loc_plan",
    f"{DRAFT}._draft_extend_for_decode": "self batch batch_result kv_loc_plan",
    f"{OUTER}.forward_batch_generation": "self batch on_publish grammar_barrier pp_proxy_tensors",
    f"{SPEC}.base_spec_worker.BaseSpecWorker.clear_cache_pool": "self",
    f"{TRITON}.forward_extend": "self q k v layer forward_batch save_kv_cache sinks score_mod aux_tensors",
    f"{SAMPLER}.top_k_top_p_min_p_sampling_from_probs_torch": "probs top_ks top_ps min_ps need_min_p_sampling "
    "sampling_seed positions return_filtered_probs max_top_k",
}


def group() -> Any:
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.attn_tp_group if is_dp_attention_enabled() else parallel.tp_group


def draft_context(draft_worker: Any) -> Any:
    from sglang.srt.speculative.spec_utils import draft_tp_context

    return draft_tp_context(draft_worker.parallel_layout)


def decode_graphs(server_args: Any) -> Any:
    from sglang.srt.runtime_context import get_exec

    return get_exec().graph.cuda_graph_config.decode


def verify_mask(backend: Any, num_rows: int) -> Any:
    mask = backend.verify_mask
    return mask.buffer if mask is not None and mask.fits(num_rows) else None


def write_slots(backend: Any, forward_batch: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    return KVWriteLoc.for_batch(forward_batch, swa_loc=backend.forward_metadata.swa_out_cache_loc)
