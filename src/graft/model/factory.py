"""The choice of a model's runner: CUDA graphs on a GPU, eager steps elsewhere."""

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
    """Make the runner for a model: one with CUDA graphs if the model is on a single GPU and Triton is installed.

    exact: a token has the same bits in any batch. Raises a GraftError where that is impossible.
    pool, store: the pages, and the keys and values, of another runner to share; None: new ones.
    """
    if model.device.type == "cuda" and len(set(getattr(model, "hf_device_map", {"": 0}).values())) == 1:
        try:
            from graft.model.cuda_graphs import CapturedTarget

            return CapturedTarget(model, hidden_layers, chunk_size, exact, pool, store)
        except ImportError as error:
            warnings.warn(f"Triton is missing, so steps on the GPU are slow: {error}", stacklevel=2)
    if exact:
        raise GraftError(f"exact steps need a single GPU and Triton, but the model is on {model.device}: drop exact")
    return TargetRunner(model, hidden_layers, chunk_size, pool, store)
