"""SGLang's EAGLE workers with Graft's tree between the head's drafts and the verify. Importing this needs SGLang.

SGLang's own code drafts, verifies and moves the KV cache. Hooks in some of its functions (`hooks`) call these workers:
all drafted levels are kept, the tree is Graft's, and the target's tokens are chosen by keyed noise.

SGLang may overlap scheduling with the GPU's work: while a verify runs, it processes the results of the one before.
Between the last draft pass and the verify, the GPU waits only for this: reading the drafts, building the tree, and
sending it back.
"""

import copy
import os
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers import sampler
from sglang.srt.layers.dp_attention import get_attention_tp_group, is_dp_attention_enabled
from sglang.srt.speculative import eagle_worker_v2
from torch import Tensor

from graft.errors import GraftError
from graft.integrations.sglang.hooks import drafting, set_to
from graft.integrations.sglang.rounds import Proposal, RoundLog, Rounds
from graft.integrations.sglang.settings import (
    SGLangSettings,
    TreeSize,
    captured_sizes,
    check_head,
    check_server,
    from_environment,
    sizes_for,
)
from graft.integrations.sglang.trees import (
    Drafted,
    Sampling,
    VerifyArrays,
    fill_verify,
    link_memory,
    mask_size,
    place_numbers,
    target_tokens,
    verify_arrays,
)
from graft.tree.tree import TreeLinks

_SKIP = "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"  # SGLang's switch: in rounds without trees the head reads nothing
_DRAWN_AT_ONCE = 256  # places, since SGLang's noise takes several times 8 bytes for each token of the vocabulary


class GraftDraftWorker(eagle_worker_v2.EagleDraftWorker):
    """The worker of the draft head, with Graft's trees."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_head(self.draft_runner.model_config.hf_config.architectures or ())
        self._group = get_attention_tp_group() if is_dp_attention_enabled() else get_tp_group()
        self._vocab_size = self.target_worker.model_config.vocab_size
        sizes = (self.topk, self.speculative_num_steps, self.speculative_num_draft_tokens)
        self._rounds = Rounds(self._vocab_size, *sizes, _settings()) if self._group.rank_in_group == 0 else None
        self._log = RoundLog(_settings().log)
        self._batch: Any = None  # SGLang's ScheduleBatch, while drafting for it
        self._coming: _Coming | None = None  # the drafts in progress
        self._proposal: Proposal | None = None  # the last one, on rank 0
        self._unlearned: Callable[[], object] | None = None  # learns the last round, whose results are on their way
        self.reads_prompts = True

    def draft(self, batch: Any) -> Any:
        """The verify's input, made by SGLang's own code, in which `build` makes the tree."""
        self._batch = batch
        with set_to(drafting, self):
            verify_input = super().draft(batch)
        self._batch = None
        # Limits the walk down the tree. Grafted chains can be longer than drafted ones.
        verify_input.spec_steps = self.speculative_num_draft_tokens - 1
        verify_input.graft_worker = self
        return verify_input

    def draft_forward(self, forward_batch: Any) -> Any:
        """The draft passes, which may be captured in a CUDA graph. They return all levels."""
        with set_to(drafting, self):
            return super().draft_forward(forward_batch)

    def _draft_extend_for_prefill(self, batch: Any, hidden_states: Any, next_token_ids: Any, *more: Any) -> Any:
        """Let the head read prompts and restarted requests, unless the next rounds have no trees."""
        if not self.reads_prompts:
            return eagle_worker_v2.EagleDraftInput(
                bonus_tokens=next_token_ids, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1
            )
        if self._rounds is not None:
            whole = zip(batch.reqs, batch.prefix_lens or (), strict=True)  # only a prompt's first part counts
            self._rounds.texts.find_head([request for request, num_before in whole if num_before == 0])
        return super()._draft_extend_for_prefill(batch, hidden_states, next_token_ids, *more)

    def _draft_extend_for_decode(self, batch: Any, batch_result: Any) -> None:
        """Let the head read the accepted tokens and draft the first level of the next round."""
        with set_to(drafting, self):
            super()._draft_extend_for_decode(batch, batch_result)

    def build(self, roots: Tensor, drafted: Drafted, seq_lens: Tensor, mask: Tensor | None) -> VerifyArrays:
        """Rank 0's tree as the verify's inputs.

        If SGLang has a buffer for the mask, the inputs are empty, and `fill` fills them after SGLang has prepared the
        verify. That preparation takes as long as the head's passes, and runs at the same time.
        """
        coming = self._coming = _Coming(self, roots, drafted, seq_lens, self._batch.seq_lens_cpu)
        self._catch_up()  # while the head is drafting
        if self._rounds is not None:
            self._rounds.begin(self._batch.reqs, self.speculative_num_draft_tokens)
        is_prepared_elsewhere = getattr(self, "plan_stream", None) is not None  # on another CUDA stream
        if mask is None or is_prepared_elsewhere or getattr(self.target_worker.model_runner, "model_is_mrope", False):
            return self._arrays(self._batch.reqs, seq_lens, mask)
        size = (len(seq_lens), self.speculative_num_draft_tokens)
        coming.mask = mask.fill_(True)  # all of it: a padded batch reads beyond our rows
        tokens, positions = torch.zeros(2, size[0] * size[1], dtype=torch.int64, device=seq_lens.device)
        index = place_numbers(*size, seq_lens.device)
        return VerifyArrays(mask, positions, index, index, index, tokens)

    def fill(self, verify_input: Any, requests: Any, is_captured: bool) -> None:
        """Write the tree into the verify's inputs, if `build` has left them empty.

        is_captured: the verify is a CUDA graph, which reads SGLang's own mask buffer.
        """
        coming = self._coming
        if coming is None or coming.mask is None:
            return
        links, num_tokens = self._links(requests)
        size = mask_size(links, num_tokens)
        if len(coming.mask) < size:  # too small for a batch larger than all captured ones
            if is_captured:
                raise GraftError(f"SGLang's mask has room for {len(coming.mask)} tokens, and {size} are needed")
            verify_input.custom_mask = torch.ones(size, dtype=torch.bool, device=coming.seq_lens.device)
        # The forward's input already refers to these tokens and positions, so they are written in place.
        written = (verify_input.draft_token, verify_input.positions, verify_input.custom_mask)
        found = fill_verify(links, coming.seq_lens, *written)
        verify_input.retrieve_next_token, verify_input.retrieve_next_sibling = found

    def _arrays(self, requests: Any, seq_lens: Tensor, mask: Tensor | None) -> VerifyArrays:
        links, num_tokens = self._links(requests)
        # SGLang does not know the number of tokens if it has a buffer for the mask.
        return verify_arrays(links, seq_lens, num_tokens, mask)

    def _links(self, requests: Any) -> tuple[TreeLinks, int]:
        """Wait for the drafts; return rank 0's trees and the total number of tokens before them."""
        coming, self._coming = self._coming, None
        assert coming is not None
        waiting = time.perf_counter()
        lengths, arrived = coming.wait()
        started = time.perf_counter()

        links = None
        if self._rounds is not None:
            last_tokens, *levels = arrived
            whole = [length + 1 for length in lengths.tolist()]
            num_places = self.speculative_num_draft_tokens
            roots = last_tokens.to(torch.int64, copy=True)
            self._proposal = self._rounds.propose(requests, roots, whole, Drafted(*levels), num_places)
            links = self._proposal.tree.links(link_memory(len(requests), num_places, coming.seq_lens.is_cuda))
        links = self._broadcast(links)
        self._log.built(len(requests), waiting, started)
        return links, int(lengths.sum())

    def choose(self, requests: Any, info: Any, positions: Tensor, logits: Tensor, best: Tensor) -> Tensor:
        """Rank 0's choice of the target's token after every place, [B, D] on the device.

        info: SGLang's `SamplingBatchInfo`. logits: with penalties. best [B, D]: their likeliest tokens.
        """
        if info.is_all_greedy or self._rounds is None:  # other ranks get rank 0's choice
            chosen = best
        elif info.sampling_seed is not None and not info.need_min_p_sampling:
            chosen = _tokens_without_speculation(logits, positions, info, best.shape[1]).view(best.shape)
        else:
            sampling = self._sampling(requests, info)
            chosen = target_tokens(logits, best.flatten(), positions, sampling).view(best.shape)
        if self._group.world_size > 1:
            self._group.broadcast(chosen, src=0)
        return chosen

    def remember(self, chosen: Tensor, successors: Tensor, logits: Tensor) -> None:
        """Send a verify's results to the host, which learns from them before the next draft."""
        rounds, proposal, self._proposal = self._rounds, self._proposal, None
        assert rounds is not None and proposal is not None
        results = {"chosen": chosen, "successors": successors, "logits": logits}
        on_host = [_to_host(tensor, use) for use, tensor in results.items()]
        arrived = None
        if chosen.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()

        def learn() -> None:
            if arrived is not None:
                arrived.synchronize()
            started = time.perf_counter()
            accepted = rounds.learn(proposal, *on_host)
            self._log.learned(sum(map(len, accepted.tokens)), started)

        self._unlearned = learn

    def digest(self) -> None:
        """Do the part of learning that the next tree did not need, while that tree is being verified."""
        if self._rounds is not None:
            self._rounds.digest()

    @property
    def decides(self) -> bool:
        return self._rounds is not None

    @property
    def learns(self) -> bool:
        """Whether this rank learns from the tree that is being verified."""
        return self._proposal is not None

    def leave_out(self) -> None:
        """Prepare for a round without a tree, from which nothing is learned."""
        self._catch_up()
        self._proposal = None

    def lose_head(self, requests: Any) -> None:
        """Note that the head has not read the tokens of this round."""
        if self._rounds is not None:
            self._rounds.texts.lose_head(requests)

    def reset(self) -> None:
        """Forget all texts and everything learned from them."""
        self._unlearned = self._proposal = self._coming = None
        if self._rounds is not None:
            self._rounds.reset()

    def _broadcast(self, value: Any) -> Any:
        """Broadcast rank 0's value to all ranks."""
        return self._group.broadcast_object(value) if self._group.world_size > 1 else value

    def _catch_up(self) -> None:
        learn, self._unlearned = self._unlearned, None
        if learn is not None:
            learn()

    def _sampling(self, requests: Any, info: Any) -> Sampling:
        assert self._rounds is not None
        random = [request.sampling_params for request in requests if request.sampling_params.top_k > 1]
        is_truncated = any(each.top_k < self._vocab_size or each.top_p < 1 or each.min_p > 0 for each in random)
        device = info.temperatures.device
        seeds = torch.tensor(self._rounds.texts.seeds(requests), dtype=torch.int64, device=device)
        return Sampling(seeds, info.temperatures.flatten(), info.top_ks, info.top_ps, info.min_ps, is_truncated)


class GraftWorker(eagle_worker_v2.EAGLEWorkerV2):
    """SGLang's EAGLE worker with a `GraftDraftWorker`, which its constructor finds by name.

    Trees are smaller if more requests are decoded together. SGLang captures graphs and makes attention backends for one
    size. Its adaptive mode, made for chains, can make more of them, of which one is used at a time.
    """

    def __init__(self, server_args: Any, *args: Any, **kwargs: Any) -> None:
        settings = _settings()
        check_server(server_args, settings)
        if server_args.disable_radix_cache:  # with a prefix cache, requests would share text the head has not read
            os.environ.setdefault(_SKIP, "1")
        super().__init__(server_args, *args, **kwargs)
        self._first = TreeSize(None, server_args.speculative_num_draft_tokens, server_args.speculative_num_steps)
        self._sizes = sizes_for(server_args, settings)
        self._states: dict[tuple[int, int], Any] = {}  # by places and steps
        self._now: Any = None
        self._present: dict[str, Any] = {}  # by id, the requests of the last round and later ones
        self._without_trees: dict[int, Any] = {}  # inputs of a verify without trees, by the number of requests
        self._no_drafts: dict[str, Tensor] = {}  # zeros in place of drafts, for the most requests so far
        # In this worker it is the greatest depth of a verified path. In the draft worker it is the number of levels.
        self.speculative_num_steps = self._first.places - 1

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        draft, target = self.draft_worker, self.target_worker.model_runner
        self._now = self._states[self._first[1:]] = eagle_worker_v2.SpecRuntimeState(
            speculative_num_steps=self._first.steps,
            speculative_num_draft_tokens=self._first.places,
            draft_attn_backend=draft.draft_attn_backend,
            cuda_graph_runner=draft.cuda_graph_runner,
            target_attn_backend=target.attn_backend,
            target_graph_runner=target.decode_cuda_graph_runner,
            draft_extend_attn_backend=draft.draft_extend_attn_backend,
            cuda_graph_runner_for_draft_extend=draft.cuda_graph_runner_for_draft_extend,
        )
        above = 0  # the largest batch of the size before
        for size in self._sizes:
            if size[1:] not in self._states:
                self._states[size[1:]] = self._make_state(size, above)
            above = size.max_requests or above

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a round or a prefill. The head reads prompts unless there will be too many requests for trees."""
        coming = {request.rid: request for request in batch.reqs}
        if not (batch.forward_mode.is_extend() or batch.is_extend_in_batch):
            self._present = coming
            return super().forward_batch_generation(batch, *args, **kwargs)
        self._present = {rid: each for rid, each in self._present.items() if not each.finished()} | coming
        has_trees = self._size_for(len(self._present)).places > 1
        self.draft_worker.reads_prompts = has_trees or not self._skips_without_trees()
        result = super().forward_batch_generation(batch, *args, **kwargs)
        if not self.draft_worker.reads_prompts:
            self._stub_skipped_draft_extend(batch, result)
        return result

    def activate_step_by_batch(self, batch_size: int) -> None:
        """Switch to the tree size for a round of so many requests."""
        size = self._size_for(batch_size)
        state = self._states.get(size[1:])
        if state is None or state is self._now:  # None: SGLang has not captured anything yet
            return
        self._now, draft, target = state, self.draft_worker, self.target_worker.model_runner
        for worker in (self, draft):
            worker.speculative_num_draft_tokens = size.places
        self.speculative_num_steps, draft.speculative_num_steps = size.places - 1, size.steps
        draft.draft_attn_backend = draft.draft_runner.draft_attn_backend = state.draft_attn_backend
        draft.cuda_graph_runner = state.cuda_graph_runner
        draft.draft_extend_attn_backend = state.draft_extend_attn_backend
        draft.cuda_graph_runner_for_draft_extend = state.cuda_graph_runner_for_draft_extend
        if state.draft_extend_attn_backend is not None:
            draft.draft_runner.attn_backend = state.draft_extend_attn_backend
        target.attn_backend = state.target_attn_backend
        target.decode_cuda_graph_runner = state.target_graph_runner
        # The server's flags stay the same: SGLang reserves memory by them, for the largest trees.

    def clear_cache_pool(self) -> None:
        super().clear_cache_pool()
        self.draft_worker.reset()

    def _build_trivial_verify_input(self, batch: Any) -> Any:
        """The verify of the roots alone, for rounds without trees."""
        self.draft_worker.leave_out()
        num_rows, known = len(batch.reqs), self._without_trees
        mask, positions = self.target_worker.model_runner.attn_backend.get_verify_buffers_to_fill_after_draft()
        if mask is None or positions is not None or batch.forward_mode.is_idle():
            made = super()._build_trivial_verify_input(batch)
        else:  # all but two fields are the same in every round, so they are reused to save launches
            if num_rows not in known or known[num_rows].custom_mask is not mask:
                known[num_rows] = super()._build_trivial_verify_input(batch)
            made = copy.copy(known[num_rows])
            made.draft_token, made.positions = batch.spec_info.bonus_tokens, batch.seq_lens.to(torch.int64)
        made.graft_worker = self.draft_worker
        return made

    def _finalize_accept_tree_path(
        self, batch: Any, accept_index: Tensor, accept_lens: Tensor, predict: Tensor, logits_output: Any, bs: int
    ) -> Tensor:
        """Move the accepted path's keys and values, tokens and features to the front of each row's places.

        SGLang does the same with more launches. accept_index [B, D]: indices of the path's places, then -1.
        """
        num_places = self.speculative_num_draft_tokens
        if num_places == 1:  # nothing to move
            return predict
        own = place_numbers(bs, num_places, accept_index.device)
        order = torch.where(accept_index < 0, own, accept_index).flatten()  # what is not accepted stays
        slots = batch.out_cache_loc
        self.token_to_kv_pool_allocator.get_kvcache().move_kv_cache(slots, slots[order])
        if logits_output.hidden_states is not None:
            logits_output.hidden_states = logits_output.hidden_states[order]
        return predict[order]

    def _stub_skipped_draft_extend(self, batch: Any, batch_output: Any) -> None:
        """Skip the head after a round without trees, and after a prefill before one.

        That saves up to a tenth of the time. Later trees of these requests have retrieved tokens only.
        """
        made, num_rows = batch_output.next_draft_input, len(batch.reqs)
        if num_rows > len(self._no_drafts.get("topk_p", ())):
            super()._stub_skipped_draft_extend(batch, batch_output)
            self._no_drafts = {name: getattr(made, name) for name in ("topk_p", "topk_index", "hidden_states")}
        for name, zeros in self._no_drafts.items():
            setattr(made, name, zeros[:num_rows])
        self.draft_worker.lose_head(batch.reqs)

    def _skips_without_trees(self) -> bool:
        """Whether the head is skipped in rounds without trees. Not if another server decodes what is prefilled here."""
        is_decoded_here = getattr(self.server_args, "disaggregation_mode", "null") == "null"
        return is_decoded_here and bool(getattr(eagle_worker_v2.envs, _SKIP).get())

    def _size_for(self, num_requests: int) -> TreeSize:
        return next(each for each in self._sizes if each.max_requests is None or num_requests <= each.max_requests)

    def _make_state(self, size: TreeSize, above: int) -> Any:
        """Backends and graphs for batches above `above` requests, up to the size's `max_requests`."""
        draft, graphs = self.draft_worker, self.server_args.cuda_graph_config.decode
        captured = graphs.bs
        with (
            draft.draft_tp_context(draft.draft_runner.tp_group),
            eagle_worker_v2.speculative_moe_backend_context(),
            eagle_worker_v2.speculative_moe_a2a_backend_context(),
        ):
            if captured:
                graphs.bs = captured_sizes(captured, above, size.max_requests)
            try:
                return self.build_adaptive_runtime_state(size.steps, size.places, cuda_graph_bs=graphs.bs)
            finally:
                graphs.bs = captured


class _Coming:
    """The inputs of a tree, on their way to the host."""

    def __init__(
        self,
        worker: GraftDraftWorker,
        roots: Tensor,
        drafted: Drafted,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor | None,
    ) -> None:
        self.seq_lens, self._lengths = seq_lens, seq_lens_cpu
        self.mask: Tensor | None = None  # of a verify that `fill` fills later
        wanted = {"lengths": seq_lens} if seq_lens_cpu is None else {}
        if worker.decides:
            wanted |= {"roots": roots} | drafted._asdict()
        self._copies = [_to_host(tensor, use) for use, tensor in wanted.items()]
        self._arrived = torch.cuda.Event() if seq_lens.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> tuple[Tensor, list[Tensor]]:
        """Each row's tokens in the KV cache, and roots and drafts if this rank decides."""
        if self._arrived is not None:
            self._arrived.synchronize()
        if self._lengths is not None:
            return self._lengths, self._copies
        return self._copies[0], self._copies[1:]


def _tokens_without_speculation(logits: Tensor, positions: Tensor, info: Any, num_places: int) -> Tensor:
    """The tokens [B * D] that SGLang's own sampler draws in deterministic mode, by seed and position.

    So the text is the one that SGLang draws without speculation. (It refuses seeds with min-p.)
    """
    columns = (info.temperatures.flatten(), info.sampling_seed, info.top_ks, info.top_ps, info.min_ps)
    temperatures, seeds, *limits = (column.repeat_interleave(num_places) for column in columns)
    is_truncated = info.need_top_k_sampling or info.need_top_p_sampling
    drawn = []
    for first in range(0, len(logits), _DRAWN_AT_ONCE):
        part = slice(first, first + _DRAWN_AT_ONCE)
        probabilities = torch.softmax(logits[part] / temperatures[part, None], dim=-1)
        if is_truncated:
            now = [column[part] for column in limits]
            tokens = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
                probabilities, *now, False, seeds[part], positions[part]
            )
        else:
            tokens = sampler.sampling_from_probs_torch(
                probabilities, sampling_seed=seeds[part], positions=positions[part]
            )
        drawn.append(tokens.long())
    return torch.cat(drawn)


def _settings() -> SGLangSettings:
    return from_environment(os.environ) or SGLangSettings()


def _to_host(tensor: Tensor, use: str) -> Tensor:
    """A copy that may still be on its way. The next copy for the same use overwrites it."""
    num_rows, *sizes = tensor.shape
    memory = _host_memory(use, 1 << (num_rows - 1).bit_length(), tuple(sizes), tensor.dtype, tensor.is_cuda)
    return memory[:num_rows].copy_(tensor, non_blocking=True)


@lru_cache(maxsize=1024)  # uses x powers of two x sizes of trees
def _host_memory(use: str, num_rows: int, sizes: tuple[int, ...], dtype: torch.dtype, is_pinned: bool) -> Tensor:
    return torch.empty(num_rows, *sizes, dtype=dtype, pin_memory=is_pinned)
