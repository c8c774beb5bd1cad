"""How many pages the KV cache has: what memory allows, and no more than all rows could use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from graft.model.kv_cache import PAGE

if TYPE_CHECKING:
    from graft.core.scheduler import SchedulerSettings
    from graft.engine import Engine

_OF_A_GPU = 0.85  # weights, KV cache and CUDA graphs
_OF_A_MACHINE = 0.25  # the KV cache alone
_WORKSPACE = 1 << 30  # bytes on a GPU beside weights, cache and logits: what a step's kernels take


def num_pages_for(engine: Engine, settings: SchedulerSettings) -> int:
    """Pages of the target's KV cache, and the drafter's, that are to be allocated."""
    device, limits = engine.target.device, []
    if engine.target.max_positions is not None:
        # Twice what all rows could use at once: as much again is for texts that are kept.
        limits.append(2 * settings.max_rows * (-(-engine.target.max_positions // PAGE) + 4))
    if settings.max_cache_tokens is not None:
        limits.append(settings.max_cache_tokens // PAGE)
    else:
        share = settings.memory
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            room = (share or _OF_A_GPU) * total - torch.cuda.memory_allocated(device)
            logits = 2 * settings.max_batched_tokens * engine.target.vocab_size * 4
            num_bytes = min(room, free) - logits - _WORKSPACE
        else:
            num_bytes = (share or _OF_A_MACHINE) * _machine_memory()
        limits.append(int(num_bytes) // (PAGE * bytes_per_token(engine)))
    return max(min(limits), 0)


def bytes_per_token(engine: Engine) -> int:
    """Bytes that a token takes in the target's KV cache and in the drafter's."""
    head = getattr(engine.drafter, "head", None)
    own = 0
    if head is not None:
        own = 2 * head.config.num_key_value_heads * head.config.head_dim * head.fc.weight.element_size()
    return int(engine.target.bytes_per_token()) + own


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
