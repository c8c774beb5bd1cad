"""A small model with another tokenizer as drafter: `text_alignment` converts its drafted text to target tokens.

Its tokens are not the target's, so its keys and values have their own page pool. A round's whole beam search is one
pass of the target's round, because the target's tokens are known only when the texts are complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from graft.drafters import small_model
from graft.drafters.drafter import KEPT_OF_A_LEVEL, Passes, TreeSettings
from graft.drafters.small_model import ModelRow, ModelState, SmallModelDrafter
from graft.drafters.text_alignment import (
    DraftedTree,
    TargetTrie,
    TextRow,
    VocabularyPair,
    as_target_tokens,
)
from graft.model import KVCache, NoRoomError, PagePool, Row, TargetRunner, VerifyOutput, target_for
from graft.model.noise import ComingDraws
from graft.settings import require
from graft.tree.device.round import AddLevel

_TOKENS_PER_DRAFT = 2  # the most target tokens per drafted token; enough in practice
_LEAST_REACH = 0.05  # stop drafting below this probability that one of the beams is right
_LEAST_CONTEXT = 64  # tokens of text that must fit in the draft model's context, besides drafts


@dataclass(eq=False)
class AlignedRow(ModelRow):
    """One row's draft state: pages of its own pool, and the text in both vocabularies."""

    text: TextRow | None = None  # None: drafting has stopped for this row
    unseen: list[int] = field(default_factory=list)  # target tokens to be added to `text`

    @property
    def length(self) -> int:
        return self.target.length  # the drafter uses none of the target's pages

    @property
    def num_ids(self) -> int:
        """Known target tokens. The root is among them unless this is a first round."""
        return (len(self.text.ids) if self.text is not None else 0) + len(self.unseen)

    @property
    def last(self) -> int:
        """The last draft token of the text; 0 for an empty text, which occurs when times are measured."""
        return self.text.drafts[-1] if self.text is not None and self.text.drafts else 0

    def keep(self, length: int) -> None:
        """Keep the keys and values of `length` draft tokens. The others are pending, except the last one."""
        drafts = self.text.drafts if self.text is not None else []
        self.own.length = max(min(length, len(drafts) - 1), 0)
        self.pending = drafts[self.own.length : -1]


class OtherTokenizerDrafter(SmallModelDrafter):
    """Drafts with a small model of another vocabulary."""

    def __init__(self, model: PreTrainedModel, pair: VocabularyPair, settings: TreeSettings | None = None) -> None:
        super().__init__(model, pair.draft.size, settings)
        self._pair = pair
        limit = self._max_length()
        require(
            limit is None or limit >= _LEAST_CONTEXT,
            f"the draft model's context leaves room for {max(limit or 0, 0)} tokens of text besides {self.num_slots} "
            "drafted ones: make the tree smaller, or use another model",
        )

    def knows(self, draws: ComingDraws) -> bool:
        return False  # the noise belongs to the target's tokens, not to the drafted ones

    def with_settings(self, settings: TreeSettings) -> OtherTokenizerDrafter:
        return OtherTokenizerDrafter(self.model, self._pair, settings)

    @property
    def max_passes(self) -> int:
        return 1

    def level_sizes(self, num_rows: int, keep: int = KEPT_OF_A_LEVEL) -> tuple[int, ...]:
        return (keep * self.max_depth,)

    def beams_of(self, num_rows: int, keep: int = KEPT_OF_A_LEVEL) -> int:
        return 0

    @property
    def max_depth(self) -> int:
        return _TOKENS_PER_DRAFT * (self.settings.depth + 1)

    def _max_length(self) -> int | None:
        """The longest text, in draft tokens, that the draft model's context allows; None: no limit."""
        return None if self._max_positions is None else self._max_positions - self.num_slots

    def _new_runner(self, cache: KVCache) -> TargetRunner:
        """A runner with a pool as large as the target's: texts have about as many tokens in either vocabulary."""
        pool = cache.pool
        there, size = (pool.num_pages, {}) if pool.is_fixed else (None, {"first_pages": pool.num_pages + 1})
        own = PagePool(self.device, self._max_positions, there, pool.num_table_rows - 1, **size)
        return target_for(self.model, pool=own)

    def open(self, cache: KVCache, texts: Sequence[Sequence[int]] = ()) -> ModelState:
        runner = self._runner(cache)
        rows = []
        for number, row in enumerate(cache.rows):
            known = list(texts[number][: row.length]) if texts else []
            rows.append(AlignedRow(runner.pool.open_row(0), row, text=TextRow(self._pair), unseen=known))
        return ModelState(self, runner.pool, rows, runner)

    def copied(self, state: ModelState, known: AlignedRow, row: Row) -> AlignedRow:
        copied = AlignedRow(state.pool.open_row(0), row, unseen=list(known.unseen))
        if known.text is not None:
            copied.text = known.text.copy()
            # Only pages of settled tokens are shared, as neither row writes to them again.
            known.drop_drafts()
            known.keep(min(known.own.length, known.text.num_settled))
            try:
                state.pool.copy(known.own, copied.own)
            except NoRoomError:  # the copy reads its text again when there is room
                copied.own.length = 0
            copied.keep(copied.own.length)
        return copied

    def read(self, chunks: Sequence[tuple[Any, int, VerifyOutput, Sequence[int]]]) -> None:
        for state, row, verified, _ in chunks:
            state.rows[row].unseen += verified.tokens[0].tolist()
            self._read_unseen(state, [state.rows[row]])

    def learn(
        self, state: Any, verified: VerifyOutput, nodes: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> None:
        for number, row in enumerate(state.rows):
            # The root is known already unless this was a first round without drafts.
            new = [int(verified.tokens[number, 0]), *tokens[number]]
            known = row.num_ids - (row.target.length - len(new) + 1)
            if row.text is not None and known in (0, 1):
                row.unseen += new[known:]
            else:
                self._give_up(state, row)
        behind = [row for row in state.rows if len(row.unseen) > small_model.MAX_PENDING]
        if behind:
            self._read_unseen(state, behind)

    @torch.no_grad()
    def run_passes(self, asked: Passes, add_level: AddLevel) -> None:
        state = asked.state
        for row, root in zip(state.rows, asked.roots[: len(state.rows)].tolist(), strict=True):
            if row.num_ids == row.target.length:
                row.unseen.append(root)
            elif row.num_ids != row.target.length + 1:  # parts of its text were never passed to `read`
                self._give_up(state, row)
        self._align(state, state.rows)
        rows = [number for number, row in enumerate(state.rows) if self._has_room(state, row)]
        tries = [TargetTrie() for _ in state.rows]
        if rows:
            drafting = state.select(rows)
            drafted = self._drafted(replace(asked, state=drafting), asked.keep == 1)
            for number, row, tree in zip(rows, drafting.rows, drafted, strict=True):
                assert row.text is not None
                tries[number] = as_target_tokens(self._pair, row.text, tree)
        nodes = _nodes_of(tries, min(self.max_depth, asked.max_depth), asked.keep, self.level_sizes(0, asked.keep)[0])
        add_level(0, *map(asked.flat, nodes))

    def _drafted(self, asked: Passes, is_chain: bool) -> list[DraftedTree]:
        """By row, the tree of draft tokens."""
        rows, topk = asked.state.rows, 1 if is_chain else self.settings.topk
        trees, made = [DraftedTree() for _ in rows], torch.ones(self.settings.depth + 2, dtype=torch.int32)

        def add_level(number: int, tokens: Tensor, parents: Tensor, q: Tensor) -> None:
            reach = 0.0
            columns = (part.view(len(rows), -1).tolist() for part in (tokens, parents, q))
            for tree, *nodes in zip(trees, *columns, strict=True):
                expanded = set[int]()
                first = len(tree.tokens)
                for token, parent, own in zip(*nodes, strict=True):
                    if parent not in expanded:  # each beam's likeliest child comes first
                        tree.looked_ahead.append(len(tree.tokens))
                    expanded.add(parent)
                    tree.tokens.append(token)
                    tree.parents.append(parent)
                    tree.paths.append(tree.paths[parent] * own)
                reach = max(reach, sum(tree.paths[first : first + topk]))
            made[number + 1] = reach >= _LEAST_REACH

        inner = replace(
            asked,
            num_passes=self.settings.depth + 1,
            table_rows=torch.zeros(len(rows), dtype=torch.int32),
            roots=torch.tensor([row.last for row in rows]),
            made=made,
            keep=topk * topk,
            draws=None,
        )
        super().run_passes(inner, add_level)
        return trees

    # Reading the text

    def _read_unseen(self, state: ModelState, rows: Sequence[AlignedRow]) -> None:
        self._align(state, rows)
        self._read_pending(state, [row for row in rows if self._has_room(state, row)])

    def _align(self, state: ModelState, rows: Sequence[AlignedRow]) -> None:
        """Align new text. Keep keys and values of unchanged tokens, and of drafts that have become text."""
        drafted: list[tuple[AlignedRow, list[int]]] = []
        for row in rows:
            if row.text is None:
                continue
            before = len(row.text.drafts)
            unchanged = row.text.extend(row.unseen) if row.unseen else before
            row.unseen = []
            if row.tokens and 0 < unchanged == before:  # the token drafted after is unchanged
                drafted.append((row, row.path(row.text.drafts[before:])))
            row.own.length = min(row.own.length, unchanged)
            row.drop_drafts()
        if drafted:
            cache = state.runner.cache_of([row.own for row, _ in drafted])
            state.runner.commit(cache, [path for _, path in drafted])
        for row in rows:
            if row.text is not None:
                row.keep(row.own.length)

    def _has_room(self, state: ModelState, row: AlignedRow) -> bool:
        """Whether text and drafts fit in the context and in the pool. Gives up rows that outgrow the context."""
        if row.text is None:
            return False
        limit = self._max_length()
        if limit is not None and len(row.text.drafts) > limit:
            self._give_up(state, row)
            return False
        try:
            state.pool.ensure(row.own, len(row.text.drafts) + self.num_slots)
        except NoRoomError:
            return False
        return True

    def _give_up(self, state: ModelState, row: AlignedRow) -> None:
        """Stop drafting for this row, and release its pages."""
        row.text, row.unseen, row.pending = None, [], []
        row.drop_drafts()
        row.own.length = 0
        state.pool.trim(row.own, 0)


def _nodes_of(tries: Sequence[TargetTrie], max_depth: int, keep: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, parents and q [B, size] of several rows' trees, depth by depth, the likeliest `keep` of each first."""
    tokens, parents = torch.zeros(2, len(tries), size, dtype=torch.int32)
    q = torch.zeros(len(tries), size)
    for row, trie in enumerate(tries):
        numbers = {0: 0}  # of the kept nodes
        for depth in range(1, max_depth + 1):
            nodes = [
                node
                for node, own in enumerate(trie.depths)
                if own == depth and trie.parents[node] in numbers and trie.paths[node] > 0
            ]
            for node in sorted(nodes, key=lambda node: -trie.paths[node])[:keep]:
                parent, at = trie.parents[node], len(numbers) - 1
                tokens[row, at], parents[row, at] = trie.tokens[node], numbers[parent]
                q[row, at] = trie.paths[node] / trie.paths[parent]
                numbers[node] = at + 1
    return tokens, parents, q
