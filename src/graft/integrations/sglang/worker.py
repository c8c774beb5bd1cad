"""SGLang's EAGLE workers with Graft's tree between the head's drafts and the verify. Importing this needs SGLang.

SGLang's own code drafts, verifies and moves the KV cache. Hooks in some of its functions (`hooks`) call these workers.
Trees are built by kernels behind the head's passes, in the same CUDA graph, so SGLang may prepare and launch a verify
before its tree is known: overlapped scheduling works as with SGLang's own trees.
"""

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.layers import sampler
from sglang.srt.speculative import eagle_worker_v2
from torch import Tensor

from graft.errors import GraftError
from graft.integrations.sglang import release
from graft.integrations.sglang.fallback import Attempt, say_once
from graft.integrations.sglang.hooks import Drafting, drafting, set_to
from graft.integrations.sglang.kernels import Drafted, Rows
from graft.integrations.sglang.settings import (
    SGLangSettings,
    TreeSize,
    captured_sizes,
    check_head,
    check_server,
    from_environment,
    sizes_for,
)
from graft.integrations.sglang.trees import Server, Trees, VerifyArrays, draw_in_torch
from graft.tree.device.round import MAX_TREE_TOKENS

_SKIP = "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"  # SGLang's switch: in rounds without trees the head reads nothing
_DRAWN_AT_ONCE = 256  # places; SGLang's noise takes several times 8 bytes for each place and token of the vocabulary
_MOVED_BY_A_THREAD = 128  # bytes


class GraftDraftWorker(eagle_worker_v2.EagleDraftWorker):
    """The worker of the draft head, with Graft's trees."""

    trees: Trees
    reads_prompts = True
    has_tree = False  # whether this round's trees are Graft's
    is_sound = True  # whether nothing has failed in this round
    _is_capturing = False  # whether SGLang is capturing its graphs
    _fits_graphs = True  # False: our kernels failed during the capture, so some graphs lack them

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        super().alloc_memory_pool(*args, **kwargs)
        check_head(self.draft_runner.model_config.hf_config.to_dict())
        self._group = release.current().group()
        with Attempt("let SGLang move fewer tokens at once"):
            _limit_moves(self.token_to_kv_pool_allocator.get_kvcache())
        args_of, tables, kv = self.server_args, self.req_to_token_pool.req_to_token, self.token_to_kv_pool_allocator
        self._tables = tables
        settings = _settings()
        captured = release.current().decode_graphs(args_of).bs or ()
        sizes = [size for size in sizes_for(args_of, settings, captured) if size.places > 1]
        # By places, the rows of the largest graph that has such trees. SGLang captures more for the largest trees.
        self._most_rows = {
            size.places: min((rows for rows in captured if rows >= size.max_requests), default=size.max_requests)
            for size in sizes
            if size.max_requests is not None
        }
        self._is_deterministic = bool(getattr(args_of, "enable_deterministic_inference", False))
        if self._is_deterministic:
            say_once("in the deterministic mode sampled tokens are drawn by SGLang's own code, which is slower")
        server = Server(
            num_slots=len(tables),
            context=tables.shape[1],
            num_kv_slots=kv.size + kv.page_size + 1,
            vocab_size=self.target_worker.model_config.vocab_size,
            topk=self.topk,
            num_steps=self.speculative_num_steps,
            most_rows=max(min(MAX_TREE_TOKENS // min((size.places for size in sizes), default=2), len(tables)), 1),
            random_seed=args_of.random_seed,
            knows_noise=not self._is_deterministic,
        )
        self.trees = Trees(server, settings, getattr(self, "hot_token_id", None), tables.device)

    # Drafting

    def draft(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The verify's input, made by SGLang's own code, in which `build` makes the tree."""
        self.has_tree = False
        if not batch.forward_mode.is_idle():
            is_loaded = self._load(batch, batch.spec_info.bonus_tokens)
            # Ranks must agree, whatever fails in one of them: rank 0 then sends trees of roots alone.
            self.has_tree, self.is_sound = self._has_trees(len(batch.reqs)), self._fits_graphs and is_loaded
        with set_to(drafting, Drafting(self)):
            verify_input = super().draft(batch, *args, **kwargs)
        # Limits the walk down the tree. Grafted chains can be longer than drafted ones.
        verify_input.spec_steps = self.speculative_num_draft_tokens - 1
        verify_input.graft_worker = self
        return verify_input

    def _load(self, batch: Any, roots: Tensor) -> bool:
        """Prepare the rows of a batch, and return whether that worked."""
        with Attempt("prepare a round") as attempt:
            self.trees.see(batch.reqs)
            rows = Rows(batch.req_pool_indices, batch.seq_lens, roots)
            self.trees.load(rows, self.speculative_num_draft_tokens)
        return not attempt.failed

    def _has_trees(self, num_requests: int) -> bool:
        """Whether a round of so many requests has our trees."""
        num_rows, num_places = self._padded(num_requests), self.speculative_num_draft_tokens
        if not self.trees.fits(num_rows, num_places):
            say_once(f"batches of more than {MAX_TREE_TOKENS} places have SGLang's own trees")
        return self._has_room(num_rows, num_places)

    def _has_room(self, num_rows: int, num_places: int) -> bool:
        """Whether a batch of `num_rows`, with padding, has our trees. The graph and the round must agree on it."""
        fits = num_places > 1 and self.trees.fits(num_rows, num_places)
        return fits and num_rows <= self._most_rows.get(num_places, num_rows)

    def _padded(self, num_rows: int) -> int:
        """The rows of the graph that a batch runs in. If ranks pad to each other's batches, it is the largest graph."""
        captured = list(getattr(getattr(self, "cuda_graph_runner", None), "capture_bs", ()))
        if captured and getattr(self.server_args, "enable_dp_attention", False):
            return max(captured)
        return min((size for size in captured if size >= num_rows), default=num_rows)

    def _capture_cuda_graphs(self) -> None:
        """Capture the draft graphs, for those batches alone that have trees of this size."""
        graphs = release.current().decode_graphs(self.server_args)
        captured, most = graphs.bs, self._most_rows.get(self.speculative_num_draft_tokens)
        if captured and most is not None:
            graphs.bs = [rows for rows in captured if rows <= most] or captured
        self._is_capturing = True
        try:
            super()._capture_cuda_graphs()
        except Exception:
            say_once("SGLang's draft graphs cannot be captured with its kernels in them: unset GRAFT_SGLANG")
            raise
        finally:
            self._is_capturing, graphs.bs = False, captured

    @contextmanager
    def _inside_graphs(self) -> Iterator[None]:
        """Context for what SGLang captures. If it fails during a capture, all later rounds do without it.

        Waiting for the device would break the capture, and with it the launch of the server. So waiting is made an
        error already in the trial run that SGLang makes before it captures a batch.
        """
        if not self._fits_graphs:
            raise GraftError("the kernels failed when graphs were captured")
        watched = self._is_capturing and self._tables.is_cuda and not torch.cuda.is_current_stream_capturing()
        mode = torch.cuda.get_sync_debug_mode() if watched else 0
        try:
            if watched:
                torch.cuda.set_sync_debug_mode("error")
            yield
        except Exception:
            self._fits_graphs = not self._is_capturing
            raise
        finally:
            if watched:
                torch.cuda.set_sync_debug_mode(mode)

    def draft_forward(self, forward_batch: Any) -> Any:
        """The draft passes and the tree, which may be captured in a CUDA graph. Returns all levels."""
        with set_to(drafting, Drafting(self, forward_batch.seq_lens + 1, depth=2)):
            found = super().draft_forward(forward_batch)
        beams, scores, tokens, *_ = found
        num_places = self.speculative_num_draft_tokens
        if tokens is not None and self._has_room(len(tokens), num_places):
            with Attempt("propose trees") as attempt, self._inside_graphs():
                self.trees.propose(Drafted(tokens, scores, beams), num_places)
            self.is_sound = self.is_sound and not attempt.failed
        return found

    def likeliest(self, logits: Tensor, topk: int, ends: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        with self._inside_graphs():
            return self.trees.likeliest(logits, topk, ends, depth)

    def build(
        self,
        lengths: Tensor,
        roots: Tensor,
        mask: Tensor | None,
        most_tokens: int,
        has_texts: bool,
        fills: bool,
    ) -> VerifyArrays | None:
        """The proposed trees, the same on all ranks, as the verify's inputs. None: the trees are SGLang's own."""
        num_places, is_alone = self.speculative_num_draft_tokens, self._group.world_size == 1
        if not self.has_tree or (is_alone and not self.is_sound):
            self.has_tree = False
            return None
        if not is_alone:
            if not self.is_sound:
                self.trees.leave_roots(roots, lengths, num_places)
            self._group.broadcast(self.trees.step, src=0)
        if mask is not None:  # SGLang does not count tokens then
            most_tokens = len(lengths) * self.target_worker.model_runner.attn_backend.max_context_len
        with Attempt("build trees") as attempt:
            return self.trees.arrays(len(lengths), num_places, mask, most_tokens, has_texts, fills)
        assert attempt.failed
        if not is_alone:
            raise GraftError("a rank cannot build the trees that the others verify")
        self.has_tree = False
        return None

    def warm_up(self, all_rows: Sequence[int], num_places: int, backend: Any) -> None:
        """Compile and capture what runs outside of SGLang's graphs, for batches of these sizes.

        backend: the target's, for verifies of so many places.
        """
        outputs = getattr(self.target_worker.model_runner, "graph_shared_output", None)
        for num_rows in all_rows:
            if not self.trees.fits(num_rows, num_places):
                continue
            with Attempt("compile its kernels beforehand"):
                size, logits = num_rows * num_places, None
                if outputs is not None and size <= outputs.max_rows:
                    logits = outputs.get_logits_buffer(self.target_worker.model_config.vocab_size, rows=size)
                mask = release.current().verify_mask(backend, num_rows)
                if mask is not None and len(mask) < size * (backend.max_context_len + num_places):
                    mask = None
                self.trees.warm_up(num_rows, num_places, logits, mask)
        self.trees.reset()

    # Reading

    def _draft_extend_for_prefill(
        self, batch: Any, hidden_states: Any, next_token_ids: Any, *more: Any, **kw: Any
    ) -> Any:
        """Let the head read prompts and restarted requests, unless the next rounds have no trees."""
        if not batch.forward_mode.is_idle():
            self._load(batch, next_token_ids)
        if not self.reads_prompts:
            self.lose_head(batch)
            return eagle_worker_v2.EagleDraftInput(
                bonus_tokens=next_token_ids, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1
            )
        if not batch.forward_mode.is_idle():
            for request in batch.reqs:
                request.graft_has_head = True
            with Attempt("note what the head has read"):
                lengths = batch.prefix_lens or ()
                self.trees.find_head(batch.req_pool_indices, batch.out_cache_loc, lengths, self._tables)
        with set_to(drafting, Drafting(self, batch.seq_lens + 1, depth=1)):
            return super()._draft_extend_for_prefill(batch, hidden_states, next_token_ids, *more, **kw)

    def _draft_extend_for_decode(self, batch: Any, batch_result: Any, *args: Any, **kwargs: Any) -> None:
        """Let the head read the accepted tokens and draft the first level of the next round."""
        with set_to(drafting, Drafting(self, batch_result.new_seq_lens + 1, depth=1)):
            super()._draft_extend_for_decode(batch, batch_result, *args, **kwargs)

    def lose_head(self, batch: Any) -> None:
        """Note that the head does not read the tokens that the target has just read."""
        if batch.forward_mode.is_idle():  # another data parallel rank has work, this one has none
            return
        for request in batch.reqs:
            request.graft_has_head = False
        with Attempt("note what the head has read"):
            self.trees.lose_head(batch.req_pool_indices, batch.out_cache_loc)

    # Choosing and learning

    def choose(self, batch: Any, info: Any, positions: Tensor, logits: Tensor, best: Tensor) -> Tensor:
        """Rank 0's choice of the target's token after every place, [B, D] on the device.

        info: SGLang's `SamplingBatchInfo`. logits: with penalties. best [B, D]: their likeliest tokens.
        """
        if info.is_all_greedy:
            chosen = best
        elif info.sampling_seed is not None and not info.need_min_p_sampling:
            chosen = _tokens_without_speculation(logits, positions, info, best.shape[1]).view(best.shape)
        else:
            chosen = self._draw(batch, info, positions, logits, best.flatten()).view(best.shape)
        if self._group.world_size > 1:
            self._group.broadcast(chosen, src=0)
        return chosen

    def _draw(self, batch: Any, info: Any, positions: Tensor, logits: Tensor, best: Tensor) -> Tensor:
        vocab_size = logits.shape[1]
        random = [each.sampling_params for each in batch.reqs if each.sampling_params.top_k > 1]
        truncates = any(each.top_k < vocab_size or each.top_p < 1 or each.min_p > 0 for each in random)
        with Attempt("draw tokens in its kernel"):
            self.trees.see(batch.reqs)
            return self.trees.draw(logits, best, positions, batch.req_pool_indices.long(), truncates)
        limits = (info.temperatures.flatten(), info.top_ks, info.top_ps, info.min_ps)
        return draw_in_torch(logits, best, positions, [self.trees.seed_of(each) for each in batch.reqs], limits)

    def rank_successors(self, logits: Tensor) -> None:
        self.trees.rank_successors(logits, self.speculative_num_draft_tokens)

    def learn(self, chosen: Tensor) -> None:
        """chosen: [B, D] the target's tokens after every place."""
        num_rows, num_places = chosen.shape
        self.trees.finish(num_rows, num_places, chosen.flatten())


class GraftWorker(eagle_worker_v2.EAGLEWorkerV2):
    """SGLang's EAGLE worker with a `GraftDraftWorker`, which its constructor finds by name.

    Trees are smaller if more requests are decoded together. SGLang captures graphs and makes attention backends for one
    size. Its adaptive mode, made for chains, can make more of them, of which one is used at a time.
    """

    def __init__(self, server_args: Any, *args: Any, **kwargs: Any) -> None:
        settings = _settings()
        check_server(server_args, settings)
        os.environ.setdefault(_SKIP, "1")
        super().__init__(server_args, *args, **kwargs)
        self._first = TreeSize(None, server_args.speculative_num_draft_tokens, server_args.speculative_num_steps)
        self._sizes = sizes_for(server_args, settings, release.current().decode_graphs(server_args).bs or ())
        self._states: dict[tuple[int, int], Any] = {}  # by places and steps
        self._now: Any = None
        self._present: dict[str, Any] = {}  # by id, the requests of the last round and later ones
        self._has_head = True  # whether the head has read a text of this round; known here without asking the device
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
        above, captured = 0, release.current().decode_graphs(self.server_args).bs or [1]
        for size in self._sizes:  # above: the largest batch of the size before
            all_rows = captured_sizes(captured, above, size.max_requests)
            if size.places == 1:  # also for small batches, which have no trees if the head has not read their texts
                all_rows = [rows for rows in captured if rows & (rows - 1) == 0 and rows < min(all_rows)] + all_rows
            if size[1:] not in self._states:
                self._states[size[1:]] = self._make_state(size, all_rows)
            draft.warm_up(all_rows, size.places, self._states[size[1:]].target_attn_backend)
            above = size.max_requests or above

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a round or a prefill. The head reads prompts unless there will be too many requests for trees."""
        coming = {request.rid: request for request in batch.reqs}
        if not (batch.forward_mode.is_extend() or batch.is_extend_in_batch):
            self._present = coming
            self._has_head = any(getattr(request, "graft_has_head", True) for request in batch.reqs)
            return super().forward_batch_generation(batch, *args, **kwargs)
        self._present = {rid: each for rid, each in self._present.items() if not each.finished()} | coming
        has_trees = self._size_for(len(self._present)).places > 1
        self.draft_worker.reads_prompts = has_trees or not self._skips_without_trees()
        result = super().forward_batch_generation(batch, *args, **kwargs)
        if not self.draft_worker.reads_prompts:
            self._fill_no_drafts(batch, result)
        return result

    def activate_step_by_batch(self, batch_size: int) -> None:
        """Switch to the tree size for a round of `batch_size` requests."""
        size, largest = self._size_for(batch_size), self._sizes[-1]
        if largest.places == 1 and batch_size and not self._has_head:
            size = largest  # trees of retrieved tokens alone seldom pay
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
        self.draft_worker.trees.reset()

    def _build_trivial_verify_input(self, batch: Any) -> Any:
        """The verify of the roots alone, for rounds without trees: SGLang's plain decoding, with our sampling."""
        draft, num_rows, known = self.draft_worker, len(batch.reqs), self._without_trees
        draft.has_tree = False
        if batch.forward_mode.is_idle():
            return super()._build_trivial_verify_input(batch)
        draft._load(batch, batch.spec_info.bonus_tokens)
        mask = release.current().verify_mask(self.target_worker.model_runner.attn_backend, num_rows)
        if mask is None:
            made = super()._build_trivial_verify_input(batch)
        else:  # all but two fields are the same in every round, so they are reused to save launches
            if num_rows not in known or known[num_rows].custom_mask is not mask:
                known[num_rows] = super()._build_trivial_verify_input(batch)
            made = copy.copy(known[num_rows])
            made.draft_token, made.positions = batch.spec_info.bonus_tokens, batch.seq_lens.to(torch.int64)
        made.graft_worker = draft
        return made

    def _stub_skipped_draft_extend(self, batch: Any, batch_output: Any) -> None:
        """Skip the head after a round without trees, which saves up to a tenth of the time.

        Later trees of these requests have retrieved tokens only.
        """
        self._fill_no_drafts(batch, batch_output)
        self.draft_worker.lose_head(batch)

    def _fill_no_drafts(self, batch: Any, batch_output: Any) -> None:
        made, num_rows = batch_output.next_draft_input, len(batch.reqs)
        if num_rows > len(self._no_drafts.get("topk_p", ())):
            super()._stub_skipped_draft_extend(batch, batch_output)
            self._no_drafts = {name: getattr(made, name) for name in ("topk_p", "topk_index", "hidden_states")}
        for name, zeros in self._no_drafts.items():
            setattr(made, name, zeros[:num_rows])

    def _skips_without_trees(self) -> bool:
        """Whether the head is skipped in rounds without trees. Not if another server decodes what is prefilled here."""
        is_decoded_here = getattr(self.server_args, "disaggregation_mode", "null") == "null"
        return is_decoded_here and bool(getattr(eagle_worker_v2.envs, _SKIP).get())

    def _size_for(self, num_requests: int) -> TreeSize:
        return next(each for each in self._sizes if each.max_requests is None or num_requests <= each.max_requests)

    def _make_state(self, size: TreeSize, all_rows: list[int]) -> Any:
        """Backends, and graphs for batches of these sizes."""
        graphs = release.current().decode_graphs(self.server_args)
        captured = graphs.bs
        with (
            release.current().draft_context(self.draft_worker),
            eagle_worker_v2.speculative_moe_backend_context(),
            eagle_worker_v2.speculative_moe_a2a_backend_context(),
        ):
            if captured:
                graphs.bs = all_rows
            try:
                return self.build_adaptive_runtime_state(size.steps, size.places, cuda_graph_bs=graphs.bs)
            finally:
                graphs.bs = captured


def _limit_moves(pool: Any) -> None:
    """Let SGLang's kernel move only as many tokens' keys and values at once as its registers hold.

    It moves the accepted path to the front. With 64 requests of 4 places these are 256 tokens, which take 0.74 ms at
    once, where 128 take 0.04 ms.
    """
    config = getattr(pool, "_kv_copy_config", None)
    if config is not None:
        most = _MOVED_BY_A_THREAD * 32 * config["num_warps"] // config["bytes_per_tile"]
        config["num_locs_upper"] = min(config["num_locs_upper"], max(most, 1))


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
