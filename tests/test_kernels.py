"""The Triton kernels, on a GPU or in Triton's interpreter: attention against a plain softmax, and bit for bit
between a tree and plain decoding; the commit against the cache's own."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from graft.model import TreeCache
from graft.spec_decode.tree import DraftTree
from proposers import random_tree

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")

import plain_kernels
from graft.model.kernels import attention as attention_kernels
from graft.model.kernels import eagle3 as eagle3_kernels
from graft.model.kernels import topk as topk_kernels
from graft.model.kernels.attention import Tiles, scratch_size, tree_attention
from graft.model.kernels.matmul import Products, Tile, can_multiply, tile_for

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cannot multiply matrices of bfloat16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
# Small enough that short texts have many blocks and splits of both kinds.
SMALL = Tiles(rows=16, keys=16, short_split=32, border=64, long_split=48, combined=64, prefix_stages=2)


@dataclass
class Problem:
    """A forward's queries, and the cache they meet. What lies behind a row's nodes is NaN: nobody may look there."""

    lengths: list[int]
    tree: DraftTree
    nodes: list[int]  # those of the tree whose queries are in the forward
    query: Tensor  # [B, heads, W, head_dim]
    keys: Tensor  # [B, slots, kv_heads, head_dim]
    values: Tensor

    @classmethod
    def make(cls, lengths, tree, nodes=None, kv_heads=1, group=2, head_dim=8, dtype=torch.float32) -> "Problem":
        torch.manual_seed(0)
        nodes = list(range(tree.width)) if nodes is None else nodes
        query = torch.randn(len(lengths), kv_heads * group, len(nodes), head_dim).to(DEVICE, dtype)
        shape = (len(lengths), max(lengths) + tree.width + 3, kv_heads, head_dim)
        keys, values = torch.randn(2, *shape).to(DEVICE, dtype)
        for row, length in enumerate(lengths):
            keys[row, length + tree.width :] = values[row, length + tree.width :] = torch.nan
        return cls(lengths, tree, nodes, query, keys, values)

    @classmethod
    def random(cls, lengths, width=5, **shape) -> "Problem":
        return cls.make(lengths, random_tree(random.Random(3), [1] * len(lengths), width - 1, vocab_size=4), **shape)

    def slots(self, row: int, node: int) -> list[int]:
        """Where the node's text is, in order."""
        length, depth = self.lengths[row], int(self.tree.depths()[row, node])
        return [*range(length), *(length + place for place in self.tree.paths()[row, node, : depth + 1].tolist())]

    def attend(self, tiles: Tiles = SMALL, max_context: int | None = None, **options) -> Tensor:
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)
        paths, depths = (index[:, self.nodes].int().to(DEVICE) for index in (self.tree.paths(), self.tree.depths()))
        limit = max(self.lengths) if max_context is None else max_context
        return tree_attention(
            self.query, self.keys, self.values, lengths, paths, depths, max_context=limit, tiles=tiles, **options
        )

    def expected(self, window: int | None = None) -> Tensor:
        """Softmax over each node's own text, in double precision."""
        batch, heads, width, head_dim = self.query.shape
        group = heads // self.keys.shape[2]
        out = torch.empty(batch, width, heads, head_dim, dtype=torch.float64, device=DEVICE)
        for row in range(batch):
            for place, node in enumerate(self.nodes):
                slots = self.slots(row, node)[-(window or 0) :]
                key, value = (
                    stored[row, slots].double().repeat_interleave(group, dim=1) for stored in (self.keys, self.values)
                )
                scores = torch.einsum("hd,shd->hs", self.query[row, :, place].double(), key) * head_dim**-0.5
                out[row, place] = torch.einsum("hs,shd->hd", scores.softmax(dim=1), value)
        return out.flatten(2)

    def decoded_plainly(self) -> "Problem":
        """Every node as a row of its own, in which its path is committed."""
        batch, heads, width, head_dim = self.query.shape
        kv_heads = self.keys.shape[2]
        texts = [(row, self.slots(row, node)) for row in range(batch) for node in self.nodes]
        roots = DraftTree.roots(torch.ones(len(texts), dtype=torch.int64))
        shape = {"kv_heads": kv_heads, "group": heads // kv_heads, "head_dim": head_dim, "dtype": self.query.dtype}
        plain = Problem.make([len(slots) - 1 for _, slots in texts], roots, **shape)
        plain.query[:] = self.query.transpose(1, 2).reshape(batch * width, heads, 1, head_dim)
        for place, (row, slots) in enumerate(texts):
            plain.keys[place, : len(slots)] = self.keys[row, slots]
            plain.values[place, : len(slots)] = self.values[row, slots]
        return plain


def check(problem: Problem, window: int | None = None, tiles: Tiles = SMALL) -> None:
    """Attention is what it should be, and for every node has the very bits of plain decoding."""
    out = problem.attend(tiles, window=window)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[out.dtype]
    torch.testing.assert_close(out.double(), problem.expected(window), atol=tolerance, rtol=tolerance)
    plain = problem.decoded_plainly().attend(tiles, window=window)
    assert torch.equal(out.flatten(0, 1), plain.flatten(0, 1))


# No text at all, then lengths around the borders of blocks (16), of short splits (32) and of long ones (64, 112).
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [[0, 1], [15, 16, 17], [30, 32], [63, 61, 65], [111, 150]], ids=str)
def test_a_node_sees_its_text_alone_and_gets_what_plain_decoding_gives_it(lengths, dtype):
    check(Problem.random(lengths, dtype=dtype))


def test_a_path_may_cross_several_splits_and_most_of_it_be_of_earlier_forwards():
    chain = DraftTree.chain(torch.ones(1, 90, dtype=torch.int64))
    check(Problem.make([27], chain, nodes=[4, 5, 36, 37, 84, 85, 89]))


def test_a_wide_tree_fills_several_tiles():
    check(Problem.random([40], width=20))


@pytest.mark.parametrize("stacked", [2, 4])
def test_tiles_of_a_program_do_not_touch_each_others_bits(stacked):
    problem = Problem.random([100], width=20, group=8, dtype=torch.float16)
    one = replace(SMALL, rows=64, warps=4)
    check(problem, tiles=replace(one, stacked=stacked))
    assert torch.equal(problem.attend(one), problem.attend(replace(one, stacked=stacked)))


def test_tiles_whose_warps_share_rows_are_not_stacked():
    with pytest.raises(ValueError, match="warps share rows"):
        Tiles(rows=32, warps=4, stacked=2)
    with pytest.raises(ValueError, match="sum otherwise"):
        Tiles(rows=32, warps=2, stacked=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(head_dim, dtype):
    check(Problem.random([21, 40], width=2, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize(("kv_heads", "group"), [(3, 1), (1, 3), (2, 4), (1, 20)])
def test_query_heads_share_keys_in_groups_of_any_size(kv_heads, group):
    check(Problem.random([50], width=2, kv_heads=kv_heads, group=group))


@pytest.mark.parametrize("window", [1, 16, 30, 100, 200])
@pytest.mark.parametrize("lengths", [[0, 33], [100, 130]], ids=str)
def test_keys_outside_the_window_are_not_seen(lengths, window):
    check(Problem.random(lengths, width=4), window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_tiles_of_real_use(dtype):
    check(Problem.random([63, 270], width=2, head_dim=64, dtype=dtype), tiles=attention_kernels.tiles_for(64, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_long_path_in_the_tiles_of_large_models(dtype):
    """Most of what a deep node sees is of its own forward, while plain decoding has it behind it, in whole blocks."""
    chain = DraftTree.chain(torch.ones(1, 64, dtype=torch.int64))
    nodes = [4, 27, 28, 29, 63] if DEVICE == "cpu" else list(range(64))
    problem = Problem.make([100], chain, nodes=nodes, group=4, head_dim=128, dtype=dtype)
    check(problem, tiles=attention_kernels.tiles_for(128, dtype))


def test_room_for_a_longer_context_changes_nothing():
    problem = Problem.random([3, 70])
    assert torch.equal(problem.attend(), problem.attend(max_context=200))


def test_what_is_left_in_the_scratch_changes_nothing():
    problem = Problem.random([3, 70])
    batch, heads, width, head_dim = problem.query.shape
    size = scratch_size(batch, heads, width, head_dim, problem.tree.max_depth, 70, SMALL)
    first, second = (
        problem.attend(scratch=torch.full((size,), rubbish, device=DEVICE)) for rubbish in (torch.nan, 1e30)
    )
    assert torch.equal(first, second)


def test_any_layout_of_queries_and_cache():
    """As they come: heads and nodes transposed, one layer and some rows of a cache."""
    problem = Problem.random([3, 40])
    expected = problem.attend()
    problem.query = problem.query.transpose(1, 2).contiguous().transpose(1, 2)
    stored = torch.full((2, 2, 5, *problem.keys.shape[1:]), torch.nan, device=DEVICE)  # [kind, layers, rows, ...]
    stored[0, 1, 2:4], stored[1, 1, 2:4] = problem.keys, problem.values
    problem.keys, problem.values = stored[0, 1, 2:4], stored[1, 1, 2:4]
    assert torch.equal(problem.attend(), expected)


@pytest.mark.parametrize("borders", [(30, 64, 64), (32, 64, 40), (48, 64, 64)])
def test_splits_that_do_not_fit_blocks_are_refused(borders):
    short, border, long = borders
    with pytest.raises(ValueError, match="whole blocks"):
        Tiles(keys=16, short_split=short, border=border, long_split=long)


@pytest.mark.parametrize("num_positions", [1, 31, 32, 33, 63, 64, 65, 112, 113, 300])
def test_splits_are_counted_as_the_kernels_count_them(num_positions):
    starts = [0, 32, *range(64, 400, 48)]
    assert SMALL.count_splits(num_positions) == sum(start < num_positions for start in starts)


@pytest.mark.parametrize("paths", [[[2, 3, 5], [1, 2]], [[7], []], [[1, 3, 4, 5, 6, 7], [4]], [[], []]], ids=str)
def test_committing_moves_what_the_cache_moves(paths):
    torch.manual_seed(0)
    layers, width, kv_heads, head_dim = 2, 8, 3, 8
    cache = TreeCache(layers, num_rows=3, num_slots=20)
    cache.lengths = [5, 0, 9]
    cache.aim(slice(0, 3), width, torch.device(DEVICE))
    for layer in range(layers):
        cache.update(*torch.randn(2, 3, kv_heads, width, head_dim, device=DEVICE), layer)
    cache.aim(slice(1, 3), width, torch.device(DEVICE))  # the other row stays as it is
    keys, values = cache._keys.clone(), cache._values.clone()

    places = [path + [0] * (width - len(path)) for path in paths]
    lengths, places, counts = (
        torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
        for numbers in (cache.lengths[1:], places, [len(path) for path in paths])
    )
    attention_kernels.commit(keys[:, 1:], values[:, 1:], lengths, places, counts)
    cache.commit(paths)
    assert torch.equal(keys, cache._keys) and torch.equal(values, cache._values)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_tokens_product_is_the_same_beside_any_number_of_others(dtype):
    torch.manual_seed(0)
    weight, bias, x = (torch.randn(*size).to(DEVICE, dtype) for size in ((64, 64), (64,), (512, 64)))
    products = Products(x.device)
    together = products.multiply(x, weight, bias)
    for number in range(1, 513) if DEVICE == "cuda" else SOME_NUMBERS:
        assert torch.equal(products.multiply(x[:number], weight, bias), together[:number]), number
        assert torch.equal(products.multiply(x[-number:], weight, bias), together[-number:]), number


def test_what_the_other_tokens_are_changes_nothing():
    torch.manual_seed(0)
    weight, x, others = (torch.randn(*size).to(DEVICE, torch.float16) for size in ((128, 192), (70, 192), (70, 192)))
    products = Products(x.device)
    expected = products.multiply(x, weight)
    for kept in (0, 33, 69):
        others[kept] = x[kept]
        assert torch.equal(products.multiply(others, weight)[kept], expected[kept])


@pytest.mark.parametrize("outputs", [64, 128, 256])
@pytest.mark.parametrize("tokens", [16, 64, 128])
@pytest.mark.parametrize("inputs", [64, 128])
def test_tiles_change_no_bit(outputs, tokens, inputs):
    torch.manual_seed(0)
    weight, bias, x = (torch.randn(*size).to(DEVICE, torch.float16) for size in ((512, 384), (512,), (150, 384)))
    products = Products(x.device)
    # The interpreter leaves the order within a block to NumPy; instructions have their own, in blocks of any size.
    block = inputs if DEVICE == "cpu" else 64
    expected = products.multiply(x, weight, bias, Tile(64, 16, block, warps=4, stages=2, num_whole=8))
    rows = 512 // outputs
    for num_whole in {rows, 1, 0} if outputs > 64 else {rows}:
        tile = Tile(outputs, tokens, inputs, warps=8 if outputs * tokens >= 2**14 else 4, stages=2, num_whole=num_whole)
        assert torch.equal(products.multiply(x, weight, bias, tile), expected), num_whole


def test_devices_that_know_no_descriptors_load_the_same():
    torch.manual_seed(0)
    weight, x = (torch.randn(*size).to(DEVICE, torch.float16) for size in ((384, 192), (150, 192)))
    products, others = Products(x.device), Products(x.device)
    others._by_descriptor = False
    for number in (3, 150):
        tile = replace(tile_for(number, (384, 192), x.dtype), outputs=128, num_whole=1)
        expected = products.multiply(x[:number], weight, None, tile)
        assert torch.equal(others.multiply(x[:number], weight, None, tile), expected)


SHAPES = [(6144, 4096), (28672, 4096), (2048, 5632), (51200, 5120), (576, 1536), (128256, 4096), (64, 64), (64, 192)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tiles_leave_nothing_out_and_fit(shape, dtype):
    for number in (1, 17, 64, 96, 128, 200, 256, 384, 512, 4096):
        for processors, shared_memory in ((132, 227 * 1024), (108, 163 * 1024), (40, 99 * 1024)):
            tile = tile_for(number, shape, dtype, processors, shared_memory)
            assert shape[0] % tile.outputs == 0 and shape[1] % tile.inputs == 0
            assert 0 <= tile.num_whole <= shape[0] // tile.outputs
            assert tile.num_whole == shape[0] // tile.outputs or tile.outputs > 64, "instructions have 64 rows"
            size = (tile.outputs + tile.tokens) * tile.inputs * dtype.itemsize
            assert tile.stages >= 2 and tile.stages * size <= shared_memory


def test_a_last_round_of_few_tiles_has_halves():
    whole = tile_for(512, (4096, 4096), torch.bfloat16)
    halved = tile_for(512, (28672, 4096), torch.bfloat16)
    assert (whole.outputs, whole.num_whole) == (128, 32), "128 tiles, all at once"
    assert (halved.outputs, halved.num_whole) == (256, 99), "three rounds of 132 tiles, and 104 halves"


def test_products_are_our_own_where_they_are_as_fast(monkeypatch):
    made = []
    monkeypatch.setattr(Products, "multiply", lambda self, x, weight, bias: made.append((len(x), len(weight))))
    multiply, always = Products(torch.device("cpu")), Products(torch.device("cpu"), always=True)
    large, small = torch.zeros(2048, 2048, dtype=torch.float16), torch.zeros(64, 2048, dtype=torch.float16)
    for products in (multiply, always):
        for number in (512, 513):
            for weight in (large, small):
                products(torch.zeros(number, 2048, dtype=torch.float16), weight)
    assert made == [(512, 2048), (512, 2048), (512, 64), (513, 2048), (513, 64)]


def test_products_need_sizes_of_multiples_of_64():
    assert can_multiply((64, 192))
    assert not can_multiply((65, 64)) and not can_multiply((64, 96))


# Choices


@pytest.mark.parametrize("vocab_size", [5, 1024, 2500])
def test_the_highest_come_in_order_and_of_equals_the_first(vocab_size):
    torch.manual_seed(0)
    logits = torch.randn(3, vocab_size).round(decimals=1).to(DEVICE)  # many are equal
    logits[1] = -torch.inf
    logits[1, -2:] = 3.0
    tokens, values, total = topk_kernels.highest(logits, 4)
    expected = plain_kernels.highest(logits, 4)
    torch.testing.assert_close((values, total), expected[1:])
    finite = values > -torch.inf
    assert torch.equal(tokens[finite], expected[0][finite])


def test_draws_are_those_of_the_keyed_noise_at_every_node():
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 1500)[:, :3].to(DEVICE)  # a part of a wider step
    seeds, positions = torch.tensor([7, -(2**61)]), torch.tensor([[5, 6, 6], [900, 901, 902]])
    for temperatures in ([1.0, 0.3], [0.0, 2.5]):
        inputs = (seeds.to(DEVICE), positions.to(DEVICE), torch.tensor(temperatures, device=DEVICE))
        assert torch.equal(topk_kernels.draw(logits, *inputs), plain_kernels.draw(logits, *inputs))


# The head's passes


@pytest.mark.parametrize("keeps_normed", [False, True])
def test_entries_of_the_head(keeps_normed):
    torch.manual_seed(0)
    embedding, hidden, norms = torch.randn(9, 12), torch.randn(2, 3, 12), torch.randn(2, 12)
    tokens, origins = torch.tensor([[1, 8], [0, 3]]), torch.tensor([[2, 0], [1, 1]], dtype=torch.int32)
    for inputs in ((tokens, embedding, hidden, origins), (tokens, embedding, hidden[:, :2].contiguous(), None)):
        options = (tuple(norms.to(DEVICE)), 1e-5, keeps_normed)
        there = [None if part is None else part.to(DEVICE) for part in inputs]
        expected = plain_kernels.enter(*inputs, tuple(norms), *options[1:])
        ours = tuple(part.cpu() for part in eagle3_kernels.enter(*there, *options))
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("room", [2, 8])
def test_a_device_goes_down_trees_as_the_walk_does(room):
    rng = random.Random(0)
    tokens = [[rng.randrange(2) for _ in range(12)] for _ in range(4)]
    parents = [[0, *(rng.choice([-1, 0, node - 1, rng.randrange(node)]) for node in range(1, 12))] for _ in tokens]
    chosen = torch.tensor([[rng.randrange(2) for _ in range(12)] for _ in tokens])[:, :10]  # the rest are no nodes
    trees = [torch.tensor(part, dtype=torch.int32) for part in (tokens, parents)]
    starts = torch.tensor([5, 0, 7, 9], dtype=torch.int32)
    results = []
    for function, device in ((eagle3_kernels.follow, DEVICE), (plain_kernels.follow, "cpu")):
        written = [torch.zeros(shape, dtype=torch.int32, device=device) for shape in (4, 4, (4, room), (4, room))]
        function(*(part.to(device) for part in (*trees, chosen, starts)), *written)
        results.append([part.tolist() for part in written])
    assert (
        results[0] == results[1]
        and min(results[0][0]) < 2 <= max(results[0][0])
        and (room == 2 or max(results[0][0]) > 2)
    )


@pytest.mark.parametrize(("topk", "keep"), [(3, None), (3, 5), (1, None), (1, 5)])
def test_beams_spread_into_levels_and_the_likeliest_go_on(topk, keep):
    rows, passes, vocab = 2, 3, 20
    beams = [eagle3_kernels.Beams.make(rows, topk, passes, torch.device(device)) for device in ("cpu", DEVICE)]
    levels = [
        torch.zeros(passes, 3, rows * topk * topk, dtype=torch.int64, device=device) for device in ("cpu", DEVICE)
    ]
    to_target = torch.arange(vocab) * 2
    for number in range(passes + 1):  # one more than there is room for: it is written over the last
        torch.manual_seed(number)
        found = rows * (1 if number == 0 else topk)
        ids = torch.stack([torch.randperm(vocab)[:topk] for _ in range(found)]).int()
        logits, totals = torch.randn(found, topk).sort(dim=1, descending=True).values, torch.full((found,), 3.0)
        for module, own, level in zip((plain_kernels, eagle3_kernels), beams, levels, strict=True):
            if module is plain_kernels and number == passes:
                continue
            inputs = (part.to(level.device) for part in (ids, logits, totals, to_target))
            module.spread(*inputs, own, level, keep, is_first=number == 0)
        if number < passes:
            torch.testing.assert_close({k: v.cpu() for k, v in vars(beams[1]).items()}, vars(beams[0]))
            assert torch.equal(levels[1][number, :2].cpu(), levels[0][number, :2])
            torch.testing.assert_close(*(level[number, 2].cpu().view(torch.float32) for level in levels))
