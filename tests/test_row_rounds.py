"""Device rounds of rows with penalties, biases, min_tokens, log-probabilities and grammars give the texts of plain
decoding on the host. What the kernel computes: test_adjust.py. Here the interpreter runs the kernels."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")
pytest.importorskip("llguidance", reason="llguidance is not installed, and without it there are no grammars")

from captured_parts import DEVICE, TwoContexts, plain_answers, plain_ids, use_host
from graft import Engine, SamplingSettings
from graft.engine.decode_loop import DecodeLoop
from graft.engine.jobs import Failure, Job
from graft.engine.round_reports import _scores_of
from graft.engine.settings import SchedulerSettings
from graft.model.grammar import GrammarTree
from graft.server.grammar import GrammarConstraint, Grammars, GrammarSpec
from graft.tree.device.round import RoundShape
from scheduling import Asked, scheduler_over
from tiny import BYTE_VOCAB, byte_tokenizer, tiny_model

PROMPT = [3, 17, 42, 9, 9, 30, 5, 21, 17, 42, 9, 11]


ROWS = [
    {"repetition_penalty": 1.4, "logprobs": 0},
    {"presence_penalty": 1.1, "frequency_penalty": 0.4, "temperature": 0.9},
    {"logprobs": 2},
    {
        "repetition_penalty": 0.8,
        "frequency_penalty": 0.4,
        "logit_bias": {9: 1.0, 30: 2.0, 42: -torch.inf},
        "min_tokens": 5,
        "stop_token_ids": list(range(30)),
        "logprobs": 11,
        "temperature": 0.6,
        "top_p": 0.9,
    },
]
OTHERS = [
    {"min_tokens": 6, "stop_token_ids": list(range(40))},
    {"logit_bias": {3: 2.0, 17: -torch.inf, 60: 1.5}, "logprobs": 33},
    {"logprobs": 0, "temperature": 0.5, "frequency_penalty": -0.7},
    {"repetition_penalty": 1.2, "temperature": 1.0},
]


@pytest.mark.parametrize("rows", [ROWS, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["rows", "others"])
def test_rows_of_several_kinds_share_rounds_and_have_their_own_texts(rows, on_device, monkeypatch):
    model = tiny_model("llama").to(DEVICE)
    prompts = [PROMPT[row:] for row in range(len(rows))]
    options = {"max_new_tokens": 8, "seed": 5}
    answers = Engine(model, policy="graft", budget=3).generate_batch(prompts, each=rows, **options)
    expected = plain_answers(model, prompts, monkeypatch, each=rows, **options)
    assert [answer.ids for answer in answers] == [answer.ids for answer in expected]
    assert all("propose" in answer.stats.seconds_by_phase for answer in answers), "the device has made the rounds"
    assert sum(answer.stats.accepted > 0 for answer in answers) >= 2
    for answer, other in zip(answers, expected, strict=True):
        assert_same_scores(answer.choices[0].logprobs, other.choices[0].logprobs)


def assert_same_scores(found, expected):
    """The same tokens, and numbers of the same model but for the last bits."""
    assert [each.token for each in found] == [each.token for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert list(one.alternatives) == list(other.alternatives)
        assert list(one.alternatives.values()) == pytest.approx(list(other.alternatives.values()), abs=1e-4)


@pytest.mark.parametrize("most", [0, 8, 9, 33, 70, 200])
def test_scores_of_walked_places_are_torchs_log_softmax(most):
    """33 and more are beyond what the kernel is compiled for; 200 is more than the vocabulary has."""
    torch.manual_seed(most)
    logits = (torch.randn(8, 90) * 4).to(DEVICE)
    nodes = torch.tensor([[0, 2, 3], [4, 9, 9], [6, 7, 9]], dtype=torch.int32, device=DEVICE)
    tokens = torch.randint(90, (3, 3), dtype=torch.int32, device=DEVICE)
    counts = torch.tensor([3, 1, 2], dtype=torch.int32, device=DEVICE)
    wide = [torch.nn.functional.pad(part, (0, 29)) for part in (nodes, tokens)]
    walked = type("Round", (), {"walked": lambda self, shape: (*wide, counts), "device": torch.device(DEVICE)})()
    asks = torch.tensor([1, 0, 1], dtype=torch.int32, device=DEVICE)
    scores = _scores_of(walked, RoundShape(3, 8), logits, asks, most)
    num_found = scores.shape[1] // 2
    assert num_found >= min(most, 90)
    expected = torch.log_softmax(logits.double(), dim=1).cpu()
    for row, own in [(0, 3), (2, 2)]:
        for node, token in zip(nodes[row, :own].tolist(), tokens[row, :own].tolist(), strict=True):
            values = scores[node, : 1 + num_found].cpu().view(torch.float32).double()
            order = expected[node].argsort(descending=True)[:num_found]
            assert scores[node, 1 + num_found :].cpu().tolist() == order.tolist()
            torch.testing.assert_close(values[0], expected[node, token], atol=1e-5, rtol=0)
            torch.testing.assert_close(values[1:], expected[node, order], atol=1e-5, rtol=0)


def test_penalties_of_preempted_and_joining_rows_count_the_whole_answer(on_device, monkeypatch):
    model = tiny_model("llama").to(DEVICE)
    options = {"max_new_tokens": 9, "frequency_penalty": -1.5, "presence_penalty": 0.4, "min_tokens": 3}
    prompts = [PROMPT, PROMPT[:5], PROMPT[3:8]]
    expected = plain_ids(model, prompts, monkeypatch, **options)
    engine = Engine(model, policy="off")
    loop = DecodeLoop(engine, SchedulerSettings(max_rows=3, prefix_cache_tokens=0), max_batched_tokens=64)
    jobs = [Job(engine.new_sequences(prompt, SamplingSettings(**options))) for prompt in prompts]
    loop.submit(*jobs[:2])
    for _ in range(5):
        loop.step()
    loop._preempt(jobs[0])
    assert 0 < jobs[0].sequences[0].num_new < 9 and jobs[0].is_preempted
    loop.submit(jobs[2])
    while loop.has_work:
        loop.step()
    assert [job.sequences[0].new_ids for job in jobs] == expected


def test_where_rounds_cannot_be_captured_any_more_the_host_knows_what_the_answers_have(on_device, monkeypatch):
    model = tiny_model("llama").to(DEVICE)
    options = {"max_new_tokens": 9, "frequency_penalty": -1.5, "presence_penalty": 0.4, "min_tokens": 7}
    expected = plain_ids(model, [PROMPT], monkeypatch, stop_token_ids=[*range(30)], **options)
    capture, calls = TwoContexts.capture, []

    def fails_later(target, key, run):
        calls.append(key)
        if len(calls) == 17:
            raise ValueError("no more")
        return capture(target, key, run)

    monkeypatch.setattr(TwoContexts, "capture", fails_later)
    with pytest.warns(UserWarning, match="no more"):
        answers = Engine(model, policy="off").generate_batch([PROMPT], stop_token_ids=[*range(30)], **options)
    assert [answer.ids for answer in answers] == expected


# Grammars

SCHEMA = GrammarSpec.schema(
    {
        "type": "object",
        "properties": {"a": {"enum": ["yes", "yet"]}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)
CALL = GrammarSpec("regular expression", r"<call>[a-f]{2,9}</call>", "tools")


def byte_model():
    return tiny_model("llama", vocab_size=BYTE_VOCAB, max_position_embeddings=512).to(DEVICE)


@pytest.fixture(scope="module")
def grammars():
    """By specification, a function that makes new constraints."""
    compiler = Grammars(byte_tokenizer(), BYTE_VOCAB, [2])
    compiled = {spec: asyncio.run(compiler.compile(spec)) for spec in (SCHEMA, CALL)}
    return {None: lambda: None} | {spec: lambda own=own: compiler.constraint(own) for spec, own in compiled.items()}


def constrained_ids(engine, grammars, asked, **options):
    """The answers' tokens and statistics. asked: prompts, grammars and further options."""
    sequences = []
    for prompt, spec, own in asked:
        [sequence] = engine.new_sequences(engine.encode(prompt), SamplingSettings(**options | own))
        sequence.constraint = grammars[spec]()
        sequences.append(sequence)
    for _ in engine.rounds(sequences):
        pass
    assert not any(sequence.constraint and sequence.constraint.error for sequence in sequences)
    return [sequence.new_ids for sequence in sequences], [sequence.stats for sequence in sequences]


class Brittle:
    """A matcher that fails after some tokens: as it takes them, or its masks, by an error that it keeps or a panic."""

    def __init__(self, matcher, bad, fails, taken=()):
        self._matcher, self._bad, self._fails, self._taken, self._is_broken = matcher, bad, fails, list(taken), False

    def deep_copy(self):
        assert not self._is_broken
        return Brittle(self._matcher.deep_copy(), self._bad, self._fails, self._taken)

    def compute_bitmask(self):
        if self._taken and self._taken[-1] in self._bad:
            self._is_broken = True
            if self._fails == "panic":
                raise BaseException("index out of bounds")
        return self._matcher.compute_bitmask()

    def try_consume_tokens(self, tokens):
        assert not self._is_broken
        count = self._matcher.try_consume_tokens(tokens)
        self._taken += tokens[:count]
        self._is_broken = self._fails == "consume" and count > 0 and tokens[0] in self._bad
        return 0 if self._is_broken else count

    def consume_tokens(self, tokens):
        return self.try_consume_tokens(tokens) == len(tokens)

    def rollback(self, count):
        assert not self._is_broken
        del self._taken[len(self._taken) - count :]
        return self._matcher.rollback(count)

    def is_error(self):
        return self._is_broken or self._matcher.is_error()

    def get_error(self):
        return "index out of bounds" if self._is_broken else self._matcher.get_error()

    def is_stopped(self):
        return self._matcher.is_stopped()


def random_tree_of(rng, constraint, count):
    """Tokens and parents of a tree, most of which the grammar allows."""
    tokens, parents, states = [1], [0], [constraint]
    while len(tokens) < count:
        parent = rng.randrange(len(tokens))
        allowed = (states[parent].mask(torch.zeros(BYTE_VOCAB)) == 0).nonzero().flatten().tolist()
        tokens.append(rng.choice(allowed) if rng.random() < 0.8 else rng.randrange(BYTE_VOCAB))
        parents.append(parent)
        states.append(GrammarConstraint(states[parent]._matcher.deep_copy()))
        states[-1].take(tokens[-1])
    return tokens, parents, states


def fill_one_by_one(executor, work, out):
    """llguidance's function, for matchers that are not its own."""
    for matcher, number in work:
        out[number] = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)


@pytest.mark.parametrize("fails", [None, "consume", "error", "panic"])
@pytest.mark.parametrize("seed", range(4))
def test_the_masks_of_trees_are_those_of_each_path_by_itself(seed, fails, grammars, monkeypatch):
    rng, num_masked, num_failed, trees = random.Random(seed), 0, 0, []
    for text in ('{"a": "ye', '{"a": "yet", "b": -10', '{"a": "yes", "b": 1}', ""):
        constraint = grammars[SCHEMA]()
        for token in byte_tokenizer().encode(text):
            constraint.take(token)
        tokens, parents, states = random_tree_of(rng, constraint, 14)
        bad = set(rng.sample(tokens[1:], 2)) if fails is not None else set()
        if fails is not None:
            constraint = GrammarConstraint(Brittle(constraint._matcher.deep_copy(), bad, fails))
        trees.append((GrammarTree(constraint, tokens, parents), states, bad))
    if fails is not None:
        monkeypatch.setattr("graft.server.grammar.fill_next_token_bitmask_par", fill_one_by_one)
    out = np.zeros((4 * 14, -(-BYTE_VOCAB // 32)), dtype=np.int32)
    found = GrammarConstraint.masks([tree for tree, *_ in trees], out)
    for (tree, states, bad), (numbers, failures) in zip(trees, found, strict=True):
        closed = set()
        assert tree.constraint.error is None and set(failures.values()) <= {"index out of bounds"}
        for node, state in enumerate(states):
            parent = states[tree.parents[node]]
            has_ended = node and parent._matcher.is_stopped()
            if tree.parents[node] in closed or (node and state.error is not None) or has_ended:
                closed.add(node)
                assert numbers[node] < 0 and node not in failures
            elif node and tree.tokens[node] in bad:
                closed.add(node)
                num_failed += 1
                assert node in failures
            else:
                bits = np.unpackbits(out[numbers[node]].view(np.uint8), bitorder="little")[:BYTE_VOCAB]
                assert np.array_equal(bits > 0, (state.mask(torch.zeros(BYTE_VOCAB)) == 0).numpy())
                num_masked += 1
        assert torch.equal(*(own.mask(torch.zeros(BYTE_VOCAB)) for own in (tree.constraint, states[0]))), "unchanged"
    assert num_masked > 10 and (num_failed > 0) == (fails is not None)


ASKED = [
    ('{"a": "yes", "b": 12} and {"a": ', SCHEMA, {"temperature": 0.8}),
    ("no grammar here", None, {}),
    ("<call>abc</call> and <call>ab", CALL, {"presence_penalty": 0.5, "logprobs": 1}),
    ('{"a": "yet"', SCHEMA, {"min_tokens": 18, "logit_bias": {100: -torch.inf}}),
]


def test_rows_with_grammars_share_rounds_and_have_their_own_texts(on_device, grammars, monkeypatch):
    model, options = byte_model(), {"max_new_tokens": 24, "seed": 3}
    engine = Engine(model, byte_tokenizer(), policy="graft", budget=4)
    found, stats = constrained_ids(engine, grammars, ASKED, **options)
    with monkeypatch.context() as eager:
        use_host(eager)
        expected, _ = constrained_ids(Engine(model, byte_tokenizer(), policy="off"), grammars, ASKED, **options)
    assert found == expected
    assert all("propose" in own.seconds_by_phase for own in stats), "the device has made the rounds"
    assert stats[0].accepted > 0 < stats[2].accepted


def test_a_grammar_alone_in_plain_rounds(on_device, grammars, monkeypatch):
    engine = Engine(byte_model(), byte_tokenizer(), policy="off")
    [ids], _ = constrained_ids(engine, grammars, [("a call: ", CALL, {})], max_new_tokens=30)
    text = engine.tokenizer.decode(ids, skip_special_tokens=True)
    assert text.startswith("<call>") and text.endswith("</call>") and set(text[6:-7]) <= set("abcdef")


def test_a_grammar_that_fails_ends_its_answer_alone(on_device, grammars, monkeypatch):
    engine = Engine(byte_model(), byte_tokenizer(), policy="off")
    with scheduler_over(engine, max_rows=2) as scheduler:
        good = Asked(scheduler, "good", max_new_tokens=12)
        letters = [byte_tokenizer().convert_tokens_to_ids(letter) for letter in "abcdef"]
        options = {"max_new_tokens": 12, "logit_bias": dict.fromkeys(letters, -torch.inf)}
        bad = Asked(scheduler, "bad", constraint=grammars[CALL], **options)
        failure, [text] = bad.wait(), good.wait()
    assert isinstance(failure, Failure)
    assert failure.message.endswith("the request's other settings forbid every token that it allows here")
    with monkeypatch.context() as eager:
        use_host(eager)
        plain = Engine(engine.target.model, byte_tokenizer(), policy="off")
        assert text == plain.generate("good", max_new_tokens=12).text


# Watched rounds


def records_of(engine, prompt, **options):
    """The answer's ids and the records of its rounds."""
    records = []
    stream = engine.stream(prompt, watch=records.append, show_all=True, **options)
    "".join(stream)
    return stream.result.ids, records


def test_every_round_of_a_watched_answer_is_recorded_once_as_on_the_host(on_device, monkeypatch):
    model, prompt = byte_model(), "one two, one two, one three"
    options = {"max_new_tokens": 12, "temperature": 0.7, "seed": 3}
    ids, records = records_of(Engine(model, byte_tokenizer(), policy="graft", budget=2), prompt, **options)
    use_host(monkeypatch)
    expected, theirs = records_of(Engine(model, byte_tokenizer(), policy="graft", budget=2), prompt, **options)
    assert ids == expected == [token for record in records for token in record.new_tokens]
    one, other = records[0], theirs[0]  # before anything was learned
    assert one.num_verified == 3 and one.num_pruned > 0 and one.knew_noise
    for name in ("tokens", "parents", "sources", "accepted", "new_tokens", "num_hidden", "num_pruned", "knew_noise"):
        assert getattr(one, name) == getattr(other, name)
    assert one.probabilities == pytest.approx(other.probabilities, rel=1e-5)
