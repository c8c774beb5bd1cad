"""The block drafter against the head run on whole texts without a cache, and the engine that uses it."""

import pytest
import torch

from batches import prefilled
from block_heads import HEADS, LONG, PROMPT, hidden_without_cache, make_head
from drafted import drafts
from graft import Engine
from graft.drafters.block import save_head
from graft.drafters.block.drafter import BlockDrafter, BlockTreeSettings
from graft.drafters.drafter import TreeSettings
from graft.loading import load_drafter
from graft.request.stats import Clock
from tiny import VOCAB, tiny_model

EXACT = BlockTreeSettings(
    width=VOCAB, children=VOCAB, shortlist=VOCAB, nodes=30
)  # a table of all tokens leaves nothing out


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=6)


@torch.no_grad()
def after(head, hidden, slot, parents):
    """q [parents, vocab] of a slot's token after each token before it."""
    if head.config.has_conditionals:
        logits = head.conditionals(hidden[:, slot : slot + 1], torch.tensor([[parents]]))[0, 0]
    else:
        logits = head.marginals(hidden[0, slot]).expand(len(parents), -1)
    return logits.softmax(dim=-1)


def best_paths(head, hidden, root, num_nodes):
    """q and the path's of the likeliest paths, of all there are, down to all depths."""
    found, before = {}, {(): 1.0}
    for slot in range(head.config.num_drafts):
        q = after(head, hidden, slot, [path[-1] if path else root for path in before])
        level = {
            (*path, token): (float(q[number, token]), whole * float(q[number, token]))
            for number, (path, whole) in enumerate(before.items())
            for token in range(VOCAB)
        }
        level = dict(sorted(level.items(), key=lambda item: -item[1][1])[:num_nodes])
        found |= level
        before = {path: whole for path, (_, whole) in level.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1][1])[:num_nodes])


def assert_levels_are_those_of_whole_texts(head, model, batch, levels, most):
    for row, sequence in enumerate(batch.sequences):
        hidden = hidden_without_cache(head, model, sequence.ids)
        expected = best_paths(head, hidden, sequence.ids[-1], most)
        paths = [()]
        drafted = {}
        for depth, level in enumerate(levels, start=1):
            columns = (level.tokens, level.parents, level.probabilities, level.path_probabilities)
            for token, parent, q, whole in zip(*(column[row].tolist() for column in columns), strict=True):
                paths.append((*paths[parent], token))
                if q > 0:
                    assert len(paths[-1]) == depth and paths[-1] not in drafted
                    drafted[paths[-1]] = (q, whole)
        assert len(drafted) == most
        least = min(whole for _, whole in expected.values())
        for path in {*drafted, *expected}:  # equals may go either way
            if path in drafted and path in expected:
                assert drafted[path] == pytest.approx(expected[path], rel=1e-3)
            else:
                assert drafted.get(path, expected.get(path))[1] == pytest.approx(least, rel=1e-3)


@pytest.mark.parametrize("kind", HEADS)
def test_levels_are_those_of_the_head_run_on_whole_texts(model, kind):
    """Before any round, after rounds with accepted nodes, with others that join, and when some have left."""
    head = make_head(model, **HEADS[kind])
    drafter = BlockDrafter(head, EXACT)
    engine = Engine(model, policy="dense", drafter=drafter)
    batch, late = prefilled(engine, PROMPT, [5], LONG), prefilled(engine, PROMPT[:3])

    def check():
        levels = drafts(drafter, batch.draft, batch.roots())
        assert_levels_are_those_of_whole_texts(head, model, batch, levels, 30)

    check()
    for _ in range(3):
        engine.run_round(batch, Clock())
    check()
    batch.join(late)
    engine.run_round(batch, Clock())
    check()
    assert sum(sequence.stats.accepted for sequence in batch.sequences) > 0, "some nodes were accepted"
    batch.keep([1, 2, 3])
    engine.run_round(batch, Clock())
    check()


def test_a_token_that_the_table_does_not_follow_is_a_leaf(model):
    drafter = BlockDrafter(make_head(model, **HEADS["conditional"]), BlockTreeSettings(width=6, nodes=200))
    engine = Engine(model, policy="dense", drafter=drafter)
    batch = prefilled(engine, PROMPT, LONG)
    levels = drafts(drafter, batch.draft, batch.roots())
    q = torch.cat([level.probabilities for level in levels], dim=1)
    assert (q == 0).any() and (q > 0).any()
    engine.run_round(batch, Clock())
    for sequence in batch.sequences:
        sequence.settle()
    assert [s.stats.nodes for s in batch.sequences] == [min(n, 60) for n in (q > 0).sum(dim=1).tolist()]


def test_a_saved_block_head_loads_as_a_drafter(model, tmp_path):
    head = make_head(model, **HEADS["conditional"])
    save_head(head, tmp_path)
    drafter = load_drafter(str(tmp_path), model, TreeSettings(topk=5, total_token=30))
    assert isinstance(drafter, BlockDrafter)
    assert drafter.settings == BlockTreeSettings(width=8, shortlist=32, nodes=30), "as wide as such trees of EAGLE-3"
    assert load_drafter(str(tmp_path), model, TreeSettings()).settings == BlockTreeSettings()
    drafted = []
    for each in (drafter, BlockDrafter(head, drafter.settings)):
        batch = prefilled(Engine(model, policy="dense", drafter=each), PROMPT)
        drafted.append(drafts(each, batch.draft, batch.roots()))
    for loaded, level in zip(*drafted, strict=True):
        assert loaded.tokens.tolist() == level.tokens.tolist()
        torch.testing.assert_close(loaded.path_probabilities, level.path_probabilities)
