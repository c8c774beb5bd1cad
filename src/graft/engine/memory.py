"""Size of the KV cache: the pages that memory allows, but no more than all rows could use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from graft.machine import total_memory
from graft.model.kv_cache import PAGE

if TYPE_CHECKING:
    from graft.engine.rounds import Rounds
    from graft.engine.settings import SchedulerSettings

_OF_A_GPU = 0.85  # share of a GPU's memory for weights, KV cache and CUDA graphs
_OF_A_MACHINE = 0.25  # share of the machine's memory for the KV cache, on a CPU
_WORKSPACE = 2 << 30  # bytes of a GPU for CUDA graphs and kernels, not counting weights, KV cache and steps
_CONTEXT = 1 << 30  # upper bound of a CUDA context's bytes; all other use belongs to other processes


def num_pages_for(engine: Rounds, settings: SchedulerSettings, max_batched_tokens: int) -> int:
    """Pages to allocate for the KV caches of the target and the drafter."""
    device, limits = engine.target.device, []
    if engine.target.max_positions is not None:
        # Twice what all rows could use at once, to leave half for the prefix cache.
        limits.append(2 * settings.max_rows * (-(-engine.target.max_positions // PAGE) + 4))
    if settings.max_cache_tokens is not None:
        limits.append(settings.max_cache_tokens // PAGE)
    else:
        share = settings.memory
        if device.type == "cuda":
            torch.cuda.empty_cache()  # memory left over from loading
            free, total = torch.cuda.mem_get_info(device)
            room = _room(share or _OF_A_GPU, free, total, torch.cuda.memory_reserved(device))
            num_bytes: float = room - engine.target.step_bytes(max_batched_tokens) - _WORKSPACE
        else:
            num_bytes = (share or _OF_A_MACHINE) * total_memory()
        limits.append(int(num_bytes) // (PAGE * bytes_per_token(engine)))
    return max(min(limits), 0)


def _room(share: float, free: int, total: int, reserved: int) -> int:
    """Bytes of a GPU that may still be allocated. reserved: by this process, without its CUDA context."""
    context = min(max(total - free - reserved, 0), _CONTEXT)
    return min(int(share * total) - reserved - context, free)


def bytes_per_token(engine: Rounds) -> int:
    """Bytes that a token takes in the target's KV cache and in the drafter's."""
    own = engine.drafter.bytes_per_token if engine.drafter is not None else 0
    return int(engine.target.bytes_per_token()) + own
