"""The EAGLE-3 drafter against a plain reference, and the engine that uses it."""

from itertools import islice

import pytest
import torch

from batches import prefill
from graft import Engine, GraftError, SamplingSettings
from graft.request.sequence import TreeRow
from graft.request.stats import Clock
from graft.spec_decode.acceptance import walk
from graft.spec_decode.proposers.drafter import TreeSettings
from graft.spec_decode.proposers.eagle3.drafter import Eagle3Drafter
from graft.tree.tree import DraftTree
from heads import SMALL_TREE, make_head, plain_draft
from tiny import tiny_model

PROMPT = [3, 17, 42, 9, 9, 30, 5, 21]


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=6)


def test_every_drafted_node_has_the_probability_that_plain_drafting_gives_it(model):
    head = make_head(model)
    engine = Engine(model, policy="dense", drafter=Eagle3Drafter(head, SMALL_TREE))
    sequences = engine.new_sequences(PROMPT, _settings(12))
    for _ in islice(engine.rounds(sequences), 4):  # drafts after some rounds, when features were refreshed
        pass
    tokens = sequences[0].ids
    batch = engine.open(engine.new_sequences(tokens, _settings(12)))
    prefill(engine, batch)
    roots = batch.roots()
    for keep, width in ((None, 1 + 3 + 3 * 9), (5, 1 + 3 + 3 * 5), (2, 1 + 4 * 2), (1, 1 + 4)):
        levels = list(islice(engine.drafter.levels(batch.draft, roots, keep), 4))
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
    prompts = [PROMPT, [5, 6], PROMPT * 2]
    sequences = [s for p in prompts for s in engine.new_sequences(p, _settings(20))]
    batch = engine.open(sequences)
    prefill(engine, batch)
    for _ in range(6):
        engine.run_round(batch, Clock())
    roots = batch.roots()
    old = next(drafter.levels(batch.draft, roots))
    assert sum(s.stats.accepted for s in sequences) > 0, "some nodes were accepted"
    for row, sequence in enumerate(sequences):
        fresh = engine.open(engine.new_sequences(sequence.ids, _settings(4)))
        prefill(engine, fresh)
        new = next(drafter.levels(fresh.draft, roots[row : row + 1]))
        torch.testing.assert_close(old.probabilities[row], new.probabilities[0], atol=1e-4, rtol=1e-3)


def test_text_with_a_head_is_that_of_plain_decoding_alone_and_in_a_batch(model):
    drafter = Eagle3Drafter(make_head(model), SMALL_TREE)
    prompts = [PROMPT, [5], PROMPT * 3]
    for options in ({}, {"temperature": 1.2, "top_p": 0.9, "seed": 3, "frequency_penalty": 0.2}):
        plain = Engine(model, policy="off").generate_batch(prompts, max_new_tokens=24, **options)
        dense = Engine(model, policy="dense", drafter=drafter).generate_batch(prompts, max_new_tokens=24, **options)
        assert [g.ids for g in dense] == [g.ids for g in plain]
        assert sum(g.stats.accepted for g in dense) > 0


def test_several_answers_share_the_prefill_of_the_head_too(model):
    engine = Engine(model, policy="dense", drafter=Eagle3Drafter(make_head(model), SMALL_TREE))
    result = engine.generate(PROMPT, n=3, temperature=1.0, seed=1, max_new_tokens=10)
    plain = Engine(model, policy="off").generate(PROMPT, n=3, temperature=1.0, seed=1, max_new_tokens=10)
    assert [c.ids for c in result.choices] == [c.ids for c in plain.choices]


def test_a_chain_is_a_tree_of_one_beam(model):
    chain = TreeSettings(depth=4, topk=1, total_token=5)
    engine = Engine(model, policy="dense", drafter=Eagle3Drafter(make_head(model), chain))
    result = engine.generate(PROMPT, max_new_tokens=24)
    assert result.ids == Engine(model, policy="off").generate(PROMPT, max_new_tokens=24).ids
    assert result.stats.nodes <= 5 * result.stats.rounds


def test_dense_without_a_head_says_so(model):
    with pytest.raises(GraftError, match="draft="):
        Engine(model, policy="dense")


def _settings(max_new_tokens):
    return SamplingSettings(max_new_tokens=max_new_tokens)


def test_graft_pools_drafts_with_retrieval_and_gives_the_same_text(model):
    prompts = [PROMPT, [5], PROMPT * 3]
    engine = Engine(model, drafter=Eagle3Drafter(make_head(model), SMALL_TREE), budget=12)
    engine.policy.budget.pass_cost = 0.03  # by the clock a pass of so small a head may cost more than it brings
    for options in ({}, {"temperature": 1.2, "top_p": 0.9, "seed": 3, "frequency_penalty": 0.2}):
        plain = Engine(model, policy="off").generate_batch(prompts, max_new_tokens=24, **options)
        pooled = engine.generate_batch(prompts, max_new_tokens=24, **options)
        assert [g.ids for g in pooled] == [g.ids for g in plain]
    proposed = set().union(*(g.stats.proposed_by_source for g in pooled))
    assert {"drafted", "suffix", "adjacency"} <= proposed


def test_rounds_without_drafts_leave_their_features_waiting_for_the_next_draft(model):
    drafter = Eagle3Drafter(make_head(model), SMALL_TREE)
    engine = Engine(model, policy="dense", drafter=drafter)
    sequences = engine.new_sequences(PROMPT, _settings(20))
    batch = engine.open(sequences)
    prefill(engine, batch)
    for _ in range(4):  # plain rounds
        tree = DraftTree.roots(batch.roots())
        verified = engine.target.verify(batch.cache, tree)
        accepted = walk(tree, verified, batch.chooser)
        batch.cache.commit(accepted.nodes)
        engine.policy.learn(batch, tree, verified, accepted, 0.0)
        sequences[0].extend(accepted.tokens[0], accepted.nodes[0], TreeRow(tree, verified.logits, 0, ("root",)))
    late = next(drafter.levels(batch.draft, batch.roots()))
    fresh = engine.open(engine.new_sequences(sequences[0].ids, _settings(4)))
    prefill(engine, fresh)
    new = next(drafter.levels(fresh.draft, fresh.roots()))
    torch.testing.assert_close(late.probabilities, new.probabilities, atol=1e-4, rtol=1e-3)


def test_who_joins_others_that_wait_for_a_draft_drafts_as_alone(model):
    drafter = Eagle3Drafter(make_head(model), SMALL_TREE)
    engine = Engine(model, policy="dense", drafter=drafter)
    prompts = [PROMPT, [5, 6, 7]]
    running, joining, alone = (
        engine.open(engine.new_sequences(prompt, _settings(20))) for prompt in (*prompts, prompts[1])
    )
    for batch in (running, joining, alone):
        prefill(engine, batch)
    for _ in range(3):
        engine.run_round(running, Clock())
    running.join(joining)
    among = next(drafter.levels(running.draft, running.roots()))
    new = next(drafter.levels(alone.draft, alone.roots()))
    torch.testing.assert_close(among.probabilities[1:], new.probabilities, atol=1e-4, rtol=1e-3)
    assert running.draft.lengths[1] == alone.draft.lengths[0]
