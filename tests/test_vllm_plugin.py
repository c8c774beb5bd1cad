"""Graft inside vLLM, as far as it needs no vLLM: chains, texts, settings. `make test-engines` runs it inside."""

import os
import random
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.errors import GraftError
from graft.integrations.environment import is_on
from graft.integrations.vllm import plugin
from graft.integrations.vllm.chains import Chains, Paths, successors_in
from graft.integrations.vllm.cpu_sampling import expand
from graft.integrations.vllm.retrieval import RetrievalProposer
from graft.integrations.vllm.settings import SWITCH, ChainSettings
from graft.integrations.vllm.texts import Texts, UnnamedTexts
from graft.spec_decode.candidates import Candidates
from graft.spec_decode.grafter import Text
from graft.spec_decode.proposers import NgramTables

VOCAB = 60


def test_what_decides_needs_neither_vllm_nor_transformers():
    program = """
import sys
sys.modules["transformers"] = sys.modules["vllm"] = None
import graft.integrations.vllm.chains, graft.integrations.vllm.texts, graft.integrations.vllm.plugin
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# The best chain


@st.composite
def proposals(draw):
    """Nodes (token, parent, probability) below a root, with many equal paths; needs rise along paths."""
    nodes = []
    for number in range(draw(st.integers(1, 14))):
        parent = draw(st.integers(0, number))
        probability = draw(st.integers(0, 64)) / 65  # 0 is padding
        need = max(draw(st.integers(0, 2)), nodes[parent - 1][3] if parent else 0)
        nodes.append((draw(st.integers(0, 2)), parent, probability, need))
    return nodes


def reference_values(nodes):
    """By path: P(it is accepted) by its likeliest copy, and the fewest passes it needs."""
    paths, found = [((), 1.0)], {(): (1.0, 0)}
    for token, parent, probability, need in nodes:
        path, product = (*paths[parent][0], token), paths[parent][1] * probability
        paths.append((path, product))
        known = found.get(path)
        if product > 0:
            found[path] = (max(product, known[0]), min(need, known[1])) if known else (product, need)
    return found


@given(st.lists(proposals(), min_size=1, max_size=3), st.lists(st.integers(1, 5), min_size=3, max_size=3))
@settings(max_examples=150, deadline=None)
def test_the_best_chain_has_the_most_expected_accepted_tokens(rows, limits):
    limits = limits[: len(rows)]
    width = max(map(len, rows))
    candidates = Candidates(torch.zeros(len(rows), dtype=torch.int64), [[0]] * len(rows))
    for place in range(width):  # one by one, so that each may need other passes
        of_rows = [row[place] if place < len(row) else (0, 0, 0.0, 0) for row in rows]
        for need in range(3):
            now = [node if node[3] == need else (node[0], node[1], 0.0, 0) for node in of_rows]
            parents = [[place_of(row, node[1])] for row, node in zip(rows, now, strict=True)]
            tokens = torch.tensor([[node[0]] for node in now])
            chances = torch.tensor([[node[2]] for node in now])
            zeros = torch.zeros_like(tokens)
            candidates.add(tokens, torch.tensor(parents), chances, zeros + 1, zeros, need)
    candidates.merge()
    found = Paths(candidates, limits)
    by_need = [0.0, 0.0, 0.0]
    for row, nodes, (tokens, paths), limit in zip(range(len(rows)), rows, found.best(), limits, strict=True):
        known = reference_values(nodes)

        def value(path, known=known):
            return sum(known[path[:end]][0] for end in range(1, len(path) + 1))

        best = max(value(path) for path in known if len(path) <= limit)
        assert len(tokens) <= limit and value(tuple(tokens)) == pytest.approx(best, rel=1e-5), row
        assert paths == pytest.approx([known[tuple(tokens[:end])][0] for end in range(1, len(tokens) + 1)], rel=1e-5)
        for need in range(3):
            by_need[need] += max(value(path) for path in known if len(path) <= limit and known[path][1] <= need)
    assert found.values_by_need(2) == pytest.approx(by_need, rel=1e-5)


def place_of(row, number):
    """Where a proposal stands among the candidates: behind the root each takes three places, one for each need."""
    return 3 * (number - 1) + 1 + row[number - 1][3] if number else 0


# Rounds


def follows(text, period):
    """The next token of a text that repeats itself; at some places another."""
    return (text[-period] + (7 if len(text) % 13 == 0 else 0)) % VOCAB


def decode(chains, prompts, num_steps, head=None, period=9):
    """Texts and the tokens of each step, decoded as vLLM does: a chain is accepted as far as it is right."""
    texts = [Text(list(prompt), len(prompt)) for prompt in prompts]
    counts, passes = [], []
    for text in texts:
        text.ids.append(follows(text.ids, period))
    for _ in range(num_steps):
        round = chains.begin(texts, [chains.length] * len(texts))
        if head is not None:
            paths = [list(text.ids) for text in texts]
            while True:
                drafted = [head(path) for path in paths]
                for path, (token, _) in zip(paths, drafted, strict=True):
                    path.append(token)
                if not chains.drafted(round, *zip(*drafted, strict=True)):
                    break
            passes.append(round.round.passes[0])
        proposed = chains.end(round)
        for text, chain in zip(texts, proposed, strict=True):
            assert len(chain) <= chains.length
            new = [follows(text.ids, period)]
            for token in chain:
                if token != new[-1]:
                    break
                new.append(follows(text.ids + new, period))
            text.ids += new
            counts.append(len(new))
    return texts, counts, passes


def prompts_of(count, period=9, seed=5):
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(period)] for _ in range(count)]


def plain(prompt, count, period=9):
    text = list(prompt)
    while len(text) < count:
        text.append(follows(text, period))
    return text


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("has_drafter", [False, True])
def test_rounds_give_the_plain_text_in_fewer_steps(num_rows, has_drafter):
    chains = Chains(VOCAB, 6, ChainSettings(pass_cost=0.03), has_drafter)
    rng, prompts = random.Random(1), prompts_of(num_rows)

    def head(path):
        is_right = rng.random() < 0.7
        return (follows(path, 9) if is_right else rng.randrange(VOCAB)), 0.7

    texts, counts, _ = decode(chains, prompts, 50, head if has_drafter else None)
    for text, prompt in zip(texts, prompts, strict=True):
        assert text.ids == plain(prompt, len(text.ids))
    assert sum(counts) / len(counts) > (2.5 if has_drafter else 2.0)
    own = chains.counts
    assert (own.steps, own.rows, own.tokens) == (50, 50 * num_rows, sum(counts[:-num_rows])), (
        "the last are not seen yet"
    )


def test_a_head_that_is_never_right_is_asked_for_no_more_than_the_pass_that_is_made_anyway():
    chains = Chains(VOCAB, 6, ChainSettings(pass_cost=0.1), True)
    _, counts, passes = decode(chains, prompts_of(1), 120, lambda path: ((follows(path, 9) + 1) % VOCAB, 0.5))
    assert sum(passes[-40:]) / 40 < 1.3 and passes[0] > 1
    assert sum(counts[-40:]) / 40 > 2, "what is retrieved is proposed all the same"


def test_a_head_that_is_always_right_is_asked_for_the_whole_chain():
    chains = Chains(VOCAB, 6, ChainSettings(pass_cost=0.02), True)
    _, counts, passes = decode(chains, prompts_of(1), 60, lambda path: (follows(path, 9), 0.99))
    assert sum(counts[-20:]) / 20 > 6.5
    assert passes[0] > 1


def test_a_chain_is_drafted_at_first_and_retrieved_from_there_on():
    """Behind the end of the text nothing is known, behind the drafted token everything."""
    chains = Chains(VOCAB, 5, ChainSettings(passes=1, pass_cost=0.0), True)
    ids = [10, 11, 12, 13, 14, 15, 20, 3, 40, 4]
    for _ in range(30):  # calibrated: the head is right, and so are copies
        text = Text([*ids, 50], len(ids))
        round = chains.begin([text], [5])
        assert not chains.drafted(round, [10], [0.9])
        (chain,) = chains.end(round)
        text.ids += [10, 11, 12, 13, 14, 15]
    assert chain == [10, 11, 12, 13, 14]
    assert chains.grafter.sources[1] == "drafted"


def test_a_chain_ends_where_acceptance_is_too_improbable_and_where_there_is_no_room():
    ids = [8, 9, 10, 11, 12, 13, 14, 15, 20, 8, 9, 10]

    def chain(least=0.0, limit=6):
        chains = Chains(VOCAB, 6, ChainSettings(least=least), False)
        return chains.end(chains.begin([Text(list(ids), len(ids))], [limit]))[0]

    whole = chain()
    assert whole[:3] == [11, 12, 13] and len(whole) == 6
    assert chain(limit=2) == whole[:2]
    cut = chain(least=0.1)
    assert len(cut) < 6 and cut == whole[: len(cut)]


def test_a_pass_is_timed_in_rounds_without_drafting(monkeypatch):
    clock = iter(range(0, 1000))
    monkeypatch.setattr("graft.integrations.vllm.chains.time.perf_counter", lambda: float(next(clock)))
    chains = Chains(VOCAB, 4, ChainSettings(), True)
    before = chains.grafter.budget.pass_cost
    text = Text([1, 2, 3], 3)
    for _ in range(3):
        round = chains.begin([text], [4])  # one tick, and one for each pass
        for token in (4, 5, 6):
            chains.drafted(round, [token], [0.9])
        chains.end(round)
        text.ids += [4, 5]
    # Ticks of a round: begin, pass, pass, pass; two of four are passes behind the first.
    assert chains.grafter.budget.pass_cost == pytest.approx(1 / 2) != before


def test_first_passes_that_took_long_are_forgotten(monkeypatch):
    """A head of which nothing can be copied, right at every pass: all passes pay, but the first ones are compiled."""
    clock = SimpleNamespace(now=0.0, num_passes=0)

    def tick():
        clock.now += 0.001
        return clock.now

    monkeypatch.setattr("graft.integrations.vllm.chains.time.perf_counter", tick)
    chains = Chains(VOCAB, 4, ChainSettings(), True)
    rng = random.Random(3)
    answer = [rng.randrange(VOCAB) for _ in range(2000)]

    def head(path):
        clock.now += 5.0 if clock.num_passes < 4 else 0.0005
        clock.num_passes += 1
        return answer[len(path)], 0.95

    passes, text = [], Text(answer[:4], 4)
    for _ in range(300):
        clock.now += 0.02  # a step of the target
        round, path = chains.begin([text], [4]), list(text.ids)
        while True:
            drafted = head(path)
            path.append(drafted[0])
            if not chains.drafted(round, [drafted[0]], [drafted[1]]):
                break
        chain = chains.end(round)[0]
        num_right = next((n for n, token in enumerate(chain) if token != answer[len(text.ids) + n]), len(chain))
        text.ids += answer[len(text.ids) : len(text.ids) + num_right + 1]
        passes.append(round.round.passes[0])
    assert passes[5:15] == [1] * 10, "dear at first"
    assert passes[-50:].count(4) > 40


def test_tables_learn_what_followed_in_accepted_text():
    learned = NgramTables(VOCAB)
    learned.learn(successors_in([([1, 2, 3, 4, 5, 6, 7], 4), ([20, 21], 1)], [0, 0]))
    entries = learned._tables.tables[2]._entries  # adjacency: a row a token
    known = {token: int(row[0]) for token, row in enumerate(entries) if int(row[0]) >= 0}
    assert sorted(known) == [4, 5, 6, 20]
    candidates = Candidates(torch.tensor([4]), [[2, 3, 4]])
    chances = torch.full((3, 8, 64), 0.5)
    learned.propose(candidates, [], 1, chances, 3)
    candidates.merge()
    assert Paths(candidates, [3]).best()[0][0] == [5, 6, 7]


def test_isolated_texts_do_not_learn_from_each_other():
    def second(isolated):
        chains = Chains(VOCAB, 4, ChainSettings(isolated=isolated), False)
        for tail in ([5, 6, 7, 8], [9]):
            text = Text([1, 2, 3, 4], 4)
            chains.end(chains.begin([text], [4]))
            text.ids += tail
        other = Text([30, 2, 3, 4, 5], 5)
        return chains.end(chains.begin([other], [4]))[0]

    assert second(False)[:3] == [6, 7, 8] and second(True) == []


# Texts


class FakeBatch:
    """What vLLM keeps of its requests: rows of tokens that move when others leave."""

    def __init__(self, rng):
        self.rng, self.rows, self.number = rng, [], 0
        self.truth = {}

    def step(self):
        """Some leave, some come; everybody gets tokens. Gives rows (name, tokens, known, new)."""
        for _ in range(self.rng.randrange(2)):
            if self.rows:
                gone = self.rng.randrange(len(self.rows))
                self.rows[gone] = self.rows[-1]
                self.rows.pop()
        while len(self.rows) < 3 and self.rng.random() < 0.5:
            self.truth[self.number] = [self.rng.randrange(VOCAB) for _ in range(self.rng.randrange(1, 50))]
            self.rows.append(self.number)
            self.number += 1
        rows = []
        for name in self.rows:
            new = [self.rng.randrange(VOCAB) for _ in range(self.rng.randrange(1, 4))]
            rows.append((name, self.truth[name] + [0] * 5, len(self.truth[name]), new))
            self.truth[name] = self.truth[name] + new
        return rows


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_texts_are_those_of_the_requests_whatever_row_they_have(seed):
    batch, finished, unnamed_finished = FakeBatch(random.Random(seed)), [], []
    texts, unnamed = Texts(finished.append), UnnamedTexts(unnamed_finished.append)
    objects = {}
    for _ in range(12):
        rows = batch.step()
        texts.keep({name for name, *_ in rows})
        for name, known, count, new in rows:
            text = texts.grown(name, known, count, new)
            assert text.ids == batch.truth[name]
            assert objects.setdefault(name, text) is text
        whole = [(at, batch.truth[name], len(batch.truth[name]), len(new)) for at, (name, _, _, new) in enumerate(rows)]
        for (name, *_), text in zip(rows, unnamed.grown(whole), strict=True):
            assert text.ids == batch.truth[name]
            assert objects.setdefault(-1 - name, text) is text
        assert len(texts) == len(unnamed) == len(rows)
    gone = [batch.truth[name] for name in range(batch.number) if name not in batch.rows]
    assert sorted(text.ids for text in finished) == sorted(gone) == sorted(text.ids for text in unnamed_finished)


def test_a_request_that_began_again_under_its_name_is_another_text():
    finished = []
    texts = Texts(finished.append)
    first = texts.grown("a", [1, 2, 3], 3, [4, 5])
    second = texts.grown("a", [9, 9, 9, 9, 9, 9], 6, [7])
    assert second is not first and second.ids == [9] * 6 + [7] and finished == [first]
    assert texts.grown("a", [9] * 6 + [7, 8], 8, []).ids == [9] * 6 + [7, 8], "tokens of steps that were not seen"


# Settings


def test_settings_come_from_the_environment():
    environment = {"GRAFT_VLLM": "1", "GRAFT_VLLM_PASSES": "4", "GRAFT_VLLM_PAD": "0", "GRAFT_VLLM_LEAST": "0.1"}
    assert is_on(SWITCH, environment) and not is_on(SWITCH, {}) and not is_on(SWITCH, {"GRAFT_VLLM": "0"})
    assert ChainSettings.from_environment(environment) == ChainSettings(passes=4, pad=False, least=0.1)
    assert ChainSettings.from_environment({"GRAFT_HOME": "/x"}) == ChainSettings()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("GRAFT_VLLM_PASES", "4", "unknown environment variable 'GRAFT_VLLM_PASES': did you mean 'GRAFT_VLLM_PASSES'?"),
        ("GRAFT_VLLM_PASSES", "many", "GRAFT_VLLM_PASSES must be a whole number, not 'many'"),
        ("GRAFT_VLLM_PAD", "perhaps", "GRAFT_VLLM_PAD must be 1 or 0, not 'perhaps'"),
        ("GRAFT_VLLM_LEAST", "1.5", "least must be a probability below 1, not 1.5"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(variable, value, message):
    with pytest.raises(GraftError) as error:
        ChainSettings.from_environment({variable: value})
    assert str(error.value) == message


# At the border to vLLM


def test_the_entry_point_names_the_plugin():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    value = project["entry-points"]["vllm.general_plugins"]["graft"]
    assert EntryPoint("graft", value, "vllm.general_plugins").load() is plugin.register


def test_a_plugin_that_is_not_switched_on_touches_nothing_but_names_a_misspelt_setting(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import would fail
    for variable in [name for name in os.environ if name.startswith("GRAFT_VLLM")]:
        monkeypatch.delenv(variable)
    plugin.register()
    monkeypatch.setenv("GRAFT_VLLM_PASSSES", "3")
    with pytest.raises(GraftError, match="did you mean 'GRAFT_VLLM_PASSES'"):
        plugin.register()


@pytest.mark.parametrize(("version", "is_known"), [("0.20.2", True), ("0.32.0+cpu", True), ("0.3.2", False)])
def test_only_versions_that_were_read_are_taken(version, is_known):
    if is_known:
        plugin.check_version(version)
    else:
        with pytest.raises(GraftError, match=r"vLLM 0\.20 and 0\.32, not 0\.3\.2"):
            plugin.check_version(version)


def vllm_config(method="eagle3", is_async=False, ranks=1, parallel=False, length=4, max_model_len=64):
    return SimpleNamespace(
        speculative_config=SimpleNamespace(method=method, parallel_drafting=parallel, num_speculative_tokens=length),
        scheduler_config=SimpleNamespace(async_scheduling=is_async),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, pipeline_parallel_size=1, data_parallel_size=1),
        model_config=SimpleNamespace(max_model_len=max_model_len, get_vocab_size=lambda: VOCAB),
        device_config=SimpleNamespace(device_type="cuda"),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_async": True}, "--no-async-scheduling"),
        ({"method": "medusa"}, "not medusa"),
        ({"parallel": True}, "token by token"),
        ({"ranks": 2}, "one GPU"),
    ],
)
def test_what_cannot_be_grafted_is_refused_in_one_line(options, message):
    plugin.check_config(vllm_config())
    with pytest.raises(GraftError, match=message) as error:
        plugin.check_config(vllm_config(**options))
    assert "\n" not in str(error.value)


def test_the_retrieval_proposer_gives_vllm_what_it_asks_for(monkeypatch):
    """Rows of vLLM's arrays, one of which is still read; chains that fit the model's length."""
    monkeypatch.delenv("GRAFT_VLLM", raising=False)
    proposer = RetrievalProposer(vllm_config(length=4, max_model_len=40))
    prompts, period, steps = prompts_of(2), 9, []
    texts = np.zeros((3, 40), dtype=np.int32)
    rows = [plain(prompts[0], 10), [1, 2, 3], plain(prompts[1], 10)]
    new = [rows[0][-1:], [], rows[2][-1:]]
    for _ in range(12):
        for row, text in enumerate(rows):
            texts[row, : len(text)] = text
        proposed = proposer.propose(new, np.array([len(text) for text in rows]), texts, slot_mappings=None)
        assert proposed[1] == [] and all(len(chain) <= 4 for chain in proposed)
        assert all(len(text) + len(chain) < 40 for text, chain in zip(rows, proposed, strict=True))
        for row in (0, 2):
            new[row] = [follows(rows[row], period)]
            for token in proposed[row]:
                if token != new[row][-1]:
                    break
                new[row].append(follows(rows[row] + new[row], period))
            new[row] = new[row][: 40 - len(rows[row])]
            rows[row] = rows[row] + new[row]
            steps.append(len(new[row]))
        if max(map(len, rows)) == 40:
            break
    assert rows[0] == plain(prompts[0], len(rows[0])) and max(steps) > 2


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 3)), min_size=1, max_size=5))
def test_the_guard_gives_every_token_the_value_of_its_request(requests):
    values = torch.tensor([value for value, _ in requests])
    ends = torch.tensor([count for _, count in requests], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    wanted = [value or 1.0 for value, count in requests for _ in range(count)]
    assert expand(values, ends, len(wanted), 0, 1).tolist() == wanted
