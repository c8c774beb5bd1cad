"""Hooks around SGLang's functions, each called with the original function and its arguments. Needs SGLang.

A hook calls the original function unless one of our workers (`worker`) is the caller. In that case all drafted levels
are kept, the tree is Graft's, and the target's tokens are chosen by keyed noise before SGLang's kernel walks the tree.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.speculative import eagle_worker_v2
from torch import Tensor

from graft.integrations.sglang import release
from graft.integrations.sglang.fallback import Attempt

if TYPE_CHECKING:
    from graft.integrations.sglang.worker import GraftDraftWorker

_FULL_MASK = 0  # SGLang's number of the mask layout that covers the texts too


@dataclass
class Drafting:
    """The worker that drafts, and the place in the texts that it drafts for."""

    worker: "GraftDraftWorker"
    ends: Tensor | None = None  # [B] tokens of the texts, with their roots; None: no logits are ranked
    depth: int = 0  # depth of the tokens that the next logits predict; 1 follows the root


drafting: ContextVar[Drafting | None] = ContextVar("graft_drafting", default=None)
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
    roots: Tensor,
    beams: Tensor,
    scores: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    most_tokens: int,
    topk: int,
    num_steps: int,
    num_places: int,
    layout: Any = _FULL_MASK,
    mask: Tensor | None = None,
    position_buf: Tensor | None = None,
    **more: Any,
) -> Any:
    """`build_tree_kernel_efficient`: the inputs of a verify, ours or SGLang's own, from all levels."""
    now = drafting.get()
    if position_buf is not None:  # only backends for other models have one
        more["position_buf"], now = position_buf, None
    rest = (lengths, most_tokens, topk, num_steps, num_places, layout, mask)
    if now is None:
        return original(roots, beams, scores, tokens, *rest, **more)
    fills = more.get("fill_prefix_mask", True)
    arrays = now.worker.build(lengths, roots, mask, most_tokens, int(layout) == _FULL_MASK, fills)
    if arrays is not None:
        return tuple(arrays)
    beams, last = beams[:, :-topk], beams[:, -topk:]
    if scores.shape[1] < num_places - 1:  # fewer nodes than places: repeat the last node in the rest
        chosen = torch.arange(num_places - 1, device=scores.device).clamp(max=scores.shape[1] - 1)
        chosen = chosen.expand(len(scores), -1).contiguous()
        tokens = tokens.gather(1, chosen)
    else:
        with set_to(drafting, None):
            organize = eagle_worker_v2.organize_draft_results
            beams, chosen, tokens = organize([scores], [tokens], [beams, last], num_places)
    return original(roots, beams, chosen, tokens, *rest, **more)


def _sample(original: Any, verify_input: Any, batch: Any, logits_output: Any, *args: Any, **kwargs: Any) -> Any:
    """`eagle_sample`: let SGLang apply penalties, biases and grammars and walk the tree as for greedy rows.

    `_walk` chooses the tokens that SGLang compares with the tree's.
    """
    worker: GraftDraftWorker | None = getattr(verify_input, "graft_worker", None)
    if worker is None or batch.forward_mode.is_idle():
        return original(verify_input, batch, logits_output, *args, **kwargs)
    logits = logits_output.next_token_logits
    learns = worker.has_tree and worker.is_sound
    if learns:
        with Attempt("learn from a round") as attempt:
            worker.rank_successors(logits)  # before the call, since penalties change the logits in place
        learns = not attempt.failed
    info, chosen = batch.sampling_info, []

    def choose(best: Tensor) -> Tensor:
        chosen.append(worker.choose(batch, info, verify_input.positions[: len(logits)], logits, best))
        return chosen[0]

    batch.sampling_info = copy.copy(info)
    batch.sampling_info.is_all_greedy = True
    try:
        with set_to(choosing, choose):
            result = original(verify_input, batch, logits_output, *args, **kwargs)
    finally:
        batch.sampling_info = info
    if learns:
        with Attempt("learn from a round"):
            worker.learn(chosen[0])
    return result


def _walk(original: Any, *args: Any, **kwargs: Any) -> Any:
    """`verify_tree_greedy_func`: compare with the chosen tokens instead of the likeliest."""
    choose = choosing.get()
    if choose is not None:
        kwargs["target_predict"] = choose(kwargs["target_predict"])
    return original(*args, **kwargs)


def _compact(original: Any, *args: Any, **kwargs: Any) -> Any:
    """`_finalize_accept_tree_path`: with one place a request there is nothing to move."""
    accept_index, _, predict = args[-5:-2]
    return predict if len(predict) == len(accept_index) else original(*args, **kwargs)


HOOKS = {
    f"{release.SPEC}.eagle_utils.organize_draft_results": _keep_levels,
    f"{release.SPEC}.eagle_utils.build_tree_kernel_efficient": _build_tree,
    f"{release.SPEC}.eagle_utils.eagle_sample": _sample,
    release.current().WALK: _walk,
    release.current().COMPACT: _compact,
}


def rank_by_noise() -> None:
    """Let the head's logits be ranked by `GraftDraftWorker.likeliest`: with the noise of coming draws, in one kernel.

    This replaces names in one module. Hooks would also change functions that SGLang compiles with torch.compile.
    """
    renorm, fast_topk = eagle_worker_v2.renorm_draft_probs, eagle_worker_v2.fast_topk

    def keep_logits(logits: Tensor, *args: Any) -> Any:
        now = drafting.get()
        return renorm(logits, *args) if now is None or now.ends is None else logits

    def rank(values: Tensor, topk: int, dim: int) -> Any:
        now = drafting.get()
        if now is None or now.ends is None or not len(values):
            return fast_topk(values, topk, dim)
        with Attempt("rank the head's tokens"):
            found = now.worker.likeliest(values, topk, now.ends, now.depth)
            now.depth += 1
            return found
        return fast_topk(values.softmax(dim=-1), topk, dim)

    eagle_worker_v2.renorm_draft_probs, eagle_worker_v2.fast_topk = keep_logits, rank
