"""TargetRunner: the forwards of the target model, flat steps of trees and prompt chunks, by transformers' own code.

It has no sequences: their KV cache is passed in. Tokens are chosen in `sampler` and accepted in
`spec_decode.acceptance`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from graft.model import attention
from graft.model.kv_cache import PAGE, KVCache, KVStore, PagePool, Row
from graft.model.loan import evaluating, tree_attention
from graft.model.step import Chunk, FlatStep, Part
from graft.model.support import check_supported
from graft.model.verified import Step, VerifyOutput
from graft.progress import Report
from graft.settings import require
from graft.tree.tree import DraftTree

_IN_USE = "the KV cache is in use already: set its size before anything is decoded"


class BegunStep(Protocol):
    """What a drafter that shares the target's layers has already run of a row's next step; it stands in `Row.begun`."""

    @property
    def length(self) -> int:
        """Of the row when it was run: a row that has grown since begins anew."""

    def finish(self, runner: TargetRunner, step: FlatStep, begun: Sequence[Any]) -> Tensor:
        """Logits [1, T, V] of the whole step. begun: by row, what was run of it, or None."""


class TargetRunner:
    """Runs a target model over draft trees and chunks of prompts, on the KV caches that it opens."""

    def __init__(
        self,
        model: PreTrainedModel,
        hidden_layers: Sequence[int] = (),
        chunk_size: int = 256,
        pool: PagePool | None = None,
        store: KVStore | None = None,
    ) -> None:
        """pool: another runner's, whose pages this one's keys and values are to have too; None: one of its own.

        store: likewise, where its keys and values are the same; only with its pool.
        """
        check_supported(model)
        self.model = model
        self.chunk_size = chunk_size
        self.is_exact = False  # whether a token has the same bits in any batch
        self._hidden_layers = tuple(hidden_layers)
        config = model.config.get_text_config()
        self.vocab_size = _num_logits(model)
        self.max_positions = _max_positions(config)
        self._asks_for_positions = bool(getattr(config, "attn_temperature_tuning", False))  # its layers, of the cache
        self.progress: Callable[[Report], None] = lambda report: None  # told of one-time work
        self._store = store or KVStore(config.num_hidden_layers)
        self._pool: PagePool | None = None
        if pool is not None:
            self._use_pool(pool)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def num_setups(self) -> int:
        """One-time set-ups done so far, such as graph captures: the time of a step with one tells nothing of others."""
        return 0

    @property
    def mode(self) -> str:
        """How steps run, in a few words: captured or eager, and where they are exact (docs/exactness.md)."""
        return "eager"

    def synchronize(self) -> None:
        """Waits for this thread's CUDA stream.

        Not for the whole device: that is an error while another thread captures a graph, and ends its capture.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def wait_for(self, verified: VerifyOutput) -> None:
        """Waits until a verify's output is there, but not for what the device was given to do since."""
        if verified.step is not None:
            verified.step.judged.wait()
        else:
            self.synchronize()

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens that steps are padded to; none if steps take as many as there are."""
        return ()

    @property
    def max_tokens(self) -> int | None:
        """The most tokens that a step can have; None: any number."""
        return None

    @property
    def pool(self) -> PagePool:
        """The pages of all KV caches that it opens."""
        if self._pool is None:
            self._use_pool(PagePool(self.device, self.max_positions))
            assert self._pool is not None
        return self._pool

    def _use_pool(self, pool: PagePool) -> None:
        self._pool = pool
        pool.add_store(self._store)

    def limit_pages(self, num_pages: int, num_rows: int = 7) -> None:
        """There are so many pages from now on, for all KV caches together; nobody may have any yet.

        num_rows: as many as there will be at once, so that nothing moves when they come.
        """
        there = self._shared_pool
        if there is not None and there.is_fixed and there.num_pages == num_pages and there.num_lines > num_rows:
            return  # by another runner of the same model
        require(there is None or not there.is_in_use, _IN_USE)
        self._use_pool(PagePool(self.device, self.max_positions, num_pages, num_rows))

    @property
    def _shared_pool(self) -> PagePool | None:
        """The pool, if there is one yet."""
        return self._pool

    def bytes_per_token(self) -> int:
        """Bytes of the KV cache that a token takes. Where the config does not tell, the first step does."""
        found = _bytes_per_token(self.model)
        if found is not None:
            return found
        cache = self.open(1, 1)
        self.verify(cache, DraftTree.roots(torch.zeros(1, dtype=torch.int64)))
        cache.release()
        return self._store.bytes_per_token

    def step_bytes(self, max_tokens: int) -> int:
        """Bytes beside weights and KV cache that steps of up to so many tokens take, about: logits above all."""
        return 2 * max_tokens * self.vocab_size * 4

    def warm_up(self, max_tokens: int) -> None:
        """Does one-time work for steps of up to so many tokens; here there is none."""

    def memory_report(self) -> dict[str, int]:
        """Bytes on the device beside the model's weights and a generation's own tensors, by purpose."""
        return {"cache": self._store.nbytes}

    def open(self, num_rows: int, num_slots: int) -> KVCache:
        """A new KV cache of so many rows, each with room for so many tokens."""
        return self._opened(self.pool.open_row(num_slots) for _ in range(num_rows))

    def open_like(self, texts: Sequence[Sequence[int]], salts: Sequence[str], num_slots: int) -> KVCache:
        """A KV cache with a row for each text, which has what is kept of its beginning under its salt."""
        pairs = zip(texts, salts, strict=True)
        return self._opened(self.pool.open_like(text, salt, num_slots) for text, salt in pairs)

    def _opened(self, opening: Iterator[Row]) -> KVCache:
        """A KV cache of rows that are opened one by one: if one cannot be, none stays."""
        rows: list[Row] = []
        try:
            for row in opening:
                rows.append(row)
        except Exception:
            for row in rows:
                self.pool.release(row)
            raise
        return self.cache_of(rows)

    def cache_of(self, rows: list[Row]) -> KVCache:
        return KVCache(self.pool, self._store, rows)

    def prefill(self, cache: KVCache, row: int, tokens: Sequence[int]) -> Iterator[VerifyOutput]:
        """Commits a text to one row, chunk by chunk."""
        for start in range(0, len(tokens), self.chunk_size):
            chunk = Chunk(cache.rows[row], tokens[start : start + self.chunk_size])
            _, (verified,) = self.step(None, None, [chunk])
            self.wait_for(verified)
            yield verified

    def verify(self, cache: KVCache, tree: DraftTree, num_run: int = 0) -> VerifyOutput:
        """Logits after every node of every row's tree, in one forward. Nothing is committed. tree: on the host.

        num_run: see `step`.
        """
        verified, _ = self.step(cache, tree, num_run=num_run)
        assert verified is not None
        return verified

    @torch.no_grad()
    def step(
        self, cache: KVCache | None, tree: DraftTree | None, chunks: Sequence[Chunk] = (), num_run: int = 0
    ) -> tuple[VerifyOutput | None, list[VerifyOutput]]:
        """One forward of the trees of a cache's rows, and of chunks of other rows' texts, which are committed.

        num_run: the first nodes of each tree, if the last step of these rows had the same: they need not be run again,
        and nobody asks for their output. Without chunks only.
        Rows must have pages for their tokens of the step. Returns the output for the trees, and for each chunk.
        """
        rows = cache.rows if cache is not None else []
        self._make_room(rows, tree, chunks)
        verified = self._run(FlatStep(rows, tree, chunks), num_run)
        for chunk in chunks:
            chunk.row.length += len(chunk.tokens)
        return verified

    def commit(self, cache: KVCache, paths: Sequence[Sequence[int]]) -> None:
        """Commits each row's root and accepted path; see `KVCache.commit`."""
        cache.commit(paths)

    def _make_room(self, rows: Sequence[Row], tree: DraftTree | None, chunks: Sequence[Chunk]) -> None:
        if tree is not None:
            pool, width = self.pool, tree.width
            for row in rows:
                if row.length + width > PAGE * len(row.pages):
                    pool.ensure(row, row.length + width)
        for chunk in chunks:
            self.pool.ensure(chunk.row, chunk.row.length + len(chunk.tokens))

    def _run(self, step: FlatStep, num_run: int) -> tuple[VerifyOutput | None, list[VerifyOutput]]:
        """The step by the model's own code, eagerly."""
        begun: list[BegunStep | None] = [row.take_begun() for row in step.rows]
        first = next((own for own in begun if own is not None), None)
        if first is not None:
            assert not self._hidden_layers
            logits = first.finish(self, step, begun)
            return outputs_of(step, logits[0].float(), logits[0, :, :0])
        is_run = step.leave_out(num_run) if num_run else None
        logits, hidden = self._run_model(*self._inputs(step, is_run))
        return outputs_of(step, logits[0].float(), hidden[0])

    def _inputs(
        self, step: FlatStep, is_run: np.ndarray | None = None
    ) -> tuple[KVCache, Tensor, Tensor, attention.Visibility]:
        """What a forward takes for a step, or for those of its tokens that it runs."""
        device = self.device
        cache = self.cache_of(step.rows)
        slots, ids, at = step.slots(), step.tokens.astype(np.int64), step.positions().astype(np.int64)
        if any(row.offset for row in step.rows):
            at = at + np.repeat([row.offset for row in step.rows], step.by_row[1, : len(step.rows)])
        if is_run is not None:
            slots, ids, at = slots[is_run], ids[is_run], at[is_run]
        seen = attention.Visibility.of_step(step, device, self.model.dtype, is_run)
        cache.write_at(torch.from_numpy(slots).to(device))
        cache.read_until(seen.end)
        tokens = torch.from_numpy(ids)[None].to(device)
        return cache, tokens, self._clamped(torch.from_numpy(at)[None].to(device)), seen

    @contextmanager
    def forward_of(self, step: FlatStep, is_run: np.ndarray | None = None) -> Iterator[dict[str, Any]]:
        """The model with our attention, and the arguments of its own forward for a step, or for some of its tokens."""
        with self._lent(*self._inputs(step, is_run)) as arguments:
            yield arguments

    @contextmanager
    def _lent(
        self, cache: KVCache, tokens: Tensor, positions: Tensor, seen: attention.Visibility | attention.KernelStep
    ) -> Iterator[dict[str, Any]]:
        """The model with our attention, and the arguments of its own forward."""
        if self._asks_for_positions:
            cache.place_at(positions[0])
        with tree_attention(self.model, seen), evaluating(self.model):
            yield {"input_ids": tokens, "position_ids": positions, "past_key_values": cache, "use_cache": True}

    def _clamped(self, positions: Tensor) -> Tensor:
        """Positions at most the model's last: nodes beyond cannot become text, but must not index past its tables."""
        return positions if self.max_positions is None else positions.clamp(max=self.max_positions - 1)

    def _run_model(
        self,
        cache: KVCache,
        tokens: Tensor,  # [1, T]
        positions: Tensor,
        seen: attention.Visibility | attention.KernelStep,
    ) -> tuple[Tensor, Tensor]:
        """Logits [1, T, V] in the model's dtype, and the hidden states asked for, concatenated."""
        with self._lent(cache, tokens, positions, seen) as arguments:
            output = self.model(**arguments, output_hidden_states=bool(self._hidden_layers))
        return output.logits, side_by_side(
            [output.hidden_states[layer] for layer in self._hidden_layers], output.logits
        )


def outputs_of(
    step: FlatStep,
    logits: Tensor,
    hidden: Tensor,
    highest: tuple[Tensor, Tensor] | None = None,
    captured: Step | None = None,
) -> tuple[VerifyOutput | None, list[VerifyOutput]]:
    """A flat step's output by its parts: the trees', and each chunk's."""

    def of(part: Part) -> VerifyOutput:
        return VerifyOutput(part.tokens, part.index, part.counts, logits, hidden, highest, captured, part.depths)

    return of(step.tree) if step.tree is not None else None, [of(part) for part in step.chunks]


def side_by_side(hidden: Sequence[Tensor], like: Tensor) -> Tensor:
    """Hidden states [..., H] of some layers as one [..., layers * H]; [..., 0] if there are none."""
    return torch.cat(list(hidden), dim=-1) if hidden else like[..., :0]


def _bytes_per_token(model: PreTrainedModel) -> int | None:
    """By the config, of a model whose keys and values are alike in all layers; None if it does not say so."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None and heads and getattr(config, "hidden_size", None):
        head_dim = config.hidden_size // config.num_attention_heads
    other = ("v_head_dim", "kv_lora_rank", "num_kv_shared_layers", "per_layer_config")
    differs = any(getattr(config, name, None) for name in other)
    if not isinstance(heads, int) or not isinstance(head_dim, int) or differs:
        return None
    return 2 * int(config.num_hidden_layers) * heads * head_dim * model.dtype.itemsize


def _num_logits(model: PreTrainedModel) -> int:
    """Rows of the output layer, which may be more than the config's vocabulary."""
    output = model.get_output_embeddings()
    return output.weight.shape[0] if output is not None else model.config.get_text_config().vocab_size


def _max_positions(config: PreTrainedConfig) -> int | None:
    """The model's context length: positions below it mean the same in every forward. None: no limit.

    With longrope the rotation of all tokens changes once a forward goes past the original context, so a tree that
    reaches further than plain decoding would change the text: there such a model's context ends.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        return int(original)
    return limit
