"""Rounds that the device makes by itself give the texts of plain decoding; here the interpreter runs their kernels."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")


import block_heads
import graft.bench.baselines  # noqa: F401 - registers `dense` and the ablations
from batches import opened
from captured_parts import DEVICE, CapturedEagle3Drafter, TwoContexts, plain_answers, plain_ids, use_host
from graft import Engine, SamplingSettings
from graft.drafters.block.drafter import BlockDrafter, BlockTreeSettings
from graft.drafters.block.fused_head import FastBlock
from graft.drafters.eagle3.drafter import Eagle3Drafter
from graft.engine.captured_rounds import CapturedRounds
from graft.engine.decode_loop import DecodeLoop
from graft.engine.device_rounds import DeviceRounds
from graft.engine.flight import Flight
from graft.engine.jobs import Job
from graft.engine.memory import _WORKSPACE
from graft.engine.rounds import PrefillChunk
from graft.engine.settings import SchedulerSettings
from graft.engine.staging import Staging
from graft.model.captures import ROWS, padded
from graft.model.cuda_graphs import STEP_SIZES
from graft.request.sequence import Sequence as TokenSequence
from graft.spec_decode.memory import FACTORS
from graft.tree.device.buffers import Tables
from graft.tree.device.round import MAX_TREE_TOKENS, DeviceRound, Sources
from heads import SMALL_TREE, make_head
from scheduling import Asked, scheduler_over
from tiny import BYTE_VOCAB, byte_tokenizer, tiny_model

PROMPT = [3, 17, 42, 9, 9, 30, 5, 21, 17, 42, 9, 11]
PROMPTS = [PROMPT, PROMPT[:5]]


class Drafter(CapturedEagle3Drafter):
    contexts = (64, 128)


class OfBlocks(BlockDrafter):
    contexts = (64, 128)

    def __init__(self, head, settings):
        super().__init__(head, settings, FastBlock(head, settings))


def test_every_padded_number_of_rows_is_the_size_of_a_step():
    """A plain round fills its step: the rest of a larger step would be tokens of an earlier one."""
    assert {padded(rows, ROWS) for rows in range(1, DeviceRounds.max_rows + 1)} <= set(STEP_SIZES)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 1.3, "top_p": 0.8, "top_k": 9}])
def test_plain_rounds_of_the_device_give_the_same_texts(on_device, monkeypatch, settings):
    model = tiny_model("llama").to(DEVICE)
    options = {"max_new_tokens": 9, "seed": 5, **settings}
    engine = Engine(model, policy="off")
    answers = engine.generate_batch(PROMPTS, each=[{}, {"max_new_tokens": 4}], **options)
    assert [answer.ids for answer in answers] == [
        plain_ids(model, PROMPTS[:1], monkeypatch, **options)[0],
        plain_ids(model, PROMPTS[1:], monkeypatch, **options | {"max_new_tokens": 4})[0],
    ]
    assert answers[0].stats.rounds == 9 and "propose" in answers[0].stats.seconds_by_phase


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_trees_of_the_device_give_the_same_texts(on_device, monkeypatch, temperature):
    model = tiny_model("llama").to(DEVICE)
    options = {"max_new_tokens": 8, "temperature": temperature, "seed": 5}
    drafter = Drafter(make_head(model).to(DEVICE), SMALL_TREE)
    engine = Engine(model, policy="graft", drafter=drafter, budget=6)
    engine.policy.planner.pass_cost = 0.0
    answers = engine.generate_batch(PROMPTS, **options)
    assert [answer.ids for answer in answers] == plain_ids(model, PROMPTS, monkeypatch, **options)
    for stats in (answer.stats for answer in answers):
        assert stats.accepted > 0 and stats.draft_passes > 0 and stats.nodes == 6 * stats.rounds
        assert {"drafted", "adjacency"} <= set(stats.proposed_by_source)
    # What the device has learned can be kept, and another engine begins with it.
    state = engine.policy.state()
    assert len(state["adjacency/rows"]) > 0 and sorted(state["past/lengths"].tolist()) == [13, 20]
    other = Engine(model, policy="graft", budget=6)
    other.policy.restore(state)
    assert other.generate(PROMPT, **options).ids == answers[0].ids


@pytest.fixture
def first_trees(monkeypatch):
    """By prompt, the paths of the first tree that was verified for it, and the source of each node."""
    seen, extend = {}, TokenSequence.extend

    def watched(sequence, tokens, nodes, row):
        tree, number = row._tree, row._row
        paths = [()]
        for token, parent in zip(tree.tokens[number, 1:].tolist(), tree.parents[number, 1:].tolist(), strict=True):
            paths.append((*paths[parent], token))
        found = list(zip(paths, tree.sources[number].tolist(), strict=True))[: 1 + row.num_nodes]
        seen.setdefault(tuple(sequence.ids), sorted(found))
        extend(sequence, tokens, nodes, row)

    monkeypatch.setattr(TokenSequence, "extend", watched)
    return seen


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        *(("dense", 0.0), ("paper", 0.0), ("block-paper", 0.0)),
        *(pytest.param(*slow, marks=pytest.mark.slow) for slow in (("dense", 0.8), ("prune", 0.0))),
    ],
)
def test_a_baselines_first_trees_on_the_device_are_those_of_the_host(
    on_device, first_trees, monkeypatch, name, temperature
):
    """Dense: all passes, a fixed number of nodes, and nothing retrieved. Gated rows all stop at the second gate."""
    model, is_gated = tiny_model("llama").to(DEVICE), name != "dense"
    options = {"max_new_tokens": 6, "seed": 5, "temperature": temperature}
    expected = plain_ids(model, PROMPTS, monkeypatch, **options)

    def first_round(kind):
        first_trees.clear()
        drafter = kind(make_head(model).to(DEVICE), SMALL_TREE)
        engine = Engine(model, policy=name, drafter=drafter, budget=10 if is_gated else 7)
        if is_gated:
            engine.policy.thresholds = [0.0, 1.0, 0.0]
        if name.endswith("paper"):
            entries = engine.policy.memory.tables.entries[-model.config.vocab_size :]
            entries[:, 0] = 16 * torch.arange(len(entries), device=DEVICE).roll(-7)
        answers = engine.generate_batch(PROMPTS, **options)
        assert [answer.ids for answer in answers] == expected
        for stats in (answer.stats for answer in answers):
            if is_gated:
                assert stats.draft_passes <= 2 * stats.rounds, "no third pass"
            else:  # near an answer's end direct rounds are less deep
                assert (stats.draft_passes == (SMALL_TREE.depth + 1) * stats.rounds) == (kind is Drafter)
        return dict(first_trees)

    there = first_round(Drafter)
    use_host(monkeypatch)
    here = first_round(Eagle3Drafter)
    for prompt in map(tuple, PROMPTS):
        assert there[prompt] == here[prompt]
        depth = max(len(path) for path, source in there[prompt] if source == 1)
        assert depth == 2 if is_gated else len(there[prompt]) == 8
        assert {source for _, source in there[prompt]} == ({0, 1, 2} if name.endswith("paper") else {0, 1})


@pytest.mark.slow
@pytest.mark.parametrize("what", ["suffix", "past", "ngrams", "adjacency", "recall", "pruning", "merging", "noise"])
def test_ablations_of_what_the_device_can_leave_out_run_there(on_device, monkeypatch, what):
    model = tiny_model("llama").to(DEVICE)
    options = {"max_new_tokens": 8, "temperature": 0.7, "seed": 5}
    drafter = Drafter(make_head(model).to(DEVICE), SMALL_TREE)
    engine = Engine(model, policy=f"graft-without-{what}", drafter=drafter, budget=6)
    engine.policy.planner.pass_cost = 0.0
    answers = engine.generate_batch(PROMPTS, **options)
    assert [answer.ids for answer in answers] == plain_ids(model, PROMPTS, monkeypatch, **options)
    assert all("propose" in answer.stats.seconds_by_phase for answer in answers)


@pytest.mark.parametrize(
    ("head", "policy"),
    [
        ("conditional", "graft"),
        pytest.param("conditional", "graft-without-noise", marks=pytest.mark.slow),
        *(pytest.param(head, "graft", marks=pytest.mark.slow) for head in ("marginal", "markov")),
    ],
)
def test_block_heads_draft_the_same_trees_on_the_device_as_on_the_host(
    on_device, first_trees, monkeypatch, head, policy
):
    """One row is greedy. The other is sampled: there, each slot has the noise of its own position, if it is known."""
    model = tiny_model("llama", num_hidden_layers=4).to(DEVICE)
    settings = BlockTreeSettings(nodes=9)
    options = {"max_new_tokens": 7, "seed": 5, "each": [{}, {"temperature": 0.7}]}
    for own, ids in zip(options["each"], plain_ids(model, PROMPTS, monkeypatch, **options), strict=True):
        own["stop_token_ids"] = [ids[1]]  # the first round suffices
    first_trees.clear()
    network = block_heads.make_head(model, **block_heads.HEADS[head]).to(DEVICE)
    with torch.no_grad():
        network.norm.weight *= 8  # so sure of its drafts that trees are deep
    engine = block_heads.make_engine(model, policy, OfBlocks(network, settings))
    answers = engine.generate_batch(PROMPTS, **options)
    assert [answer.ids for answer in answers] == plain_ids(model, PROMPTS, monkeypatch, **options)
    for stats in (answer.stats for answer in answers):
        assert "propose" in stats.seconds_by_phase, "the device has made the rounds"
        assert stats.draft_passes > 0 and stats.proposed_by_source["drafted"] > 0
    there = dict(first_trees)
    first_trees.clear()
    with monkeypatch.context() as eager:
        use_host(eager)
        host = block_heads.make_engine(model, policy, BlockDrafter(network, settings))
        host.generate_batch(PROMPTS, **options)
    for prompt in map(tuple, PROMPTS):
        assert there[prompt] == first_trees[prompt]
        assert max(len(path) for path, source in there[prompt] if source == 1) > 1


def test_isolated_texts_are_proposed_to_their_owner_alone(on_device, first_trees):
    engine = Engine(tiny_model("llama").to(DEVICE), policy="graft", budget=6, isolated=True)
    owner = 1 << 56 | 7

    def first_sources(prompt, owner):
        first_trees.clear()
        [sequence] = engine.new_sequences(prompt, SamplingSettings(max_new_tokens=3))
        sequence.owner = owner
        for _ in engine.rounds([sequence]):
            pass
        return {engine.policy.sources[source] for _, source in first_trees[tuple(prompt)]}

    first_sources(PROMPT, owner)
    for other in (None, owner + 1, owner + (1 << 40)):
        assert first_sources(PROMPT[5:7], other) == {"root"}
    assert first_sources(PROMPT[5:7], owner) >= {"past", "bigram"}
    kept = [part for part in vars(engine.policy.memory).values() if isinstance(part, dict)]
    assert not any(kept), "clients may name any number of users"


def test_requests_that_join_and_leave_have_their_own_texts(on_device, monkeypatch):
    engine = byte_engine()
    asked = [
        ("the first, which is long", {"max_new_tokens": 14}),
        ("it ends early", {"max_new_tokens": 3, "temperature": 1.0, "seed": 3}),
        ("it has penalties", {"max_new_tokens": 8, "repetition_penalty": 1.3}),
        ("it comes later", {"max_new_tokens": 6, "temperature": 0.7, "seed": 4}),
    ]
    with scheduler_over(engine, max_rows=4) as scheduler:
        listeners = [Asked(scheduler, prompt, **options) for prompt, options in asked[:3]]
        cancelled = Asked(scheduler, "nobody waits for it", max_new_tokens=50)
        listeners[0].next()
        scheduler.cancel(cancelled.job)
        listeners.append(Asked(scheduler, asked[3][0], **asked[3][1]))
        texts = [listener.wait()[0] for listener in listeners]
    assert not engine.target.pool.is_in_use
    assert texts == [plain_text(engine, prompt, monkeypatch, **options) for prompt, options in asked]


def test_rows_that_are_prefilled_elsewhere_are_left_to_the_host(on_device, monkeypatch):
    """Their rotary positions may differ from their places in the text, as behind an image."""
    model = tiny_model("llama").to(DEVICE)

    def text_of(engine):
        def prefill(batch):
            engine.prefill([PrefillChunk(batch, 0, batch.next_chunk(0, 64))])
            batch.cache.rows[0].offset = 5

        [sequence] = engine.new_sequences(PROMPT, SamplingSettings(max_new_tokens=8))
        for _ in engine.rounds([sequence], prefill=prefill):
            pass
        return sequence.new_ids

    there = text_of(Engine(model, policy="off"))
    use_host(monkeypatch)
    assert there == text_of(Engine(model, policy="off")) != Engine(model, policy="off").generate(PROMPT).ids[:8]


def test_requests_wait_that_a_device_round_has_no_rows_for(on_device, monkeypatch):
    monkeypatch.setattr("graft.engine.device_rounds.DeviceRounds.max_rows", 2)
    engine, prompts = byte_engine(), ["one", "another", "a third", "and one more"]
    with scheduler_over(engine, max_rows=8) as scheduler:
        answers = [Asked(scheduler, prompt, max_new_tokens=5) for prompt in prompts]
        texts = [answer.wait() for answer in answers]
    assert texts == [[plain_text(engine, prompt, monkeypatch, max_new_tokens=5)] for prompt in prompts]
    assert engine.device_rounds.captured.failure is None


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.9, marks=pytest.mark.slow)])
def test_preempted_cancelled_and_rejoined_rows_have_their_own_texts(on_device, monkeypatch, temperature):
    """Each leaves while a round with it is in flight. Texts and tables on the device know the rows."""
    model = tiny_model("llama").to(DEVICE)
    assert model.dtype == torch.float32
    options = {"max_new_tokens": 8, "temperature": temperature, "seed": 5}
    prompts = [PROMPT, PROMPT[:5], PROMPT[3:8]]
    expected = plain_ids(model, prompts, monkeypatch, **options)
    engine = Engine(model, policy="graft", budget=3)
    loop = DecodeLoop(engine, SchedulerSettings(max_rows=3, prefix_cache_tokens=0), max_batched_tokens=64)

    def ask(prompt):
        jobs.append(Job(engine.new_sequences(prompt, SamplingSettings(**options))))
        loop.submit(jobs[-1])

    def step(count):
        for _ in range(count):
            loop.step()
        assert engine.device_rounds.is_in_flight

    jobs = []
    for prompt in prompts:
        ask(prompt)
    step(3)
    loop._remove([jobs[1]])  # as the scheduler cancels it
    step(1)
    loop._preempt(jobs[2])
    ask(prompts[1])
    assert 0 < jobs[2].sequences[0].num_new < 8 and jobs[2].is_preempted
    while loop.has_work:
        loop.step()
    texts = [job.sequences[0].new_ids for job in jobs]
    assert texts[0] == expected[0] and texts[2:] == [expected[2], expected[1]]
    assert texts[1] == expected[1][: len(texts[1])] and len(texts[1]) < 8
    assert any(job.sequences[0].stats.accepted > 0 for job in jobs)
    assert not engine.target.pool.is_in_use


def plain_text(engine, prompt, monkeypatch, **options):
    return plain_answers(engine.target.model, [prompt], monkeypatch, **options)[0].text


def byte_engine(policy="off"):
    model = tiny_model("llama", vocab_size=BYTE_VOCAB, max_position_embeddings=512).to(DEVICE)
    return Engine(model, byte_tokenizer(), policy=policy)


def test_streams_in_turn_lose_no_token(on_device, monkeypatch):
    engine = byte_engine()
    prompts = ["the one", "and the other one"]
    streams = [engine.stream(prompt, max_new_tokens=9) for prompt in prompts]
    texts = ["", ""]
    for _ in range(20):
        for number, stream in enumerate(streams):
            texts[number] += next(stream, "")
    assert texts == [plain_text(engine, prompt, monkeypatch, max_new_tokens=9) for prompt in prompts]


def test_an_answer_may_end_while_another_prompt_is_read(on_device, monkeypatch):
    engine = byte_engine()
    asked = [("short", {"max_new_tokens": 2}), ("a prompt of many chunks " * 8, {"max_new_tokens": 3})]
    with scheduler_over(engine, max_rows=2, max_batched_tokens=32) as scheduler:
        answers = [Asked(scheduler, prompt, **options) for prompt, options in asked]
        texts = [answer.wait() for answer in answers]
    assert texts == [[plain_text(engine, prompt, monkeypatch, **options)] for prompt, options in asked]


def test_engines_over_one_model_do_not_share_what_rounds_were_captured_over(on_device, monkeypatch):
    model = tiny_model("llama").to(DEVICE)
    options = {"max_new_tokens": 4}
    expected = plain_ids(model, PROMPTS, monkeypatch, **options)
    engines = [Engine(model, policy="off") for _ in range(2)]
    for _ in range(2):
        assert [[answer.ids for answer in engine.generate_batch(PROMPTS, **options)] for engine in engines] == [
            expected,
            expected,
        ]
    assert engines[0].device_rounds is not engines[1].device_rounds


def test_all_graphs_that_rounds_may_need_are_captured_before_they_are_timed(on_device, monkeypatch):
    for name in ("_propose", "_finish"):
        monkeypatch.setattr(f"graft.engine.captured_rounds.CapturedRounds.{name}", lambda *given: None)
    engine = Engine(tiny_model("llama").to(DEVICE), policy="graft")
    for _ in range(2):
        engine.capture_rounds(1, 40, SamplingSettings())  # a round in flight may add tokens beyond the first context
        graphs = list(engine.target._graphs.steps)
        sizes_and_contexts = sorted(key[2:] for key in graphs if key[0] == "step")
        assert sizes_and_contexts == list(itertools.product((1, 8, 16, 64), (64, 128)))
        of_rounds = sorted((key[1], *key[-3:-1]) for key in graphs if key[0] != "step" and key[-3] > 1)
        assert of_rounds == list(itertools.product(("finish", "propose"), (8, 16, 64), (64, 128)))
        assert engine.num_setups == len(graphs)


@pytest.mark.parametrize("budget", [7, 60])
def test_the_rounds_of_a_fixed_budget_are_captured_for_every_number_of_rows_and_beside_prompts(
    on_device, monkeypatch, budget
):
    monkeypatch.setattr(TwoContexts, "sizes", STEP_SIZES)
    rounds = Engine(tiny_model("llama").to(DEVICE), policy="graft", budget=budget).device_rounds
    for num_rows, num_prefill in itertools.product(range(5, 9), (0, 100, 300, 450, 2000)):
        plan = rounds.planner.plan([0] * num_rows, 8, rounds._sizes(num_rows, 8, num_prefill), num_prefill)
        assert plan.tokens in (8, *rounds.planned_sizes(8))


def test_while_a_long_prompt_is_read_rounds_of_short_texts_keep_their_graphs(on_device, monkeypatch):
    launch, capture, contexts = CapturedRounds.launch, CapturedRounds._capture, []

    def watched(rounds, batch, chunks, clock):
        rounds.is_watched = any(chunk.row.length > 64 for chunk in chunks)
        return launch(rounds, batch, chunks, clock)

    def captured(rounds, *given):
        contexts.extend([given[4]] if rounds.is_watched else [])
        return capture(rounds, *given)

    monkeypatch.setattr(CapturedRounds, "launch", watched)
    monkeypatch.setattr(CapturedRounds, "_capture", captured)
    engine = byte_engine()
    with scheduler_over(engine, max_rows=2, max_batched_tokens=32) as scheduler:
        answers = [
            Asked(scheduler, "short", max_new_tokens=14),
            Asked(scheduler, "many chunks " * 20, max_new_tokens=1),
        ]
        assert all(answer.wait() for answer in answers)
    assert set(contexts) == {64}


def test_where_rounds_cannot_be_captured_the_host_makes_them(on_device, monkeypatch):
    engine = byte_engine()
    monkeypatch.setattr(
        "graft.engine.captured_rounds.CapturedRounds._propose", lambda *given: (_ for _ in ()).throw(ValueError("no"))
    )
    warns = pytest.warns(UserWarning, match="so the host runs them: ValueError: no")
    with scheduler_over(engine, max_rows=2) as scheduler, warns:
        answers = [Asked(scheduler, prompt, max_new_tokens=5) for prompt in ("one", "another")]
        texts = [answer.wait() for answer in answers]
    assert texts == [[plain_text(engine, prompt, monkeypatch, max_new_tokens=5)] for prompt in ("one", "another")]
    assert engine.device_rounds.captured.failure == "ValueError: no"


def test_when_the_host_takes_over_answers_that_the_last_round_ended_stay_ended(on_device, monkeypatch):
    model, capture, calls = tiny_model("llama").to(DEVICE), CapturedRounds._capture, []
    lengths = [{"max_new_tokens": 3}, {"max_new_tokens": 9}]
    expected = [plain_ids(model, [prompt], monkeypatch, **own)[0] for prompt, own in zip(PROMPTS, lengths, strict=True)]

    def fails_later(rounds, *given):
        calls.append(given)
        if len(calls) == 4:  # while the round that ends the first answer is in flight
            raise ValueError("no more")
        return capture(rounds, *given)

    monkeypatch.setattr(CapturedRounds, "_capture", fails_later)
    with pytest.warns(UserWarning, match="no more"):
        answers = Engine(model, policy="off").generate_batch(PROMPTS, each=lengths)
    assert [answer.ids for answer in answers] == expected


def test_a_round_whose_results_could_not_be_taken_is_run_again(on_device, monkeypatch):
    engine = byte_engine()
    options = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3}
    expected = plain_text(engine, "the one", monkeypatch, **options)
    stream = engine.stream("the one", **options)
    text = next(stream)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(Flight, "tree", lambda flight: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.generate("another answer takes the stream's results", **options)
    assert text + "".join(stream) == expected


def test_prompts_of_one_step_teach_the_tables_what_they_teach_the_host_one_by_one(on_device, monkeypatch):
    model = tiny_model("llama").to(DEVICE)
    prompts = [PROMPT, [17, 42, 9, 30, 5], [7], [9, 9, 30, 5, 21, 40]]

    def learned(engine, are_together):
        sequences = [engine.new_sequences(prompt, SamplingSettings(max_new_tokens=2))[0] for prompt in prompts]
        sequences[1].speculates = False  # a prompt in between that teaches nothing
        batch = opened(engine, sequences)
        chunks = [PrefillChunk(batch, row, batch.next_chunk(row, 64)) for row in range(len(prompts))]
        chunks = [part for part in chunks if part.chunk.tokens]
        for together in [chunks] if are_together else [[part] for part in chunks]:
            engine.prefill(together)
        batch.cache.release()
        return engine.policy.state()

    on_gpu = learned(Engine(model, policy="graft"), True)
    use_host(monkeypatch)
    on_host = learned(Engine(model, policy="graft"), False)
    for table in ("trigram", "bigram", "adjacency"):
        for part in ("rows", "entries"):
            assert torch.equal(on_gpu[f"{table}/{part}"], on_host[f"{table}/{part}"].cpu()), (table, part)
    assert on_host["adjacency/rows"].tolist() == [3, 5, 9, 17, 21, 30, 42]


def device_memory(num_rows, context, past_tokens):
    """By purpose, of rounds with a tree of EAGLE-3 and a vocabulary of 49,152 tokens; nothing is allocated."""
    meta = torch.device("meta")
    known = Tables.make((1 << 18, 1 << 18, 49152), (True, True, False), FACTORS, False, meta)
    levels, sources = (10, *[24] * 8), Sources(7, 16, 4, drafted=1, copies=2, tables=4)
    shape = (num_rows, num_rows + 1, context, past_tokens, lambda rows: levels, lambda rows: 10, len(levels), 1)
    return DeviceRound(*shape, sources, known, meta).memory()


def test_device_state_takes_the_memory_that_the_docs_say_and_leaves_most_of_the_workspace_to_graphs():
    megabytes = {what: size / 1e6 for what, size in device_memory(64, 8192, 1 << 18).items()}
    assert megabytes["texts"] == pytest.approx(65 * 8192 * 4 / 1e6, rel=0.01)
    assert megabytes["finished texts"] == pytest.approx(12 * (1 << 18) / 1e6)
    assert sum(megabytes.values()) == pytest.approx(49, abs=1)
    assert sum(device_memory(64, 8192, 1 << 20).values()) / 1e6 == pytest.approx(104, abs=1)
    assert sum(device_memory(MAX_TREE_TOKENS, 131072, 1 << 20).values()) < _WORKSPACE / 4


def test_device_state_does_not_grow_with_what_is_decoded(on_device):
    """The ring of finished texts holds 1,024 tokens here."""
    engine = Engine(tiny_model("llama").to(DEVICE), policy="graft", budget=2)
    engine.generate(PROMPT, max_new_tokens=2)
    before = engine.device_rounds.memory.bytes()
    sequence = TokenSequence([7] * 299, SamplingSettings(), [])
    for _ in range(5):
        engine.device_rounds.finish_text(sequence)
    assert engine.device_rounds.memory.bytes() == before and sum(before.values()) > 0
    assert engine.policy.state()["past/lengths"].tolist() == [299, 299, 299]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64])
def test_more_numbers_than_the_pinned_buffer_holds_arrive_on_the_device(dtype, monkeypatch):
    monkeypatch.setattr("graft.engine.staging._STAGED", 8)
    staging = Staging(torch.device(DEVICE))
    for count in (3, 8, 9, 30, 1):
        numbers = torch.arange(count).to(dtype) - 5
        assert staging.send(numbers.numpy(), dtype).cpu().equal(numbers)
