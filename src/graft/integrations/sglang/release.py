"""The installed release of SGLang. What differs between releases is in a module for each: `release_0_5_15` and so on.

`signatures` are those of all functions that are hooked or called. They are compared before anything is hooked, so that
a release that changed one of them is left as it is.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol, cast

from graft.errors import GraftError
from graft.settings import require

SPEC = "sglang.srt.speculative"
WORKERS = f"{SPEC}.eagle_worker_v2"
DRAFT, OUTER = f"{WORKERS}.EagleDraftWorker", f"{WORKERS}.EAGLEWorkerV2"
TRITON = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
SAMPLER = "sglang.srt.layers.sampler"
TREE = "bonus_tokens parent_list top_scores_index draft_tokens seq_lens seq_lens_sum topk spec_steps num_verify_tokens"

# By path, the parameters of functions that all releases have alike.
_COMMON = {
    f"{SPEC}.eagle_utils.organize_draft_results": "score_list token_list parents_list num_draft_token",
    f"{SPEC}.spec_utils.renorm_draft_probs": "next_token_logits sampling_info use_rejection_sampling",
    "sglang.srt.utils.common.fast_topk": "values topk dim",
    f"{DRAFT}.alloc_memory_pool": "self memory_pool_config req_to_token_pool token_to_kv_pool_allocator",
    f"{DRAFT}.draft_forward": "self forward_batch",
    f"{DRAFT}._capture_cuda_graphs": "self",
    f"{OUTER}.init_cuda_graphs": "self",
    f"{OUTER}.activate_step_by_batch": "self batch_size",
    f"{OUTER}._build_trivial_verify_input": "self batch",
    f"{OUTER}._stub_skipped_draft_extend": "self batch batch_output",
    f"{OUTER}.build_adaptive_runtime_state": "self speculative_num_steps speculative_num_draft_tokens cuda_graph_bs",
    f"{TRITON}.init_cuda_graph_state": "self max_bs max_num_tokens kv_indices_buf cuda_graph_num_kv_splits_buf",
    f"{SAMPLER}.sampling_from_probs_torch": "probs sampling_seed positions",
    "sglang.srt.server_args.ServerArgs.check_server_args": "self",
}
WALK_PARAMETERS = (
    "predicts accept_index accept_token_num candidates retrieve_index retrieve_next_token retrieve_next_sibling "
    "target_predict topk"
)
# What the module of the workers has under these names is used or replaced there.
USED_NAMES = (
    "EagleDraftInput",
    "SpecRuntimeState",
    "envs",
    "fast_topk",
    "organize_draft_results",
    "renorm_draft_probs",
    "speculative_moe_a2a_backend_context",
    "speculative_moe_backend_context",
)
RELEASES = {"0.5.15": "release_0_5_15", "0.5.15.post1": "release_0_5_15", "0.5.23": "release_0_5_23"}


class Release(Protocol):
    """A module of a release."""

    SIGNATURES: Mapping[str, str]  # by path, the parameters of functions that differ from other releases
    WALK: str  # the path of the function that walks down a tree
    COMPACT: str  # the path of the function that moves the accepted path to the front

    def group(self) -> Any:
        """The ranks that hold one batch."""

    def draft_context(self, draft_worker: Any) -> Any:
        """The context in which the head's backends and graphs are made."""

    def decode_graphs(self, server_args: Any) -> Any:
        """The settings of decode graphs; `bs` are the batch sizes that are captured."""

    def verify_mask(self, backend: Any, num_rows: int) -> Any:
        """The backend's memory for the mask of a verify, or None."""

    def write_slots(self, backend: Any, forward_batch: Any) -> Any:
        """Where the keys and values of a forward are written."""


@lru_cache(maxsize=1)
def current() -> Release:
    import sglang

    return release_of(sglang.__version__)


def release_of(version: str) -> Release:
    known = ", ".join(RELEASES)
    require(version in RELEASES, f"the plugin knows SGLang {known}, not {version}: unset GRAFT_SGLANG")
    return cast(Release, importlib.import_module(f"graft.integrations.sglang.{RELEASES[version]}"))


def signatures(release: Release) -> dict[str, list[str]]:
    """By path, the parameters of everything that is hooked or called."""
    return {path: names.split() for path, names in (_COMMON | dict(release.SIGNATURES)).items()}


def check_signatures(release: Release) -> None:
    """Refuse an SGLang whose functions differ from those that the hooks were written for."""
    workers = pkgutil.resolve_name(WORKERS)
    missing = [name for name in USED_NAMES if not hasattr(workers, name)]
    require(not missing, f"SGLang's {WORKERS} has no {', '.join(missing)}: unset GRAFT_SGLANG")
    for path, expected in signatures(release).items():
        try:
            found = list(inspect.signature(pkgutil.resolve_name(path)).parameters)
        except (ImportError, AttributeError) as error:
            raise GraftError(f"SGLang has no {path}: unset GRAFT_SGLANG") from error
        message = f"SGLang's {path} takes ({', '.join(found)}), not ({', '.join(expected)}): unset GRAFT_SGLANG"
        require(found == expected, message)
