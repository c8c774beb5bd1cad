"""The captured EAGLE-3 drafter without a GPU, its graphs called instead of replayed: against the eager drafter."""

import random
import warnings
from itertools import islice

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")

import plain_kernels
from graft import Engine, SamplingSettings
from graft.model import NoRoomError, PagePool, TargetRunner
from graft.model.captures import Captures, Event
from graft.model.runner import outputs_of
from graft.model.sampler import Sampler
from graft.model.step import Chunk
from graft.model.verified import Step
from graft.spec_decode.policies import DraftResult, make_policy
from graft.spec_decode.proposers.drafter import TreeSettings
from graft.spec_decode.proposers.eagle3 import cuda_graphs
from graft.spec_decode.proposers.eagle3.cuda_graphs import CapturedDrafter, CapturedState, num_beams
from graft.spec_decode.prospect import Prospect
from graft.spec_decode.tree import DraftTree
from graft.stats import Clock
from proposers import random_tree
from test_drafter import SMALL_TREE, Eagle3Drafter, make_head
from tiny import tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT = [3, 17, 42, 9, 9, 30, 5, 21, 17, 42, 9, 11]


class StaticTarget(TargetRunner):
    """Eager steps that leave their output where captured ones do, at the same place each time."""

    def __init__(self, model, hidden_layers=(), chunk_size=256, exact=False):
        super().__init__(model, hidden_layers, chunk_size)
        self._hidden = torch.full((512, len(hidden_layers) * model.config.hidden_size), torch.nan, device=model.device)

    def _run(self, step):
        tree, chunks = super()._run(step)
        logits, hidden = (tree or chunks[0]).logits, (tree or chunks[0]).hidden
        self._hidden[: len(hidden)] = hidden
        columns, by_row = (torch.from_numpy(part.copy()).to(self.device) for part in (step.columns, step.by_row))
        captured = Step(
            tokens=columns[0],
            parents=columns[1],
            rows=columns[4],
            depths=columns[3],
            starts=by_row[0],
            counts=by_row[1],
            best=logits.argmax(dim=1).int(),
            chosen=torch.zeros(len(logits), dtype=torch.int64),
            judged=Event(self.device),
        )
        return outputs_of(step, logits, self._hidden[: len(hidden)], None, captured)


class SmallDrafter(CapturedDrafter):
    """Contexts whose borders short texts cross."""

    contexts = (16, 32)


class Resting:
    """A policy that drafts nothing for a while."""

    def __init__(self, policy):
        self._policy = policy

    def grow(self, batch, roots, clock):
        return DraftResult.without_drafts(DraftTree.roots(roots))

    def __getattr__(self, name):
        return getattr(self._policy, name)


@pytest.fixture
def plain(monkeypatch):
    """Without a GPU, PyTorch in place of kernels; engines run steps whose output the device can go on from."""
    if DEVICE == "cpu":
        plain_kernels.use_plain_kernels(monkeypatch)
    monkeypatch.setattr("graft.engine.target_for", lambda *given: StaticTarget(*given))


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=6).to(DEVICE)


def drafter_of(kind, model, settings=SMALL_TREE):
    return kind(make_head(model).to(DEVICE), settings)


class Text:
    """Rows of a target and of a drafter, without an engine."""

    def __init__(self, model, kind, settings=SMALL_TREE, target=StaticTarget):
        self.drafter = drafter_of(kind, model, settings)
        self.target = target(model, self.drafter.hidden_layers)
        self.rng = random.Random(0)

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
            self.drafter.read(state, row, verified, prompt[start + 1 : start + 1 + len(tokens)])

    def round(self, cache, state, roots, width=6, ahead=False):
        """Verifies random trees, and takes some path of each. Returns the new roots."""
        tree = random_tree(self.rng, roots, width, 61)
        verified = self.target.verify(cache, tree)
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
        if ahead:
            chosen = torch.full((sum(verified.counts),), 62, device=self.target.device)
            for row, (path, new) in enumerate(zip(nodes, tokens, strict=True)):
                chosen[verified.index[row, [0, *path]]] = torch.tensor(new, device=chosen.device)
            self.drafter.draft_ahead(state, verified, chosen)
        self.target.commit(cache, nodes)
        self.drafter.learn(state, verified, nodes, tokens)
        return [new[-1] for new in tokens]

    def levels(self, state, count=4, keep=None, stops=None):
        roots = torch.zeros(len(state.rows), dtype=torch.int64)
        return list(islice(self.drafter.levels(state, roots, keep, stops), count))


def assert_alike(levels, others):
    """The same nodes; and probabilities but for the last bits."""
    assert len(levels) == len(others)
    for level, other in zip(levels, others, strict=True):
        assert torch.equal(level.tokens, other.tokens.cpu()) and torch.equal(level.parents, other.parents.cpu())
        for name in ("probabilities", "path_probabilities"):
            torch.testing.assert_close(getattr(level, name), getattr(other, name), atol=1e-5, rtol=1e-3)


def both(model, **options):
    return Text(model, SmallDrafter, **options), Text(model, Eagle3Drafter, **options)


@pytest.mark.parametrize("keep", [None, 5])
@pytest.mark.parametrize("shuffled", [False, True])
def test_drafts_are_those_of_the_eager_drafter(plain, model, keep, shuffled):
    """Of ragged rows, over contexts of several pages, round after round, wherever the pages lie."""
    found = []
    for text in both(model):
        cache, state = text.open(PROMPT, [5, 6], PROMPT * 14, shuffled=shuffled)
        levels, roots = text.levels(state, keep=keep), [11, 6, 11]
        for _ in range(3):
            roots = text.round(cache, state, roots)
            levels += text.levels(state, keep=keep)
        assert isinstance(state, CapturedState) == isinstance(text.drafter, CapturedDrafter)
        found.append((levels, state.lengths))
        if shuffled:
            assert cache.rows[2].pages != sorted(cache.rows[2].pages) or cache.rows[2].pages[1] != cache.rows[2].pages[0] + 1
    assert_alike(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_the_real_kernels_draft_the_same(model):
    """In Triton's interpreter, where there is no GPU."""
    settings, found = TreeSettings(depth=2, topk=2), []
    for text in both(model, settings=settings):
        cache, state = text.open(PROMPT[:3], [5, 6])
        levels = text.levels(state, 3, keep=3)
        text.round(cache, state, [9, 6], 3, ahead=True)
        found.append(levels + text.levels(state, 3, keep=3))
    assert_alike(*found)
