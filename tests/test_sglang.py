"""The SGLang plugin without SGLang or a GPU: texts and trees, and whole rounds over a stand-in."""

import ast
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")

import sglang_double
from graft.errors import GraftError
from graft.integrations.sglang import kernels, plugin, slots, trees
from graft.integrations.sglang.kernels import Drafted, Rows
from graft.integrations.sglang.settings import (
    SGLangSettings,
)
from graft.integrations.sglang.trees import Server, Trees, draw_in_torch
from graft.model.captures import CaptureError
from graft.model.sampler import Sampler, SamplingSettings
from graft.tree.device import triton_kernels
from graft.tree.device.round import DeviceRound
from sglang_rounds import PROMPT, VOCAB, check_texts, decode, plain, requests_of, run, use_quick_parts

SERVER = Server(
    num_slots=5, context=200, num_kv_slots=1000, vocab_size=VOCAB, topk=3, num_steps=2, most_rows=4, random_seed=0,
    knows_noise=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_memory(monkeypatch):
    monkeypatch.setattr(trees, "_PAST_TOKENS", 1024)
    monkeypatch.setattr(trees, "_TABLE_ROWS", 1024)


def made(settings=None, **changes):
    shape = Server(**vars(SERVER) | changes)
    return Trees(shape, settings or SGLangSettings(), None, torch.device("cpu"))


def request(slot, prompt, output=(), **params):
    one = sglang_double.Request(f"request {slot}", list(prompt), **params)
    one.req_pool_idx = slot
    one.ids = list(output) or one.ids
    one.output_ids.extend(output)
    return one


# The target's tokens


@pytest.mark.parametrize(
    ("limits", "is_captured"),
    [({}, False), ({"top_k": 5}, False), ({"top_p": 0.6}, False), ({"min_p": 0.2}, False), ({"top_p": 0.6}, True)],
)
def test_tokens_are_those_of_our_own_sampler_whatever_stands_beside_them(limits, is_captured):
    rng = torch.Generator().manual_seed(0)
    contexts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    usual = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | limits
    wanted = [SamplingSettings(temperature=0.8, seed=11, **usual), SamplingSettings(temperature=0.0)]
    logits = torch.randn(2, 4, VOCAB, generator=rng) * 2
    given = usual | {"top_k": usual["top_k"] or 1 << 30}
    requests = [request(3, contexts[0], temperature=0.8, sampling_seed=11, **given), request(1, contexts[1])]
    depths = torch.tensor([0, 1, 1, 2])
    positions = (torch.tensor([len(context) - 1 for context in contexts])[:, None] + depths).flatten()
    flat, best, now = logits.flatten(0, 1), logits.argmax(-1).flatten(), made()
    if is_captured:  # for batches of up to three, whose logits lie in the same memory
        buffer = torch.zeros(12, VOCAB)
        now.warm_up(3, 4, buffer, None)
        now.reset()
        flat = buffer[:8].copy_(flat)
    now.see(requests)
    drawn = now.draw(flat, best, positions, torch.tensor([3, 1]), bool(limits))
    assert (drawn.data_ptr() == now._chosen.data_ptr()) == is_captured, "a graph leaves its tokens in the same memory"
    found = drawn.view(2, 4).clone()
    for place, depth in enumerate(depths.tolist()):
        sampler = Sampler(wanted, [[*context, *[0] * depth] for context in contexts], [], VOCAB, torch.device("cpu"))
        assert found[:, place].tolist() == sampler.choose(logits[:, place], [True, True]).tolist()
    for row, slot in enumerate((3, 1)):
        own = slice(4 * row, 4 * row + 4)
        alone = now.draw(flat[own], best[own], positions[own], torch.tensor([slot]), bool(limits))
        assert alone.equal(found[row]), "alone"
    names = ("temperature", "top_k", "top_p", "min_p")
    columns = [torch.tensor([getattr(each.sampling_params, name) for each in requests]) for name in names]
    seeds = [now.seed_of(each) for each in requests]
    assert draw_in_torch(flat, best, positions, seeds, columns).equal(found.flatten()), "what stands in for the kernels"


def test_the_heads_tokens_are_ranked_with_the_noise_of_the_draws_to_come():
    """Given the target's own logits, the head's first token is the one that will be drawn."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(2, VOCAB)
    now, ends = made(), torch.tensor([9, 6])
    requests = [request(2, range(9), top_k=1 << 30, temperature=0.7), request(4, range(6))]
    now.see(requests)
    rows = torch.tensor([2, 4])
    now.load(Rows(rows, ends - 1, torch.tensor([1, 2])), 4)
    _, tokens = now.likeliest(logits / 1.2, 3, ends, depth=3)  # a head's logits are sharpened
    best = logits.argmax(-1)
    assert tokens[:, 0].equal(now.draw(logits, best, ends + 1, rows, False)) and tokens[0, 0] != best[0]


def test_a_graph_ranks_the_heads_tokens_as_its_kernels_do_and_leaves_those_of_an_earlier_batch():
    torch.manual_seed(0)
    requests = [request(2, range(9), top_k=1 << 30, temperature=0.7), request(4, range(6))]
    found = []
    for is_captured in (False, True):
        now = made()
        if is_captured:
            now.warm_up(4, 4, None, None)
        load(now, requests, [1, 2])
        generator = torch.Generator().manual_seed(1)
        batches = [torch.randn(2, VOCAB, generator=generator) for _ in range(2)]
        found.append([now.likeliest(logits, 3, torch.tensor([9, 6]), depth=1) for logits in batches])
    for eager, captured in zip(*found, strict=True):
        assert eager[0].equal(captured[0]) and eager[1].equal(captured[1])


def test_a_request_without_a_seed_has_one_of_its_own_and_keeps_it():
    now, others = made(), made()
    first, second = request(1, PROMPT), request(1, PROMPT)
    seeds = [now.seed_of(each) for each in (first, second, first)]
    assert seeds[0] == seeds[2] != seeds[1]
    assert others.seed_of(request(1, PROMPT)) == seeds[0], "the same on all ranks"
    assert now.seed_of(request(1, PROMPT, sampling_seed=5)) == 5


# Texts


def text_of(now, slot):
    length = int(now.round.texts.lengths[slot])
    return now.round.texts.own[slot, :length].tolist()


def past_of(now):
    """The finished texts that are searched."""
    written, dropped = now.round.texts.past_end.tolist()
    ring = now.round.texts.past.tolist()
    joined = [ring[at % len(ring)] for at in range(dropped, written)]
    texts = [[]]
    for token in joined:
        texts.append([]) if token < 0 else texts[-1].append(token)
    return [text for text in texts if text]


def load(now, requests, roots, num_places=4):
    now.see(requests)
    lengths = [len(each.origin_input_ids) + len(each.ids) - 1 for each in requests]
    slots = torch.tensor([each.req_pool_idx for each in requests])
    now.load(Rows(slots, torch.tensor(lengths), torch.tensor(roots)), num_places)


def test_texts_end_in_the_token_to_be_decoded_next_also_after_rounds_without_trees():
    now, one = made(), request(2, PROMPT)
    one.ids = [7]
    load(now, [one], [7])
    assert text_of(now, 2) == [*PROMPT, 7]
    one.ids = [7, 1]
    load(now, [one], [1], num_places=1)  # the scheduler knows nothing of it yet
    assert text_of(now, 2) == [*PROMPT, 7, 1]
    one.ids, one.output_ids = [7, 1, 5, 6], one.output_ids[:0]  # a round failed: its tokens are not known here
    load(now, [one], [6])
    assert text_of(now, 2) == [*PROMPT, 7, 1, -1, 6]


def test_a_slot_that_another_request_takes_has_its_text_and_settings():
    now = made()
    load(now, [request(2, PROMPT, temperature=0.4, top_k=9)], [7])
    assert now.round.inputs["temperatures"][0] == pytest.approx(0.4) and now.round.inputs["kinds"][0] == 1
    load(now, [request(2, [1, 2, 1 << 40], [9])], [3])
    assert text_of(now, 2)[:2] == [1, 2] and text_of(now, 2)[2] == -1, "an image is not a token"
    assert now.round.inputs["temperatures"][0] == 0 and now.round.inputs["kinds"][0] == 0
    assert now.round.inputs["caps"].tolist() == [3, -1, -1, -1, -1], "the others are padding"


def test_finished_texts_are_kept_and_what_prompts_have_in_common_only_once(monkeypatch):
    now, system = made(), [*range(30), *range(30)]
    for number in range(3):
        load(now, [request(1, [*system, 35, number], [5, 6], length=2)], [6])
    load(now, [request(1, [1], [1])], [1])
    first, *others = past_of(now)
    assert first == [*system, 35, 0, 5, 6]
    context = [*system, 35][-slots.MAX_MATCH :]  # so much of the common part that matches are found
    assert others == [[*context, number, 5, 6] for number in (1, 2)]
    monkeypatch.setattr(slots, "_MOST_OF_A_TEXT", 4)
    load(now, [request(2, [9] * 50, [1, 2], length=2)], [2])
    load(now, [request(2, [1], [1])], [1])
    assert past_of(now)[-1] == [9, 9, 1, 2]


def test_texts_that_end_and_requests_that_take_their_slots_are_one_launch(monkeypatch):
    monkeypatch.setattr(slots, "_COMPARED_TOKENS", 0)
    now, launches, write = made(), [], kernels.write_requests
    monkeypatch.setattr(kernels, "write_requests", lambda *args: launches.append(write(*args)))
    rng, expected = np.random.default_rng(0), []
    for turn in range(12):  # the ring of 1,024 tokens is written three times over
        texts = [rng.integers(0, VOCAB, rng.integers(1, 120)).tolist() for _ in range(3)]
        slots_of = rng.permutation(4)[:3] + 1
        requests = [request(int(slot), text, [7], length=1) for slot, text in zip(slots_of, texts, strict=True)]
        now.see(requests)
        assert len(launches) == turn + 1
        for one in requests:
            own = now.round.texts.own[one.req_pool_idx].tolist()
            assert own == [*one.origin_input_ids, 7] + [-1] * (200 - len(one.origin_input_ids) - 1)
        if turn:
            assert past_of(now)[-3:] == expected, "in the order of the slots before"
        expected = [[*one.origin_input_ids, 7] for one in requests]
    now.see([])
    assert past_of(now)[-3:] == expected and len(launches) == 13


def test_a_retracted_request_is_kept_once_when_it_has_ended():
    now, one = made(), request(1, PROMPT, [7], length=2)
    now.see([one])
    now.see([request(1, [3, 4], [5], length=2)])
    assert past_of(now) == []
    one.req_pool_idx = 2
    now.see([one])
    one.ids = [7, 8]
    one.output_ids.append(8)
    now.round.texts.own[2, len(PROMPT) + 1] = 8  # as a round writes it
    now.see([])
    assert past_of(now) == [[*PROMPT, 7, 8]]


def test_after_a_failed_launch_nothing_is_lost(monkeypatch):
    now = made()
    now.see([request(1, [1, 2], [3], length=1)])
    write, both = kernels.write_requests, [request(1, [4], [5], length=1), request(2, [6], [7], length=1)]
    monkeypatch.setattr(kernels, "write_requests", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        now.see(both)
    monkeypatch.setattr(kernels, "write_requests", write)
    now.see(both)
    empty = request(3, [1], length=0)
    empty.origin_input_ids = empty.origin_input_ids[:0]
    now.see([empty])
    now.see([])
    assert past_of(now) == [[1, 2, 3], [4, 5], [6, 7]]


def test_if_more_ends_at_once_than_is_kept_the_oldest_texts_are_left_out():
    now = made(num_slots=12)
    requests = [request(slot, [slot] * 150, [1], length=1) for slot in range(1, 11)]
    now.see(requests)
    now.see([])
    assert past_of(now) == [[slot] * 150 + [1] for slot in range(5, 11)]


def test_isolated_requests_leave_nothing_to_others():
    now = made(SGLangSettings(isolated=True))
    salts = []
    for _ in range(2):
        load(now, [request(1, PROMPT, [1], length=1)], [1])
        salts.append(int(now.round.inputs["salts"][0]))
    assert not past_of(now) and len(set(salts)) == 2 and 0 not in salts


class NoReading(TorchFunctionMode):
    """Refuses what would make the host wait for the device."""

    REFUSED = ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert getattr(function, "__name__", "") not in self.REFUSED, function
        assert function is not torch.Tensor.to or "cpu" not in map(str, args[1:])
        return function(*args, **kwargs or {})


def test_a_round_reads_nothing_back_from_the_device(monkeypatch):
    """The kernels themselves cannot, so they are left out."""
    for name in ("load_rows", "split_levels", "place_trees"):
        monkeypatch.setattr(kernels, name, lambda *args: None)
    monkeypatch.setattr(trees.draw_kernels, "draw", lambda *args, **more: None)
    monkeypatch.setattr(trees.topk_kernels, "highest", lambda logits, k: (torch.zeros(len(logits), k),) * 3)
    now, rows = made(), torch.tensor([2, 3])
    monkeypatch.setattr(now.round, "propose", lambda *args, **more: None)
    monkeypatch.setattr(now.round, "finish", lambda *args, **more: None)
    requests = [request(2, PROMPT), request(3, PROMPT, top_k=9)]
    drafted = Drafted(torch.zeros(2, 12).long(), torch.zeros(2, 12), torch.zeros(2, 7).long())
    lengths, places = torch.tensor([8, 8]), torch.zeros(8).long()
    with NoReading():
        for _ in range(3):
            now.see(requests)
            now.load(Rows(rows, lengths, rows), 4)
            now.propose(drafted, 4)
            now.arrays(2, 4, None, 16, True, True)
            now.rank_successors(torch.zeros(8, VOCAB), 4)
            now.draw(torch.zeros(8, VOCAB), places, places, rows, True)
            now.finish(2, 4, places)
            requests = [request(2, PROMPT, [1], length=1), requests[1]]  # one ends and another takes its place
        now.lose_head(rows, lengths)
        now.find_head(rows, lengths, [3, 0], torch.zeros(5, 9).int())


# Whole rounds


@pytest.fixture
def sglang(monkeypatch):
    """The stand-in, with the plugin's hooks applied as SGLang does."""
    double = sglang_double.install(monkeypatch)
    monkeypatch.setenv("GRAFT_SGLANG", "1")
    monkeypatch.setenv(sglang_double.SKIP, "")  # so that what the worker sets is taken back
    monkeypatch.delenv(sglang_double.SKIP)
    use_quick_parts(monkeypatch)
    plugin.register()
    double.HookRegistry.apply_hooks()
    return double


@pytest.mark.parametrize(("room", "is_overlapped"), [(None, True), (4 * 6 * 200, False), (4 * 6 * 20, True)])
def test_whole_rounds_give_the_plain_text_in_fewer_rounds(sglang, room, is_overlapped, caplog):
    requests = requests_of(sglang)
    buffer = torch.zeros(room, dtype=torch.uint8) if room is not None else None  # the last is too small for any round
    worker, inputs = decode(sglang, requests, mask_buffer=buffer, is_overlapped=is_overlapped)
    assert not caplog.records and sglang.num_own_trees == 0
    check_texts(requests)
    assert len(inputs) < 22, "little more than the tokens of one request alone"
    assert all(len(each.draft_token) % 6 == 0 for each in inputs)
    assert len(past_of(worker.draft_worker.trees)) >= len(requests) - 2


def test_triton_kernels_of_whole_rounds_give_the_plain_text(sglang, monkeypatch):
    monkeypatch.setattr(trees, "DeviceRound", partial(DeviceRound, kernels=triton_kernels))
    requests = [sglang.Request("a", PROMPT * 2, length=7, temperature=0.7, top_k=1 << 30, sampling_seed=5)]
    worker, inputs = decode(sglang, requests, speculative_num_draft_tokens=4)
    check_texts(requests)
    assert len(inputs) < 6 and sglang.num_own_trees == 0
    assert (worker.draft_worker.trees.round.tables.entries >= 0).any(), "successors were learned"


def test_what_fails_costs_a_rounds_tree_and_is_logged_once(sglang, monkeypatch, caplog):
    counts = {"calls": 0, "failures": 0}

    def failing(name, function):
        def called(*args, **more):
            counts["calls"] += 1
            if counts["calls"] % 7 == 0:
                counts["failures"] += 1
                raise RuntimeError(f"planted in {name}")
            return function(*args, **more)

        return called

    for name in ("see", "load", "propose", "arrays", "likeliest", "draw", "finish"):
        monkeypatch.setattr(Trees, name, failing(name, getattr(Trees, name)))
    requests = requests_of(sglang)
    decode(sglang, requests, is_overlapped=True)
    check_texts(requests)
    assert counts["failures"] > 10 and sglang.num_own_trees > 0
    messages = [record.message for record in caplog.records]
    assert len(messages) == len(set(messages)) and all("SGLang continues without it" in each for each in messages)
    assert any("planted" in str(record.exc_info[1]) for record in caplog.records)


@pytest.mark.parametrize("name", ["propose", "likeliest"])
def test_what_fails_in_a_capture_leaves_sglangs_own_trees_in_all_rounds(sglang, monkeypatch, caplog, name):
    """The captured graph does without our kernel for good, so what its rounds leave in memory is not a tree."""
    works, calls = getattr(Trees, name), []

    def fails_once(*args):
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("planted")
        return works(*args)

    monkeypatch.setattr(Trees, name, fails_once)
    requests = requests_of(sglang, length=8)
    sglang.captured_batch = sglang.batch_of(requests[:1])
    _, inputs = decode(sglang, requests)
    check_texts(requests)
    assert sglang.num_own_trees == len(inputs) and len(calls) == 1
    assert "planted" in str(caplog.records[0].exc_info[1])


def test_graphs_for_more_requests_than_have_such_trees_build_none(sglang, monkeypatch):
    """SGLang captures the largest trees for all batch sizes, and compiling their kernels would take minutes."""
    monkeypatch.setenv("GRAFT_SGLANG_PLACES", "1:6,2:4,3:1")
    built, propose = [], Trees.propose
    monkeypatch.setattr(Trees, "propose", lambda self, *args: (built.append(args[1]), propose(self, *args))[1])
    requests = requests_of(sglang, length=8)
    for number, each in enumerate(requests):
        each.req_pool_idx = number + 1
    flags = sglang.server_args(max_running_requests=8, speculative_num_steps=2, speculative_num_draft_tokens=6)
    for num_rows, expected in ((1, [6]), (2, [])):
        sglang.captured_batch = sglang.batch_of(requests[:num_rows])
        worker = sglang.EAGLEWorkerV2(flags, sglang.target_worker())
        worker.init_cuda_graphs()
        assert built == expected and worker.draft_worker.captured == [1]
        assert flags.cuda_graph_config.decode.bs == [1, 2, 4, 8], "SGLang's own setting stays"
        built.clear()
    sglang.captured_batch = None
    decode(sglang, requests, max_running_requests=8)
    assert {6, 4} == set(built) and sglang.num_own_trees == 0
    check_texts(requests)


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_trees_shrink_with_the_number_of_requests_and_end_when_the_head_has_read_none(
    sglang, monkeypatch, is_overlapped
):
    monkeypatch.setenv("GRAFT_SGLANG_PLACES", "1:6,2:4,3:1")
    requests = requests_of(sglang)
    requests[-1].sampling_params.length = 40
    are_read, batch_of = [], sglang.batch_of

    def noted(batch, *args, prefix_lens=None):
        if prefix_lens is None:
            are_read.append(any(each.is_read_by_head for each in batch))
        return batch_of(batch, *args, prefix_lens=prefix_lens)

    monkeypatch.setattr(sglang, "batch_of", noted)
    flags = {"max_running_requests": 8, "speculative_num_steps": 3}
    worker, inputs = decode(sglang, requests, is_overlapped=is_overlapped, **flags)
    assert worker.built == [(4, 2, [2]), (1, 1, [1, 2, 4, 8])]
    sizes = [each.draft_token_num for each in inputs]
    assert {1, 4, 6} == set(sizes) and sizes[0] == 6 and sizes[-1] == 1
    for each, num_places, is_read in zip(inputs, sizes, are_read, strict=True):
        assert num_places == ({1: 6, 2: 4}.get(len(each.draft_token) // num_places, 1) if is_read else 1)
    check_texts(requests)
    used = worker.draft_worker.draft_runner, worker.target_worker.model_runner
    assert used[0].attn_backend == "1" == used[1].attn_backend
    late = request(1, PROMPT)
    run(worker, sglang.batch_of([late], prefix_lens=[0]))
    run(worker, sglang.batch_of([late]))
    assert used[0].attn_backend == "first extend" and used[1].attn_backend == "first", "trees come back"


def test_trees_come_back_with_the_first_text_that_the_head_has_read(sglang, monkeypatch):
    monkeypatch.setenv("GRAFT_SGLANG_PLACES", "4:4,5:1")
    worker = sglang.EAGLEWorkerV2(sglang.server_args(max_running_requests=8), sglang.target_worker())
    worker.init_cuda_graphs()
    old, new = [request(slot, PROMPT) for slot in range(1, 6)], request(6, PROMPT)

    def places_of(*requests):
        return run(worker, sglang.batch_of(list(requests))).verify_input.draft_token_num

    run(worker, sglang.batch_of(old, prefix_lens=[0] * 5))
    assert places_of(*old) == 1, "too many requests"
    assert places_of(*old[:3]) == 1, "the head has read none of them"
    run(worker, sglang.batch_of([new], prefix_lens=[0]))
    assert places_of(*old[:3], new) == 4
    assert new.is_read_by_head and new.drafts[0].any() and not old[0].is_read_by_head
    assert places_of(*old[:3], new) == 4, "the head goes on reading it"
    for each in (*old, new):
        assert each.ids == plain(each)[: len(each.ids)]


class Ranks:
    """Two ranks, one after the other: the second gets what the first has sent."""

    world_size = 2

    def __init__(self):
        self.sent, self.is_first = [], True

    def broadcast(self, tensor, src):
        assert src == 0
        if self.is_first:
            self.sent.append(tensor.clone())
        else:
            tensor.copy_(self.sent.pop(0))
        return tensor


@pytest.mark.parametrize("is_failing", [False, True])
def test_all_ranks_verify_the_tree_of_rank_0(sglang, monkeypatch, is_failing):
    """Though the head of the other rank drafts other tokens. If rank 0 fails, which it does in every second round, all
    ranks have trees of roots alone, and none waits for another."""
    group, found, texts, honest, propose = Ranks(), [], [], sglang.head_logits, Trees.propose
    sglang.group = group

    def fails(self, *args):
        self.calls = getattr(self, "calls", 0) + 1
        if is_failing and group.is_first and self.calls % 2:
            raise RuntimeError("planted")
        return propose(self, *args)

    monkeypatch.setattr(Trees, "propose", fails)
    for group.is_first in (True, False):
        if not group.is_first:
            sglang.head_logits = lambda *context: honest(*context).flip(0)
        requests = requests_of(sglang, length=12)[:2]
        _, inputs = decode(sglang, requests)
        names = ("draft_token", "positions", "custom_mask", "retrieve_next_token", "retrieve_next_sibling")
        found.append([[getattr(each, name) for name in names] for each in inputs])
        check_texts(requests)
        texts.append([each.output_ids.tolist() for each in requests])
    assert texts[0] == texts[1] and not group.sent and len(found[0]) == len(found[1]) > 4
    assert sglang.num_own_trees == 0
    for own, their in zip(*found, strict=True):
        assert all(a.equal(b) for a, b in zip(own, their, strict=True))
    has_nodes = {bool(tokens[1:6].any()) for tokens, *_ in found[0]}
    assert has_nodes == ({False, True} if is_failing else {True})


def test_batches_that_are_too_large_have_sglangs_own_trees(sglang, monkeypatch, caplog):
    monkeypatch.setattr(trees, "MAX_TREE_TOKENS", 11)
    requests = requests_of(sglang)[:2]
    decode(sglang, requests, rounds_each_joins=3)
    check_texts(requests)
    assert sglang.num_own_trees > 0
    assert [record.message for record in caplog.records] == [
        "Graft: batches of more than 512 places have SGLang's own trees"
    ]


def test_prompts_that_are_read_together_are_not_taken_for_a_round_of_large_trees(sglang, monkeypatch, caplog):
    monkeypatch.setattr(trees, "MAX_TREE_TOKENS", 11)
    monkeypatch.setenv("GRAFT_SGLANG_PLACES", "1:6,2:4")
    worker = sglang.EAGLEWorkerV2(sglang.server_args(max_running_requests=2), sglang.target_worker())
    worker.init_cuda_graphs()
    requests = [request(slot, PROMPT) for slot in (1, 2)]
    run(worker, sglang.batch_of(requests[:1], prefix_lens=[0]))
    run(worker, sglang.batch_of(requests[:1]))  # six places
    run(worker, sglang.batch_of(requests, prefix_lens=[0, 0]))
    run(worker, sglang.batch_of(requests))  # four
    assert not caplog.records and sglang.num_own_trees == 0


def test_the_head_drafts_no_more_for_requests_whose_tokens_it_has_not_read(sglang, monkeypatch):
    monkeypatch.setenv("GRAFT_SGLANG_PLACES", "2:6,3:1")
    drafted = {}  # by request: of every tree, whether it was read by the head, and whether the head drafted for it
    split = kernels.split_levels

    def recorded(*args):
        split(*args)
        num_rows, levels = len(args[0].tokens), args[4]
        for row, each in enumerate(now[:num_rows]):
            own = levels[2][: num_rows * 3].view(num_rows, 3)[row]
            drafted.setdefault(each.rid, set()).add((each.is_read_by_head, bool(own.any())))

    now = []
    see = Trees.see
    monkeypatch.setattr(
        Trees, "see", lambda self, requests: (now.__setitem__(slice(None), requests), see(self, requests))
    )
    monkeypatch.setattr(kernels, "split_levels", recorded)
    requests = [
        sglang.Request(name, [*PROMPT, number], length=40, temperature=3.0, top_k=1 << 30, sampling_seed=number)
        for number, name in enumerate("abcd")
    ]
    requests[1].sampling_params.length, requests[2].sampling_params.length = 12, 3
    decode(sglang, requests, rounds_each_joins=3, max_running_requests=8)
    assert drafted["a"] == {(True, True), (False, False)}, "before three ran together, and beside a later one"
    assert drafted["d"] == {(True, True)}
    check_texts(requests)


def test_a_prompt_behind_text_that_the_head_has_not_read_is_drafted_for_by_retrieval_alone(sglang):
    worker = sglang.EAGLEWorkerV2(sglang.server_args(), sglang.target_worker())
    draft, one = worker.draft_worker, request(1, PROMPT)
    run(worker, sglang.batch_of([one], prefix_lens=[0]))
    assert draft.trees._has_head[1] == 1
    tables = draft.req_to_token_pool.req_to_token
    draft.trees.lose_head(torch.tensor([1]), tables[1, 8:16])  # its answer was written without the head
    assert draft.trees._has_head[1] == 0
    tables[2, :16] = tables[1, :16]  # a request that continues the same text finds it in the prefix cache
    run(worker, sglang.batch_of([request(2, PROMPT * 3)], prefix_lens=[16]))
    run(worker, sglang.batch_of([request(3, PROMPT * 3)], prefix_lens=[0]))
    assert draft.trees._has_head[2:4].tolist() == [0, 1]


def test_the_head_reads_no_prompts_that_come_to_rounds_without_trees(sglang, monkeypatch):
    monkeypatch.setenv("GRAFT_SGLANG_PLACES", "2:6,3:1")
    args = sglang.server_args(max_running_requests=8)
    worker = sglang.EAGLEWorkerV2(args, sglang.target_worker())
    worker.init_cuda_graphs()
    a, b, c, d = (request(slot, PROMPT) for slot in range(1, 5))
    for each, rid in zip((a, b, c, d), "abcd", strict=True):
        each.rid = rid

    def reads(one, num_before=0):
        found = run(worker, sglang.batch_of([one], prefix_lens=[num_before])).next_draft_input
        assert found.bonus_tokens.tolist() == [one.ids[-1]]
        assert one.is_read_by_head == bool(found.topk_p.any())
        return one.is_read_by_head

    assert reads(a)
    assert reads(a, num_before=4), "the same request's prompt, of which this is a later part"
    run(worker, sglang.batch_of([a]))
    assert reads(b)
    assert not reads(c), "a third, before any round of three"
    run(worker, sglang.batch_of([a]))
    assert reads(d), "only one is left"
    run(worker, sglang.batch_of([a, d]))
    a.output_ids.extend(range(60))
    assert reads(request(5, PROMPT)), "one has ended since the last round"


def test_a_rank_without_requests_reads_nothing_while_others_read_prompts(sglang):
    worker = sglang.EAGLEWorkerV2(sglang.server_args(), sglang.target_worker())
    idle = sglang.batch_of([], prefix_lens=[])
    idle.prefix_lens = None
    worker.forward_batch_generation(idle)


@pytest.mark.parametrize(("tile", "warps", "most"), [(128, 4, 128), (256, 4, 64), (512, 8, 64), (1 << 20, 1, 1)])
def test_sglang_moves_no_more_tokens_at_once_than_its_registers_hold(sglang, tile, warps, most):
    worker = sglang.EAGLEWorkerV2(sglang.server_args(), sglang.target_worker())
    draft = worker.draft_worker
    copies = draft.token_to_kv_pool_allocator.get_kvcache()._kv_copy_config
    assert copies["num_locs_upper"] == 128
    copies |= {"bytes_per_tile": tile, "num_warps": warps, "num_locs_upper": 256}
    draft.alloc_memory_pool(None, draft.req_to_token_pool, draft.token_to_kv_pool_allocator)
    assert copies["num_locs_upper"] == most


def test_pools_that_move_tokens_in_another_way_are_left_alone(sglang, caplog):
    draft = sglang.EAGLEWorkerV2(sglang.server_args(), sglang.target_worker()).draft_worker
    draft.token_to_kv_pool_allocator.get_kvcache()._kv_copy_config = None
    draft.alloc_memory_pool(None, draft.req_to_token_pool, draft.token_to_kv_pool_allocator)
    assert "could not" not in caplog.text
    draft.token_to_kv_pool_allocator.get_kvcache()._kv_copy_config = {"another": "layout"}
    draft.alloc_memory_pool(None, draft.req_to_token_pool, draft.token_to_kv_pool_allocator)
    assert "could not let SGLang move fewer tokens at once" in caplog.text


def test_the_mask_of_graphs_has_room_for_the_places_behind_the_longest_texts(sglang):
    backend, other = sglang.TritonAttnBackend(), sglang.TritonAttnBackend(has_mask=False)
    for each in (backend, other):
        each.init_cuda_graph_state(4, 4 * 12)
    assert len(backend.cuda_graph_custom_mask) == 4 * 12 * (100 + 12)
    assert backend.cuda_graph_custom_mask.dtype == torch.uint8 and not hasattr(other, "cuda_graph_custom_mask")


def test_a_line_is_logged_every_so_many_rounds(sglang, monkeypatch, caplog):
    monkeypatch.setenv("GRAFT_SGLANG_LOG", "2")
    caplog.set_level("INFO")
    _, inputs = decode(sglang, [sglang.Request("a", PROMPT, length=14)])
    lines = [record.message for record in caplog.records if "Graft:" in record.message]
    assert 1 <= len(lines) <= len(inputs) // 2
    assert lines[0].startswith("Graft: 2 rounds with trees of 1.0 requests, ")
    assert 1 <= float(lines[0].split()[-4]) <= 6, "of a tree of six places; what was captured beforehand does not count"


@pytest.mark.parametrize("limits", [{}, {"top_k": 9}, {"top_p": 0.7}])
def test_in_deterministic_mode_the_text_is_the_one_that_sglang_draws_without_speculation(
    sglang, monkeypatch, caplog, limits
):
    from graft.integrations.sglang import worker

    monkeypatch.setattr(worker, "_DRAWN_AT_ONCE", 5)  # less than a tree: parts cut through it
    drawn = {"top_k": 1 << 30, "temperature": 0.8, "length": 20} | limits
    requests = [sglang.Request(str(seed), PROMPT * 2 + [seed], **drawn, sampling_seed=seed) for seed in (3, 4)]
    _, inputs = decode(sglang, requests, is_deterministic=True, enable_deterministic_inference=True)
    assert len(inputs) < 25
    told = ["Graft: in the deterministic mode sampled tokens are drawn by SGLang's own code, which is slower"]
    assert [record.message for record in caplog.records] == told
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
    assert [each.output_ids[:20] for each in with_our_noise] != [each.output_ids[:20] for each in requests]


def test_rounds_replay_graphs_that_were_captured_beforehand(sglang, monkeypatch, caplog):
    replayed, capture = Counter(), trees.Captures.capture

    def counted(self, run):
        replay = capture(self, run)
        return lambda: (replayed.update([run.func.__name__]), replay())

    monkeypatch.setattr(trees.Captures, "capture", counted)
    requests = requests_of(sglang)[:3]
    worker = sglang.EAGLEWorkerV2
    init = worker.init_cuda_graphs
    monkeypatch.setattr(worker, "init_cuda_graphs", lambda self: (init(self), replayed.clear()))
    _, inputs = decode(sglang, requests, mask_buffer="backend")
    check_texts(requests)
    num_drawn = sum(
        len(each.draft_token) > 6 for each in inputs
    )  # the first request, which is greedy, is alone at first
    num_ranked = len(inputs) + len(requests)  # of rounds and prompts
    expected = {name: len(inputs) for name in ("_place", "_rank_successors", "_finish")}
    assert replayed == expected | {"_draw": num_drawn, "_rank_first_level": num_ranked}
    assert not caplog.records


def test_rounds_without_trees_draw_in_graphs_too(sglang, monkeypatch, caplog):
    monkeypatch.setenv("GRAFT_SGLANG_PLACES", "1:6,2:1")
    replayed, draw = [], Trees.draw

    def noted(self, logits, best, *args):
        chosen = draw(self, logits, best, *args)
        replayed.append((len(best) < 6, chosen.data_ptr() == self._chosen.data_ptr()))
        return chosen

    monkeypatch.setattr(Trees, "draw", noted)
    requests = requests_of(sglang)
    decode(sglang, requests, rounds_each_joins=1, mask_buffer="backend", max_running_requests=8)
    check_texts(requests)
    assert (True, True) in replayed and all(is_captured for _, is_captured in replayed)
    assert not caplog.records


def test_what_cannot_be_captured_runs_without_graphs_and_is_logged_once(sglang, monkeypatch, caplog):
    def fails(self, run):
        raise CaptureError("planted")

    monkeypatch.setattr(trees.Captures, "capture", fails)
    requests = requests_of(sglang)
    decode(sglang, requests, mask_buffer="backend")
    check_texts(requests)
    assert sglang.num_own_trees == 0
    assert [record.message for record in caplog.records] == [
        "Graft could not capture its kernels in CUDA graphs, and launches them one by one; SGLang continues without it"
    ]


def test_counts_of_a_round_change_the_calibration_on_the_device(monkeypatch):
    now = made()
    monkeypatch.setattr(now.round, "finish", lambda *given: None)  # so that the counts stay
    probs = now.round.inputs["acceptance_probs"]
    prior, rng = probs.clone().double().numpy(), np.random.default_rng(0)
    tried = fitted = 0
    for _ in range(3):
        counts = rng.integers(0, 9, prior.shape)
        right = rng.integers(0, counts + 1)
        now.round.found["tried"].copy_(torch.from_numpy(counts))
        now.round.found["fitted"].copy_(torch.from_numpy(right))
        tried, fitted = tried + counts, fitted + right
        load(now, [request(1, PROMPT)], [5])
        now.leave_roots(torch.tensor([5]), torch.tensor([len(PROMPT)]), 4)
        now.finish(1, 4, torch.tensor([1, 2, 3, 4]))
    np.testing.assert_allclose(probs.numpy(), (16 * prior + fitted) / (16 + tried), rtol=1e-5)
    now.reset()
    np.testing.assert_array_equal(probs.double().numpy(), prior)


def test_trees_of_roots_alone_end_in_the_chosen_tokens_whatever_was_there_before():
    now, requests = made(), [request(1, PROMPT), request(2, PROMPT[:5])]
    now.step.fill_(7)
    load(now, requests, [11, 12])
    lengths = [len(PROMPT), 5]
    now.leave_roots(torch.tensor([11, 12]), torch.tensor(lengths), 4)
    found = now.arrays(2, 4, None, sum(lengths), True, True)
    assert found.draft_token.tolist() == [11, 0, 0, 0, 12, 0, 0, 0]
    assert found.positions.view(2, 4)[:, 0].tolist() == lengths
    now.finish(2, 4, torch.tensor([1, 0, 0, 0, 2, 0, 0, 0]))
    assert text_of(now, 1) == [*PROMPT, 11, 1] and text_of(now, 2) == [*PROMPT[:5], 12, 2]


def test_flushing_the_cache_forgets_what_was_learned(sglang):
    worker, _ = decode(sglang, requests_of(sglang)[:2])
    now = worker.draft_worker.trees
    now.round.tables.entries[3] = 5
    assert past_of(now)
    worker.clear_cache_pool()
    assert not past_of(now) and (now.round.tables.entries == -1).all()


def test_sglang_itself_goes_on_where_no_worker_of_ours_calls(sglang):
    tokens, scores = torch.arange(3)[None], torch.tensor([[0.5, 0.3, 0.2]])
    found = sglang.organize_draft_results([scores], [tokens], [torch.tensor([[-1]]), torch.zeros(1, 3)], 3)
    assert found[1].tolist() == [[0, 1]]
    sglang.build_tree_kernel_efficient(torch.tensor([4]), *found, torch.tensor([2]), 2, 3, 1, 3)
    assert sglang.num_own_trees == 1
    assert sglang.fast_topk(scores, 1, dim=-1).indices.tolist() == [[0]]


def test_wrong_flags_end_the_launcher_with_one_line_and_a_wrong_head_once_it_is_loaded(sglang):
    sglang.server_args().check_server_args()
    with pytest.raises(SystemExit, match=r"^error: Graft replaces what --speculative-adaptive does"):
        sglang.server_args(speculative_adaptive=True).check_server_args()
    with pytest.raises(GraftError, match="LlamaForCausalLMEagle3"):
        sglang.EAGLEWorkerV2(sglang.server_args(), sglang.target_worker("LlamaForCausalLM"))


def test_kernels_use_no_python_function_of_triton():
    """SGLang replaces triton.next_power_of_2 by a plain function, with which no kernel that uses it compiles."""
    source = Path(kernels.__file__).parents[2]
    for path in source.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in function.decorator_list):
                body = "\n".join(ast.unparse(line) for line in function.body)
                assert "triton." not in body, f"{path.name}: {function.name}"
