"""The captured EAGLE-3 drafter without a GPU, its graphs called instead of replayed: against the eager drafter."""

import warnings

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")


from batches import opened, prefill
from captured_parts import (
    DEVICE,
    PROMPT,
    CapturedEagle3Drafter,
    SmallDrafter,
    SmallTarget,
    StaticTarget,
    Text,
    assert_alike,
    drafter_of,
)
from graft import Engine, SamplingSettings
from graft.drafters import draft_buffers, head_drafter
from graft.drafters.beam_drafter import num_beams
from graft.drafters.drafter import TreeSettings
from graft.drafters.eagle3.drafter import Eagle3Drafter
from graft.model import NoRoomError, PagePool, TargetRunner
from graft.model.captures import Captures
from graft.model.cuda_graphs import CapturedTarget
from graft.model.noise import ComingDraws, RowDraws
from graft.spec_decode.policies import make_policy
from graft.tree.tree import DraftTree
from tiny import tiny_model


@pytest.fixture(params=[pytest.param(StaticTarget, marks=pytest.mark.slow), SmallTarget])  # the second is the product's
def engines(plain, monkeypatch, request):
    """Engines run steps whose output the device can go on from."""
    monkeypatch.setattr("graft.engine.engine.target_for", request.param)
    return request.param


@pytest.fixture(scope="module")
def model():
    return tiny_model().to(DEVICE)


def both(model, **options):
    return Text(model, SmallDrafter, **options), Text(model, Eagle3Drafter, **options)


@pytest.mark.parametrize("keep", [None, 5, 1])
@pytest.mark.parametrize("shuffled", [False, True])
def test_drafts_are_those_of_the_eager_drafter(plain, model, keep, shuffled):
    """Of ragged rows, over contexts of several pages, round after round, wherever the pages lie. In the last rounds
    the draws of two rows are known."""
    found = []
    for text in both(model):
        cache, state = text.open(PROMPT, [5, 6], PROMPT * 14, shuffled=shuffled)
        levels, roots = text.levels(state, keep=keep), [11, 6, 11]
        for temperatures in (None, None, (0.7, 0.0, 1.2), (1.0, 0.5, 0.0)):
            roots = text.round(cache, state, roots)
            levels += text.levels(state, keep=keep, temperatures=temperatures)
        assert text.drafter.is_captured == isinstance(text.drafter, SmallDrafter)
        found.append((levels, state.lengths))
        if shuffled:
            assert (
                cache.rows[2].pages != sorted(cache.rows[2].pages)
                or cache.rows[2].pages[1] != cache.rows[2].pages[0] + 1
            )
    assert_alike(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize(
    "norms", [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_residual": True, "head_norms": True}]
)
def test_the_real_kernels_draft_the_same(model, norms, monkeypatch):
    """In Triton's interpreter, where there is no GPU; with little padding, as every program takes its time there."""
    monkeypatch.setattr(head_drafter, "ENTRIES", (8,))
    settings, found = TreeSettings(depth=2, topk=2), []
    for text in both(model, settings=settings, **norms):
        cache, state = text.open(PROMPT[:3], [5, 6])
        levels = text.levels(state, 3, keep=3)
        text.round(cache, state, [9, 6], 3)
        found.append(levels + text.levels(state, 3, keep=3, temperatures=(0.8, 0.0)))
    assert_alike(*found)


def test_graphs_know_keyed_noise_and_not_that_of_torchs_generator(model):
    drafter = drafter_of(SmallDrafter, model)
    assert drafter.knows(ComingDraws([RowDraws(1, 2, 1.0), None]))
    assert not drafter.knows(ComingDraws([RowDraws(1, 2, 1.0), RowDraws(0, 2, 1.0, times=[torch.ones(61)])]))


def test_rows_that_join_leave_and_are_copied_draft_as_alone(plain, model):
    found = []
    for text in both(model):
        cache, state = text.open(PROMPT, PROMPT[3:])
        text.levels(state)
        roots = text.round(cache, state, [11, 11])
        others, joining = text.open([7, 8, 9, 10], PROMPT)
        state, cache = state.concat(joining), cache.with_rows(cache.rows + others.rows)
        levels = text.levels(state)
        roots = text.round(cache, state, [*roots, 10, 11])
        # The last row goes on from the first; the second leaves.
        row = text.go_on_from(cache.rows[0])
        text.target.pool.release(cache.rows[3])
        cache.rows[3] = row
        state.copy_row(0, 3, row)
        levels += text.levels(state)
        assert torch.equal(levels[-1].tokens[0], levels[-1].tokens[3])
        text.target.pool.release(cache.rows[1])
        state, cache = state.select([0, 2, 3]), cache.with_rows([cache.rows[row] for row in (0, 2, 3)])
        levels += text.levels(state)
        roots = text.round(cache, state, [roots[0], roots[2], roots[0]])
        found.append((levels + text.levels(state), state.lengths))
    assert_alike(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_many_rows_have_fewer_beams(plain, model):
    assert [num_beams(rows, 10) for rows in (1, 8, 16, 24, 32, 64, 128)] == [10, 10, 8, 4, 4, 2, 2]
    assert num_beams(128, 1) == 1
    settings = TreeSettings(depth=2, topk=10)
    many = Text(model, SmallDrafter, settings)
    prompts = [[*PROMPT[: 2 + number % 9], number] for number in range(17)]
    cache, state = many.open(*prompts)
    levels = many.levels(state, 3)
    assert [level.tokens.shape for level in levels] == [(17, 4), (17, 16), (17, 16)]
    few = Text(model, Eagle3Drafter, TreeSettings(depth=2, topk=4))
    assert_alike(levels, few.levels(few.open(*prompts)[1], 3))
    many.round(cache, state, [prompt[-1] for prompt in prompts])
    state = state.select([0, 16])  # all beams again
    assert [level.tokens.shape for level in many.levels(state, 2, keep=20)] == [(2, 10), (2, 20)]


def test_rows_without_drafts_for_long_draft_what_others_do(plain, model, monkeypatch):
    """Rounds may bring more tokens than a graph runs at once."""
    for module in (head_drafter, draft_buffers):
        monkeypatch.setattr(module, "ENTRIES", (4, 16, 32))
    found = []
    for text in both(model):
        cache, state = text.open(PROMPT, [5, 6])
        for length in (3, 20, 15, 1, 40, 70, 2):
            tree = DraftTree.chain(torch.tensor([[7 * n % 61 for n in range(length)]] * 2))
            verified = text.target.verify(cache, tree)
            nodes, tokens = [range(1, length), range(1, 2)], [[9] * length, [8, 9][: min(length, 2)]]
            nodes[1] = range(1, len(tokens[1]))
            text.target.commit(cache, nodes)
            text.drafter.learn(state, verified, nodes, tokens)
        found.append(text.levels(state))
        assert state.lengths == cache.lengths
    assert_alike(*found)


@pytest.mark.parametrize("is_same_step", [False, True])
def test_reading_a_prompt_leaves_the_drafts_of_others_as_they_are(plain, model, is_same_step):
    found = []
    for others_read in (True, False):
        text = Text(model, SmallDrafter)
        cache, state = text.open(PROMPT, [5, 6], PROMPT[3:])
        text.levels(state, 2)
        reading = None
        if others_read and is_same_step:
            its_cache = text.target.open(1, 200)
            reading = its_cache, text.drafter.open(its_cache)
        text.round(cache, state, [11, 6, 11], reading=reading)
        if others_read and not is_same_step:
            text.open(PROMPT * 20)  # several chunks
        found.append(text.levels(state))
        if reading is not None:
            assert_alike(text.levels(reading[1]), text.levels(text.open(PROMPT)[1]))
    assert_alike(*found)


def test_batches_that_take_turns_draft_as_alone(plain, model):
    """They share the beams."""
    text = Text(model, SmallDrafter)
    (_, first), (_, second) = text.open(PROMPT, [5, 6]), text.open(PROMPT[3:])
    expected = [text.levels(state) for state in (first, second)]
    for state, levels in zip((first, second), expected, strict=True):
        assert_alike(text.levels(state), levels)


def test_drafts_go_on_when_the_pool_grows(plain, model):
    for text in both(model):
        cache, state = text.open(PROMPT)
        expected = text.levels(state)
        roots = text.round(cache, state, [11])
        before = text.target.pool.num_resized
        others = [text.open(PROMPT) for _ in range(9)]  # more table rows, and more pages
        more = text.target.open(5, 448)
        assert text.target.pool.num_resized > before + 1
        assert_alike(text.levels(others[-1][1]), expected)
        fresh = Text(model, SmallDrafter)
        fresh_cache, fresh_state = fresh.open(PROMPT)
        fresh.levels(fresh_state)
        assert fresh.round(fresh_cache, fresh_state, [11]) == roots
        assert_alike(text.levels(state), fresh.levels(fresh_state))
        more.release()


def test_without_pages_for_drafts_nothing_is_lost(plain, model):
    found = []
    for num_pages in (None, 3):
        text = Text(model, SmallDrafter, TreeSettings(depth=8, topk=3))
        text.use_pool(PagePool(text.target.device, 2048, num_pages))
        cache = text.target.open(1, 64)
        state = text.drafter.open(cache)
        text.read(cache, state, 0, (PROMPT * 5)[:52])
        taken = None if num_pages is None else text.target.open(1, 128)
        if taken is not None:
            with pytest.raises(NoRoomError):
                text.levels(state)
        text.round(cache, state, [11], 4)
        if taken is not None:
            with pytest.raises(NoRoomError):
                text.levels(state)
            taken.release()
        found.append(text.levels(state))
    assert_alike(*found)


def test_a_text_at_the_end_of_the_context_is_drafted_for(plain, model):
    """Drafts may need more room than the block tables name."""
    text = Text(model, SmallDrafter, TreeSettings(depth=20, topk=20))
    text.use_pool(PagePool(text.target.device, 64))
    cache, state = text.open((PROMPT * 6)[:63])
    assert len(text.levels(state, 21)) == 21 and len(cache.rows[0].pages) == 5


# Engines


@pytest.mark.parametrize("policy", ["dense", "graft"])
def test_a_head_drafts_the_same_from_captured_hidden_states(policy, engines, monkeypatch, model):
    runs = []
    for target, kind in (
        (engines, SmallDrafter),
        (lambda model, layers, *_: TargetRunner(model, layers), Eagle3Drafter),
    ):
        monkeypatch.setattr("graft.engine.engine.target_for", target)
        drafter = drafter_of(kind, model)
        engine = Engine(
            model, policy=make_policy(policy, TargetRunner(model), drafter, 9, pass_cost=0.0), drafter=drafter
        )
        runs.append(engine.generate_batch([PROMPT, PROMPT[3:]], max_new_tokens=16))
    for captured_run, ordinary in zip(*runs, strict=True):
        assert captured_run.ids == ordinary.ids and captured_run.stats.accepted == ordinary.stats.accepted


def test_after_a_warm_up_no_prompt_captures_anything(plain, monkeypatch, model):
    monkeypatch.setattr("graft.engine.engine.target_for", CapturedTarget)
    drafter = drafter_of(CapturedEagle3Drafter, model)
    engine = Engine(model, policy="graft", drafter=drafter)
    reports = []
    engine.target.progress = reports.append
    engine.warm_up(max_tokens=512, max_rows=4)
    of_drafter = [report.words for report in reports if report.words.startswith("drafter")]
    assert of_drafter[-2:] == ["drafter, 1024 entries", "drafter, 2048 entries"]
    batch = opened(engine, [engine.new_sequences(prompt, SamplingSettings())[0] for prompt in (PROMPT, PROMPT * 9)])
    before = drafter.num_setups
    prefill(engine, batch)
    assert drafter.num_setups == before and batch.draft.lengths == [len(PROMPT) - 1, 9 * len(PROMPT) - 1]
    batch.cache.release()


def test_drafting_falls_back_to_eager_passes_with_one_warning(plain, monkeypatch, model):
    def fail(*given):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    expected = Text(model, Eagle3Drafter)
    expected = expected.levels(expected.open(PROMPT)[1])
    monkeypatch.setattr(Captures, "capture", fail)
    text = Text(model, SmallDrafter)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        states = [text.open(PROMPT)[1] for _ in range(2)]
    assert [str(warning.message) for warning in caught] == [
        "draft passes cannot be captured in CUDA graphs: RuntimeError: operation not permitted when stream is capturing"
    ]
    for state in states:
        assert_alike(text.levels(state), expected)
