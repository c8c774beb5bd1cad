"""The EAGLE-3 drafter against a plain reference, and the engine that uses it."""

from itertools import islice

import pytest
import torch

from batches import plain_rounds, prefilled
from drafted import drafts
from graft import Engine, SamplingSettings
from graft.drafters.eagle3.drafter import Eagle3Drafter
from graft.request.stats import Clock
from heads import SMALL_TREE, make_head, plain_draft
from tiny import tiny_model

PROMPT = [3, 17, 42, 9, 9, 30, 5, 21]


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=6)


def test_every_drafted_node_has_the_probability_that_plain_drafting_gives_it(model):
    head = make_head(model)
    engine = Engine(model, policy="dense", drafter=Eagle3Drafter(head, SMALL_TREE))
    sequences = engine.new_sequences(PROMPT, SamplingSettings(max_new_tokens=12))
    for _ in islice(engine.rounds(sequences), 4):  # drafts after some rounds, when features were refreshed
        pass
    tokens = sequences[0].ids
    batch = prefilled(engine, tokens)
    roots = batch.roots()
    for keep, width in ((None, 1 + 3 + 3 * 9), (5, 1 + 3 + 3 * 5), (2, 1 + 4 * 2), (1, 1 + 4)):
        levels = drafts(engine.drafter, batch.draft, roots, keep, count=4)
        drafted = [(int(roots[0]), 0, 1.0)]
        for level in levels:
            columns = (level.tokens[0], level.parents[0], level.probabilities[0])
            drafted += zip(*(column.tolist() for column in columns), strict=True)
        assert len(drafted) == width
        for token, parent, q in drafted[1:]:
            above = []
            while parent:
                above.insert(0, drafted[parent][0])
                parent = drafted[parent][1]
            assert q == pytest.approx(float(plain_draft(head, model, tokens, above)[token]), rel=1e-3)


def test_refreshed_features_draft_what_a_fresh_prefill_drafts(model):
    """After rounds with accepted nodes the head's cache holds what reading the whole text anew would give."""
    drafter = Eagle3Drafter(make_head(model), SMALL_TREE)
    engine = Engine(model, policy="dense", drafter=drafter)
    batch = prefilled(engine, PROMPT, [5, 6], PROMPT * 2)
    sequences = batch.sequences
    for _ in range(6):
        engine.run_round(batch, Clock())
    roots = batch.roots()
    old = drafts(drafter, batch.draft, roots, count=1)[0]
    assert sum(s.stats.accepted for s in sequences) > 0, "some nodes were accepted"
    for row, sequence in enumerate(sequences):
        fresh = prefilled(engine, sequence.ids)
        new = drafts(drafter, fresh.draft, roots[row : row + 1], count=1)[0]
        torch.testing.assert_close(old.probabilities[row], new.probabilities[0], atol=1e-4, rtol=1e-3)


def test_rounds_without_drafts_leave_their_features_waiting_for_the_next_draft(model):
    drafter = Eagle3Drafter(make_head(model), SMALL_TREE)
    engine = Engine(model, policy="dense", drafter=drafter)
    batch = prefilled(engine, PROMPT)
    sequences = batch.sequences
    with plain_rounds(engine):
        for _ in range(4):
            engine.run_round(batch, Clock())
    late = drafts(drafter, batch.draft, batch.roots(), count=1)[0]
    fresh = prefilled(engine, sequences[0].ids)
    new = drafts(drafter, fresh.draft, fresh.roots(), count=1)[0]
    torch.testing.assert_close(late.probabilities, new.probabilities, atol=1e-4, rtol=1e-3)
