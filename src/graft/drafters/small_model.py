"""A small causal model with the target's vocabulary as drafter: beam search, one step for each depth.

It reads tokens, not the target's hidden states. It has its own runner, whose keys and values are in the target's pages.
So pages are shared, copied and released for both models at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from graft.drafters.beam_drafter import BeamDrafter, Found, likeliest
from graft.drafters.drafter import DraftState, Passes, TreeSettings
from graft.model import Chunk, KVCache, Row, TargetRunner, VerifyOutput, target_for
from graft.model.noise import ComingDraws
from graft.model.support import check_supported
from graft.settings import require
from graft.tree.device.buffers import Beams
from graft.tree.tree import DraftTree

MAX_PENDING = 256  # tokens of a row that may wait for the next draft pass
_MAX_STEP = 512  # tokens of a step of several rows, since logits of the whole vocabulary take memory


@dataclass(eq=False)
class ModelRow:
    """One row's draft state. Tokens that were read, and pending tokens, together are the target's committed tokens."""

    own: Row  # the target's pages; its length is what the draft model has read
    target: Row  # keeps the pages alive
    pending: list[int] = field(default_factory=list)  # committed tokens that it has not read yet
    # Tokens that this round's passes have run: the root, then beams. Parents are indices into these lists.
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.own.length

    def path(self, tokens: Sequence[int]) -> list[int]:
        """Indices of the drafted path with these tokens, as far as it was drafted."""
        children = {node: place for place, node in enumerate(zip(self.parents, self.tokens, strict=True))}
        path, node = list[int](), 0
        for token in tokens:
            place = children.get((node, token), 0)
            if place == 0:
                break
            path.append(node := place)
        return path

    def drop_drafts(self) -> None:
        self.tokens, self.parents = [], []


@dataclass(eq=False)
class ModelState(DraftState[Any]):
    """Draft state of one batch, of rows `ModelRow`."""

    runner: TargetRunner


class SmallModelDrafter(BeamDrafter):
    """Drafts with a small model."""

    is_captured = False  # its steps are graphs of their own runner, which the host makes one by one
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, model: PreTrainedModel, vocab_size: int, settings: TreeSettings | None = None) -> None:
        """vocab_size: of the target. Only tokens of both vocabularies are drafted."""
        check_supported(model)
        self.model = model
        self.settings = settings or TreeSettings()
        self._vocab_size = vocab_size
        embedding = model.get_input_embeddings().weight
        assert isinstance(embedding, Tensor)
        self._num_known = len(embedding)  # size of the draft model's vocabulary
        runner = TargetRunner(model)
        self._max_positions = runner.max_positions
        self._num_drafted = min(vocab_size, runner.vocab_size, self._num_known)
        require(
            self.settings.topk <= self._num_drafted,
            f"topk is {self.settings.topk}, but the draft model drafts from {self._num_drafted} tokens",
        )
        self._runners: weakref.WeakSet[TargetRunner] = weakref.WeakSet()

    def with_settings(self, settings: TreeSettings) -> SmallModelDrafter:
        return SmallModelDrafter(self.model, self._vocab_size, settings)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def num_slots(self) -> int:
        return 1 + super().num_slots  # one more for the root

    @property
    def bytes_per_token(self) -> int:
        return TargetRunner(self.model).bytes_per_token()

    @property
    def num_setups(self) -> int:
        return sum(runner.num_setups for runner in self._runners)

    def open(self, cache: KVCache, texts: Sequence[Sequence[int]] = ()) -> Any:
        # A prefix from the prefix cache has keys and values of both models.
        rows = [ModelRow(Row(row.block_table_row, row.pages, row.length), row) for row in cache.rows]
        return ModelState(self, cache.pool, rows, self._runner(cache))

    def copied(self, state: ModelState, known: Any, row: Row) -> ModelRow:
        return ModelRow(Row(row.block_table_row, row.pages, known.own.length), row, list(known.pending))

    def _runner(self, cache: KVCache) -> TargetRunner:
        """The draft model's runner for the pool of a target's cache."""
        pool = cache.pool
        with pool.lock:
            runner: TargetRunner | None = pool.guests.get(self)
            if runner is None:
                runner = self._new_runner(cache)
                pool.guests[self] = runner
                self._runners.add(runner)
            return runner

    def _new_runner(self, cache: KVCache) -> TargetRunner:
        return target_for(self.model, pool=cache.pool)

    def warm_up(self, target: TargetRunner, max_rows: int) -> None:
        runner = self._runner(target.cache_of([]))
        runner.progress = target.progress
        widest = max(self.num_slots, runner.chunk_size)
        runner.warm_up(max(widest, min(max_rows * self.num_slots, _MAX_STEP)))

    def read(self, chunks: Sequence[tuple[Any, int, VerifyOutput, Sequence[int]]]) -> None:
        for state, row, verified, _ in chunks:
            state.rows[row].pending += verified.tokens[0].tolist()
            self._read_pending(state, [state.rows[row]])

    def learn(
        self,
        state: ModelState,
        verified: VerifyOutput,
        nodes: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
    ) -> None:
        drafted: list[tuple[ModelRow, list[int]]] = []
        for number, (row, path) in enumerate(zip(state.rows, nodes, strict=True)):
            committed = verified.tokens[number, [0, *path]].tolist()
            if row.tokens:  # keys and values of the root and the drafted path stay
                drafted.append((row, row.path(committed[1:])))
                committed = committed[1 + len(drafted[-1][1]) :]
            row.pending += committed
            row.drop_drafts()
        if drafted:
            cache = state.runner.cache_of([row.own for row, _ in drafted])
            state.runner.commit(cache, [path for _, path in drafted])
        if max(len(row.pending) for row in state.rows) > MAX_PENDING:
            self._read_pending(state, state.rows)

    def root(self, asked: Passes, topk: int) -> Found:
        """Read pending tokens and run the roots, in one step."""
        state, found = asked.state, []
        roots = self._known(asked.roots[: len(state.rows)].tolist())
        counts = [len(row.pending) + 1 for row in state.rows]
        for group in _groups(counts):
            rows = [state.rows[number] for number in group]
            ends = [roots[number] for number in group]
            chunks = [Chunk(row.own, [*self._known(row.pending), root]) for row, root in zip(rows, ends, strict=True)]
            _, read = state.runner.step(None, None, chunks)
            logits = self._logits(read[0].logits, torch.stack([part.index[0, -1:] for part in read]))
            found.append(likeliest(logits, topk, _draws_of(asked, group), 1))
            for row, root in zip(rows, ends, strict=True):
                row.own.length -= 1  # the root is run, but not committed yet
                row.pending, row.tokens, row.parents = [], [root], [0]
        return _joined(found)

    def expand(self, asked: Passes, beams: Beams, number: int, features: Any) -> Found:
        rows, topk = asked.state.rows, beams.tokens.shape[1]
        # Places of the beams expanded last; at first of the root.
        above = beams.origins % topk + 1 + (number - 2) * topk if number > 1 else torch.zeros_like(beams.origins)
        new = zip(rows, beams.tokens.tolist(), above.tolist(), strict=True)
        columns = [([*row.tokens, *tokens], [*row.parents, *parents]) for row, tokens, parents in new]
        tokens, parents = (torch.tensor(column) for column in zip(*columns, strict=True))
        return self._run_nodes(asked, tokens, parents, tokens.shape[1] - topk, topk, number + 1)

    def _run_nodes(self, asked: Passes, tokens: Tensor, parents: Tensor, first: int, topk: int, depth: int) -> Found:
        """Run the nodes of drafted trees [B, N] from `first` on. depth: of the tokens after them."""
        state, found = asked.state, []
        for group in _groups([tokens.shape[1]] * len(tokens)):
            own = tokens[group]
            tree = DraftTree(own, parents[group], torch.ones(own.shape), torch.zeros_like(own))
            cache = state.runner.cache_of([state.rows[number].own for number in group])
            verified = state.runner.verify(cache, tree, num_already_run=first)
            logits = self._logits(verified.logits, verified.index[:, first:])
            found.append(likeliest(logits, topk, _draws_of(asked, group), depth))
        for row, *run in zip(state.rows, tokens.tolist(), parents.tolist(), strict=True):
            row.tokens, row.parents = run
        return _joined(found)

    def _read_pending(self, state: ModelState, rows: Sequence[ModelRow]) -> None:
        """Read pending tokens, in several steps if there are many."""
        most = state.runner.chunk_size
        while rows := [row for row in rows if row.pending]:
            for group in _groups([min(len(row.pending), most) for row in rows]):
                some = [rows[number] for number in group]
                state.runner.step(None, None, [Chunk(row.own, self._known(row.pending[:most])) for row in some])
                for row in some:
                    del row.pending[:most]

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Replace tokens outside the draft model's vocabulary by token 0."""
        return [token if token < self._num_known else 0 for token in tokens]

    def _logits(self, logits: Tensor, index: Tensor) -> Tensor:
        """A step's logits [T, V] at `index` [B, F], of only the tokens that may be drafted."""
        return logits[index.to(logits.device), : self._num_drafted]


def _groups(counts: Sequence[int]) -> Iterator[list[int]]:
    """Split rows with these numbers of tokens into groups, each for one step."""
    group, total = list[int](), 0
    for number, count in enumerate(counts):
        if group and total + count > _MAX_STEP:
            yield group
            group, total = [], 0
        group.append(number)
        total += count
    yield group


def _draws_of(asked: Passes, rows: Sequence[int]) -> ComingDraws | None:
    draws = asked.draws
    assert draws is None or isinstance(draws, ComingDraws)
    return draws.select(rows) if draws is not None else None


def _joined(parts: Sequence[tuple[Tensor, Tensor]]) -> Found:
    """The results of several steps, by row."""
    tokens, q = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(q), None


def shares_vocabulary(
    name: str,
    model: PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: Any | None = None,
    target_tokenizer: Any | None = None,
) -> bool:
    """Whether token ids mean the same to the draft model `name` and to its target.

    One may have more tokens at the end. Without both tokenizers the output layers must be of the same size.
    """
    if tokenizer is None or target_tokenizer is None:
        own, its = TargetRunner(model).vocab_size, TargetRunner(target).vocab_size
        require(
            own == its,
            f"{name} has {own:,} tokens and the target {its:,}, and without tokenizers they cannot be compared: "
            "name both models, or pass the tokenizers of those in memory",
        )
        return True
    own_tokens, its_tokens = (
        {number: token for token, number in each.get_vocab().items()} for each in (tokenizer, target_tokenizer)
    )
    return all(own_tokens[number] == its_tokens[number] for number in own_tokens.keys() & its_tokens.keys())
