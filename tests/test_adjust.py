"""What `model.kernels.adjust` makes of logits is what the sampler and transformers' processors make of them."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")

from graft import SamplingSettings
from graft.engine.adjustments import Adjusted, Adjustments
from graft.engine.staging import Staging
from graft.model.cuda_graphs import StepBuffers
from graft.model.grammar import TreeMasks
from graft.model.kv_cache import Row
from graft.model.sampler import Sampler
from graft.request.sequence import Sequence
from graft.tree.device.round import RoundShape

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 75  # three words of a mask, the last one not full
EOS = [7, 50]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr("graft.model.kernels.adjust._CHUNK", 32)


def text_of(rng, num_prompt=6, num_new=0, **options):
    """A sequence with an answer so far. Few tokens, so that they come again."""
    sequence = Sequence([rng.randrange(12) for _ in range(num_prompt)], SamplingSettings(**options), EOS)
    sequence.ids += [rng.randrange(12) for _ in range(num_new)]
    return sequence


class Step:
    """Trees of some rows, as a device round lays them out, with padding to `size` tokens."""

    def __init__(self, rng, sequences, size=32, num_rows=4):
        self.shape = RoundShape(num_rows, size)
        self.buffers = StepBuffers(size, VOCAB, 1, torch.zeros(1, device=DEVICE))
        self.logits = torch.randn(size, VOCAB, generator=torch.Generator().manual_seed(rng.randrange(99))) * 3
        self.buffers.logits.copy_(self.logits)
        self.paths = []  # by row and node: the tokens behind the root
        columns, by_row = torch.zeros(6, size, dtype=torch.int32), torch.zeros(4, size, dtype=torch.int32)
        columns[4] = num_rows
        start = 0
        for row, sequence in enumerate(sequences):
            paths = [[]]
            for node in range(rng.randrange(4, 7)):
                parent = rng.randrange(len(paths)) if node else 0
                token = rng.randrange(12) if node else sequence.ids[-1]
                if node:
                    paths.append([*paths[parent], token])
                columns[:5, start + node] = torch.tensor([token, parent, node, len(paths[node]), row])
            by_row[:3, row] = torch.tensor([start, len(paths), len(sequence.ids) - 1])
            self.paths.append((start, paths))
            start += len(paths)
        self.buffers.columns[:, :size], self.buffers.by_row[:, :size] = columns.to(DEVICE), by_row.to(DEVICE)

    def adjusted(self, adjustments, sequences, rows):
        """The logits after `Adjustments.apply`, as in a round."""
        trees = adjustments.fetch_trees(sequences, self.buffers, self.shape)
        self.result = adjustments.apply(sequences, rows, self.buffers, self.shape, trees)
        return self.buffers.logits.cpu()


def added(sequences):
    adjustments = Adjustments(DEVICE, VOCAB, Staging(DEVICE))
    rows = [Row(number + 1) for number in range(len(sequences))]
    for row, sequence in zip(rows, sequences, strict=True):
        adjustments.add_row(row, sequence)
    return adjustments, rows


KINDS = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.4},
    {"frequency_penalty": 0.37},
    {"logit_bias": {3: 1.7, 70: -2.5, 5: -torch.inf}},
    {"min_tokens": 4, "stop_token_ids": [2]},
    {"repetition_penalty": 0.7, "presence_penalty": -0.3, "frequency_penalty": 0.11, "logit_bias": {1: 4.0, 2: -3.3}},
]


@pytest.mark.parametrize("seed", range(6))
def test_logits_after_every_node_are_the_samplers_to_the_last_bit(seed):
    """A row's kinds of adjustment may all be there, and any other row's."""
    rng = random.Random(seed)
    sequences = [text_of(rng, num_new=rng.randrange(6), **KINDS[(seed + row) % len(KINDS)]) for row in range(3)]
    sequences.insert(rng.randrange(4), text_of(rng))
    adjustments, rows = added(sequences)
    step = Step(rng, sequences)
    found, reached = step.adjusted(adjustments, sequences, rows), 0
    for sequence, (start, paths) in zip(sequences, step.paths, strict=True):
        for node, path in enumerate(paths):
            settings, counts = [sequence.settings], [sequence.num_prompt_tokens]
            sampler = Sampler(settings, [sequence.ids + path], EOS, VOCAB, torch.device("cpu"), None, counts)
            expected = sampler._penalized(step.logits[start + node : start + node + 1])
            assert torch.equal(found[start + node], expected[0])
        reached = start + len(paths)
    assert torch.equal(found[reached:], step.logits[reached:]), "padding is left alone"


def test_logits_are_those_of_transformers_processors():
    """Its repetition penalty covers prompt and answer, and the bias comes before it."""
    rng = random.Random(1)
    options = {"logit_bias": {3: 1.5, 9: -4.0}, "repetition_penalty": 1.4, "min_tokens": 5}
    sequences = [text_of(rng, num_new=3, **options)]
    adjustments, rows = added(sequences)
    step = Step(rng, sequences)
    found, (start, paths) = step.adjusted(adjustments, sequences, rows), step.paths[0]
    assert max(map(len, paths)) > 1
    processors = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[token], bias] for token, bias in options["logit_bias"].items()]),
            RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]),
            MinNewTokensLengthLogitsProcessor(sequences[0].num_prompt_tokens, 5, EOS, device="cpu"),
        ]
    )
    for node, path in enumerate(paths):
        ids = torch.tensor([sequences[0].ids + path])
        torch.testing.assert_close(found[start + node], processors(ids, step.logits[[start + node]].clone())[0])


def test_presence_and_frequency_count_the_answer_and_the_nodes_own_path():
    sequence = text_of(random.Random(0), presence_penalty=0.5, frequency_penalty=0.25)
    sequence.ids += [3, 4, 3]
    adjustments, rows = added([sequence])
    step = Step(random.Random(2), [sequence])
    found, (start, paths) = step.adjusted(adjustments, [sequence], rows), step.paths[0]
    assert any(len(set(path)) > 1 for path in paths)
    for node, path in enumerate(paths):
        counts = np.bincount([3, 4, 3, *path], minlength=VOCAB)
        expected = step.logits[start + node].numpy() - 0.5 * (counts > 0) - 0.25 * counts
        np.testing.assert_allclose(found[start + node].numpy(), expected, rtol=1e-6)


def test_tokens_that_a_walk_adds_are_counted_as_if_the_row_had_come_with_them():
    rng = random.Random(3)
    sequences = [text_of(rng, num_new=2, **kind) for kind in (KINDS[0], {}, KINDS[5])]
    adjustments, rows = added(sequences)
    new = [[5, 5, 8], [1], [2, 70, 2, 2]]
    tokens = torch.tensor([[*own, *[9] * (6 - len(own))] for own in new], dtype=torch.int32, device=DEVICE)
    counts = torch.tensor([len(own) for own in new], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([adjustments._slots.get(row, -1) for row in rows], dtype=torch.int32, device=DEVICE)
    assert slots.tolist() == [0, -1, 1]
    walked = type("Round", (), {"found": {"tokens": tokens, "counts": counts}})()
    adjustments.count(walked, RoundShape(3, 3), Adjusted(slots))
    for sequence, own in zip(sequences, new, strict=True):
        sequence.ids += own
    fresh, _ = added(sequences)
    assert torch.equal(adjustments._state.entries, fresh._state.entries)


def test_slots_are_used_again_and_grow_in_number_without_loss(monkeypatch):
    monkeypatch.setattr("graft.engine.adjustments._FIRST_SLOTS", 1)
    rng = random.Random(4)
    sequences = [text_of(rng, num_new=number, **KINDS[5]) for number in range(3)]
    adjustments, rows = added(sequences)
    assert adjustments._num_slots == 4
    rows[1]._finalizer = type("Released", (), {"alive": False})()
    sequences[1], rows[1] = text_of(rng, num_new=5, **KINDS[0]), Row(9)
    adjustments.add_row(rows[1], sequences[1])
    assert adjustments._num_slots == 4 and adjustments._slots[rows[1]] == 1
    fresh, again = added(sequences)
    for row, other in zip(rows, again, strict=True):
        for part, there in zip(adjustments._state, fresh._state, strict=True):
            assert torch.equal(part[adjustments._slots[row]], there[fresh._slots[other]])


class Modulo:
    """A grammar: after a token come those that are greater by 0, 1 or 2, modulo the vocabulary; after 11 it fails."""

    error = None

    def __init__(self, last):
        self._last = last

    @staticmethod
    def masks(trees, out):
        found, count = [], itertools.count()
        for constraint, tokens, parents in trees:
            last, own = [constraint._last, *tokens[1:]], TreeMasks([], {})
            for node, parent in enumerate(parents):
                is_next = not node or (own.numbers[parent] >= 0 and (last[node] - last[parent]) % VOCAB < 3)
                own.numbers.append(next(count) if is_next and last[node] != 11 else -1)
                if is_next and last[node] == 11:
                    own.failures[node] = "no more"
                elif is_next:
                    flags = np.zeros(out.shape[1] * 32, dtype=np.uint8)
                    flags[[(last[node] + more) % VOCAB for more in range(3)]] = 1
                    out[own.numbers[node]] = np.packbits(flags, bitorder="little").view(np.int32)
            found.append(own)
        return found


def allowed_after(tokens):
    """The tokens that `Modulo` allows after the last of these; all, if it does not allow these."""
    pairs = itertools.pairwise(tokens)
    is_walked = all((after - before) % VOCAB < 3 and before != 11 for before, after in pairs) and tokens[-1] != 11
    return [(tokens[-1] + more) % VOCAB for more in range(3)] if is_walked else list(range(VOCAB))


@pytest.mark.parametrize("seed", range(4))
def test_grammars_leave_the_tokens_that_they_allow_after_each_node(seed):
    rng = random.Random(seed)
    sequences = [text_of(rng, num_new=2, **options) for options in ({}, KINDS[0], {}, KINDS[3])]
    sequences[0].ids[-1] = 73  # a mask that ends in another word than it begins
    adjustments, rows = added(sequences)
    step = Step(rng, sequences)
    free = step.adjusted(adjustments, sequences, rows).clone()
    step.buffers.logits.copy_(step.logits)
    for sequence in (sequences[0], sequences[3]):
        sequence.constraint = Modulo(sequence.ids[-1])
    found, num_masked = step.adjusted(adjustments, sequences, rows), 0
    for sequence, (start, paths) in zip(sequences, step.paths, strict=True):
        for node, path in enumerate(paths):
            tokens = [sequence.ids[-1], *path]
            allowed = allowed_after(tokens) if sequence.constraint is not None else list(range(VOCAB))
            expected = torch.full((VOCAB,), -torch.inf)
            expected[allowed] = free[start + node, allowed]
            assert torch.equal(found[start + node], expected)
            num_masked += len(allowed) == 3
    assert num_masked >= 2


@pytest.mark.parametrize(("bias", "early"), [({3: -torch.inf, 4: -torch.inf, 5: -torch.inf}, False), ({}, True)])
def test_a_grammar_that_leaves_only_what_other_settings_forbid_fails_at_that_node_alone(bias, early):
    sequence = text_of(random.Random(0), logit_bias=bias, min_tokens=2 if early else 0, stop_token_ids=[3, 4, 5])
    sequence.ids[-1] = 1  # then 1, 2 or 3 may come
    sequence.constraint = Modulo(1)
    adjustments, rows = added([sequence])
    step = Step(random.Random(0), [sequence])
    tokens, parents = [1, 3, 3, 3], [0, 0, 1, 2]  # 3, 4 or 5 may follow each 3
    for place, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        step.buffers.columns[:5, place] = torch.tensor([token, parent, place, place, 0], dtype=torch.int32)
    step.buffers.by_row[:3, 0] = torch.tensor([0, 4, len(sequence.ids) - 1], dtype=torch.int32)
    step.adjusted(adjustments, [sequence], rows)
    # The second token of the answer may be no ending either.
    places = [1] if early else [1, 2, 3]
    assert list(step.result.failures[0]) == places
    assert set(step.result.failures[0].values()) == {
        "the request's other settings forbid every token that it allows here"
    }


# Types of the kernels' arguments, and their sizes.
COMPILED = """
import triton
from graft.model.kernels import adjust, topk
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def check(kernel, types, **sizes):
    given = iter(types.split())
    kinds = {name: "constexpr" if name in sizes else next(given) for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=sizes)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]

rows, state, masks = "*i32 *i32 *fp32 *fp32 *fp32", "*i32 *fp32", "*i32 *i32 i32"
check(adjust._adjust_kernel, f"*fp32 i64 *i32 *i32 *i32 *i32 *i32 *i32 {rows} {state} {masks} i32", CHUNK=2048)
no_draws = dict.fromkeys(("seeds", "temperatures", "positions", "to_target", "num_passes", "flag"))
for k in (8, 32):
    sizes = {"K": k, "KEPT": k}
    check(topk._chunk_topk_kernel, "*fp32 i64 *i32 *fp32 *fp32 *fp32 i32 i32 *i32", CHUNK=1024, **sizes, **no_draws)
    sizes |= {"NUM_FOUND": 128 * k, "NUM_CHUNKS": 128, "flag": None}
    check(topk._rank_kernel, "*i32 *fp32 *fp32 *fp32 *i32 *fp32 *fp32 i32 *i32", **sizes)
"""


@pytest.mark.slow
def test_kernels_compile_for_a_gpu():
    """Triton's interpreter takes what its compiler refuses: a name that has two types, for instance."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", COMPILED], env=environment, check=True)
