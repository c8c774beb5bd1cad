"""A small causal model with the target's vocabulary as drafter: beam search, one step for each depth.

It reads tokens, not the target's hidden states. It has its own runner, whose keys and values are in the target's pages.
So pages are shared, copied and released for both models at once.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from graft.model import Chunk, KVCache, Row, TargetRunner, VerifyOutput, target_for
from graft.model.noise import ComingDraws
from graft.model.support import check_supported
from graft.settings import require
from graft.spec_decode.proposers.drafter import BeamSearch, LevelByLevel, TreeSettings, likeliest
from graft.tree.device.buffers import Level
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

    @classmethod
    def of(cls, row: Row, length: int, pending: Sequence[int] = ()) -> Self:
        return cls(Row(row.block_table_row, row.pages, length), row, list(pending))

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


R = TypeVar("R", bound=ModelRow)


@dataclass
class ModelState(Generic[R]):
    """Draft state of one batch."""

    runner: TargetRunner
    rows: list[R]

    @property
    def lengths(self) -> list[int]:
        return [row.own.length for row in self.rows]

    def select(self, rows: Sequence[int]) -> Self:
        return replace(self, rows=[self.rows[row] for row in rows])

    def copy_row(self, source: int, target: int, row: Row) -> None:
        known = self.rows[source]
        self.rows[target] = type(known).of(row, known.own.length, known.pending)

    def concat(self, other: Self) -> Self:
        return replace(self, rows=self.rows + other.rows)


class SmallModelDrafter(LevelByLevel):
    """Drafts with a small model."""

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
        return ModelState(self._runner(cache), [ModelRow.of(row, row.length) for row in cache.rows])

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

    def read(self, state: ModelState[Any], row: int, verified: VerifyOutput, following: Sequence[int]) -> None:
        own = state.rows[row]
        own.pending += verified.tokens[0].tolist()
        self._read_pending(state, [own])

    def learn(
        self,
        state: ModelState[Any],
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

    @torch.no_grad()
    def levels(
        self,
        state: ModelState[Any],
        roots: Tensor,
        keep: int | None = None,
        draws: ComingDraws | None = None,
    ) -> Iterator[Level]:
        topk = min(self.settings.topk, keep or self.settings.topk)
        search = BeamSearch(len(roots), topk, keep, self.device)
        known = self._known(roots.tolist())
        found = self._run_roots(state, known, topk, draws)
        tokens = torch.tensor(known)[:, None]  # [B, N] run so far
        parents = torch.zeros_like(tokens)  # [B, N] their places
        first = 0  # place of the first of the beams expanded last; at first the root
        for depth in itertools.count(2):
            yield search.level(*found).to_host()
            beams, origin = (part.cpu() for part in search.expand())
            parents = torch.cat([parents, first + origin], dim=1)
            first = tokens.shape[1]
            tokens = torch.cat([tokens, beams], dim=1)
            found = self._run_beams(state, tokens, parents, first, topk, draws, depth)

    def _run_roots(
        self, state: ModelState[Any], roots: Sequence[int], topk: int, draws: ComingDraws | None
    ) -> tuple[Tensor, Tensor]:
        """Read pending tokens and run the roots, in one step. Returns the likeliest next tokens [B, 1, topk]."""
        found = []
        counts = [len(row.pending) + 1 for row in state.rows]
        for group in _groups(counts):
            rows = [state.rows[number] for number in group]
            ends = [roots[number] for number in group]
            chunks = [Chunk(row.own, [*self._known(row.pending), root]) for row, root in zip(rows, ends, strict=True)]
            _, read = state.runner.step(None, None, chunks)
            logits = self._logits(read[0].logits, torch.stack([part.index[0, -1:] for part in read]))
            found.append(likeliest(logits, topk, draws and draws.select(group), 1))
            for row, root in zip(rows, ends, strict=True):
                row.own.length -= 1  # the root is run, but not committed yet
                row.pending, row.tokens, row.parents = [], [root], [0]
        return _joined(found)

    def _run_beams(
        self,
        state: ModelState[Any],
        tokens: Tensor,
        parents: Tensor,
        first: int,
        topk: int,
        draws: ComingDraws | None,
        depth: int,
    ) -> tuple[Tensor, Tensor]:
        """Run the nodes of drafted trees [B, N] from `first` on. Returns the likeliest tokens [B, N - first, topk].

        depth: of these tokens.
        """
        found, runner = [], state.runner
        for group in _groups([tokens.shape[1]] * len(tokens)):
            own = tokens[group]
            tree = DraftTree(own, parents[group], torch.ones(own.shape), torch.zeros_like(own))
            cache = runner.cache_of([state.rows[number].own for number in group])
            verified = runner.verify(cache, tree, num_already_run=first)
            logits = self._logits(verified.logits, verified.index[:, first:])
            found.append(likeliest(logits, topk, draws and draws.select(group), depth))
        for row, *run in zip(state.rows, tokens.tolist(), parents.tolist(), strict=True):
            row.tokens, row.parents = run
        return _joined(found)

    def _read_pending(self, state: ModelState[Any], rows: Sequence[ModelRow]) -> None:
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


def _joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The results of several steps, by row."""
    tokens, q = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(q)


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
