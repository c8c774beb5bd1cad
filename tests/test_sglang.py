"""The SGLang plugin without SGLang or a GPU: its pure parts against slow ones, whole rounds over a stand-in."""

import json
import os
from array import array
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sglang_double
from graft.errors import GraftError
from graft.integrations.sglang import plugin
from graft.integrations.sglang.rounds import Rounds, Texts
from graft.integrations.sglang.settings import (
    SGLangSettings,
    captured_sizes,
    check_head,
    check_server,
    check_version,
    from_environment,
    sizes_for,
    tree_sizes,
)
from graft.integrations.sglang.trees import (
    Drafted,
    Sampling,
    levels_of,
    target_tokens,
    verify_arrays,
)
from graft.model.sampler import Sampler, SamplingSettings
from graft.spec_decode.acceptance import paths
from graft.spec_decode.grafter import Grafter, Text
from graft.spec_decode.proposers.drafter import KEPT_OF_A_LEVEL
from graft.tree.tree import DRAFTED, TreeLinks
from tree_strategies import path_of, trees

VOCAB = sglang_double.VOCAB


# Trees


def drafted_by(topk, num_steps, num_rows, seed):
    """Drafts of SGLang's loop in its flat ids; by row also the nodes by path: {path: (score, q)}."""
    rng = torch.Generator().manual_seed(seed)
    tokens, scores, beams, nodes = [], [], [], []
    for _ in range(num_rows):
        known = {}
        own_tokens, own_scores, own_beams = [], [], [-1, *range(topk)]
        p = torch.rand(topk, generator=rng).sort(descending=True).values
        t = torch.randperm(1000, generator=rng)[:topk].tolist()
        frontier = []
        for score, token in zip(p.tolist(), t, strict=True):
            own_tokens.append(token)
            own_scores.append(score)
            known[(token,)] = (score, score)
            frontier.append((score, (token,)))
        for _ in range(1, num_steps):
            first, level = len(own_tokens), []
            for score, path in frontier:
                q = torch.rand(topk, generator=rng).tolist()
                for own, token in zip(q, torch.randperm(1000, generator=rng)[:topk].tolist(), strict=True):
                    own_tokens.append(token)
                    own_scores.append(score * own)
                    known[(*path, token)] = (score * own, own)
                    level.append((score * own, (*path, token)))
            order = sorted(range(len(level)), key=lambda place: -level[place][0])[:topk]
            own_beams += [first + place for place in order]
            frontier = [level[place] for place in order]
        tokens.append(own_tokens)
        scores.append(own_scores)
        beams.append(own_beams)
        nodes.append(known)
    return Drafted(torch.tensor(tokens), torch.tensor(scores), torch.tensor(beams)), nodes


@given(st.integers(2, 9), st.integers(1, 5), st.integers(1, 3), st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_levels_are_the_best_nodes_of_sglangs_loop_with_their_own_parents(topk, num_steps, num_rows, seed):
    drafted, nodes = drafted_by(topk, num_steps, num_rows, seed)
    levels = levels_of(drafted, topk)
    assert len(levels) == num_steps
    for row in range(num_rows):
        found = [()]  # by number in the drafted tree, the path
        for depth, level in enumerate(levels, start=1):
            own = []
            for token, parent, q, score in zip(*(c[row].tolist() for c in vars(level).values()), strict=True):
                path = (*found[parent], token)
                assert len(path) == depth
                assert (score, q) == pytest.approx(nodes[row][path], rel=1e-5)
                own.append(path)
            best = sorted((p for p in nodes[row] if len(p) == depth), key=lambda p: -nodes[row][p][0])
            assert own == best[: max(KEPT_OF_A_LEVEL, topk)], "the likeliest first"
            found += own


def test_nodes_below_one_that_is_left_out_are_padding():
    topk = 6
    drafted, _ = drafted_by(topk, 3, 1, 0)
    scores = drafted.scores.clone()
    scores[:, topk : topk + topk * topk] = 0.25  # all equal: SGLang may have expanded any of them
    beams = drafted.beams.clone()
    beams[0, 1 + topk] = topk + topk * topk - 1  # the last, which is left out
    levels = levels_of(Drafted(drafted.tokens, scores, beams), topk)
    flat = topk + topk * topk + torch.arange(topk)  # its children
    is_child = torch.isin(levels[2].tokens, drafted.tokens[0, flat])
    assert is_child.any() and (levels[2].probabilities[is_child] == 0).all()
    assert (levels[2].probabilities[~is_child] > 0).any()


@given(trees(), st.integers(0, 3), st.data())
@settings(max_examples=60, deadline=None)
def test_verify_arrays_show_each_place_its_path_and_lead_the_kernel_down_it(tree, more, data):
    width = tree.width + more
    num_rows = len(tree.tokens)
    lengths = [data.draw(st.integers(0, 5)) for _ in range(num_rows)]
    wide = tree.links(TreeLinks.empty(num_rows, width))
    size = width * (sum(lengths) + num_rows * width)
    room = data.draw(st.sampled_from([None, size + 7, size, size - 1]))
    buffer = torch.zeros(room, dtype=torch.uint8) if room is not None else None
    arrays = verify_arrays(wide, torch.tensor(lengths, dtype=torch.int32), sum(lengths), buffer)
    tokens = arrays.draft_token.view(num_rows, width)[:, : tree.width]
    assert tokens.equal(tree.tokens.where(tree.valid, 0))
    fits = room is not None and room >= size
    assert arrays.custom_mask is buffer if fits else len(arrays.custom_mask) == size
    start = 0
    for row, length in enumerate(lengths):
        for place in range(width):
            is_node = place < tree.width and bool(tree.valid[row, place])
            path = path_of(tree.parents[row].tolist(), place) if is_node else [place]
            seen = arrays.custom_mask[start : start + length + width].bool()
            assert seen.nonzero().flatten().tolist() == [*range(length), *(length + node for node in sorted(path))]
            assert arrays.positions[row * width + place] == length + len(path) - 1
            start += length + width
    chosen = torch.tensor([[data.draw(st.integers(0, 3)) for _ in range(width)] for _ in range(num_rows)])
    predicts, counts = torch.zeros(num_rows * width, dtype=torch.int32), torch.empty(num_rows, dtype=torch.int32)
    accept_index = torch.full((num_rows, width), -1, dtype=torch.int32)
    sglang_double.verify_tree_greedy_func(
        predicts, accept_index, counts, arrays.draft_token.view(num_rows, width), *arrays[2:5], chosen
    )
    expected = paths(tree, chosen[:, : tree.width])
    for row in range(num_rows):
        nodes = (accept_index[row, : int(counts[row]) + 1] - row * width).tolist()
        assert nodes == [0, *expected.nodes[row]]
        assert predicts[accept_index[row, : len(nodes)]].tolist() == expected.tokens[row]


# The target's tokens


@pytest.mark.parametrize("limits", [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}])
def test_tokens_are_those_of_our_own_sampler_whatever_stands_beside_them(limits):
    rng = torch.Generator().manual_seed(0)
    contexts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    usual = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | limits
    wanted = [SamplingSettings(temperature=0.8, seed=11, **usual), SamplingSettings(temperature=0.0)]
    logits = torch.randn(2, 4, VOCAB, generator=rng) * 2
    sampling = Sampling(
        torch.tensor([11, 5]),
        torch.tensor([0.8, 1.0]),
        torch.tensor([usual["top_k"] or 1 << 30, 1]),
        torch.tensor([usual["top_p"], 1.0]),
        torch.tensor([usual["min_p"], 0.0]),
        bool(limits),
    )
    depths = torch.tensor([0, 1, 1, 2])
    positions = torch.tensor([len(context) - 1 for context in contexts])[:, None] + depths
    best = logits.argmax(-1).flatten()
    found = target_tokens(logits.flatten(0, 1), best, positions.flatten(), sampling).view(2, 4)
    for place, depth in enumerate(depths.tolist()):
        sampler = Sampler(wanted, [[*context, *[0] * depth] for context in contexts], [], VOCAB, torch.device("cpu"))
        assert found[:, place].tolist() == sampler.choose(logits[:, place], [True, True]).tolist()


def test_noise_made_in_parts_is_the_same(monkeypatch):
    logits = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(1))
    columns = (torch.full((3,), 0.7), torch.full((3,), 1 << 30), torch.ones(3), torch.zeros(3))
    sampling, positions = Sampling(torch.tensor([1, 2, 3]), *columns, False), torch.arange(12)
    best = logits.argmax(-1)
    whole = target_tokens(logits, best, positions, sampling)
    monkeypatch.setattr("graft.integrations.sglang.trees._NOISE_AT_ONCE", 5 * VOCAB)
    assert target_tokens(logits, best, positions, sampling).equal(whole)
    assert not whole.equal(best)


# Texts of requests


def request(rid, prompt, output, seed=None, done=False):
    params = SimpleNamespace(sampling_seed=seed)
    ids = {"origin_input_ids": array("q", prompt), "output_ids": array("q", output)}
    return SimpleNamespace(rid=rid, **ids, sampling_params=params, is_done=done, finished=lambda: done)


def ended(one):
    one.finished = lambda: True


def texts_of(texts, *requests):
    """The texts of requests whose own ids are complete."""
    roots = [(request.output_ids or request.origin_input_ids)[-1] for request in requests]
    return texts.of(requests, roots, [len(each.origin_input_ids) + len(each.output_ids) for each in requests])


def test_texts_grow_with_their_requests_and_finish_when_these_have_left():
    finished = []
    texts = Texts(100, 8, lambda text: finished.append(list(text.ids)))
    a, b = request("a", [1, 2], [3], seed=7), request("b", [4], [5])
    first, second = texts_of(texts, a, b)
    assert (first.ids, second.ids, first.num_prompt_tokens) == ([1, 2, 3], [4, 5], 2)
    assert texts.seeds([a, b])[0] == 7
    drawn = texts.seeds([b])
    a.output_ids.extend([8, 9])
    assert texts_of(texts, a)[0] is first and first.ids == [1, 2, 3, 8, 9]
    assert not finished, "b has not ended: it waits for memory"
    b.output_ids.extend([6])
    assert texts_of(texts, b)[0] is second and second.ids == [4, 5, 6] and texts.seeds([b]) == drawn
    a.output_ids.extend([10])
    ended(a)
    texts_of(texts, b)
    assert finished == [[1, 2, 3, 8, 9, 10]] and len(texts) == 1


def test_texts_are_complete_where_the_requests_own_ids_lag_behind():
    texts = Texts(100, 8, lambda text: None)
    one = request("a", [1, 2], [])
    (text,) = texts.of([one], [3], [3])  # the prefill's token is the root
    assert text.ids == [1, 2, 3]
    text.ids += [4, 5]  # a tree was verified
    one.output_ids.append(3)
    assert texts.of([one], [5], [5]) == [text] and text.ids == [1, 2, 3, 4, 5]
    one.output_ids.extend([4, 5, 6, 7])  # rounds without a tree: all but the last token is known
    assert texts.of([one], [8], [8]) == [text] and text.ids == [1, 2, 3, 4, 5, 6, 7, 8]
    text.ids += [9]
    assert texts.of([one], [9], [9]) == [text] and text.ids[-2:] == [8, 9]
    one.output_ids.append(8)  # the last verify was dropped: another token in its place
    assert texts.of([one], [7], [9])[0].ids == [1, 2, 3, 4, 5, 6, 7, 8, 7]


def test_a_round_behind_the_end_of_a_text_is_forgotten():
    finished = []
    texts = Texts(100, 8, lambda text: finished.append(list(text.ids)))
    one = request("a", [1, 2], [3])
    (text,) = texts_of(texts, one)
    text.ids += [4, 5, 6]
    one.output_ids.append(4)
    ended(one)
    texts_of(texts, request("b", [9], [9]))
    assert finished == [[1, 2, 3, 4]]


@pytest.mark.parametrize("change", ["none", "a row more", "other texts", "another root", "other places"])
def test_a_round_begun_while_the_head_drafts_is_used_where_it_is_still_right(change, monkeypatch):
    trees, num_begun, begin = [], [], Grafter.begin
    monkeypatch.setattr(Grafter, "begin", lambda *args, **more: num_begun.append(1) or begin(*args, **more))
    for is_begun in (False, True):
        rounds = Rounds(1000, 3, 2, 12, SGLangSettings())
        batch = [request("a", [1, 2, 3, 4, 1, 2], [3]), request("b", [7, 8, 7, 8], [7])]
        texts_of(rounds.texts, *batch)
        if is_begun:
            rounds.begin(batch, 12)
        num_begun.clear()
        roots, num_places = [3, 7], 12
        if change == "a row more":
            batch, roots = [*batch, request("c", [5, 6, 5], [6])], [3, 7, 6]
        elif change == "other texts":
            batch, roots = batch[::-1], [7, 3]
        elif change == "another root":
            batch[0].output_ids[-1] = roots[0] = 4
        elif change == "other places":
            num_places = 9
        lengths = [len(each.origin_input_ids) + 1 for each in batch]
        drafted, _ = drafted_by(3, 2, len(batch), seed=0)
        trees.append(rounds.propose(batch, torch.tensor(roots), lengths, drafted, num_places).tree)
    assert trees[0].tokens.equal(trees[1].tokens) and trees[0].parents.equal(trees[1].parents)
    assert (trees[0].sources > 1).any(), "something was copied"
    assert len(num_begun) == (0 if change == "none" else 1)


def test_a_request_that_began_anew_and_one_with_a_known_id_get_new_texts():
    finished = []
    texts = Texts(100, 8, lambda text: finished.append(list(text.ids)))
    a = request("a", [1, 2], [3, 4])
    (first,) = texts_of(texts, a)
    seeds = texts.seeds([a])
    a.output_ids = array("q")
    (again,) = texts_of(texts, a)
    assert again is not first and again.ids == [1, 2] and texts.seeds([a]) == seeds and not finished
    (other,) = texts_of(texts, request("a", [9, 9], [1]))
    assert other.ids == [9, 9, 1] and finished == [[1, 2]]


def test_kept_texts_are_bounded_and_hold_tokens_only():
    finished = []
    texts = Texts(100, 3, finished.append)
    for number in range(10):
        texts_of(texts, request(str(number), [number, 1 << 40], [1]))
    assert len(texts) == 3 and [text.ids for text in finished] == [[number, 0, 1] for number in range(7)]
    many = [request(f"m{number}", [1], [2]) for number in range(6)]
    assert len(texts_of(texts, *many)) == 6 and len(texts) == 6


# Settings


def test_settings_come_from_the_environment():
    assert from_environment({}) is None and from_environment({"GRAFT_SGLANG": "0"}) is None
    variables = {"GRAFT_SGLANG": "1", "GRAFT_SGLANG_BUDGET": "31", "GRAFT_SGLANG_ISOLATED": "true", "HOME": "/"}
    assert from_environment(variables) == SGLangSettings(budget=31, isolated=True)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"GRAFT_SGLANG_BUGDET": "3"},
            "unknown environment variable 'GRAFT_SGLANG_BUGDET': did you mean 'GRAFT_SGLANG_BUDGET'?",
        ),
        ({"GRAFT_SGLANG_BUDGET": "few"}, "GRAFT_SGLANG_BUDGET must be a whole number, not 'few'"),
        ({"GRAFT_SGLANG_BUDGET": "0"}, "GRAFT_SGLANG_BUDGET must be at least 1, not 0"),
        ({"GRAFT_SGLANG_BUDGET": "128"}, "GRAFT_SGLANG_BUDGET must be at most 127, not 128"),
        ({"GRAFT_SGLANG_LOG": "0"}, "GRAFT_SGLANG_LOG must be at least 1, not 0"),
        ({"GRAFT_SGLANG": "perhaps"}, "GRAFT_SGLANG must be 1 or 0, not 'perhaps'"),
    ],
)
def test_bad_settings_are_one_clear_line(variables, message):
    with pytest.raises(GraftError) as error:
        from_environment(variables)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"speculative_algorithm": "EAGLE"}, "needs --speculative-algorithm EAGLE3, not EAGLE"),
        ({"speculative_eagle_topk": 1}, "--speculative-eagle-topk must be 2 or more, not 1"),
        ({"speculative_num_draft_tokens": 129}, "must be between 2 and 128, not 129"),
        ({"speculative_num_draft_tokens": 8}, "GRAFT_SGLANG_BUDGET (9) must be less than"),
        ({"speculative_adaptive": True}, "--speculative-adaptive does: leave it out"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, message):
    check_server(sglang_double.server_args(), SGLangSettings(budget=9))
    with pytest.raises(GraftError) as error:
        check_server(sglang_double.server_args(**flags), SGLangSettings(budget=9))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ("48", "must be pairs of requests and places like \"2:48,16:8\", not '48'"),
        ("2:8,2:4", "must name growing numbers of requests, from 1, not 2, 2"),
        ("2:4,4:8", "must name fewer places for more requests, not 4, 8"),
        ("0:8", "must name growing numbers of requests, from 1, not 0"),
        ("1:13", "must have places between 1 and --speculative-num-draft-tokens (12), not 13"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(places, message):
    with pytest.raises(GraftError) as error:
        check_server(sglang_double.server_args(), SGLangSettings(places=places))
    assert str(error.value) == f"GRAFT_SGLANG_PLACES {message}"


def test_a_head_must_name_the_class_that_sglang_loads_it_with(tmp_path):
    check_head(["LlamaForCausalLMEagle3"])
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(GraftError, match=r'must say "architectures": .*it names LlamaForCausalLM$'):
        check_server(sglang_double.server_args(speculative_draft_model_path=str(tmp_path)), SGLangSettings())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(GraftError, match="cannot read"):
        check_server(sglang_double.server_args(speculative_draft_model_path=str(tmp_path)), SGLangSettings())


def test_another_version_ends_the_process_with_one_line(monkeypatch):
    double = sglang_double.install(monkeypatch)
    double.__version__ = "0.6.0"
    plugin.register()  # not switched on
    monkeypatch.setenv("GRAFT_SGLANG", "1")
    with pytest.raises(SystemExit, match=r"^error: the SGLang plugin is made for SGLang 0\.5\.15, not 0\.6\.0"):
        plugin.register()
    assert not double.HookRegistry.hooks
    with pytest.raises(GraftError):
        check_version("0.5.14")


# Whole rounds


@pytest.fixture
def sglang(monkeypatch):
    """The stand-in, with the plugin's hooks applied as SGLang does."""
    double = sglang_double.install(monkeypatch)
    monkeypatch.setenv("GRAFT_SGLANG", "1")
    monkeypatch.setenv(sglang_double.SKIP, "")  # so that what the worker sets is taken back
    monkeypatch.delenv(sglang_double.SKIP)
    plugin.register()
    double.HookRegistry.apply_hooks()
    return double


PROMPT = [3, 9, 4, 17, 22, 31, 8, 5]


def decode(
    double, requests, rounds_each_joins=3, mask_buffer=None, is_deterministic=False, is_overlapped=False, **flags
):
    """Decodes requests that join one after the other and leave when they have ended; how many rounds it took.

    is_overlapped: the scheduler takes in a round's results while the next one runs.
    """
    worker = double.EAGLEWorkerV2(double.server_args(**flags), double.target_worker())
    worker.init_cuda_graphs()
    waiting, running, inputs = list(requests), [], []
    while waiting or running:
        if waiting and len(inputs) % rounds_each_joins == 0:
            running.append(waiting.pop(0))
            worker.forward_batch_generation(double.batch_of(running[-1:], prefix_lens=[0]))
        before = [len(each.ids) for each in running]
        if not is_overlapped:
            for each in running:
                each.process(len(each.ids))
        batch = double.batch_of(running, mask_buffer, is_deterministic, is_overlapped)
        inputs.append(worker.forward_batch_generation(batch))
        for each, num_before in zip(running, before, strict=True):
            each.process(num_before if is_overlapped else len(each.ids))
        running = [each for each in running if not each.finished()]
    return worker, inputs


def plain(request):
    """The text by our own sampler, token by token."""
    params = request.sampling_params
    seed = 0 if params.sampling_seed is None else params.sampling_seed
    chosen = SamplingSettings(
        temperature=0.0 if params.top_k == 1 else params.temperature,
        top_k=params.top_k if 1 < params.top_k < VOCAB else 0,
        top_p=params.top_p,
        seed=seed,
        logit_bias=params.logit_bias or {},
    )
    ids = [*request.origin_input_ids, request.origin_input_ids[0]]
    sampler = Sampler([chosen], [ids], [], VOCAB, torch.device("cpu"))
    while len(ids) < len(request.origin_input_ids) + params.length:
        ids.append(int(sampler.choose(sglang_double.target_logits(ids)[None], [True])))
    return ids[len(request.origin_input_ids) :]


def requests_of(double):
    sampled = {"top_k": 1 << 30, "temperature": 0.7}
    return [
        double.Request("greedy", PROMPT),
        double.Request("sampled", PROMPT[::-1], **sampled, sampling_seed=5),
        double.Request("biased", [*PROMPT, 1], logit_bias={7: 3.0}),
        double.Request("nucleus", [*PROMPT, 2, 6], **sampled | {"top_p": 0.8, "top_k": 12}, sampling_seed=9),
        double.Request("late", PROMPT),
    ]


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("room", [None, 5 * 12 * 100, 5 * 12 * 20])  # the last: too little for most rounds
def test_whole_rounds_give_the_plain_text_in_fewer_rounds(sglang, room, is_overlapped, caplog):
    requests = requests_of(sglang)
    buffer = torch.zeros(room, dtype=torch.uint8) if room is not None else None
    worker, inputs = decode(sglang, requests, mask_buffer=buffer, is_overlapped=is_overlapped)
    assert not caplog.records, "every text is known whole"
    for each in requests:
        length = each.sampling_params.length
        assert each.output_ids[:length].tolist() == plain(each)[:length], each.rid
    assert len(inputs) < 60, "tokens of one request alone"
    assert all(len(each.draft_token) % 12 == 0 for each in inputs)
    rounds = worker.draft_worker._rounds
    assert len(rounds.texts) <= 1, "those that left are finished"
    past = rounds.grafter.state()["past/lengths"]
    assert len(past) >= len(requests) - 1


def test_paths_deeper_than_the_head_drafts_are_accepted(sglang):
    requests = [sglang.Request("a", PROMPT * 2, length=150), sglang.Request("b", PROMPT * 2, length=150)]
    _, inputs = decode(sglang, requests, rounds_each_joins=40, speculative_num_steps=1)
    depths = [int((each.positions.view(-1, 12) - each.positions.view(-1, 12)[:, :1]).max()) for each in inputs]
    assert max(depths) > 3
    assert all(each.output_ids[:150].tolist() == plain(each)[:150] for each in requests)
    assert len(inputs) < 150


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_trees_shrink_with_the_number_of_requests_and_come_back(sglang, monkeypatch, is_overlapped):
    monkeypatch.setenv("GRAFT_SGLANG_PLACES", "1:12,2:5,3:1")
    requests = requests_of(sglang)
    requests[-1].sampling_params.length = 120
    flags = {"max_running_requests": 8, "speculative_num_steps": 4}
    worker, inputs = decode(sglang, requests, rounds_each_joins=4, is_overlapped=is_overlapped, **flags)
    assert worker.built == [(5, 3, [2]), (1, 1, [4, 8])]
    sizes = [each.draft_token_num for each in inputs]
    assert {1, 5, 12} == set(sizes) and sizes[0] == 12 and sizes[-1] == 12, "few at the beginning and at the end"
    for each, num_places in zip(inputs, sizes, strict=True):
        num_requests = len(each.draft_token) // num_places
        assert num_places == {1: 12, 2: 5}.get(num_requests, 1)
    for each in requests:
        length = each.sampling_params.length
        assert each.output_ids[:length].tolist() == plain(each)[:length], each.rid
    used = worker.draft_worker.draft_runner, worker.target_worker.model_runner
    assert used[0].attn_backend == "first extend" and used[1].attn_backend == "first"


@pytest.mark.parametrize("has_prefix_cache", [False, True])
def test_the_head_drafts_no_more_for_requests_whose_tokens_it_has_not_read(sglang, monkeypatch, has_prefix_cache):
    monkeypatch.setenv("GRAFT_SGLANG_PLACES", "2:12,3:1")
    drafted = {}  # by request: of every tree, whether it was read by the head, and whether it has drafted nodes
    propose = Rounds.propose

    def recorded(self, requests, *args):
        proposal = propose(self, requests, *args)
        for request, sources in zip(requests, proposal.tree.sources, strict=True):
            drafted.setdefault(request.rid, []).append((request.is_read_by_head, bool((sources == DRAFTED).any())))
        return proposal

    monkeypatch.setattr(Rounds, "propose", recorded)
    requests = [sglang.Request(name, PROMPT[: 8 - number], length=60) for number, name in enumerate("abc")]
    requests[2].sampling_params.length = 20
    flags = {"max_running_requests": 8, "disable_radix_cache": not has_prefix_cache}
    decode(sglang, requests, rounds_each_joins=2, **flags)
    expected = {True} if has_prefix_cache else {True, False}  # before and after three ran together
    assert {was_read for was_read, _ in drafted["a"]} == expected
    assert all(was_read == is_drafted for each in drafted.values() for was_read, is_drafted in each)
    assert all(each.output_ids[: each.sampling_params.length].tolist() == plain(each) for each in requests)


def test_a_request_that_lost_the_head_and_is_read_again_is_drafted_for(sglang):
    worker = sglang.EAGLEWorkerV2(sglang.server_args(disable_radix_cache=True), sglang.target_worker())
    texts, requests = worker.draft_worker._rounds.texts, [sglang.Request("a", PROMPT), sglang.Request("b", PROMPT)]
    texts.lose_head(requests)

    def read(request, num_before=0):
        worker.forward_batch_generation(sglang.batch_of([request], prefix_lens=[num_before]))
        return texts.have_heads(requests)

    assert read(requests[1], num_before=4) == [False, False], "it has not read the beginning"
    assert read(requests[1]) == [False, True]
    assert read(sglang.Request("a", PROMPT)) == [False, True], "another request with its id"


@pytest.mark.parametrize("has_prefix_cache", [False, True])
def test_the_head_reads_no_prompts_that_come_to_rounds_without_trees(sglang, monkeypatch, has_prefix_cache):
    monkeypatch.setenv("GRAFT_SGLANG_PLACES", "2:12,3:1")
    args = sglang.server_args(max_running_requests=8, disable_radix_cache=not has_prefix_cache)
    worker = sglang.EAGLEWorkerV2(args, sglang.target_worker())
    worker.init_cuda_graphs()
    a, b, c, d = (sglang.Request(name, PROMPT) for name in "abcd")

    def reads(*requests, num_before=0):
        prompts = sglang.batch_of(requests, prefix_lens=[num_before] * len(requests))
        found = worker.forward_batch_generation(prompts).next_draft_input
        assert found.topk_p is not None and found.bonus_tokens.tolist() == [each.ids[-1] for each in requests]
        has_read = bool(found.topk_p.any())
        assert {each.is_read_by_head for each in requests} == {has_read}
        return has_read

    assert reads(a)
    assert reads(a, num_before=4), "the same request's prompt, of which this is a later part"
    worker.forward_batch_generation(sglang.batch_of([a]))
    assert reads(b)
    assert reads(c) == has_prefix_cache, "a third, before any round of three"
    worker.forward_batch_generation(sglang.batch_of([a]))
    assert reads(d), "only one is left"
    worker.forward_batch_generation(sglang.batch_of([a, d]))
    a.output_ids.extend(range(60))
    assert reads(sglang.Request("e", PROMPT)), "one has ended since the last round"
    worker.forward_batch_generation(sglang.batch_of([d]))
    for number in range(4):  # requests that want no token never come to a round
        assert reads(sglang.Request(f"empty {number}", PROMPT, length=0))


def test_a_rank_without_requests_reads_nothing_while_others_read_prompts(sglang):
    worker = sglang.EAGLEWorkerV2(sglang.server_args(disable_radix_cache=True), sglang.target_worker())
    idle = sglang.batch_of([], prefix_lens=[])
    idle.prefix_lens = None
    worker.forward_batch_generation(idle)


def test_a_graph_never_reads_a_mask_that_is_too_small(sglang):
    """It reads the memory that it was captured with: the trees could not be put elsewhere."""
    target = sglang.target_worker()
    target.is_captured = True
    worker = sglang.EAGLEWorkerV2(sglang.server_args(), target)
    batch = sglang.batch_of([sglang.Request("a", PROMPT)], torch.zeros(12 * 12, dtype=torch.uint8))
    with pytest.raises(GraftError, match="room for 144 tokens"):
        worker.forward_batch_generation(batch)


def test_the_mask_of_graphs_has_room_for_the_places_behind_the_longest_texts(sglang):
    backend, other = sglang.TritonAttnBackend(), sglang.TritonAttnBackend(has_mask=False)
    for each in (backend, other):
        each.init_cuda_graph_state(4, 4 * 12)
    assert len(backend.cuda_graph_custom_mask) == 4 * 12 * (100 + 12)
    assert backend.cuda_graph_custom_mask.dtype == torch.uint8 and not hasattr(other, "cuda_graph_custom_mask")


def test_a_line_is_logged_every_so_many_rounds(sglang, monkeypatch, caplog):
    monkeypatch.setenv("GRAFT_SGLANG_LOG", "5")
    caplog.set_level("INFO")
    _, inputs = decode(sglang, [sglang.Request("a", PROMPT)])
    lines = [record.message for record in caplog.records if "Graft:" in record.message]
    assert len(lines) == len(inputs) // 5 >= 1 and lines[0].startswith("Graft: 5 rounds of 1.0 requests, ")


def test_texts_that_are_not_known_whole_give_the_plain_text_and_a_warning(sglang, monkeypatch, caplog):
    from graft.integrations.sglang import rounds

    whole = rounds.Texts.of

    def late(*args):
        return [Text(text.ids[:-2], text.num_prompt_tokens) for text in whole(*args)]

    monkeypatch.setattr(rounds.Texts, "of", late)
    one = sglang.Request("a", PROMPT)
    decode(sglang, [one])
    assert one.output_ids[:60].tolist() == plain(one)[:60]
    assert [record.message for record in caplog.records] == [
        "requests do not end with the token to be decoded next: Graft retrieves badly"
    ]


def test_a_request_without_a_seed_gets_one_of_its_own(sglang):
    texts = []
    for _ in range(2):
        one = sglang.Request("same id", PROMPT, top_k=1 << 30, temperature=1.5)
        decode(sglang, [one])
        texts.append(one.output_ids.tolist())
    assert texts[0] != texts[1]


@pytest.mark.parametrize("limits", [{}, {"top_k": 9}, {"top_p": 0.7}])
def test_in_deterministic_mode_the_text_is_the_one_that_sglang_draws_without_speculation(sglang, monkeypatch, limits):
    from graft.integrations.sglang import worker

    monkeypatch.setattr(worker, "_DRAWN_AT_ONCE", 5)  # less than a tree: parts cut through it
    drawn = {"top_k": 1 << 30, "temperature": 0.8} | limits
    requests = [sglang.Request(str(seed), PROMPT * 2 + [seed], **drawn, sampling_seed=seed) for seed in (3, 4)]
    _, inputs = decode(sglang, requests, is_deterministic=True)
    assert len(inputs) < 60
    for each in requests:
        params = each.sampling_params
        ids = [*each.origin_input_ids, each.origin_input_ids[0]]
        for _ in range(params.length - 1):
            probabilities = (sglang_double.target_logits(ids) / params.temperature).softmax(0)[None]
            place = [torch.tensor([params.sampling_seed]), torch.tensor([len(ids) - 1])]
            if limits:
                cut = [torch.tensor([params.top_k]), torch.tensor([params.top_p]), torch.zeros(1)]
                token = sglang_double.top_k_top_p_min_p_sampling_from_probs_torch(probabilities, *cut, False, *place)
            else:
                token = sglang_double.sampling_from_probs_torch(probabilities, *place)
            ids.append(int(token))
        assert each.output_ids[: params.length].tolist() == ids[len(each.origin_input_ids) :]
    with_our_noise = [sglang.Request(str(seed), PROMPT * 2 + [seed], **drawn, sampling_seed=seed) for seed in (3, 4)]
    decode(sglang, with_our_noise)
    assert [each.output_ids[:60] for each in with_our_noise] != [each.output_ids[:60] for each in requests]


def test_flushing_the_cache_forgets_what_was_learned(sglang):
    worker, _ = decode(sglang, requests_of(sglang)[:2])
    rounds = worker.draft_worker._rounds
    assert rounds.grafter.state()["past/lengths"].numel() or len(rounds.texts)
    worker.clear_cache_pool()
    assert not rounds.grafter.state()["past/lengths"].numel() and not len(rounds.texts)


def test_sglang_itself_goes_on_where_no_worker_of_ours_calls(sglang):
    with pytest.raises(AssertionError, match="SGLang's own"):
        sglang.organize_draft_results([], [], [], 3)
    with pytest.raises(AssertionError, match="SGLang's own"):
        sglang.build_tree_kernel_efficient(*[torch.zeros(1)] * 4, torch.ones(1), 1, 2, 3, 4)


def test_flags_are_checked_by_the_launcher_and_the_head_once_it_is_loaded(sglang):
    sglang.server_args().check_server_args()
    with pytest.raises(GraftError, match="--speculative-adaptive"):
        sglang.server_args(speculative_adaptive=True).check_server_args()
    with pytest.raises(GraftError, match="LlamaForCausalLMEagle3"):
        sglang.EAGLEWorkerV2(sglang.server_args(), sglang.target_worker("LlamaForCausalLM"))


def test_ranks_that_choose_apart_have_one_size_of_trees():
    flags = sglang_double.server_args(enable_dp_attention=True)
    assert [tuple(size) for size in sizes_for(flags, SGLangSettings())] == [(None, 12, 3)]
    assert [tuple(size) for size in sizes_for(flags, SGLangSettings(places="4:5"))] == [(None, 5, 3)]
    with pytest.raises(GraftError, match="GRAFT_SGLANG_PLACES must name one size of trees with --enable-dp-attention"):
        check_server(flags, SGLangSettings(places="1:12,4:5"))


def test_sizes_of_trees_follow_the_flags_or_the_variable():
    assert [tuple(size) for size in tree_sizes(None, 48, 6)] == [
        (2, 48, 6),
        (4, 32, 5),
        (8, 16, 4),
        (16, 8, 3),
        (32, 4, 2),
        (None, 1, 1),
    ]
    assert [tuple(size) for size in tree_sizes(None, 48, 6, max_requests=3)] == [(2, 48, 6), (None, 32, 5)]
    assert [tuple(size) for size in tree_sizes(None, 3, 2)] == [(None, 3, 2)]
    assert [tuple(size) for size in tree_sizes("4:16,64:1", 48, 6)] == [(4, 16, 4), (None, 1, 1)]
    assert captured_sizes([1, 2, 4, 8, 12], 2, 5) == [4, 8] and captured_sizes([1, 2, 4], 2, None) == [4]
    assert captured_sizes([1, 2, 4], 8, None) == [4], "larger batches run without a graph"


# Ranks


def serve_rank(rank, folder):
    """One of two ranks, whose head drafts other tokens than the other's: both must verify the same tree."""
    os.environ["GRAFT_SGLANG"] = "1"
    torch.distributed.init_process_group("gloo", f"file://{folder}/ranks", rank=rank, world_size=2)
    with pytest.MonkeyPatch.context() as patch:
        double = sglang_double.install(patch)
        double.group = double.Processes()
        plugin.register()
        double.HookRegistry.apply_hooks()
        honest = double.head_probabilities
        if rank:
            double.head_probabilities = lambda context: honest(context).flip(0)
        requests = requests_of(double)
        worker, inputs = decode(double, requests)
        names = ("draft_token", "positions", "custom_mask", "retrieve_next_token", "retrieve_next_sibling")
        trees = [[getattr(each, name) for name in names] for each in inputs]
        torch.save(
            (trees, [each.output_ids.tolist() for each in requests], worker.draft_worker.decides), f"{folder}/{rank}.pt"
        )
    torch.distributed.destroy_process_group()


def test_all_ranks_verify_the_tree_of_rank_0(tmp_path):
    torch.multiprocessing.spawn(serve_rank, (str(tmp_path),), nprocs=2)
    (trees, texts, decides), (others, their_texts, they_decide) = (
        torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)
    )
    assert decides and not they_decide
    assert len(trees) == len(others) > 10 and texts == their_texts
    for own, their in zip(trees, others, strict=True):
        assert all(a.equal(b) for a, b in zip(own, their, strict=True))
    for each, text in zip(requests_of(sglang_double), texts, strict=True):
        length = each.sampling_params.length
        assert text[:length] == plain(each)[:length]
