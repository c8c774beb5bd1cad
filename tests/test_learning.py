"""Retrievers and calibration: what is learned, and that it is learned right."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft import Engine
from graft.model.verified import NUM_SUCCESSORS, top_logits, top_probabilities
from graft.spec_decode.buckets import NUM_BUCKETS
from graft.spec_decode.calibration import Calibration, PathCalibration
from graft.spec_decode.proposers import NgramTables, SuffixLookup, TargetTopK
from graft.spec_decode.proposers.base import salt_of
from graft.spec_decode.proposers.successor_table import COLD, SuccessorTable, SuccessorTables, adjacency_table
from graft.spec_decode.proposers.suffix import SuffixIndex
from graft.tree.candidates import NO_TOKEN, Candidates
from judgements import judged, judged_alone, verified
from proposers import Text, random_tree, token_paths
from tiny import VOCAB, tiny_model

NUM_ROWS = 1 << 10


def words(*ids):
    """A history."""
    return Text(list(ids), 0)


def pool_for(*histories):
    roots = torch.tensor([history.ids[-1] for history in histories])
    return Candidates(roots, [history.ids for history in histories])


def draft(candidates, chain, chance=0.9):
    """Adds a drafted chain to the pool's first row; it is padding in the others."""
    for depth, token in enumerate(chain):
        parents = torch.full_like(candidates.nodes.tokens[:, :1], candidates.width - 1 if depth else 0)
        only_first = torch.tensor([[float(row == 0)] for row in range(len(parents))])
        ones = torch.ones_like(parents)
        candidates.add(token * ones, parents, chance * only_first, ones, 0 * ones, needs=depth + 1)


def proposed(retriever, candidates, *histories, max_depth=8, first=1):
    """What a retriever adds: by row, {token path: (source, score bucket)}; the likeliest of equal ones."""
    before = candidates.width
    priors = [torch.ones(1)] * (first - 1) + list(retriever.prior)
    retriever.propose(candidates, histories, first, Calibration(priors).acceptance_probs, max_depth)
    nodes = candidates.nodes
    rows = []
    for row in range(len(histories)):
        paths = {0: ()}
        found = {}
        for n in range(1, candidates.width):
            paths[n] = (*paths[int(nodes.parents[row, n])], int(nodes.tokens[row, n]))
            if n >= before and nodes.paths[row, n] > 0:
                assert int(nodes.depths[row, n]) == len(paths[n]) <= max_depth
                found.setdefault(paths[n], (int(nodes.sources[row, n]) - first, int(nodes.score_bucket[row, n])))
        rows.append(found)
    return rows


def learn(table, *judgements):
    for each in judgements:
        SuccessorTables([table]).learn(each)


def successors(table, ngram, salt=0):
    """Tokens and buckets that the table has after the n-gram (earlier, before, token), likeliest first."""
    candidates = Candidates(torch.tensor(ngram[-1:]), [list(ngram)], [salt])
    candidates.follow(
        SuccessorTables([table]).structs, torch.full((3, 2, NUM_BUCKETS), 0.5), 1, waves=1, beam=1, max_depth=1
    )
    nodes = candidates.nodes
    known = nodes.paths[0] > 0
    assert known[0] and (nodes.depths[0, 1:] == 1).all() and candidates.width == 1 + NUM_SUCCESSORS
    return nodes.tokens[0, known][1:].tolist(), nodes.score_bucket[0, known][1:].tolist()


def first_successor(table, ngram, salt=0):
    return next(iter(successors(table, ngram, salt)[0]), COLD)


# Judgements


def test_tables_learn_a_prompt_chunk_with_the_tokens_before_it():
    logits = torch.randn(1, 3, VOCAB)
    said = logits[0].argmax(dim=1).tolist()
    for preceding, text in (([], [NO_TOKEN, NO_TOKEN]), ([4], [NO_TOKEN, 4]), ([3, 4], [3, 4]), ([1, 2, 3, 4], [3, 4])):
        table = SuccessorTable(3, NUM_ROWS, isolated=True)
        learn(table, TargetTopK.of_chunk(verified(torch.tensor([[7, 8, 9]]), logits), preceding, salt=6))
        text = [*text, 7, 8, 9]
        for place, token in enumerate(said):
            assert first_successor(table, text[place : place + 3], salt=6) == token
            assert first_successor(table, text[place : place + 3], salt=5) == COLD
        assert len(table.state()["rows"]) == 3


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(0, 12), st.lists(st.integers(1, 4), min_size=3))
def test_tables_learn_every_node_of_a_tree_with_its_own_path_the_root_last(seed, num_rows, num_nodes, lengths):
    """Padding passes for the root, and so teaches nothing."""
    rng = random.Random(seed)
    histories = [[rng.randrange(50, 60) for _ in range(length)] for length in lengths[:num_rows]]
    tree = random_tree(rng, [history[-1] for history in histories], num_nodes, vocab_size=9)
    logits = torch.randn(num_rows, tree.width, VOCAB, generator=torch.Generator().manual_seed(seed))
    salts = [rng.randrange(9) for _ in histories]
    table = SuccessorTable(3, 1 << 20)
    learn(table, TargetTopK.of_trees(verified(tree.tokens, logits), tree, histories, salts))
    expected = {}
    for row, history in enumerate(histories):
        valid = tree.valid[row].nonzero().flatten().tolist()
        for node, path in reversed(list(zip(valid, token_paths(tree, row), strict=True))):
            text = [NO_TOKEN, NO_TOKEN, *history, *path]
            expected[tuple(text[-3:]), salts[row]] = logits[row, node].argmax().item()
    assert {key: first_successor(table, *key) for key in expected} == expected
    assert len(table.state()["rows"]) == len(expected)


@pytest.mark.parametrize("vocab_size", [5, VOCAB, 2048, 2049, 49152, 49153])
@pytest.mark.parametrize("by_library", [True, False])
def test_the_likeliest_are_those_of_a_full_ranking(vocab_size, by_library, monkeypatch):
    """The highest may lie anywhere: spread out, in one block, or in the last."""
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(1))
    logits[1, : vocab_size // 2] += 20
    logits[2, 256:384] += 20
    logits[3, -3:] += 20
    logits[4] = -torch.inf
    logits[4, :2] = torch.tensor([1.0, 2.0])
    values, tokens = logits.topk(min(NUM_SUCCESSORS, vocab_size), dim=1)
    if not by_library:
        monkeypatch.setattr("graft.model.verified.library", lambda: None)
    found, highest = top_logits(logits)
    finite = values.isfinite()  # which of those that cannot be chosen come next means nothing
    assert torch.equal(found[finite], tokens[finite])
    assert torch.equal(highest, values)
    assert (found >= 0).all() and (found < vocab_size).all()
    places, q = top_probabilities(logits[:4].unflatten(0, (2, -1)), 3)
    torch.testing.assert_close((q, places), logits[:4].unflatten(0, (2, -1)).softmax(-1).topk(3)[:2])


# Tables

NGRAM = {1: [(1, 2, 5), (3, 4, 5)], 2: [(1, 2, 5), (3, 2, 5)], 3: [(1, 2, 5), (1, 2, 5)]}  # alike, by order
OTHER = {1: (1, 2, 6), 2: (1, 3, 5), 3: (2, 2, 5)}


def make_table(order, hashed):
    return SuccessorTable(order, NUM_ROWS if hashed else VOCAB, hashed=hashed)


@pytest.fixture(params=[(1, False), (1, True), (2, True), (3, True)], ids=["matrix", "1", "2", "3"])
def table(request):
    return make_table(*request.param)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_another_ngram_on_the_same_row_is_told_apart_and_takes_it_over(order):
    table = SuccessorTable(order, 1)  # all share one row
    learn(table, judged([(1, 2, 5)], [20]))
    assert first_successor(table, (1, 2, 5)) == 20
    assert first_successor(table, (1, 2, 6)) == COLD
    learn(table, judged([(1, 2, 6), (1, 2, 5), (1, 2, 7)], [21, 22, 23]))
    assert [first_successor(table, (1, 2, token)) for token in (5, 6, 7)] == [COLD, COLD, 23]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_texts_under_different_salts_are_kept_apart(order):
    table = SuccessorTable(order, NUM_ROWS)
    learn(table, judged([(1, 2, 5)], [20], salt=1))
    assert [first_successor(table, (1, 2, 5), salt) for salt in (0, 1, 2)] == [COLD, 20, COLD]
    learn(table, judged([(1, 2, 5)], [30], salt=2))
    assert [first_successor(table, (1, 2, 5), salt) for salt in (0, 1, 2)] == [COLD, 20, 30]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_state_of_a_table_for_all_serves_every_isolated_text(order):
    common = SuccessorTable(order, NUM_ROWS) if order > 1 else adjacency_table(VOCAB, isolated=False)
    learn(common, judged([(1, 2, 5), (2, 5, 6)], [40, 41]))
    isolated = SuccessorTable(order, 4 * NUM_ROWS, isolated=True)
    isolated.restore(common.state())
    assert [first_successor(isolated, ngram, salt=7) for ngram in ((1, 2, 5), (2, 5, 6))] == [40, 41]


def test_the_adjacency_table_is_one_for_all_texts_unless_they_are_isolated():
    for isolated in (False, True):
        table = adjacency_table(VOCAB, isolated)
        learn(table, judged([(1, 2, 5)], [20], salt=isolated))
        assert first_successor(table, (3, 4, 5), salt=isolated) == 20
        assert first_successor(table, (3, 4, 5), salt=2) == (COLD if isolated else 20)


@pytest.mark.parametrize("first", [0, 50_000, 65_536, 131_071, 262_143 - NUM_SUCCESSORS + 1])
def test_an_entry_is_a_token_and_its_share_whatever_the_token_and_the_share(first):
    vocab_size = 262_144
    tokens = first + torch.arange(NUM_SUCCESSORS).flip(0)
    logits = torch.full((1, 1, vocab_size), -torch.inf)
    logits[0, 0, tokens] = 5.0 - torch.arange(NUM_SUCCESSORS)  # shares from 0.63 to 0.0006
    for table in (SuccessorTable(1, vocab_size, hashed=False), SuccessorTable(2, NUM_ROWS)):
        learn(table, judged_alone([vocab_size - 1], [vocab_size - 1], [0], logits))
        found = successors(table, (0, vocab_size - 1, vocab_size - 1))
        assert found == (tokens.tolist(), [1, 4, 7, 9, 12, 15, 15, 15])


def test_a_table_is_restored_from_its_state_and_from_nothing(table):
    learned, same = NGRAM[table.order]
    learn(table, judged([learned, OTHER[table.order]], [20, 21]))
    state = table.state()
    assert len(state["rows"]) == 2, "only what was judged"
    learn(table, judged([learned], [30]))
    other = make_table(table.order, hashed="tags" in state)
    for restored in (table, other):
        restored.restore(state)
        assert first_successor(restored, same) == 20
        assert first_successor(restored, OTHER[table.order]) == 21
    table.restore({})
    assert first_successor(table, same) == COLD


# NgramTables


def recall(**options):
    return NgramTables(VOCAB, num_rows=NUM_ROWS, **options)


def test_tables_propose_by_the_longest_known_ngram():
    made = recall()
    made.learn(judged([(0, 0, 5)], [20]))
    made.learn(judged([(0, 2, 5)], [30]))
    made.learn(judged([(1, 2, 5)], [40]))
    histories = [words(1, 2, 5), words(3, 2, 5), words(3, 3, 5), words(5), words(2, 5)]
    likeliest_at = [
        max(found, key=lambda path: -found[path][1]) for found in proposed(made, pool_for(*histories), *histories)
    ]
    # The last judgement of 5 alone, and of 2 5, was that of 1 2 5: it holds for all that end so.
    assert likeliest_at == [(40,), (40,), (40,), (40,), (40,)]
    made.learn(judged([(7, 7, 5)], [50]))
    sources = []
    for history, token in zip(histories, (40, 40, 50, 50, 40), strict=True):
        (found,) = proposed(made, pool_for(history), history)
        sources.append(made.names[found[(token,)][0]])
    assert sources == ["trigram", "bigram", "adjacency", "adjacency", "bigram"]


# Suffix lookup


def test_pairs_of_dropped_texts_take_no_memory():
    index = SuffixIndex(max_tokens=100)
    for first in range(0, 100_000, 100):
        index.begin()
        index.extend(range(first, first + 100))
    assert index._struct.num_slots <= 1024


def owned(owner, *ids):
    text = words(*ids)
    text.owner = owner
    return text


def test_finished_texts_of_isolated_owners_are_looked_up_by_their_owner_alone():
    lookup = SuffixLookup(isolated=True)
    lookup.finish(owned(7, 1, 2, 30))
    lookup.finish(owned(8, 1, 2, 40))
    lookup.finish(owned(None, 1, 2, 50))
    histories = [owned(owner, 9, 1, 2) for owner in (8, 7, 9, None)]
    found = proposed(lookup, pool_for(*histories), *histories)
    assert [set(paths) for paths in found] == [{(40,)}, {(30,)}, set(), set()]
    assert lookup.common == () and lookup.state()["past/tokens"].numel() == 0, "and they are handed on to nobody"


def grouped(group, owner, *ids):
    text = owned(owner, *ids)
    text.group, text.num_prompt_tokens = group, 3
    return text


def test_answers_to_one_prompt_are_looked_up_in_each_other_while_they_grow():
    lookup = SuffixLookup()
    lookup.finish(words(8, 8, 8, 20))
    prompt = [7, 8, 8]
    ahead = grouped(1, None, *prompt, 1, 2, 30, 31)
    histories = [grouped(1, None, *prompt, 1, 2), ahead, grouped(1, None, *prompt), grouped(2, None, *prompt, 1, 2)]
    found = proposed(lookup, pool_for(*histories), *histories, max_depth=2)
    assert [set(paths) for paths in found] == [{(30,), (30, 31)}, set(), {(1,), (1, 2)}, set()]
    assert {lookup.names[source] for source, _ in found[0].values()} == {"past"}
    ahead.ids += [1, 2, 40]
    first, *_ = proposed(lookup, pool_for(*histories), *histories, max_depth=1)
    assert set(first) == {(30,)}, "of its occurrences those that match further back"
    alone = proposed(lookup, pool_for(*histories[:1]), *histories[:1])
    assert alone == [{}], "those that are not decoded any more are no longer there"


@pytest.mark.parametrize(("owner", "is_seen"), [(None, False), (3, True)])
def test_where_texts_are_isolated_a_group_needs_an_owner(owner, is_seen):
    histories = [grouped(1, owner, 7, 8, 9, 1, 2), grouped(1, owner, 7, 8, 9, 1, 2, 30)]
    lookup = SuffixLookup(isolated=True)
    assert (set(proposed(lookup, pool_for(*histories), *histories)[0]) == {(30,)}) == is_seen


def test_isolated_texts_have_tables_of_their_own_or_those_of_their_owner():
    histories = [words(1, 2), words(1, 2), owned(1 << 56, 1, 2), owned(1 << 56, 3, 4)]
    one, other, first, second = (salt_of(history, isolated=True) for history in histories)
    assert len({0, one, other, first}) == 4 and first == second
    assert {salt_of(history, isolated=False) for history in histories} == {0}


def test_finished_texts_of_all_owners_together_are_bounded(monkeypatch):
    monkeypatch.setattr("graft.spec_decode.proposers.suffix._MAX_OWNERS", 5)
    lookup = SuffixLookup(isolated=True, max_past_tokens=40)
    for owner in range(20):
        lookup.finish(owned(owner, 1, 2, 30 + owner))
        lookup.finish(owned(0, 1, 2, 30))  # who goes on asking is not forgotten
    histories = [owned(owner, 9, 1, 2) for owner in range(20)]
    known = [set(proposed(lookup, pool_for(history), history)[0]) for history in histories]
    assert known == [{(30,)}, *[set()] * 15, {(46,)}, {(47,)}, {(48,)}, {(49,)}], "the last four, and the first"


def test_finished_texts_are_looked_up_behind_the_texts_own_and_are_part_of_the_state():
    lookup, other = SuffixLookup(), SuffixLookup()
    lookup.finish(words(1, 2, 30, 31))
    lookup.finish(words(1, 2, 3))
    history = words(1, 2, 3, 1, 2)
    other.restore(lookup.state())
    for made in (lookup, other):
        (found,) = proposed(made, pool_for(history), history, max_depth=2)
        names = {path: made.names[source] for path, (source, _) in found.items()}
        assert names == {(3,): "suffix", (3, 1): "suffix", (30,): "past", (30, 31): "past"}
    other.restore({})
    assert set(proposed(other, pool_for(history), history, max_depth=2)[0]) == {(3,), (3, 1)}


# Calibration


def test_calibration_learns_how_often_a_source_is_right():
    calibration = Calibration([torch.tensor([0.5, 0.5]), torch.tensor([0.9])])
    rng = random.Random(1)
    for _ in range(400):
        # Source 1 proposes token 7, right three times in four; source 2 proposes 8 below it, never right.
        candidates = pool_for(words(1))
        one = torch.ones(1, 1, dtype=torch.int64)
        candidates.add(7 * one, 0 * one, 0.5 * one, one, 0 * one)
        candidates.add(8 * one, one, 0.5 * one, 2 * one, 0 * one)
        candidates.merge()
        calibration.observe(candidates, [[7, 9] if rng.random() < 0.75 else [5, 8]])
    probability = calibration.probability(torch.tensor([[0, 1, 2]]), torch.tensor([[0, 0, 0]]))[0].tolist()
    assert probability == pytest.approx([1.0, 0.75, 0.0], abs=0.06)
    assert calibration.probability(torch.tensor([[1]]), torch.tensor([[1]])).item() == 0.5, "unseen: the prior"


def test_calibration_follows_a_source_that_gets_better():
    calibration = Calibration([torch.tensor([0.5])])
    candidates = pool_for(words(1))
    draft(candidates, [7])
    candidates.merge()
    seen = []
    for token in (5, 7):
        for _ in range(4000):
            calibration.observe(candidates, [[token]])
        seen.append(calibration.probability(torch.tensor([1]), torch.tensor([0])).item())
    assert seen == pytest.approx([0.0, 1.0], abs=0.05)


def test_overestimated_paths_count_for_less():
    """Two rows: nodes of 0.6 come true, of those of 0.1 every second one that should, of those of 0.001 none ever."""
    calibration = PathCalibration()
    assert set(calibration.ratios) == {1.0}
    paths = torch.tensor([[1.0, 0.6, 0.1, 0.001, 0.001], [1.0, 0.6, 0.1, 0.1, 0.0]])
    for number in range(4000):
        first = [1] if number % 5 < 3 else []
        second = [1] if number % 5 < 3 else ([2] if number % 20 < 10 and number % 5 == 3 else [])
        calibration.observe(paths, [first, second if number % 2 else first])
    ratios = calibration.ratios
    assert ratios[0] == pytest.approx(1.0, abs=0.1)
    assert ratios[2] == ratios[0] and ratios[3] == pytest.approx(0.05 / 0.3, abs=0.1), "0.1 is a sixteenth to an eighth"
    assert ratios[5] == ratios[3], "of what never was, the best guess is that of the next likelier"
    assert ratios[9] < ratios[5]
    other = PathCalibration()
    other.restore(calibration.state())
    assert other.ratios == ratios
    others = {name: torch.zeros(len(ratios)).double() for name in ("hoped", "came")}
    others["hoped"][:2], others["came"][:2] = torch.tensor([1.0, 100.0]), torch.tensor([1.5, 140.0])
    other.restore(others)
    assert 1 < other.ratios[1] <= other.ratios[0], "no ratio is above that of likelier nodes, also if all are above 1"
    other.restore({})
    assert set(other.ratios) == {1.0}


def test_calibration_is_restored_from_its_state_and_from_nothing():
    made, other = (Calibration([torch.tensor([0.5, 0.2])]) for _ in range(2))
    candidates = pool_for(words(1))
    draft(candidates, [7])
    candidates.merge()
    both = (torch.tensor([1, 1]), torch.tensor([0, 1]))
    made.observe(candidates, [[7]])
    state = made.state()
    made.observe(candidates, [[7]])
    other.restore(state)
    once, twice = other.probability(*both)[0].item(), made.probability(*both)[0].item()
    assert 0.5 < once < twice, "a state is a copy"
    other.restore({})
    assert other.probability(*both).tolist() == pytest.approx([0.5, 0.2])


def test_a_repeating_answer_is_accepted_from_both_retrievers():
    """A model that looks at its last token only must come back to a token it has had, and then repeats itself."""
    model = tiny_model()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    plain = Engine(model, policy="off").generate([3, 4, 5], max_new_tokens=200)
    result = Engine(model, budget=16).generate([3, 4, 5], max_new_tokens=200)
    assert result.ids == plain.ids
    assert result.stats.mean_accepted > 4
    accepted = set(result.stats.accepted_by_source)
    assert "suffix" in accepted and accepted & {"adjacency", "bigram", "trigram"}
