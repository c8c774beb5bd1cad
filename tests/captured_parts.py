"""Captured targets and drafters of small sizes, whose graphs are called instead of replayed where there is no GPU; and
engines whose rounds the device or the host makes."""

import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")

from drafted import drafts
from graft import Engine
from graft.drafters.drafter import TreeSettings
from graft.drafters.eagle3.drafter import Eagle3Drafter
from graft.drafters.eagle3.fused_head import FastHead
from graft.model import TargetRunner
from graft.model.cuda_graphs import CapturedTarget
from graft.model.noise import ComingDraws, RowDraws
from graft.model.step import Chunk
from heads import SMALL_TREE, make_head
from proposers import random_tree
from tiny import byte_tokenizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

PROMPT = [3, 17, 42, 9, 9, 30, 5, 21, 17, 42, 9, 11]


class StaticTarget(TargetRunner):
    """Eager steps that leave their output where captured ones do, at the same place each time."""

    def __init__(self, model, hidden_layers=(), chunk_size=256, exact=False):
        super().__init__(model, hidden_layers, chunk_size)
        self._hidden = torch.full((512, len(hidden_layers) * model.config.hidden_size), torch.nan, device=model.device)

    def _run(self, step, num_already_run=0):
        tree, chunks = super()._run(step, num_already_run)
        hidden = (tree or chunks[0]).hidden
        self._hidden[: len(hidden)] = hidden
        static = {"hidden": self._hidden[: len(hidden)], "is_captured": True}
        return replace(tree, **static) if tree else None, [replace(chunk, **static) for chunk in chunks]


class SmallTarget(CapturedTarget):
    """Contexts whose borders short texts cross."""

    contexts = (16, 32)


class CapturedEagle3Drafter(Eagle3Drafter):
    """With the head in Triton."""

    def __init__(self, head, settings=None):
        settings = settings or TreeSettings()
        super().__init__(head, settings, FastHead(head, settings))


class SmallDrafter(CapturedEagle3Drafter):
    contexts = (16, 32)


def drafter_of(kind, model, settings=SMALL_TREE, dtype=None, **head):
    return kind(make_head(model, **head).to(DEVICE, dtype), settings)


class Text:
    """Rows of a target and of a drafter, without an engine."""

    def __init__(self, model, kind, settings=SMALL_TREE, target=StaticTarget, **head):
        self.drafter = drafter_of(kind, model, settings, **head)
        self.target = target(model, self.drafter.hidden_layers)
        self.rng = random.Random(0)

    def use_pool(self, pool):
        """Has the target keep its entries there."""
        self.target._pool = pool
        pool.add_store(self.target._store)

    def go_on_from(self, row):
        """Another row with the same text."""
        other = self.target.pool.open_row(200)
        self.target.pool.copy(row, other)
        return other

    def open(self, *prompts, shuffled=False):
        """A cache and a state whose rows have read all but the last token of their prompts."""
        pool = self.target.pool
        caches = [self.target.open(1, 0 if shuffled else 300) for _ in prompts]
        if shuffled:  # pages of the rows lie between each other's
            for slots in range(64, 300, 64):
                for cache in reversed(caches):
                    pool.ensure(cache.rows[0], slots)
        cache = self.target.cache_of([cache.rows[0] for cache in caches])
        state = self.drafter.open(cache)
        for row, prompt in enumerate(prompts):
            self.read(cache, state, row, prompt)
        return cache, state

    def read(self, cache, state, row, prompt, chunk=100):
        for start in range(0, len(prompt) - 1, chunk):
            tokens = prompt[start : min(start + chunk, len(prompt) - 1)]
            _, (verified,) = self.target.step(None, None, [Chunk(cache.rows[row], tokens)])
            self.drafter.read([(state, row, verified, prompt[start + 1 : start + 1 + len(tokens)])])

    def round(self, cache, state, roots, width=6, reading=None):
        """Verifies random trees, and takes some path of each. Returns the new roots.

        reading: a cache and a state of one row, whose prompt is read in the same step.
        """
        tree = random_tree(self.rng, roots, width, 61)
        chunks = [Chunk(reading[0].rows[0], PROMPT[:-1])] if reading else []
        verified, read = self.target.step(cache, tree, chunks)
        nodes, tokens = [], []
        for row in range(len(roots)):
            path = [0]
            while below := [
                node
                for node in range(1, tree.width)
                if int(tree.sources[row, node]) == 1 and int(tree.parents[row, node]) == path[-1]
            ]:
                path.append(self.rng.choice(below))
                if self.rng.random() < 0.3:
                    break
            nodes.append(path[1:])
            tokens.append([*tree.tokens[row, path[1:]].tolist(), self.rng.randrange(61)])
        self.target.commit(cache, nodes)
        self.drafter.learn(state, verified, nodes, tokens)
        if reading:
            self.drafter.read([(reading[1], 0, read[0], PROMPT[1:])])
        return [new[-1] for new in tokens]

    def levels(self, state, count=4, keep=None, temperatures=None):
        roots = torch.zeros(len(state.rows), dtype=torch.int64)
        return drafts(self.drafter, state, roots, keep, count, draws_of(state, temperatures))


def draws_of(state, temperatures):
    """The next draws of rows with these temperatures, each with a seed of its own; None: they are not known."""
    if temperatures is None:
        return None
    lengths = [row.row.length + 1 for row in state.rows]  # with the root
    rows = enumerate(zip(lengths, temperatures, strict=True))
    return ComingDraws([RowDraws(70 + number, length, warm) if warm else None for number, (length, warm) in rows])


def assert_alike(levels, others):
    """The same nodes; and probabilities but for the last bits."""
    assert len(levels) == len(others)
    for level, other in zip(levels, others, strict=True):
        assert torch.equal(level.tokens, other.tokens.cpu()) and torch.equal(level.parents, other.parents.cpu())
        for name in ("probabilities", "path_probabilities"):
            torch.testing.assert_close(getattr(level, name), getattr(other, name), atol=1e-5, rtol=1e-3)


class Small(CapturedTarget):
    """Few and small sizes, whose borders short texts and small trees cross."""

    sizes = (1, 4, 8, 16, 64, 256)
    contexts = (16, 32)


def small_target(model, hidden_layers=(), chunk_size=256, exact=False):
    return Small(model, hidden_layers, chunk_size, exact)


class OneContext(CapturedTarget):
    """Few sizes and one context, so that little is captured."""

    sizes = (4, 16, 128)
    contexts = (128,)


class TwoContexts(Small):
    """Sizes and contexts of short rounds."""

    sizes = (1, 2, 4, 8, 16, 64, 256)
    contexts = (64, 128)


def use_host(monkeypatch):
    """Engines whose rounds are direct, by transformers' own layers."""
    monkeypatch.setattr(
        "graft.engine.engine.target_for", lambda model, hidden, chunk, exact: TargetRunner(model, hidden)
    )


def plain_answers(model, prompts, monkeypatch, **options):
    """What plain decoding by transformers' own layers gives."""
    with monkeypatch.context() as eager:
        use_host(eager)
        return Engine(model, byte_tokenizer(), policy="off").generate_batch(prompts, **options)


def plain_ids(*given, **options):
    return [answer.ids for answer in plain_answers(*given, **options)]
