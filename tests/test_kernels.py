"""The Triton kernels beside attention, on a GPU or in Triton's interpreter, against plain PyTorch: layers, products,
choices, the walk and the heads' passes."""

import itertools
import random
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")

import plain_kernels
import reference
from attention_problems import DEVICE, DTYPES, LONG_BRANCH, NOBODY, Problem, chain, ints, some_tree, strips_of
from graft.drafters.block import kernels as block_kernels
from graft.drafters.block import tree as block_tree
from graft.drafters.eagle3 import kernels as eagle3_kernels
from graft.model.kernels import layer as layer_kernels
from graft.model.kernels import overlap
from graft.model.kernels import rotary as rotary_kernels
from graft.model.kernels import topk as topk_kernels
from graft.model.kernels.attention import PAGE
from graft.model.kernels.matmul import Products, Tile, can_gate, can_multiply, tile_for
from graft.model.kv_cache import Row
from graft.model.noise import gumbel_noise
from graft.model.step import Chunk, FlatStep
from graft.tree.device import c_kernels, triton_kernels
from graft.tree.device.buffers import Beams, DraftDraws
from graft.tree.tree import PADDING
from proposers import tree_of

# What a step's tokens are


def test_a_steps_strips_go_down_its_trees_and_prompts():
    trees, prompts = [some_tree(9, 1), [0], LONG_BRANCH, some_tree(22, 2), chain(4)], [5, 1]
    width, rows = max(map(len, trees)), [Row(line) for line in range(len(trees) + len(prompts))]
    parents = [tree + [0] * (width - len(tree)) for tree in trees]
    sources = [[0] + [1] * (len(tree) - 1) + [PADDING] * (width - len(tree)) for tree in trees]
    chunks = [Chunk(row, [3] * count) for row, count in zip(rows[len(trees) :], prompts, strict=True)]
    step = FlatStep(rows[: len(trees)], tree_of([[3] * width] * len(trees), parents, sources), chunks)
    expected = [number for tree in (*trees, *map(chain, prompts)) for number in strips_of(tree)]
    assert step.columns[5, : step.num_tokens].tolist() == expected


def test_paths_are_laid_out_where_trees_branch_and_nothing_is_written_elsewhere(monkeypatch):
    problem = Problem.make([5, 3, 9], [some_tree(7, 1), chain(12), some_tree(5, 2)], padding=3)
    layout = problem.layout()
    parents = ints([*(parent for tree in problem.trees for parent in tree), -1, -1, -1])
    inputs = (parents, layout.places, layout.depths, layout.starts, layout.rows)
    make = Tensor.new_empty  # which the interpreter calls too
    monkeypatch.setattr(Tensor, "new_empty", lambda self, *size, **kind: make(self, *size, **kind).fill_(NOBODY))
    paths = layer_kernels.lay_out(*inputs, layout.paths.shape[1])
    assert torch.equal(paths, layout.paths)
    assert 2 < int((layout.depths != layout.places).sum()) < 11, "there are both kinds"


@pytest.mark.parametrize("normed", [False, True])
def test_rotated_keys_and_values_are_stored_like_pytorch_does(normed):
    """Ragged rows, a head dimension that is no power of two, and a position past the tables."""
    torch.manual_seed(0)
    heads, kv_heads, head_dim = 5, 3, 12
    problem = Problem.make([62, 3], [some_tree(6, 1), chain(2)], padding=1, kv_heads=kv_heads, head_dim=head_dim)
    layout = problem.layout()
    qkv = torch.randn(len(problem.query), (heads + 2 * kv_heads) * head_dim)
    keys, values = torch.randn(2, *problem.keys.shape)
    cos, sin = torch.randn(2, 64, head_dim // 2)
    norms = (torch.randn(head_dim), torch.randn(head_dim)) if normed else None
    results = []
    for module in (plain_kernels, rotary_kernels):
        mine = [t.clone().to(DEVICE) for t in (qkv, keys, values)]
        weights = (*(t.to(DEVICE) for t in norms), 1e-5) if norms else None
        module.rotate_and_store(*mine, layout, cos.to(DEVICE), sin.to(DEVICE), weights)
        mine[0][:, heads * head_dim :] = 0  # keys and values are of no use there any more
        results.append([t.cpu() for t in mine])
    torch.testing.assert_close(results[1], results[0])
    assert int((results[1][1] != keys).any(dim=2).any(dim=1).sum()) == len(qkv), "each token has a slot of its own"


def test_several_layers_store_keys_and_values_without_queries():
    torch.manual_seed(0)
    layers, kv_heads, head_dim = 2, 3, 12
    problem = Problem.make([62, 3], [chain(3), chain(2)], kv_heads=kv_heads, head_dim=head_dim)
    projected = torch.randn(layers, len(problem.query), 2 * kv_heads * head_dim)
    keys, values = torch.randn(2, layers, *problem.keys.shape)
    cos, sin = torch.randn(2, 70, head_dim // 2)
    norms = torch.randn(2, layers, head_dim)
    results = []
    for module in (plain_kernels, rotary_kernels):
        mine = [t.clone().to(DEVICE) for t in (projected, keys, values)]
        tables = (cos.to(DEVICE), sin.to(DEVICE))
        module.rotate_and_store(*mine, problem.layout(), *tables, (*norms.to(DEVICE), 1e-5))
        results.append([t.cpu() for t in mine])
    torch.testing.assert_close(results[1], results[0])
    assert not torch.equal(results[1][1], keys)


@pytest.mark.parametrize("weights", [(), (2,)])
def test_residual_add_and_rms_norm_match_pytorch(weights):
    torch.manual_seed(0)
    stream, delta, weight = torch.randn(3, 40), torch.randn(3, 40), torch.randn(*weights, 40)
    for more in (delta, None):
        expected = plain_kernels.add_norm(stream, more, weight, 1e-5)
        ours = layer_kernels.add_norm(*(None if t is None else t.to(DEVICE) for t in (stream, more, weight)), 1e-5)
        torch.testing.assert_close(tuple(t.cpu() for t in ours), expected)
        total, own = stream if more is None else stream + more, weight.expand(2, 40)
        for row in range(3):
            norm = torch.nn.functional.rms_norm(total[row], (40,), own[row % 2], 1e-5)
            torch.testing.assert_close(ours[1][row].cpu(), norm)


def test_silu_and_product_match_pytorch():
    gate_up = torch.randn(2, 2 * 37)
    torch.testing.assert_close(layer_kernels.activate(gate_up.to(DEVICE)).cpu(), plain_kernels.activate(gate_up))


def test_padding_that_stands_behind_the_block_table_is_written_to_no_page_of_a_request():
    problem = Problem.make([3], [chain(2)], padding=2)
    layout = problem.layout()
    far = replace(layout, places=ints([0, 1, 2 * PAGE, 5 * PAGE]), depths=ints([0, 1, 2 * PAGE, 5 * PAGE]))
    assert far.tables.shape[1] == 1
    keys, values = torch.zeros_like(problem.keys), torch.zeros_like(problem.values)
    qkv, cos, sin = torch.ones(4, 4 * 8, device=DEVICE), *torch.ones(2, 9, 4, device=DEVICE)
    rotary_kernels.rotate_and_store(qkv, keys, values, far, cos, sin)
    written = values.flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert written == sorted({0, problem.slot(0, 3), problem.slot(0, 4)})


# Products


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_right(dtype, has_bias):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*size).to(DEVICE, dtype) for size in ((40, 256), (192, 256), (192,)))
    bias = bias if has_bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(Products(x.device).multiply(x, weight, bias).double(), expected, atol=1e-2, rtol=2e-3)


SOME_NUMBERS = sorted(
    {*range(1, 512, 37), *(n for border in (16, 32, 64, 128, 256) for n in (border, border + 1)), 512}
)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, marks=pytest.mark.slow), torch.float32], ids=str)
def test_a_tokens_product_is_the_same_beside_any_number_of_others(dtype):
    torch.manual_seed(0)
    weight, bias, x = (torch.randn(*size).to(DEVICE, dtype) for size in ((64, 64), (64,), (512, 64)))
    products = Products(x.device)
    together = products.multiply(x, weight, bias)
    for number in range(1, 513) if DEVICE == "cuda" else SOME_NUMBERS:
        assert torch.equal(products.multiply(x[:number], weight, bias), together[:number]), number
        assert torch.equal(products.multiply(x[-number:], weight, bias), together[-number:]), number


# Every two sizes that a tile may have stand together in one of these.
QUICK_TILES = [(64, 16, 128), (64, 64, 64), (128, 16, 64), (128, 128, 128), (256, 64, 128), (256, 128, 64)]
OTHER_TILES = sorted(set(itertools.product((64, 128, 256), (16, 64, 128), (64, 128))) - set(QUICK_TILES))


@pytest.mark.parametrize(
    ("outputs", "tokens", "inputs", "is_gated", "by_descriptor"),
    [
        *((*sizes, False, True) for sizes in QUICK_TILES),
        *(pytest.param(*sizes, False, True, marks=pytest.mark.slow) for sizes in OTHER_TILES),
        *((*sizes, True, new) for sizes in [(128, 16, 128), (128, 128, 64), (256, 64, 64)] for new in (True, False)),
    ],
)
def test_tiles_change_no_bit(outputs, tokens, inputs, is_gated, by_descriptor):
    """Of products, and of products with their activation; by_descriptor: as newer devices load blocks."""
    torch.manual_seed(0)
    weight, bias, x = (torch.randn(*size).to(DEVICE, torch.float16) for size in ((512, 256), (512,), (150, 256)))
    products, bias = Products(x.device), None if is_gated else bias
    # The interpreter leaves the order within a block to NumPy; instructions have their own, in blocks of any size.
    block, rows, least = inputs if DEVICE == "cpu" else 64, 512 // outputs, 128 if is_gated else 64
    expected = products.multiply(x, weight, bias, Tile(64, 16, block, warps=4, stages=2, num_whole=8))
    expected = layer_kernels.activate(expected) if is_gated else expected
    products._by_descriptor = by_descriptor
    for num_whole in {rows, 1, 0} if outputs > least else {rows}:
        tile = Tile(outputs, tokens, inputs, warps=8 if outputs * tokens >= 2**14 else 4, stages=2, num_whole=num_whole)
        assert torch.equal(products.multiply(x, weight, bias, tile, is_gated=is_gated), expected), num_whole


@pytest.mark.parametrize(("dtype", "neurons"), [(torch.float32, 96), *((dtype, 192) for dtype in DTYPES[1:])], ids=str)
def test_a_product_with_its_activation_has_the_bits_of_the_two_kernels(dtype, neurons):
    torch.manual_seed(0)
    weight, x = (torch.randn(*size).to(DEVICE, dtype) for size in ((2 * neurons, 128), (150, 128)))
    products = Products(x.device)
    for number in (1, 16, 17, 40, 150):
        tile = tile_for(number, (2 * neurons, 128), dtype, is_gated=True)
        # The interpreter leaves the order within a block to NumPy.
        separate = products.multiply(x[:number], weight, None, replace(tile, outputs=64, num_whole=neurons // 32))
        expected = layer_kernels.activate(separate)
        assert torch.equal(products.multiply(x[:number], weight, is_gated=True), expected), number


SHAPES = [(6144, 4096), (28672, 4096), (2048, 5632), (51200, 5120), (576, 1536), (128256, 4096), (64, 64), (64, 192)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tiles_leave_nothing_out_and_fit(shape, dtype):
    kinds = (False, True) if can_gate(shape, dtype) else (False,)
    for number, is_gated in itertools.product((1, 17, 64, 96, 128, 200, 256, 384, 512, 4096), kinds):
        for processors, shared_memory in ((132, 227 * 1024), (108, 163 * 1024), (40, 99 * 1024)):
            tile = tile_for(number, shape, dtype, processors, shared_memory, is_gated)
            least = 128 if is_gated and dtype is torch.bfloat16 else 64
            assert shape[0] % tile.outputs == 0 and shape[1] % tile.inputs == 0
            assert 0 <= tile.num_whole <= shape[0] // tile.outputs
            is_whole = tile.num_whole == shape[0] // tile.outputs
            assert tile.outputs >= (least if is_whole else 2 * least), "instructions have 64 rows"
            size = (tile.outputs + tile.tokens) * tile.inputs * dtype.itemsize
            assert tile.stages >= 2 and tile.stages * size <= shared_memory


def test_products_are_our_own_where_they_are_as_fast(monkeypatch):
    made = []
    monkeypatch.setattr(Products, "multiply", lambda self, x, weight, bias: made.append((len(x), len(weight))))
    multiply, always = Products(torch.device("cpu")), Products(torch.device("cpu"), always=True)
    large, small = (torch.zeros(number, 2048, dtype=torch.float16, device="meta") for number in (2048, 64))
    for products in (multiply, always):
        for number in (2048, 2049):
            for weight in (large, small):
                products(torch.zeros(number, 2048, dtype=torch.float16, device="meta"), weight)
    assert made == [(2048, 2048), (2048, 2048), (2048, 64), (2049, 2048), (2049, 64)]


def test_products_need_numbers_of_inputs_that_are_multiples_of_64():
    assert can_multiply((64, 192)) and can_multiply((65, 64))
    assert not can_multiply((64, 96))


# Choices


@pytest.mark.parametrize(("vocab_size", "k"), [(5, 4), (1024, 4), (2500, 4), (60, 20)])
def test_top_k_is_ordered_and_the_first_of_equal_values_wins(vocab_size, k):
    torch.manual_seed(0)
    logits = torch.randn(3, vocab_size).round(decimals=1).to(DEVICE)  # many are equal
    logits[1] = -torch.inf
    logits[1, -2:] = 3.0
    tokens, values, total = topk_kernels.highest(logits, k)
    expected = plain_kernels.highest(logits, k)
    torch.testing.assert_close((values, total), expected[1:])
    finite = values > -torch.inf
    assert torch.equal(tokens[finite], expected[0][finite])


def test_rows_that_are_not_wanted_are_left_unwritten(monkeypatch):
    """Memory that nobody has written is full of threes here."""
    logits, wanted = torch.randn(4, 2500).to(DEVICE), torch.tensor([0, 1, 0, 1], dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda own, *size, **of: own.new_full(*_shape(size), 3, **of))
    found = topk_kernels.highest(logits, 20, wanted=wanted)
    for part, expected in zip(found, topk_kernels.highest(logits, 20), strict=True):
        assert torch.equal(part[1::2], expected[1::2]) and (part[::2] == 3).all()


def _shape(size):
    return size if isinstance(size[0], tuple) else (size,)


def test_sampled_rows_are_ranked_by_logits_over_temperature_and_the_noise_of_their_draws():
    """Two texts of two beams each, the second greedy. Draft ids are not target ids."""
    torch.manual_seed(0)
    vocab_size, passes = 1500, torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    logits = (2 * torch.randn(4, vocab_size)).to(DEVICE)
    to_target = torch.arange(vocab_size, device=DEVICE) * 2
    seeds, positions = torch.tensor([-7, 5], device=DEVICE), torch.tensor([900, 3], dtype=torch.int32, device=DEVICE)
    draws = DraftDraws(seeds, torch.tensor([0.8, 0.0], device=DEVICE), positions, to_target, passes)
    tokens, values, total = topk_kernels.highest(logits, 5, draws)
    noise = gumbel_noise(seeds[:1], positions[:1].long() + 3, 3 * vocab_size)[:, ::3]
    scores = torch.cat([logits[:2] / 0.8 + noise, logits[2:].double()])
    expected = scores.topk(5)
    assert torch.equal(tokens.long(), expected.indices)
    torch.testing.assert_close(values.double(), expected.values, rtol=0, atol=1e-4)
    torch.testing.assert_close(total.double(), scores.logsumexp(dim=1), rtol=0, atol=1e-4)


def test_draft_noise_is_the_samplers_noise_where_it_is_high_and_where_it_is_low():
    """Of equal logits the noise decides, and one logit is so high that the token of the lowest noise is first."""
    seeds, positions = torch.tensor([405], device=DEVICE), torch.tensor([0], device=DEVICE)
    noise = gumbel_noise(seeds, positions, 1024)
    assert noise.max() > 14 and noise.min() < -2.2
    logits = torch.zeros(1, 1024, device=DEVICE)
    logits[0, noise.argmin()] = 20.0
    draws = DraftDraws(seeds, torch.ones(1, device=DEVICE), positions - 1, torch.zeros(1024, device=DEVICE).long())
    _, values, _ = topk_kernels.highest(logits, 8, draws)
    torch.testing.assert_close(values.double(), (logits + noise).topk(8).values, rtol=0, atol=3e-5)


# The head's passes


@pytest.mark.parametrize("keeps_normed", [False, True])
def test_inputs_of_the_eagle3_layer_match_pytorch(keeps_normed):
    torch.manual_seed(0)
    embedding, hidden, norms = torch.randn(9, 12), torch.randn(6, 12), torch.randn(2, 12)
    tokens, origins = torch.tensor([1, 8, 0, 3]), torch.tensor([2, 0, 4, 4], dtype=torch.int32)
    for inputs in ((tokens, embedding, hidden, origins), (tokens, embedding, hidden, None)):
        options = (tuple(norms.to(DEVICE)), 1e-5, keeps_normed, torch.float32)
        there = [None if part is None else part.to(DEVICE) for part in inputs]
        expected = plain_kernels.enter(*inputs, tuple(norms), *options[1:])
        ours = tuple(part.cpu() for part in eagle3_kernels.enter(*there, *options))
        torch.testing.assert_close(ours, expected)


def test_children_of_block_slots_match_pytorch():
    torch.manual_seed(0)
    batch, num_slots, num_parents, num_candidates = 2, 3, 4, 7
    logits = torch.randn(batch, num_slots, num_parents, num_candidates)
    candidates = torch.stack([torch.randperm(50)[:7] for _ in range(6)]).view(batch, num_slots, -1)
    there = block_kernels.children(logits.to(DEVICE), candidates.to(DEVICE), 5)
    found = block_tree.Table(*(part.cpu() for part in there))
    torch.testing.assert_close(tuple(found), tuple(block_tree.children(logits, candidates, 5)))
    assert (found.entries >= 0).any()
    assert (found.entries[:, -num_parents:] == -1).all(), "the last slot's have no children"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_drafts_are_tokens_of_the_vocabulary():
    """A wrong draft costs nothing; a token that does not exist would end the process."""
    nan = torch.full((2, 1030), torch.nan, device=DEVICE)
    tokens, _, _ = topk_kernels.highest(nan, 3)
    assert bool(((tokens >= 0) & (tokens < 1030)).all())
    candidates = torch.arange(100, 106, device=DEVICE).view(1, 2, 3)
    found = block_kernels.children(torch.full((1, 2, 2, 3), torch.nan, device=DEVICE), candidates, 2).tokens
    assert bool(((found >= 100) & (found < 106)).all())


def test_block_slots_hold_the_root_and_masks():
    embedding, mask, roots = torch.randn(9, 12), torch.randn(12), torch.tensor([8, 0, 3], dtype=torch.int32)
    ours = block_kernels.slots(*(part.to(DEVICE) for part in (roots, embedding, mask)), 4)
    assert torch.equal(ours.cpu(), plain_kernels.slots(roots, embedding, mask, 4))
    assert torch.equal(ours[4:6].cpu(), torch.stack([embedding[0], mask]))


@pytest.mark.parametrize("room", [2, 8])
def test_the_walk_kernel_accepts_what_the_plain_walk_accepts(room):
    """Rows of several sizes, one of no tokens, and behind them a part of a prompt, which is no tree."""
    rng = random.Random(0)
    sizes = [12, 1, 12, 0, 9, 12, 30]
    starts = [sum(sizes[:row]) for row in range(len(sizes))]
    tokens, parents, chosen = [], [], []
    for size in sizes:
        tokens += [rng.randrange(2) for _ in range(size)]
        parents += [0, *(rng.choice([-1, 0, node - 1, rng.randrange(node)]) for node in range(1, size))][:size]
        chosen += [rng.randrange(2) for _ in range(size)]
    step = (ints(tokens), ints(parents), torch.tensor(chosen), ints(starts), ints(sizes))
    expected = []
    for start, size in zip(starts[:6], sizes[:6], strict=True):
        own = slice(start, start + size)
        nodes, came = reference.walk(tokens[own], parents[own], [1] * size, chosen[own]) if size else ([], [])
        expected.append((came[:room], [start + node for node in [0, *nodes]][: len(came)][:room]))
    counts = [len(came) for came, _ in expected]
    for kernels, device in ((triton_kernels, DEVICE), (c_kernels, "cpu")):
        found, *written = [torch.zeros(shape, dtype=torch.int32, device=device) for shape in (6, (6, room), (6, room))]
        kernels.walk(*(part.to(device) for part in step), found, *written, 12)
        assert found.tolist() == counts
        rows = zip(*(part.tolist() for part in written), counts, strict=True)
        assert [(came[:count], nodes[:count]) for came, nodes, count in rows] == expected
    assert counts[1] == 1 and counts[3] == 0 and (max(counts) == 2 if room == 2 else max(counts) > 2)


def test_the_walk_kernel_reaches_the_end_of_a_tree_of_128_tokens():
    tokens, parents, chosen = ints(list(range(128))), ints(chain(128)), torch.arange(1, 129, device=DEVICE)
    counts, following, nodes = ints([0]), ints([[0] * 128]), ints([[0] * 128])
    triton_kernels.walk(tokens, parents, chosen, ints([0]), ints([128]), counts, following, nodes, 128)
    assert counts.tolist() == [128]
    assert following[0].tolist() == list(range(1, 129)) and nodes[0].tolist() == list(range(128))


@pytest.mark.parametrize(("topk", "keep"), [(3, 9), (3, 5), (1, 1)])
def test_beams_spread_as_in_pytorch_pass_by_pass(topk, keep):
    """In Triton, and in C, which is given the probabilities."""
    rows, passes, vocab = 2, 3, 20
    plainly, on_device, in_c = (
        Beams.make(rows, topk, passes, torch.device(device)) for device in ("cpu", DEVICE, "cpu")
    )
    to_target = torch.arange(vocab) * 2
    for number in range(passes + 1):  # one more than there is room for: it is written over the last
        torch.manual_seed(number)
        found = rows * (1 if number == 0 else topk)
        ids = torch.stack([torch.randperm(vocab)[:topk] for _ in range(found)])
        logits, totals = torch.randn(found, topk).sort(dim=1, descending=True).values, torch.full((found,), 3.0)
        size = rows * min(keep, topk if number == 0 else topk * topk)
        expected, triton_level, c_level = torch.zeros(3, 3, size, dtype=torch.int32)
        triton_level = triton_level.to(DEVICE)
        inputs = ids.int(), logits, totals, to_target
        there = [part.to(DEVICE) for part in inputs]
        eagle3_kernels.spread(*there, on_device, triton_level, keep, is_first=number == 0)
        c_kernels.spread(ids, (logits - totals[:, None]).exp(), to_target, in_c, c_level, keep)
        if number == passes:
            break
        plain_kernels.spread(*inputs, plainly, expected, keep, is_first=number == 0)
        for beams, level in ((on_device, triton_level.cpu()), (in_c, c_level)):
            for field in fields(Beams):
                torch.testing.assert_close(getattr(beams, field.name).cpu(), getattr(plainly, field.name))
            assert torch.equal(level[:2], expected[:2])
            torch.testing.assert_close(level[2].view(torch.float32), expected[2].view(torch.float32))


# Launches that overlap


def test_launches_overlap_only_where_that_is_asked_for_and_possible(monkeypatch):
    usual, overlapping = {"OVERLAPS": False}, {"OVERLAPS": True, "launch_pdl": True}
    with overlap.launches(True):
        assert overlap.options(torch.device("cpu")) == usual, "there is nothing to overlap"
        monkeypatch.setattr(overlap, "_is_possible", lambda device: True)
        assert overlap.options(DEVICE) == overlapping
        with overlap.launches(False):
            assert overlap.options(DEVICE) == usual
        monkeypatch.setattr(overlap, "is_on", False)
        assert overlap.options(DEVICE) == usual
        monkeypatch.setattr(overlap, "is_on", True)
    assert overlap.options(DEVICE) == usual
