"""Simulation of block heads: their accepted length on known answers, without an engine.

Each round, one pass of the head gives a tree of its likeliest nodes, as an engine with this head alone would verify.
The part of the known answer that is in the tree is accepted, and the next token becomes the root. Accepted tokens and
rounds are counted as in the engine's `Stats`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from graft.drafters.block import BlockHead, KeyValue
from graft.drafters.block.drafter import BlockTreeSettings, table_of
from graft.drafters.block.tree import Table, grown, marginal_table
from graft.model import evaluating
from graft.train.generate_data import Answered

ROWS = 64  # answers simulated together


@dataclass(frozen=True)
class Simulated:
    """Result of a simulation."""

    rounds: int
    reached: tuple[float, ...]  # share of rounds that accepted at least 1, 2 ... drafted tokens

    @property
    def mean_accepted(self) -> float:
        """Mean accepted length: 1 + accepted / rounds."""
        return 1 + sum(self.reached) if self.rounds else 0.0


@torch.no_grad()
def simulate(
    head: BlockHead,
    model: PreTrainedModel,
    answers: Sequence[Answered],
    settings: BlockTreeSettings | None = None,
    num_rows: int = ROWS,
) -> dict[str, Simulated]:
    """Results by kind of tree: `chain`, `marginal`, and `conditional` if the head reads the token before a slot."""
    settings = settings or BlockTreeSettings()
    counts: dict[str, Tensor] = {}
    for group in _groups(answers, num_rows):
        texts = _Texts(head, model, group)
        for kind in tree_kinds(head):
            accepted = torch.stack([*texts.rounds(kind, settings)])  # [rounds, B], -1 for rows that have ended
            depths = torch.arange(head.config.num_drafts + 1, device=accepted.device)
            reached = (accepted[..., None] >= depths).sum(dim=(0, 1))
            counts[kind] = counts.get(kind, torch.zeros_like(reached)) + reached
    results = {}
    for kind, reached in counts.items():
        rounds, *deeper = reached.tolist()
        results[kind] = Simulated(rounds, tuple(count / max(rounds, 1) for count in deeper))
    return results


def tree_kinds(head: BlockHead) -> tuple[str, ...]:
    return ("chain", "marginal", "conditional") if head.config.has_conditionals else ("chain", "marginal")


def table_for(kind: str, head: BlockHead, hidden: Tensor, roots: Tensor, settings: BlockTreeSettings) -> Table:
    """The table for a kind of tree, from the hidden states [B, K, H] of blocks after roots [B]."""
    if kind == "marginal":
        return marginal_table(head, hidden, settings.nodes)
    return table_of(head, hidden, roots, settings, is_chain=kind == "chain")


def num_accepted(table: Table, truth: Tensor, num_nodes: int) -> Tensor:
    """Accepted tokens [B] if the tree of the table's `num_nodes` likeliest nodes meets the tokens `truth` [B, K]."""
    trees = grown(table, truth.shape[1], num_nodes)
    depths = trees.depths.long()
    is_right = (trees.probabilities > 0) & (trees.tokens == truth.cpu().gather(1, (depths - 1).clamp(min=0)))
    on_path = torch.zeros(len(truth), 1 + num_nodes, dtype=torch.bool)
    on_path[:, 0] = True
    for _ in range(truth.shape[1]):
        on_path[:, 1:] = is_right & on_path.gather(1, trees.parents.long())
    return (depths * on_path[:, 1:]).amax(dim=1).to(truth.device)


class _Texts:
    """Known texts [B, T] with the head's KV cache of them."""

    def __init__(self, head: BlockHead, model: PreTrainedModel, answers: Sequence[Answered]) -> None:
        device = head.fc.weight.device
        self._head = head
        self._tokens = torch.nn.utils.rnn.pad_sequence(
            [answer.tokens.long() for answer in answers], batch_first=True
        ).to(device)
        self._ends = torch.tensor([len(answer.tokens) for answer in answers], device=device)
        self._roots = torch.tensor([max(answer.num_prompt_tokens, 1) - 1 for answer in answers], device=device)
        self._past = self._context(model)

    def rounds(self, kind: str, settings: BlockTreeSettings) -> Iterator[Tensor]:
        """Accepted drafted tokens [B] of each round; -1 for texts that have ended."""
        drafts = torch.arange(1, self._head.config.num_drafts + 1, device=self._tokens.device)
        roots, num_nodes = self._roots, len(drafts) if kind == "chain" else settings.nodes
        while bool((roots < self._ends - 1).any()):
            places = roots[:, None] + drafts
            inside = places < self._ends[:, None]
            truth = self._tokens.gather(1, places.clamp(max=self._tokens.shape[1] - 1)).masked_fill(~inside, -1)
            tokens = self._tokens.gather(1, roots[:, None])[:, 0]
            hidden = self._head.block(tokens, roots, self._past)
            accepted = num_accepted(table_for(kind, self._head, hidden, tokens, settings), truth, num_nodes)
            goes_on = roots < self._ends - 1
            yield torch.where(goes_on, accepted, -1)
            roots = torch.where(goes_on, (roots + accepted + 1).minimum(self._ends - 1), roots)

    def _context(self, model: PreTrainedModel) -> KeyValue:
        with evaluating(model):  # causal attention never sees the padding at the end
            states = model.base_model(input_ids=self._tokens, output_hidden_states=True, use_cache=False)
        features = torch.cat([states.hidden_states[layer] for layer in self._head.config.target_layers], dim=-1)
        positions = torch.arange(self._tokens.shape[1], device=self._tokens.device).expand(len(self._tokens), -1)
        return self._head.context(features.to(self._head.fc.weight.dtype), positions)


def _groups(answers: Sequence[Answered], rows: int) -> Iterator[list[Answered]]:
    """Groups of answers of similar length, since a group runs until its last text has ended."""
    order = sorted(answers, key=lambda answer: len(answer.tokens) - answer.num_prompt_tokens)
    for first in range(0, len(order), rows):
        yield order[first : first + rows]
