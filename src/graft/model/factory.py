"""Chooses a model's runner: on a GPU, one whose steps are CUDA graphs; elsewhere an eager one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from transformers import PreTrainedModel

from graft.errors import GraftError
from graft.model.kv_cache import KVStore, PagePool
from graft.model.runner import TargetRunner


def target_for(
    model: PreTrainedModel,
    hidden_layers: Sequence[int] = (),
    chunk_size: int = 256,
    exact: bool = False,
    pool: PagePool | None = None,
    store: KVStore | None = None,
) -> TargetRunner:
    """The runner for a model on its device: on a single GPU with Triton, one whose steps are CUDA graphs.

    exact: a token has the same bits in any batch; a GraftError where that cannot be.
    pool: another runner's, whose pages it is to share; None: one of its own. store: likewise, of keys and values.
    """
    if model.device.type == "cuda" and len(set(getattr(model, "hf_device_map", {"": 0}).values())) == 1:
        try:
            from graft.model.cuda_graphs import CapturedTarget

            return CapturedTarget(model, hidden_layers, chunk_size, exact, pool, store)
        except ImportError as error:
            warnings.warn(f"without Triton, steps on a GPU are slow: {error}", stacklevel=2)
    if exact:
        raise GraftError(f"exact steps need a single GPU and Triton, and the model is on {model.device}: drop exact")
    return TargetRunner(model, hidden_layers, chunk_size, pool, store)
