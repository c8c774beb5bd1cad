"""What is particular to SGLang 0.5.15 and 0.5.15.post1. Importing this does not import SGLang."""

from typing import Any

from graft.integrations.sglang.release import DRAFT, OUTER, SAMPLER, SPEC, TREE, TRITON, WALK_PARAMETERS

WALK = f"{SPEC}.eagle_utils.verify_tree_greedy_func"
COMPACT = f"{OUTER}._finalize_accept_tree_path"

SIGNATURES = {
    WALK: WALK_PARAMETERS,
    COMPACT: "self batch accept_index accept_lens predict logits_output bs",
    f"{SPEC}.eagle_utils.build_tree_kernel_efficient": f"{TREE} tree_mask_mode tree_mask_buf position_buf",
    f"{SPEC}.eagle_utils.eagle_sample": "verify_input batch logits_output vocab_mask",
    f"{DRAFT}.draft": "self batch",
    f"{DRAFT}._draft_extend_for_prefill": "self batch target_hidden_states next_token_ids mm_input_embeds",
    f"{DRAFT}._draft_extend_for_decode": "self batch batch_result",
    f"{OUTER}.forward_batch_generation": "self batch on_publish",
    f"{OUTER}.clear_cache_pool": "self",
    f"{TRITON}.forward_extend": "self q k v layer forward_batch save_kv_cache sinks",
    f"{SAMPLER}.top_k_top_p_min_p_sampling_from_probs_torch": "probs top_ks top_ps min_ps need_min_p_sampling "
    "sampling_seed positions",
}


def group() -> Any:
    from sglang.srt.distributed import get_tp_group
    from sglang.srt.layers.dp_attention import get_attention_tp_group, is_dp_attention_enabled

    return get_attention_tp_group() if is_dp_attention_enabled() else get_tp_group()


def draft_context(draft_worker: Any) -> Any:
    return draft_worker.draft_tp_context(draft_worker.draft_runner.tp_group)


def decode_graphs(server_args: Any) -> Any:
    return server_args.cuda_graph_config.decode


def verify_mask(backend: Any, num_rows: int) -> Any:
    return backend.get_verify_buffers_to_fill_after_draft()[0]


def write_slots(backend: Any, forward_batch: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    known = backend.forward_metadata
    return KVWriteLoc(forward_batch.out_cache_loc, known.swa_out_cache_loc, full_loc=known.out_cache_loc_full_physical)
