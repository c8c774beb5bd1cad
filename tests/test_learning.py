"""Memory and calibration: what is learned, and that it is learned right."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graft import Engine
from graft.model.verified import NUM_SUCCESSORS, top_logits, top_probabilities
from graft.spec_decode import memory
from graft.spec_decode.calibration import Calibration, PathCalibration
from graft.spec_decode.memory import Memory, PastTexts
from graft.spec_decode.policies import PolicySettings
from graft.spec_decode.policies.off import Off
from graft.spec_decode.sources import TABLES
from graft.tree.device import c_kernels
from graft.tree.device.buffers import NUM_BUCKETS, Draws, Pool, PoolShape, Texts
from reference import bucket_of
from tiny import VOCAB, tiny_model

CPU = torch.device("cpu")
LOGITS = 8.0 - torch.arange(NUM_SUCCESSORS)


def new_memory(monkeypatch, isolated=False, vocab_size=VOCAB):
    """With tables that take little memory, and those of isolated texts of another size than those for all."""
    monkeypatch.setattr(memory, "ROWS", 1 << 10)
    monkeypatch.setattr(memory, "ISOLATED_ROWS", 1 << 12)
    return Memory(vocab_size, isolated, lambda: CPU)


def ints(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def learn(known, ngrams, following, salt=0, logits=LOGITS):
    """After each n-gram (earlier, before, token) the target's likeliest tokens are following[i] and those behind it."""
    earlier, before, tokens = zip(*ngrams, strict=True)
    count, behind = len(ngrams), torch.arange(len(logits))
    step = (ints(tokens), ints([0] * count), ints([0] * count), ints(range(count)), ints(range(count)))
    successors = ints(following)[:, None] + behind.int()
    salts = torch.full((count,), salt)
    said = (successors, logits.expand(count, -1).float().contiguous())
    c_kernels.learn(known.tables, *step, ints([before, earlier]), salts, *said, count, False)


def proposed(known, text, salt=0):
    """What the tables propose after a text: (token, table, score bucket), likeliest first."""
    shape = PoolShape(1, 1, 1, (), num_waves=1, beam=1)
    texts, pool, row = Texts(1, 64, 2, CPU), Pool(1, shape.width, CPU), ints([0])
    texts.own[0, : len(text)], texts.lengths[0] = ints(text), len(text)
    c_kernels.begin(pool, shape, texts, row)
    draws = Draws(row, torch.zeros(1, dtype=torch.int64), torch.zeros(1, NUM_BUCKETS, dtype=torch.float64))
    probs = torch.full((3, len(TABLES), NUM_BUCKETS), 0.5)
    c_kernels.follow(pool, shape, known.tables, torch.tensor([salt]), probs, row + 1, draws, texts, row, 0)
    columns = [
        part[0, (pool.paths[0] > 0) & (pool.depths[0] > 0)] for part in (pool.tokens, pool.sources, pool.buckets)
    ]
    return [(token, TABLES[source], bucket) for token, source, bucket in torch.stack(columns, dim=1).tolist()]


def likeliest(known, text, salt=0):
    return next((token for token, _, _ in proposed(known, text, salt)), None)


# The target's likeliest tokens


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


def test_texts_under_different_salts_are_kept_apart(monkeypatch):
    known = new_memory(monkeypatch, isolated=True)
    learn(known, [(1, 2, 5)], [20], salt=1)
    assert [likeliest(known, (1, 2, 5), salt) for salt in (0, 1, 2)] == [None, 20, None]
    learn(known, [(1, 2, 5)], [30], salt=2)
    assert [likeliest(known, (1, 2, 5), salt) for salt in (0, 1, 2)] == [None, 20, 30]
    assert likeliest(known, (3, 4, 5), salt=2) == 30 and likeliest(known, (3, 4, 5), salt=3) is None


def test_the_state_of_tables_for_all_serves_every_isolated_text(monkeypatch):
    common, isolated = new_memory(monkeypatch), new_memory(monkeypatch, isolated=True)
    learn(common, [(1, 2, 5), (2, 5, 6)], [40, 41])
    isolated.restore(common.state())
    for text, token in (((1, 2, 5), 40), ((2, 5, 6), 41), ((3, 3, 6), 41)):
        assert proposed(isolated, text, salt=7) == proposed(common, text)
        assert likeliest(isolated, text, salt=7) == token


def test_tables_are_restored_from_their_state_and_from_nothing(monkeypatch):
    known, other = new_memory(monkeypatch), new_memory(monkeypatch)
    learn(known, [(1, 2, 5), (2, 5, 6)], [20, 21])
    state = known.state()
    assert [len(state[f"{name}/rows"]) for name in TABLES] == [2, 2, 2], "only what was judged"
    learn(known, [(1, 2, 5)], [30])
    for restored in (known, other):
        restored.restore(state)
        assert [likeliest(restored, text) for text in ((1, 2, 5), (2, 5, 6))] == [20, 21]
    known.restore({})
    assert proposed(known, (1, 2, 5)) == []


def test_tables_propose_by_the_longest_known_ngram(monkeypatch):
    known = new_memory(monkeypatch)
    learn(known, [(0, 2, 5), (1, 2, 5), (7, 7, 5)], [30, 40, 50])
    texts = ((1, 2, 5), (3, 2, 5), (3, 3, 5), (5,), (2, 5))
    found = [proposed(known, text)[0][:2] for text in texts]
    expected = [(40, "trigram"), (40, "bigram"), (50, "adjacency"), (50, "adjacency"), (40, "bigram")]
    assert found == expected, "what was judged last holds for all that ends so"


@pytest.mark.parametrize("first", [0, 50_000, 65_536, 131_071, 262_143 - NUM_SUCCESSORS + 1])
def test_an_entry_is_a_token_and_its_share_whatever_the_token_and_the_share(monkeypatch, first):
    vocab_size = 262_144
    known = new_memory(monkeypatch, vocab_size=vocab_size)
    learn(known, [(0, vocab_size - 1, vocab_size - 1)], [first])  # shares from 0.63 to 0.0006
    buckets = [1, 4, 7, 9, 12, 15, 15, 15]
    for text, table in (((0, vocab_size - 1, vocab_size - 1), "trigram"), ((vocab_size - 1,), "adjacency")):
        expected = [(first + rank, table, bucket) for rank, bucket in enumerate(buckets)]
        assert proposed(known, text) == expected


@given(st.lists(st.floats(-60, 60, width=32), min_size=NUM_SUCCESSORS, max_size=NUM_SUCCESSORS))
def test_shares_of_logits_are_those_of_a_softmax(logits):
    logits = torch.tensor(sorted(logits, reverse=True))
    with pytest.MonkeyPatch.context() as monkeypatch:
        known = new_memory(monkeypatch)
        learn(known, [(1, 2, 5)], [20], logits=logits)
    buckets = [bucket for _, _, bucket in proposed(known, (1, 2, 5))]
    for bucket, share in zip(buckets, logits.double().softmax(dim=0).tolist(), strict=True):
        assert bucket in {bucket_of(share * (1 + error)) for error in (-1e-6, 0, 1e-6)}


# Finished texts


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=31), min_size=1, max_size=8))
def test_the_last_finished_texts_are_kept_that_there_is_room_for(texts):
    past = PastTexts(64, CPU)
    for number, text in enumerate(texts, start=1):
        past.add(text, 0, lambda ids, dtype: torch.tensor(ids, dtype=dtype))
        left = past.texts()
        assert left and left == texts[number - len(left) : number]
        if len(left) < number:  # one more fills the ring or does not fit: whether its beginning is lost is not known
            assert sum(len(each) + 1 for each in texts[number - len(left) - 1 : number]) >= 64


def test_isolated_texts_have_tables_of_their_own_or_those_of_their_owner():
    class Text:
        def __init__(self, number, owner):
            self.number, self.owner = number, owner

    texts = [Text(1, None), Text(2, None), Text(3, 1 << 56), Text(4, 1 << 56)]
    policy = Off(None, None, PolicySettings())
    assert {policy.salt_of(text) for text in texts} == {0}
    policy.isolated = True
    one, other, first, second = map(policy.salt_of, texts)
    assert len({0, one, other, first}) == 4 and first == second


# Calibration


def count(calibration, source, bucket, tried, fitted):
    """Adds what one round has counted of greedy rows."""
    counts = torch.zeros(2, *calibration.acceptance_probs.shape)
    counts[0, 0, source, bucket], counts[1, 0, source, bucket] = tried, fitted
    calibration.add(*counts)


def probability(calibration, source, bucket):
    return calibration.acceptance_probs[0, source, bucket].item()


def test_calibration_learns_how_often_a_source_is_right():
    calibration = Calibration([torch.tensor([0.5, 0.5]), torch.tensor([0.9])])
    for number in range(400):
        count(calibration, 1, 0, 1, number % 4 > 0)
        count(calibration, 2, 0, 1, 0)
    assert probability(calibration, 1, 0) == pytest.approx(0.75, abs=0.02)
    assert probability(calibration, 2, 0) == pytest.approx(0.0, abs=0.06)
    assert probability(calibration, 1, 1) == 0.5, "unseen: the prior"


def test_calibration_follows_a_source_that_gets_better():
    calibration = Calibration([torch.tensor([0.5])])
    seen = []
    for fits in (0, 1):
        for _ in range(4000):
            count(calibration, 1, 0, 1, fits)
        seen.append(probability(calibration, 1, 0))
    assert seen == pytest.approx([0.0, 1.0], abs=0.05)


def test_overestimated_paths_count_for_less():
    """Two rows: nodes of 0.6 come true, of those of 0.1 every second one that should, of those of 0.001 none ever."""
    calibration = PathCalibration()
    assert set(calibration.ratios) == {1.0}
    paths = np.array([[0.6, 0.1, 0.001, 0.001], [0.6, 0.1, 0.1, 0.0]], dtype=np.float32)
    cells = calibration.cells(paths, [0, 0])
    for number in range(4000):
        first = [1] if number % 5 < 3 else []
        second = [1] if number % 5 < 3 else ([2] if number % 20 < 10 and number % 5 == 3 else [])
        calibration.observe(paths, cells, paths > 0, [first, second if number % 2 else first], [0, 0])
    ratios = calibration.ratios
    assert ratios[0] == pytest.approx(1.0, abs=0.1)
    assert ratios[2] == ratios[0] and ratios[3] == pytest.approx(0.05 / 0.3, abs=0.1), "0.1 is a sixteenth to an eighth"
    assert ratios[5] == ratios[3], "of what never was, the best guess is that of the next likelier"
    assert ratios[9] < ratios[5]
    other = PathCalibration()
    other.restore(calibration.state())
    assert other.ratios.tolist() == ratios.tolist()
    assert other.probabilities(paths, cells) == pytest.approx(paths * ratios[cells])
    others = {name: torch.zeros(len(ratios)).double() for name in ("hoped", "came")}
    others["hoped"][:2], others["came"][:2] = torch.tensor([1.0, 100.0]), torch.tensor([1.5, 140.0])
    other.restore(others)
    assert 1 < other.ratios[1] <= other.ratios[0], "no ratio is above that of likelier nodes, also if all are above 1"
    other.restore({})
    assert set(other.ratios) == {1.0}


def test_calibration_is_restored_from_its_state_and_from_nothing():
    made, other = (Calibration([torch.tensor([0.5, 0.2])]) for _ in range(2))
    count(made, 1, 0, 1, 1)
    state = made.state()
    count(made, 1, 0, 1, 1)
    other.restore(state)
    once, twice = probability(other, 1, 0), probability(made, 1, 0)
    assert 0.5 < once < twice, "a state is a copy"
    other.restore({})
    assert [probability(other, 1, bucket) for bucket in (0, 1)] == pytest.approx([0.5, 0.2])


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
