"""block verifies the chain of likeliest drafts, whoever drafts; block-paper cuts it at a gate and walks the matrix."""

from unittest.mock import patch

import pytest
import torch

from batches import prefilled
from block_heads import HEADS, LONG, PROMPT, hidden_without_cache, make_head
from drafted import drafts
from graft import Engine, SamplingSettings
from graft.bench.baselines import gate_calibration
from graft.bench.baselines.gates import CHAIN_THRESHOLDS, PUBLISHED
from graft.bench.methods import PolicyMethod
from graft.bench.runs import make_methods
from graft.drafters.block.drafter import BlockDrafter, BlockTreeSettings
from graft.drafters.drafter import TreeSettings
from graft.drafters.eagle3.drafter import Eagle3Drafter
from graft.engine.flight import Flight
from graft.request.stats import Clock
from graft.tree.device.buffers import NUM_BUCKETS
from heads import make_head as make_eagle3_head
from heads import plain_draft
from tiny import VOCAB, tiny_model

KINDS = {
    "marginal": HEADS["marginal"],
    "conditional": HEADS["conditional"],
    "markov": HEADS["markov"],
    "recurrent": {"shifted": True, "markov": "rnn", "markov_rank": 5},
}


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=6)


def make_drafter(model, kind):
    """A drafter of small trees: tables of two tokens, which do not follow many a chain."""
    if kind == "eagle3":
        return Eagle3Drafter(make_eagle3_head(model), TreeSettings(depth=6, topk=2, total_token=20))
    return BlockDrafter(make_head(model, **KINDS[kind], size=8), BlockTreeSettings(width=2, nodes=20))


@torch.no_grad()
def likeliest_chain(drafter, model, text):
    """Each draft the likeliest after those before, from the whole text and without a cache."""
    chain = []
    if isinstance(drafter, Eagle3Drafter):
        for _ in range(drafter.max_depth):
            chain.append(int(plain_draft(drafter.head, model, text, chain).argmax()))
        return chain
    head = drafter.head
    hidden = hidden_without_cache(head, model, text)
    if not head.config.has_conditionals:
        return head.marginals(hidden)[0].argmax(dim=-1).tolist()
    for slot in range(head.config.num_drafts):
        before = torch.tensor([text[-1], *chain])[None, :, None]
        chain.append(int(head.conditionals(hidden[:, : slot + 1], before)[0, slot, 0].argmax()))
    return chain


def grown(engine, batch):
    """The chains of the next round, without their roots, and who proposed their tokens; each must be a chain."""
    trees, tree_of, before = [], Flight.tree, [sequence.stats.draft_passes for sequence in batch.sequences]
    with patch.object(Flight, "tree", lambda flight: trees.append(tree_of(flight)) or trees[-1]):
        engine.run_round(batch, Clock())
    (tree,), names = trees, engine.policy.sources
    chains, sources = [], []
    for row in range(len(tree.tokens)):
        count = tree.num_nodes[row]
        assert tree.parents[row, 1 : 1 + count].tolist() == list(range(count)), "each follows the one before"
        chains.append(tree.tokens[row, 1 : 1 + count].tolist())
        sources.append([names[number] for number in tree.sources[row, 1 : 1 + count].tolist()])
    passes = [sequence.stats.draft_passes - old for sequence, old in zip(batch.sequences, before, strict=True)]
    return chains, sources, passes


@pytest.mark.parametrize("kind", [*KINDS, "eagle3"])
def test_block_is_the_chain_of_the_likeliest_drafts(model, kind):
    """All of them, in every row, before any round and after some."""
    drafter = make_drafter(model, kind)
    engine = Engine(model, policy="block", drafter=drafter)
    batch = prefilled(engine, PROMPT, LONG)
    for _ in range(3):
        expected = [likeliest_chain(drafter, model, sequence.ids) for sequence in batch.sequences]
        chains, sources, passes = grown(engine, batch)
        assert chains == expected
        assert sources == [["drafted"] * drafter.max_depth] * 2
        assert passes == [drafter.max_passes] * 2


# block-paper


def paper_engine(model, kind, thresholds=PUBLISHED, **options):
    drafter = make_drafter(model, kind)
    engine = Engine(model, policy="block-paper", drafter=drafter, **options)
    engine.policy.restore({CHAIN_THRESHOLDS: torch.tensor(thresholds)})
    return engine


def teach(engine, successor, tokens=range(VOCAB)):
    """The likeliest successor of each of these tokens; of others none is known."""
    tables = engine.policy.memory.tables
    matrix = tables.entries[int(tables.starts[-1]) :]
    matrix.fill_(-1)
    for token in tokens:
        matrix[token, 0] = successor(token) * NUM_BUCKETS


def walk(token, successor, count):
    path = []
    for _ in range(count):
        token = successor(token)
        path.append(token)
    return path


def seven_on(token):
    return (token + 7) % VOCAB


@pytest.mark.parametrize("kind", ["marginal", "conditional", "eagle3"])
@pytest.mark.parametrize(
    ("thresholds", "kept"), [((1.0, 1.0, 1.0), 1), ((0.0, 1.0, 1.0), 2), ((0.0, 0.0, 1.0), 6), ((0.0, 0.0, 0.0), None)]
)
def test_the_gate_that_stops_a_chain_says_how_much_is_kept_and_the_matrix_gives_the_rest(model, kind, thresholds, kept):
    engine = paper_engine(model, kind, thresholds)
    batch = prefilled(engine, PROMPT, LONG)
    teach(engine, seven_on)
    length = engine.drafter.max_depth
    kept = kept or length
    prefixes = [likeliest_chain(engine.drafter, model, sequence.ids)[:kept] for sequence in batch.sequences]
    chains, sources, _ = grown(engine, batch)
    for chain, prefix in zip(chains, prefixes, strict=True):
        assert chain == prefix + walk(prefix[-1], seven_on, length - kept)
    assert sources == [["drafted"] * kept + ["adjacency"] * (length - kept)] * 2


@pytest.mark.parametrize("kind", ["marginal", "conditional", "eagle3"])
def test_a_gate_compares_the_chains_own_path_probability_and_each_row_has_its_own_cut(model, kind):
    engine = paper_engine(model, kind)
    batch = prefilled(engine, PROMPT, LONG)
    levels = drafts(engine.drafter, batch.draft, batch.roots(), keep=1)
    reached = levels[1].path_probabilities[:, 0].tolist()
    torch.testing.assert_close(
        levels[1].path_probabilities, levels[0].probabilities * levels[1].probabilities, rtol=1e-4, atol=0
    )
    assert reached[0] != pytest.approx(reached[1], rel=1e-3)
    engine.policy.restore({CHAIN_THRESHOLDS: torch.tensor([0.0, sum(reached) / 2, 0.0])})
    teach(engine, seven_on)
    drafted = [own.count("drafted") for own in grown(engine, batch)[1]]
    stopped = reached.index(min(reached))
    assert drafted[stopped] == 2 and drafted[1 - stopped] == engine.drafter.max_depth


def test_the_walk_ends_where_the_matrix_knows_nothing(model):
    engine = paper_engine(model, "marginal", (1.0, 1.0, 1.0))
    batch = prefilled(engine, PROMPT)
    first = likeliest_chain(engine.drafter, model, PROMPT)[0]
    following = {first: 60, 60: 59}
    teach(engine, following.__getitem__, following)
    chains, sources, _ = grown(engine, batch)
    assert chains == [[first, 60, 59]] and sources == [["drafted", "adjacency", "adjacency"]]


def test_without_a_matrix_nothing_follows_the_kept_prefix(model):
    engine = paper_engine(model, "marginal", (1.0, 1.0, 1.0))
    batch = prefilled(engine, PROMPT)
    teach(engine, seven_on, ())
    assert grown(engine, batch)[0] == [likeliest_chain(engine.drafter, model, PROMPT)[:1]]


@pytest.mark.parametrize("kind", ["marginal", "eagle3"])
def test_a_warm_up_calibrates_the_gates_by_the_chains_that_were_accepted(model, kind, monkeypatch):
    drafter, seen = make_drafter(model, kind), []
    monkeypatch.setattr(gate_calibration, "chain_thresholds", lambda rounds: seen.extend(rounds) or [0.1, 0.2, 0.3])
    (method,) = make_methods(["block-paper"], model, drafter)
    settings = SamplingSettings(max_new_tokens=12)
    state = method.warm_up([[PROMPT], [LONG]], settings)
    assert state[CHAIN_THRESHOLDS].tolist() == torch.tensor([0.1, 0.2, 0.3]).tolist()
    method.restore(state)
    assert method.state()[CHAIN_THRESHOLDS].tolist() == state[CHAIN_THRESHOLDS].tolist()
    rounds = [PolicyMethod("block", model, drafter).answer([prompt], settings)[0].stats for prompt in (PROMPT, LONG)]
    assert 0 < len(seen) <= sum(stats.rounds for stats in rounds)
    assert sum(accepted for _, accepted in seen) <= sum(stats.accepted for stats in rounds)
    for confidences, _ in seen:
        assert 0 < confidences[2] < confidences[1] < confidences[0] <= 1, "of one path, further and further down"
