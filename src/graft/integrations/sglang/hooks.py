"""Hooks around SGLang's functions, each called with the original function and its arguments. Needs SGLang.

A hook calls the original function unless one of our workers (`worker`) is the caller. In that case all drafted levels
are kept, the tree is Graft's, and the target's tokens are chosen by keyed noise before SGLang's kernel walks the tree.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from sglang.srt.speculative import eagle_worker_v2
from torch import Tensor

from graft.integrations.sglang.trees import Drafted, VerifyArrays, likeliest_successors

_FUNCTIONS = "sglang.srt.speculative.eagle_utils"


class Worker(Protocol):
    """The part of `worker.GraftDraftWorker` that hooks use."""

    @property
    def learns(self) -> bool: ...

    def build(self, roots: Tensor, drafted: Drafted, seq_lens: Tensor, mask: Tensor | None) -> VerifyArrays: ...

    def fill(self, verify_input: Any, requests: Any, is_captured: bool) -> None: ...

    def digest(self) -> None: ...

    def choose(self, requests: Any, info: Any, positions: Tensor, logits: Tensor, best: Tensor) -> Tensor: ...

    def remember(self, chosen: Tensor, successors: Tensor, logits: Tensor) -> None: ...


drafting: ContextVar[Worker | None] = ContextVar("graft_drafting", default=None)
choosing: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar("graft_choosing", default=None)


@contextmanager
def set_to(variable: ContextVar[Any], value: object) -> Iterator[None]:
    """Set a context variable for the length of a `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _keep_levels(original: Any, scores: Any, tokens: Any, beams: Any, num_draft_token: int) -> Any:
    """`organize_draft_results`: return all drafted nodes, of which SGLang keeps only the best by score."""
    if drafting.get() is None:
        return original(scores, tokens, beams, num_draft_token)
    joined = torch.cat([level.flatten(1) for level in scores], dim=1)
    return torch.cat(beams, dim=1), joined, torch.cat(tokens, dim=1)


def _build_tree(
    original: Any,
    bonus_tokens: Tensor,
    parent_list: Tensor,
    top_scores_index: Tensor,
    draft_tokens: Tensor,
    seq_lens: Tensor,
    seq_lens_sum: int,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: Any = 0,
    tree_mask_buf: Tensor | None = None,
    position_buf: Tensor | None = None,
) -> Any:
    """`build_tree_kernel_efficient`: make the verify's arrays from the result of `_keep_levels`."""
    worker = drafting.get()
    if worker is None:
        sizes = (seq_lens, seq_lens_sum, topk, spec_steps, num_verify_tokens)
        buffers = (tree_mask_mode, tree_mask_buf, position_buf)
        return original(bonus_tokens, parent_list, top_scores_index, draft_tokens, *sizes, *buffers)
    drafted = Drafted(draft_tokens, top_scores_index, parent_list)
    arrays = worker.build(bonus_tokens, drafted, seq_lens, tree_mask_buf)
    if position_buf is not None:
        position_buf[: len(arrays.positions)] = arrays.positions
        arrays = arrays._replace(positions=position_buf)
    return tuple(arrays)


def _prepare(original: Any, verify_input: Any, req_to_token_pool: Any, batch: Any, target_worker: Any) -> Any:
    """`eagle_prepare_for_verify`: fill in the tree afterwards."""
    result = original(verify_input, req_to_token_pool, batch, target_worker)
    worker: Worker | None = getattr(verify_input, "graft_worker", None)
    if worker is not None:
        worker.fill(verify_input, batch.reqs, is_captured=result[1])
    return result


def _sample(original: Any, verify_input: Any, batch: Any, logits_output: Any, vocab_mask: Any = None) -> Any:
    """`eagle_sample`: let SGLang apply penalties, biases and grammars and walk the tree as for greedy rows.

    `_walk` chooses the tokens that SGLang compares with the tree's.
    """
    worker: Worker | None = getattr(verify_input, "graft_worker", None)
    if worker is None or batch.forward_mode.is_idle():
        return original(verify_input, batch, logits_output, vocab_mask)
    worker.digest()
    logits = logits_output.next_token_logits
    # Before the call, since penalties change the logits in place.
    highest = likeliest_successors(logits) if worker.learns else None
    info, chosen = batch.sampling_info, []

    def choose(best: Tensor) -> Tensor:
        chosen.append(worker.choose(batch.reqs, info, verify_input.positions[: len(logits)], logits, best))
        return chosen[0]

    batch.sampling_info = copy.copy(info)
    batch.sampling_info.is_all_greedy = True
    try:
        with set_to(choosing, choose):
            result = original(verify_input, batch, logits_output, vocab_mask)
    finally:
        batch.sampling_info = info
    if highest is not None:
        successors, values = highest
        shape = (*chosen[0].shape, -1)
        worker.remember(chosen[0], successors.view(shape), values.view(shape))
    return result


def _walk(original: Any, *args: Any, **kwargs: Any) -> Any:
    """`verify_tree_greedy_func`: compare with the chosen tokens instead of the likeliest."""
    choose = choosing.get()
    if choose is not None:
        kwargs["target_predict"] = choose(kwargs["target_predict"])
    return original(*args, **kwargs)


HOOKS = {
    f"{_FUNCTIONS}.organize_draft_results": _keep_levels,
    f"{_FUNCTIONS}.build_tree_kernel_efficient": _build_tree,
    f"{_FUNCTIONS}.eagle_prepare_for_verify": _prepare,
    f"{_FUNCTIONS}.eagle_sample": _sample,
    f"{_FUNCTIONS}.verify_tree_greedy_func": _walk,
}


_topk_of_sglang = eagle_worker_v2.fast_topk


def _topk(values: Tensor, topk: int, dim: int) -> Any:
    """`fast_topk`: use our kernel for the head's probabilities, which takes a sixth of the time."""
    if drafting.get() is None or not values.is_cuda or values.dim() != 2:
        return _topk_of_sglang(values, topk, dim)
    from graft.model.kernels.topk import highest  # needs Triton

    tokens, best, _ = highest(values, topk)
    return best, tokens.long()


# Replaced in this module only. A hook would also change a function that SGLang compiles with torch.compile.
eagle_worker_v2.fast_topk = _topk
