"""How many pages the KV cache has: what memory allows, and no more than all rows could use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from graft.machine import total_memory
from graft.model.kv_cache import PAGE

if TYPE_CHECKING:
    from graft.engine import Engine
    from graft.engine.jobs import SchedulerSettings

_OF_A_GPU = 0.85  # weights, KV cache and CUDA graphs
_OF_A_MACHINE = 0.25  # the KV cache alone
_WORKSPACE = 2 << 30  # bytes on a GPU beside weights, cache and steps: graphs, kernels and their code
_CONTEXT = 1 << 30  # of a CUDA context, at most: what else is in use is others'


def num_pages_for(engine: Engine, settings: SchedulerSettings, max_batched_tokens: int) -> int:
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
            torch.cuda.empty_cache()  # what loading has left
            free, total = torch.cuda.mem_get_info(device)
            room = _room(share or _OF_A_GPU, free, total, torch.cuda.memory_reserved(device))
            num_bytes: float = room - engine.target.step_bytes(max_batched_tokens) - _WORKSPACE
        else:
            num_bytes = (share or _OF_A_MACHINE) * total_memory()
        limits.append(int(num_bytes) // (PAGE * bytes_per_token(engine)))
    return max(min(limits), 0)


def _room(share: float, free: int, total: int, reserved: int) -> int:
    """Bytes of a GPU that may still be taken. reserved: by this process, beside its CUDA context."""
    context = min(max(total - free - reserved, 0), _CONTEXT)
    return min(int(share * total) - reserved - context, free)


def bytes_per_token(engine: Engine) -> int:
    """Bytes that a token takes in the target's KV cache and in the drafter's."""
    own = engine.drafter.bytes_per_token if engine.drafter is not None else 0
    return int(engine.target.bytes_per_token()) + own
