"""TargetRunner: forwards of the target model over trees and prompt chunks, by transformers' own code or on a CPU in C.

A runner holds no sequences: callers pass the KV cache. `sampler` chooses tokens, `spec_decode.acceptance` accepts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from graft.model import attention
from graft.model.context import max_positions
from graft.model.cpu_layers import CpuModel, Fused, why_not_on_cpu
from graft.model.kv_cache import PAGE, KVCache, KVStore, PagePool, Row
from graft.model.overrides import evaluating, use_tree_attention
from graft.model.step import Chunk, FlatStep, Part
from graft.model.support import check_supported
from graft.model.unusual_layers import weights_in_words
from graft.model.verified import VerifyOutput
from graft.progress import Report
from graft.settings import require
from graft.tree.tree import DraftTree

_IN_USE = "the KV cache is in use already: set its size before anything is decoded"


class TargetRunner:
    """Runs a target model over draft trees and prompt chunks, on KV caches that it opens."""

    def __init__(
        self,
        model: PreTrainedModel,
        hidden_layers: Sequence[int] = (),
        chunk_size: int = 256,
        pool: PagePool | None = None,
        store: KVStore | None = None,
    ) -> None:
        """pool: another runner's pages to share; None: a new pool.

        store: another runner's keys and values to share, with that runner's pool; None: a new store.
        """
        check_supported(model)
        self.model = model
        self.chunk_size = chunk_size
        self.is_exact = False  # whether a token has the same bits in any batch
        self._hidden_layers = tuple(hidden_layers)
        config = model.config.get_text_config()
        self.vocab_size = num_logits(model)
        self.max_positions = max_positions(config)
        # Whether layers ask the cache for their tokens' positions.
        self._asks_for_positions = bool(getattr(config, "attn_temperature_tuning", False))
        self.progress: Callable[[Report], None] = lambda report: None  # called during one-time work
        self._fused = Fused(model, why_not_on_cpu, CpuModel)  # on a CPU
        self._store = store or KVStore(config.num_hidden_layers)
        self._pool: PagePool | None = None
        if pool is not None:
            self._use_pool(pool)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def num_setups(self) -> int:
        """One-time set-ups so far, such as graph captures. The time of a step with one is not representative."""
        return 0

    @property
    def mode(self) -> str:
        """How steps run, in a few words: captured, fused or eager, and when they are exact (docs/exactness.md)."""
        return "fused, exact in any batch" if self.not_fused is None else "eager"

    @property
    def not_fused(self) -> str | None:
        """Why the model's own code runs its layers, and not our fused ones; None if ours do."""
        if self._fused.layers is not None:
            return None
        self.refresh()
        return self._fused.reason if self.device.type == "cpu" else "its steps are not captured in CUDA graphs"

    def describe(self) -> dict[str, str]:
        """What the model's weights are, how its steps run, and why the layers are not fused, if they are not."""
        facts, reason = {"weights": weights_in_words(self.model), "steps": self.mode}, self.not_fused
        return facts if reason is None or reason in facts["steps"] else facts | {"not fused": reason}

    def synchronize(self) -> None:
        """Wait for this thread's CUDA stream.

        Waiting for the whole device would fail, and break the capture, while another thread captures a graph.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Sizes that steps are padded to; empty if steps are not padded."""
        return ()

    @property
    def max_tokens(self) -> int | None:
        """The most tokens that a step can have; None: no limit."""
        return None

    @property
    def pool(self) -> PagePool:
        """The pages of all KV caches that this runner opens."""
        pool = self._opened_pool
        if pool is None:
            pool = self._new_pool()
            self._use_pool(pool)
        return pool

    @property
    def _opened_pool(self) -> PagePool | None:
        """The pool, if there is one yet."""
        return self._pool

    def _new_pool(self) -> PagePool:
        return PagePool(self.device, self.max_positions)

    def _use_pool(self, pool: PagePool) -> None:
        self._pool = pool
        pool.add_store(self._store)

    def limit_pages(self, num_pages: int, num_rows: int = 7) -> None:
        """Fix the number of pages of all KV caches together. No page may be in use yet.

        num_rows: rows that may be open at once without moving the block tables.
        """
        pool = self._opened_pool
        if pool is not None and pool.is_fixed and pool.num_pages == num_pages and pool.num_table_rows > num_rows:
            return  # another runner of the same model did it
        require(pool is None or not pool.is_in_use, _IN_USE)
        self._use_pool(PagePool(self.device, self.max_positions, num_pages, num_rows))

    def bytes_per_token(self) -> int:
        """Bytes of a token in the KV cache. If the config does not tell, a step is run to find out."""
        found = _bytes_per_token(self.model)
        if found is not None:
            return found
        cache = self.open(1, 1)
        self.verify(cache, DraftTree.roots(torch.zeros(1, dtype=torch.int64)))
        cache.release()
        return self._store.bytes_per_token

    def step_bytes(self, max_tokens: int) -> int:
        """Approximate bytes, without weights and KV cache, for steps of up to `max_tokens` tokens: mostly logits."""
        return 2 * max_tokens * self.vocab_size * 4

    def warm_up(self, max_tokens: int) -> None:
        """Do one-time work for steps of up to `max_tokens` tokens. Eager steps need none."""

    def refresh(self) -> None:
        """Check, before rows are opened, whether the model has changed, for example by weights that moved."""
        if self.device.type == "cpu":
            self._fused.refresh()

    def memory_report(self) -> dict[str, int]:
        """Bytes on the device by purpose, without the model's weights and temporary tensors."""
        return {"cache": self._store.nbytes}

    def open(self, num_rows: int, num_slots: int) -> KVCache:
        """Open a KV cache of `num_rows` rows with room for `num_slots` tokens each. If one fails, all are released."""
        self.refresh()
        rows: list[Row] = []
        try:
            for _ in range(num_rows):
                rows.append(self.pool.open_row(num_slots))
        except Exception:
            for row in rows:
                self.pool.release(row)
            raise
        return self.cache_of(rows)

    def cache_of(self, rows: list[Row]) -> KVCache:
        return KVCache(self.pool, self._store, rows)

    def prefill(self, cache: KVCache, row: int, tokens: Sequence[int]) -> Iterator[VerifyOutput]:
        """Commit a text to one row, chunk by chunk."""
        for start in range(0, len(tokens), self.chunk_size):
            chunk = Chunk(cache.rows[row], tokens[start : start + self.chunk_size])
            _, (verified,) = self.step(None, None, [chunk])
            self.synchronize()
            yield verified

    def verify(self, cache: KVCache, tree: DraftTree, num_already_run: int = 0) -> VerifyOutput:
        """Compute logits after every node of every row's tree, in one forward. Nothing is committed.

        tree: on the host. num_already_run: see `step`.
        """
        verified, _ = self.step(cache, tree, num_already_run=num_already_run)
        assert verified is not None
        return verified

    @torch.no_grad()
    def step(
        self, cache: KVCache | None, tree: DraftTree | None, chunks: Sequence[Chunk] = (), num_already_run: int = 0
    ) -> tuple[VerifyOutput | None, list[VerifyOutput]]:
        """Run the trees of a cache's rows, and prompt chunks of other rows, in one forward. Chunks are committed.

        num_already_run: the number of first nodes of each tree that were in these rows' last step too. They are not run
        again and have no output. Only without chunks.
        Returns the output for the trees, and for each chunk.
        """
        rows = cache.rows if cache is not None else []
        self._make_room(rows, tree, chunks)
        verified = self._run(FlatStep(rows, tree, chunks), num_already_run)
        for chunk in chunks:
            chunk.row.length += len(chunk.tokens)
        return verified

    def commit(self, cache: KVCache, paths: Sequence[Sequence[int]]) -> None:
        """Commit each row's root and accepted path; see `KVCache.commit`."""
        cache.commit(paths)

    def _make_room(self, rows: Sequence[Row], tree: DraftTree | None, chunks: Sequence[Chunk]) -> None:
        if tree is not None:
            pool, width = self.pool, tree.width
            for row in rows:
                if row.length + width > PAGE * len(row.pages):
                    pool.ensure(row, row.length + width)
        for chunk in chunks:
            self.pool.ensure(chunk.row, chunk.row.length + len(chunk.tokens))

    def _run(self, step: FlatStep, num_already_run: int) -> tuple[VerifyOutput | None, list[VerifyOutput]]:
        """Run the step eagerly, by the model's own code."""
        is_run = step.skip_already_run(num_already_run) if num_already_run else None
        logits, hidden = self._run_model(*self._inputs(step, is_run))
        return outputs_of(step, logits[0].float(), hidden[0])

    def _inputs(
        self, step: FlatStep, is_run: np.ndarray | None = None
    ) -> tuple[KVCache, Tensor, Tensor, attention.Visibility]:
        """A forward's inputs for those tokens of a step that are run."""
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
    def _with_tree_attention(
        self, cache: KVCache, tokens: Tensor, positions: Tensor, seen: attention.Visibility | attention.KernelStep
    ) -> Iterator[dict[str, Any]]:
        if self._asks_for_positions:
            cache.place_at(positions[0])
        with use_tree_attention(self.model, seen), evaluating(self.model):
            yield {"input_ids": tokens, "position_ids": positions, "past_key_values": cache, "use_cache": True}

    def _clamped(self, positions: Tensor) -> Tensor:
        """Clamp positions to the model's context. Nodes beyond it are never accepted, but must stay in range."""
        return positions if self.max_positions is None else positions.clamp(max=self.max_positions - 1)

    def _run_model(
        self,
        cache: KVCache,
        tokens: Tensor,  # [1, T]
        positions: Tensor,
        seen: attention.Visibility | attention.KernelStep,
    ) -> tuple[Tensor, Tensor]:
        """Logits [1, T, V] in the model's dtype, and the requested hidden states, concatenated."""
        if isinstance(seen, attention.Visibility):
            found: tuple[Tensor, Tensor] | None = self._fused.run(tokens, cache, positions, seen, self._hidden_layers)
            if found is not None:
                return found
        with self._with_tree_attention(cache, tokens, positions, seen) as arguments:
            output = self.model(**arguments, output_hidden_states=bool(self._hidden_layers))
        return output.logits, concat_hidden(
            [output.hidden_states[layer] for layer in self._hidden_layers], output.logits
        )


def outputs_of(
    step: FlatStep,
    logits: Tensor,
    hidden: Tensor,
    highest: tuple[Tensor, Tensor] | None = None,
    is_captured: bool = False,
) -> tuple[VerifyOutput | None, list[VerifyOutput]]:
    """Split a flat step's output: the trees' part, and each chunk's."""

    def of(part: Part) -> VerifyOutput:
        return VerifyOutput(part.tokens, part.index, part.counts, logits, hidden, highest, is_captured)

    return of(step.tree) if step.tree is not None else None, [of(part) for part in step.chunks]


def concat_hidden(hidden: Sequence[Tensor], like: Tensor) -> Tensor:
    """Concatenate hidden states [..., H] of layers to [..., layers * H]; [..., 0] if there are none."""
    return torch.cat(list(hidden), dim=-1) if hidden else like[..., :0]


def _bytes_per_token(model: PreTrainedModel) -> int | None:
    """Bytes of a token in the KV cache, by the config; None if layers may differ or the config does not tell."""
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


def num_logits(model: PreTrainedModel) -> int:
    """Outputs of the last layer, which may be more than the config's vocabulary. Its weight may be packed."""
    output: Any = model.get_output_embeddings()
    if output is None:
        return int(model.config.get_text_config().vocab_size)
    weight = output._parameters.get("weight")
    return len(weight) if type(weight) is nn.Parameter and weight.ndim == 2 else output.out_features
