"""The engine as its users see it: where answers end, streams, statistics, errors."""

import asyncio
import threading
import time

import numpy as np
import pytest
import torch

from batches import counting_tokens, opened
from gates import Gate
from graft import Engine, GraftError, load
from graft.drafters.eagle3.drafter import Eagle3Drafter
from graft.engine.answers import Stream
from graft.engine.rounds import PrefillChunk
from graft.errors import ContextError
from graft.model.sampler import SamplingSettings
from graft.request.stats import Clock
from heads import SMALL_TREE, make_head
from proposers import Oracle, RandomTrees
from tiny import BYTE_VOCAB, byte_tokenizer, tiny_model

PROMPT = [3, 17, 42, 9, 9, 30, 5]


@pytest.fixture(scope="module")
def byte_model():
    return tiny_model(vocab_size=BYTE_VOCAB)


def answer_of(model, **options):
    return Engine(model, byte_tokenizer(), policy="off").generate("grafting", **options)


def speculating(model, answer, prompt="grafting"):
    """An engine whose every tree holds the coming tokens, so that endings fall inside accepted blocks."""
    return Engine(model, byte_tokenizer(), policy=Oracle(answer, len(byte_tokenizer().encode(prompt))))


def test_an_end_of_text_or_a_stop_token_inside_an_accepted_block_ends_the_answer_there(byte_model):
    free = answer_of(byte_model, max_new_tokens=24)
    engine, stop = speculating(byte_model, free.ids), free.ids[10]
    stopped = engine.generate("grafting", max_new_tokens=24, stop_token_ids=[stop])
    assert stopped.ids == free.ids[: free.ids.index(stop) + 1] and stopped.finish_reason == "stop"
    byte_model.generation_config.eos_token_id = free.ids[7]
    try:
        plain = answer_of(byte_model, max_new_tokens=24)
        result = speculating(byte_model, free.ids).generate("grafting", max_new_tokens=24)
        ignoring = speculating(byte_model, free.ids).generate("grafting", max_new_tokens=24, ignore_eos=True)
    finally:
        byte_model.generation_config.eos_token_id = None
    assert result.ids == plain.ids == free.ids[: free.ids.index(free.ids[7]) + 1]
    assert result.finish_reason == plain.finish_reason == "stop"
    assert result.stats.tokens == len(result.ids) and result.stats.accepted <= result.stats.tokens
    assert ignoring.ids == free.ids


@pytest.mark.parametrize("limit", range(1, 9))
def test_the_limit_cuts_exactly_there(byte_model, limit):
    free = answer_of(byte_model, max_new_tokens=24)
    result = speculating(byte_model, free.ids).generate("grafting", max_new_tokens=limit)
    assert result.ids == free.ids[:limit] and result.finish_reason == "length"


def test_a_stop_string_across_tokens_cuts_where_plain_decoding_stops(byte_model):
    free = answer_of(byte_model, max_new_tokens=40)
    for start in range(2, 12):
        stop = free.text[start : start + 3]
        plain = answer_of(byte_model, max_new_tokens=40, stop=[stop])
        result = speculating(byte_model, free.ids).generate("grafting", max_new_tokens=40, stop=[stop])
        assert (result.text, result.ids, result.finish_reason) == (plain.text, plain.ids, "stop")
        assert result.text == free.text[: free.text.index(stop)]


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 7])
def test_a_stop_string_ends_no_answer_before_min_tokens(byte_model, min_tokens):
    letter = byte_tokenizer().encode("a")[0]
    options = {"max_new_tokens": 20, "min_tokens": min_tokens, "stop": ["aa"], "logit_bias": {letter: 1000.0}}
    for engine in (Engine(byte_model, byte_tokenizer(), policy="off"), speculating(byte_model, [letter] * 20)):
        result = engine.generate("grafting", **options)
        assert result.ids == [letter] * max(min_tokens, 2) and result.finish_reason == "stop"


def test_log_probabilities_end_at_the_stop_string(byte_model):
    free = answer_of(byte_model, max_new_tokens=24)
    for start in range(3, 9):
        engine = speculating(byte_model, free.ids)
        result = engine.generate("grafting", max_new_tokens=24, stop=[free.text[start : start + 2]], logprobs=1)
        assert [each.token for each in result.choices[0].logprobs] == result.ids == free.ids[: len(result.ids)]
        assert len(result.ids) < 24


def test_a_stop_string_that_is_a_special_token_ends_the_answer_at_that_token(byte_model):
    free = answer_of(byte_model, max_new_tokens=24)
    special = 2  # </s>, which leaves no text
    bias = {"logit_bias": {special: 1000.0}}
    options = {"max_new_tokens": 24, "stop": ["</s>"], "ignore_eos": True}
    assert answer_of(byte_model, **options).ids == free.ids, "it ends nothing where it does not come"
    result = answer_of(byte_model, **options, **bias)
    assert (result.ids, result.text, result.finish_reason) == ([special], "", "stop")
    late = answer_of(byte_model, **options, **bias, min_tokens=3)
    assert (late.ids, late.finish_reason) == ([special] * 3, "stop")
    with pytest.raises(GraftError, match=r"never part of the text: give '</s>' alone, or stop_token_ids=\[2\]"):
        answer_of(byte_model, stop=["fine", "end</s>"])


@pytest.mark.parametrize("stop", [(), ("qq", "\ufffd\ufffd"), ("s",)])
def test_streamed_pieces_join_to_the_text_and_hold_no_half_character(byte_model, stop):
    for seed in range(3):
        options = {"max_new_tokens": 40, "temperature": 1.5, "seed": seed, "stop": stop}
        expected = Engine(byte_model, byte_tokenizer(), policy="off").generate("grafting", **options)
        stream = Engine(byte_model, byte_tokenizer(), policy=RandomTrees(30, BYTE_VOCAB)).stream("grafting", **options)
        assert "".join(stream) == expected.text == stream.result.text
        assert stream.result.ids == expected.ids


def test_a_cancelled_stream_keeps_what_it_gave_and_leaves_its_prompt_for_the_next(byte_model):
    engine = load(byte_model, tokenizer=byte_tokenizer(), prefix_cache=True)
    stream = engine.stream("a" * 150, max_new_tokens=60)
    first = next(stream)
    stream.cancel()
    assert list(stream) == [] and not engine.target.pool.is_in_use
    assert stream.result.text.startswith(first) and stream.result.finish_reason is None
    assert engine.generate("a" * 150, max_new_tokens=1).stats.cached_tokens == 127


def test_statistics_add_up(byte_model):
    free = answer_of(byte_model, max_new_tokens=30)
    stats = speculating(byte_model, free.ids).generate("grafting", max_new_tokens=30).stats
    assert stats.tokens == 30 == stats.rounds + stats.accepted
    assert stats.mean_accepted == 1 + stats.accepted / stats.rounds == pytest.approx(6.0)
    assert stats.accepted_by_source == {"drafted": stats.accepted}
    assert sum(stats.accepted_by_depth.values()) == stats.accepted and max(stats.accepted_by_depth) == 5
    assert stats.nodes == sum(stats.proposed_by_source.values()) >= 2 * stats.accepted
    assert {"verify", "accept", "host"} <= set(stats.seconds_by_phase)
    assert sum(stats.seconds_by_phase.values()) == pytest.approx(stats.decode_seconds)


def test_log_probabilities_are_the_models_own_at_every_place(byte_model):
    free = answer_of(byte_model, max_new_tokens=12, temperature=1.0, seed=1)
    engine = speculating(byte_model, free.ids)
    result = engine.generate("grafting", max_new_tokens=12, temperature=1.0, seed=1, logprobs=3)
    with torch.no_grad():
        logits = byte_model(torch.tensor([result.prompt_ids + result.ids])).logits[0].log_softmax(-1)
    assert len(result.choices[0].logprobs) == 12
    for i, (token, entry) in enumerate(zip(result.ids, result.choices[0].logprobs, strict=True)):
        place = logits[len(result.prompt_ids) - 1 + i]
        assert entry.token == token and entry.logprob == pytest.approx(float(place[token]), abs=1e-4)
        assert list(entry.alternatives) == place.topk(3).indices.tolist()


def test_a_batch_may_mix_prompts_that_end_at_different_times(byte_model):
    byte_model.generation_config.eos_token_id = list(range(60, 100))
    try:
        engine = Engine(byte_model, byte_tokenizer(), budget=10)
        prompts = ["graft", "prune the tree", "g", "draft less, retrieve more"]
        options = {"max_new_tokens": 30, "temperature": 1.2, "seed": 3, "frequency_penalty": 0.3}
        alone = [Engine(byte_model, byte_tokenizer(), policy="off").generate(p, **options) for p in prompts]
        together = engine.generate_batch(prompts, **options)
    finally:
        byte_model.generation_config.eos_token_id = None
    assert len({len(g.ids) for g in alone}) > 1, "they end at different times"
    assert [(g.text, g.ids, g.finish_reason) for g in together] == [(g.text, g.ids, g.finish_reason) for g in alone]


def test_a_bad_prompt_of_a_batch_is_told_by_its_number(byte_model):
    engine = Engine(byte_model, byte_tokenizer())
    with pytest.raises(GraftError, match=r"^prompt 2 of 3: the prompt is empty; give at least one token of text$"):
        engine.generate_batch(["a", "", "b"], max_new_tokens=2)
    with pytest.raises(ContextError, match=r"^prompt 1 of 2: the prompt has 300 tokens"):
        engine.generate_batch([[3] * 300, "b"], max_new_tokens=2)


@pytest.mark.parametrize(
    "prompt",
    [
        (3, 4, 5),
        range(3, 6),
        torch.tensor([3, 4, 5]),
        torch.tensor([[3, 4, 5]], dtype=torch.int32),
        np.array([3, 4, 5], dtype=np.uint16),
        np.array([[3, 4, 5]]),
        [np.int64(3), torch.tensor(4), 5],
    ],
)
def test_token_ids_may_come_in_any_shape_of_one_row(byte_model, prompt):
    ids = Engine(byte_model).encode(prompt)
    assert ids == [3, 4, 5] and {type(token) for token in ids} == {int}


def test_a_tokenizer_of_another_model_is_refused():
    with pytest.raises(GraftError, match="token ids of this model are"):
        Engine(tiny_model(), byte_tokenizer()).generate("ÿ")


@pytest.mark.parametrize("prompts", ["hi", {"role": "user", "content": "hi"}])
def test_a_batch_is_a_list_of_prompts_not_one(byte_model, prompts):
    with pytest.raises(GraftError, match="generate_batch takes a list of prompts"):
        Engine(byte_model, byte_tokenizer()).generate_batch(prompts)


def test_the_context_can_be_filled_to_its_last_token(byte_model):
    plain = Engine(byte_model, policy="off").generate([3] * 200, max_new_tokens=56)
    graft = Engine(byte_model, budget=20).generate([3] * 200, max_new_tokens=56)
    assert plain.ids == graft.ids and len(plain.ids) == 56


@pytest.mark.parametrize("policy", ["graft", "off"])
def test_answers_of_a_group_are_those_of_its_seeds_alone(byte_model, policy):
    engine = Engine(byte_model, byte_tokenizer(), policy=policy)
    group = engine.generate_group("grafting", 5, max_new_tokens=24, seed=3, top_k=4)
    alone = [answer_of(byte_model, max_new_tokens=24, seed=3 + rank, top_k=4, temperature=1.0) for rank in range(5)]
    assert [answer.ids for answer in group] == [answer.ids for answer in alone]
    assert len({tuple(answer.ids) for answer in group}) > 1, "temperature 1 unless one is given"
    assert len({tuple(a.ids) for a in engine.generate_group("grafting", 2, max_new_tokens=8, temperature=0)}) == 1
    with pytest.raises(GraftError, match="n must be"):
        engine.generate_group("grafting", 0)


# The loop that generate, streams and the server share


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("is_prefill", [True, False])
def test_a_step_that_is_broken_off_frees_all_pages_and_the_engine_goes_on(byte_model, monkeypatch, error, is_prefill):
    engine = Engine(byte_model, byte_tokenizer(), policy="off", chunk_size=64)
    expected = engine.generate("a" * 150, max_new_tokens=9).ids
    name = "step" if is_prefill else "run_step"  # prompts alone, and rounds
    step, left = getattr(engine.target, name), [2]

    def broken_off(*given, **more):
        left[0] -= 1
        if left[0] == 0:
            raise error("in the middle of a step")
        return step(*given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(engine.target, name, broken_off)
        with pytest.raises(error, match="in the middle of a step") as raised:
            engine.generate("a" * 150, n=2, max_new_tokens=9)
        assert raised.traceback and not engine.target.pool.is_in_use, "though the traceback still holds the rows"
    assert engine.generate("a" * 150, max_new_tokens=9).ids == expected


def test_an_answer_from_which_nothing_can_be_learned_is_not_lost(byte_model, monkeypatch):
    engine = Engine(byte_model, byte_tokenizer())
    expected = answer_of(byte_model, max_new_tokens=5).text
    monkeypatch.setattr(engine.device_rounds, "finish_text", lambda sequence: 1 / 0)
    assert engine.generate("grafting", max_new_tokens=5).text == expected


@pytest.mark.parametrize("chunk_size", [8, 50])
def test_a_prompt_is_read_in_steps_of_the_chunk_size(byte_model, chunk_size):
    engine = Engine(byte_model, byte_tokenizer(), policy="off", chunk_size=chunk_size)
    with counting_tokens(byte_model) as sizes:
        engine.generate([3] * 101, max_new_tokens=2)
    whole, rest = divmod(100, chunk_size)
    assert sizes == [chunk_size] * whole + [rest] * (rest > 0) + [1, 1], "the last token is the first round's root"


# Prompts that begin alike


@pytest.mark.parametrize(
    ("policy", "sampling"),
    [
        ("off", {}),
        pytest.param("off", {"temperature": 0.8, "seed": 3}, marks=pytest.mark.slow),
        pytest.param("graft", {}, marks=pytest.mark.slow),
        ("graft", {"temperature": 0.8, "seed": 3}),
    ],
)
def test_a_conversation_is_read_from_where_it_goes_on_and_its_text_is_the_same(policy, sampling):
    model, text = tiny_model(max_position_embeddings=1024), []
    keeping, reading = (Engine(model, policy=policy, prefix_cache=kept) for kept in (True, False))
    cached = []
    for turn in range(3):
        text += [(7 * turn + 3 * place) % 50 + 5 for place in range(70)]
        answers = [engine.generate(text, max_new_tokens=40, **sampling) for engine in (keeping, reading)]
        assert answers[0].ids == answers[1].ids
        assert answers[1].stats.cached_tokens == 0
        cached.append(answers[0].stats.cached_tokens)
        text += answers[0].ids
    assert cached[0] == 0 and cached[1] >= 63 and cached[2] >= 191, "whole pages, the answers' too"


# Settings of each prompt, and asynchronous calls


def test_prompts_of_a_batch_may_have_their_own_settings():
    engine = Engine(tiny_model())
    each = [{"max_new_tokens": 5}, {"temperature": 0.9, "seed": 4}, {"n": 2, "seed": 1}]
    together = engine.generate_batch([PROMPT] * 3, each=each, max_new_tokens=9)
    for own, result in zip(each, together, strict=True):
        alone = engine.generate(PROMPT, **{"max_new_tokens": 9, **own})
        assert [choice.ids for choice in result.choices] == [choice.ids for choice in alone.choices]
    with pytest.raises(GraftError, match="options for 1 prompts, and there are 2"):
        engine.generate_batch([PROMPT] * 2, each=[{}])


def test_asynchronous_calls_give_the_same_text(byte_model):
    engine = Engine(byte_model, byte_tokenizer())
    expected = engine.generate("grafting", max_new_tokens=20).text

    async def streamed(most=99):
        pieces = []
        async for piece in engine.stream_async("grafting", max_new_tokens=20):
            pieces.append(piece)
            if len(pieces) == most:
                break
        return "".join(pieces)

    async def all_of_them():
        return await asyncio.gather(engine.generate_async("grafting", max_new_tokens=20), streamed(), streamed(1))

    whole, text, part = asyncio.run(all_of_them())
    assert whole.text == text == expected and expected.startswith(part) and part
    asyncio.run(engine.generate_async("a call that waits its turn", max_new_tokens=1))
    assert not engine.target.pool.is_in_use, "what was broken off has given its pages back"


def test_a_stream_whose_event_loop_ends_is_cancelled_in_the_engines_thread(byte_model, monkeypatch):
    """The engine's thread is busy until the loop has ended, so that the end of the stream waits its turn."""
    engine, gates, busy, cancelled_in = Engine(byte_model, byte_tokenizer()), [], [], []
    cancel, here = Stream.cancel, threading.current_thread
    monkeypatch.setattr(Stream, "cancel", lambda stream: (cancelled_in.append(here().name), cancel(stream)))

    async def left_at_the_first_piece():
        async for _ in engine.stream_async("grafting", max_new_tokens=20):
            gates.append(Gate(engine.target, num_free=0))
            busy.append(asyncio.ensure_future(engine.generate_async("keeps it busy", max_new_tokens=1)))
            await asyncio.to_thread(gates[0].wait)
            break
        await asyncio.sleep(0.1)  # the stream's end has begun

    asyncio.run(left_at_the_first_piece())
    gates[0].open()
    asyncio.run(engine.generate_async("a call that waits its turn", max_new_tokens=1))
    assert len(cancelled_in) == 1 and cancelled_in[0].startswith("graft-engine")
    assert not engine.target.pool.is_in_use


@pytest.fixture
def later(monkeypatch):
    """A list of seconds that the clock is ahead of the real one."""
    ahead, real = [0.0], time.perf_counter
    monkeypatch.setattr("time.perf_counter", lambda: real() + sum(ahead))
    return ahead


def times_learned(engine, monkeypatch):
    """Seconds of the step and of all else, of all rounds to come."""
    learned, planner = [], engine.device_rounds.planner
    learn = planner.learn

    def watched(outcome):
        learned.append((outcome.step_seconds, outcome.work_seconds))
        learn(outcome)

    monkeypatch.setattr(planner, "learn", watched)
    return learned


def test_the_wait_for_an_earlier_prefill_is_no_part_of_a_rounds_times(monkeypatch, later):
    """A prefill that nobody waited for may still run when the round begins: here the first wait takes long."""
    model = tiny_model()
    engine = Engine(model, policy="graft", drafter=Eagle3Drafter(make_head(model), SMALL_TREE), budget=4)
    batch = opened(engine, engine.new_sequences([5, 9, 5, 9, 7], SamplingSettings(max_new_tokens=6)))
    engine.prefill([PrefillChunk(batch, 0, batch.next_chunk(0, 64))], waits=False)
    learned, waits = times_learned(engine, monkeypatch), [5000.0]
    monkeypatch.setattr(engine.target, "synchronize", lambda: later.append(waits.pop() if waits else 0.0))
    engine.run_round(batch, Clock())
    batch.cache.release()
    assert not waits and len(learned) == 1
    assert all(0 <= seconds < 1000 for seconds in learned[0]) and learned[0][0] > 0


def test_time_in_which_nobody_asked_is_no_part_of_a_round(monkeypatch, later):
    engine = Engine(tiny_model(), policy="graft", budget=4)
    engine.generate([5, 9, 5, 9, 7], max_new_tokens=3)
    learned = times_learned(engine, monkeypatch)
    later.append(5000.0)
    engine.generate([7, 1, 4], max_new_tokens=3)
    assert learned and max(map(max, learned)) < 1000
