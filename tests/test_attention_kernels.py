"""The attention kernels, on a GPU or in Triton's interpreter: against a plain softmax, and bit for bit between a tree
and plain decoding; and the commit of accepted tokens."""

import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")

import plain_kernels
from attention_problems import (
    DEVICE,
    DTYPES,
    LONG_BRANCH,
    NOBODY,
    SIDE_BRANCHES,
    SMALL,
    Problem,
    chain,
    check,
    in_both,
    ints,
    some_tree,
    strips_of,
)
from graft.model import attention as model_attention
from graft.model.attention import KernelStep
from graft.model.kernels import attention as attention_kernels
from graft.model.kernels.attention import PAGE, scratch_size, tree_attention
from graft.model.layout import bidirectional_columns

in_the_interpreter = pytest.mark.skipif(DEVICE == "cuda", reason="calls in a kernel are counted in the interpreter")


# No text at all, then lengths around the borders of blocks (16), of short splits (32) and of long ones (64, 112).
LENGTHS = [[0, 1], [15, 16, 17], [30, 32], [63, 61, 65], [111, 150]]


@pytest.mark.parametrize(("lengths", "dtype"), in_both(LENGTHS, quick=[[63, 61, 65]]), ids=str)
def test_a_node_sees_its_text_alone_and_gets_what_plain_decoding_gives_it(lengths, dtype):
    check(Problem.random(lengths, dtype=dtype))


def test_a_path_may_cross_several_splits_and_most_of_it_be_of_earlier_forwards():
    branching = [0, 0, 0, *range(2, 91)]  # a chain below the second child
    check(Problem.make([27, 27], [chain(90), branching], nodes=[[4, 5, 36, 37, 84, 85, 89]] * 2))


def forest(group=2, **shape):
    """Trees of all kinds, a tree of one path, a part of a prompt and padding. Paths cross borders of blocks (16), short
    splits (32), long ones and pages (64), and the strips of long ones are cut for every group."""
    trees = [LONG_BRANCH, some_tree(9, 3), SIDE_BRANCHES, chain(3), [0] * 4, chain(12), [0]]
    return Problem.make([57, 130, 25, 31, 0, 60, 7], trees, group=group, padding=2, **shape)


@pytest.mark.parametrize(
    ("group", "window"),
    [
        (1, None),
        (3, 20),
        *(pytest.param(n, None, marks=pytest.mark.slow) for n in (4, 8, 16)),
        pytest.param(20, 20, marks=pytest.mark.slow),
    ],
)
def test_trees_and_chunks_have_tiles_of_whole_tokens_for_groups_of_any_size(group, window):
    """Sixteen tokens a tile of 16 rows; five, with a row that is not used; four, two, one; more than a tile each."""
    some = {0: [0, 1, 2, 3, 7, 8, 9, 10, 18, 21], 22: range(9), 31: [0, 6, 7, 15, 16, 19, 20, 21, 22], 54: [2]}
    some |= {57: [0, 3], 61: [0, 4, 5, 9, 10, 11], 73: [0]}  # of each row, by its first token
    tokens = [first + place for first, places in some.items() for place in places]
    check(forest(group), window, tokens=tokens if group < 16 else tokens[::4])


@pytest.mark.parametrize(
    "options",
    [
        {"chunk": 24},
        {"softcap": 0.7, "sinks": True},
        *(pytest.param(more, marks=pytest.mark.slow) for more in ({"chunk": 64}, {"softcap": 0.7, "window": 20})),
    ],
    ids=str,
)
def test_chunks_soft_caps_and_sinks_are_those_of_a_plain_softmax_in_trees_and_prompts(options):
    """Paths and tiles of a chunk of a prompt cross the borders of chunks, inside of blocks and at splits."""
    problem = Problem.make([57, 0, 60], [LONG_BRANCH, [0] * 4, chain(12)], padding=2)
    if "sinks" in options:
        options = options | {"sinks": torch.tensor([1.5, -2.0], device=DEVICE)}
    check(problem, tokens=[0, 1, 7, 8, 14, 15, 21, 25, 26, 29, 30, 37], **options)


def test_a_sink_takes_its_share_of_whatever_is_seen():
    problem = Problem.make([40], [[0]], group=1)
    none, all_of_it = (torch.tensor([score], device=DEVICE) for score in (-100.0, 100.0))
    assert torch.equal(problem.attend(sinks=none), problem.attend())
    assert problem.attend(sinks=all_of_it).abs().max() < 1e-20


def test_a_node_has_the_same_bits_in_a_strip_and_alone_in_a_tile():
    problem = forest()
    assert torch.equal(problem.attend(), problem.attend(strips=[-1] * len(problem.query)))


@pytest.mark.parametrize(
    "strips",
    [
        [1, 2, -3, 2, -2],  # the third's parent, which has a strip, in a second one: what it has seen counts twice
        [1, 2, -3, 1, 2],  # a strip without its end
        [1, -2, -1, 2, -3],  # nodes of other paths
    ],
    ids=str,
)
def test_a_wrong_strip_is_a_wrong_result(strips):
    problem = Problem.make([30], [[0, 0, 1, 1, 0]])
    scratch = torch.full((scratch_size(problem.layout(), *problem.query.shape[1:], SMALL),), 1e5, device=DEVICE)
    right = problem.attend(scratch=scratch.clone())
    assert torch.equal(right, problem.decoded_plainly().attend())
    assert not torch.equal(right, problem.attend(strips=strips, scratch=scratch))


# Chunks that start inside of a block, at a split's and a page's border, at the text's start and inside of a split.
@pytest.mark.parametrize(
    ("length", "width", "window"),
    [pytest.param(5, 136, None, marks=pytest.mark.slow), (64, 136, 40), (0, 40, 16), (75, 40, None), (75, 40, 16)],
)
def test_a_chunk_gets_the_bits_of_decoding_it_token_by_token(length, width, window):
    """Around borders of tiles, which are 8 tokens, of blocks, splits and pages."""
    tokens = [token for token in (0, 7, 8, 16, 31, 39, 58, 59, 64, 105, 122, 123, 127, 128, 135) if token < width]
    check(Problem.make([length], [chain(width)]), window, tokens=tokens)


def test_a_row_is_no_chain_because_its_last_token_is_as_deep_as_there_are_others():
    """Three nodes of depth 2, whose ancestors are of an earlier forward: places 4, 5 and 6."""
    problem = Problem.make([31, 16], [[0, 0, 0, 1, 1, 2, 2], chain(3)], nodes=[[4, 5, 6], [0, 1, 2]])
    plan = attention_kernels.plan(problem.layout(), 2, SMALL)
    assert plan.chains.tolist() == plain_kernels.plan(problem.layout(), 2, SMALL).chains.tolist() == [0, 1, 0, 0]
    check(problem)


def calls_of(monkeypatch, name):
    """The arguments of every call of one of the kernels' functions, which the interpreter runs as Python."""
    calls, function = [], getattr(attention_kernels, name)
    monkeypatch.setattr(attention_kernels, name, lambda *args: calls.append(args) or function(*args))
    return calls


@in_the_interpreter
@pytest.mark.parametrize("window", [None, 5])
def test_the_splits_of_a_tokens_own_text_are_combined_however_long_others_may_be(window, monkeypatch):
    calls = calls_of(monkeypatch, "_combine")
    Problem.make([3, 30], [some_tree(4), chain(5)]).attend(window=window, max_context=300)
    firsts, lasts = ([int(args[place].handle.data.item()) for args in calls] for place in (5, 6))
    assert firsts == [0] * 9 and lasts == [0] * 4 + [0, 0, 1, 1, 1], "the last of the chain are behind position 32"


def test_one_split_has_the_bits_that_combining_it_with_empty_ones_gives_it():
    """Deep nodes see nothing of the first split, where the root's window begins; decoded plainly, they have but one."""
    problem = Problem.make([31], [[0, 0, 0, 2, 3, 4, 5]])
    assert torch.equal(problem.attend(window=3), problem.decoded_plainly().attend(window=3))


def mixed(width):
    """Parts of prompts, one of them as wide as this, trees and padding in one step."""
    return Problem.make([70, 130, 0, 33], [some_tree(6), chain(width), chain(5), some_tree(3)], padding=2)


@pytest.mark.parametrize(("width", "window"), [(70, None), (20, 40)])
def test_prompts_trees_and_padding_stand_in_one_step(width, window):
    """Of the long prompt, the tokens around borders of tiles, blocks, splits and pages."""
    prompt = [6 + place for place in (0, 7, 8, 13, 14, 15, 29, 30, 61, 62, 69) if place < width]
    check(mixed(width), window, tokens=[*range(6), *prompt, *range(6 + width, 14 + width)])


def test_few_programs_do_all_items_of_a_plan(monkeypatch):
    problem = mixed(20)
    expected = problem.attend()
    monkeypatch.setattr(attention_kernels, "_MOST_PROGRAMS", 3)
    monkeypatch.setattr(attention_kernels, "_LEAST_PROGRAMS", 1)
    assert torch.equal(problem.attend(), expected)


def test_a_plan_holds_every_split_of_whole_blocks_of_prefix_for_every_tile():
    rng = random.Random(0)
    for group in (1, 3, 20):
        for _ in range(6):
            num_rows = rng.choice([1, 5, 9])
            lengths = [rng.choice([0, 15, 16, 33, 300]) for _ in range(num_rows)]
            trees = [make(rng.choice([1, 5, 40])) for make in rng.choices([some_tree, chain], k=num_rows)]
            check_plan(Problem.make(lengths, trees, padding=1).layout(), group)


def check_plan(layout, group):
    """The expected plan, which ours is."""
    ours, expected = (module.plan(layout, group, SMALL) for module in (attention_kernels, plain_kernels))
    for name in ("items", "strips"):
        number = int(getattr(ours, f"num_{name}"))
        assert number == int(getattr(expected, f"num_{name}")) <= len(getattr(ours, name))
        assert torch.equal(getattr(ours, name)[:number], getattr(expected, name)), name
    assert torch.equal(ours.chains, expected.chains)
    return expected


def test_a_plan_has_every_node_of_a_tree_in_one_strip_of_nodes_down_one_path():
    rng = random.Random(0)
    for group in (1, 3, 8, 16):
        trees = [LONG_BRANCH, SIDE_BRANCHES, *(some_tree(rng.choice([9, 40]), rng.random()) for _ in range(4))]
        problem, most = Problem.make([0, 20, 15, 200, 27, 63], trees), SMALL.tokens(group)
        layout, seen = problem.layout(), []
        pieces = {(row, token, size) for row, token, size, _ in check_plan(layout, group).strips.tolist()}
        for row, token, size in pieces:
            start = int(layout.starts[row])
            seen += [start + place for place in problem.path(row, token - start)[-size:]]
        assert sorted(seen) == list(range(len(layout.rows)))
        leaves = [-number for tree in trees for number in strips_of(tree) if number < 0]
        assert len(pieces) == sum(-(-length // most) for length in leaves), "no more than fill a tile each"
        assert len(leaves) == sum(node not in tree[1:] for tree in trees for node in range(len(tree)))


def test_a_plan_may_have_more_rows_and_items_than_a_program_looks_at_at_once(monkeypatch):
    monkeypatch.setattr(attention_kernels, "_PLANNED_AT_ONCE", 4)
    layout = Problem.random([3, 16, 300, 0, 31, 32, 64, 5]).layout()
    expected = check_plan(layout, 4)
    assert len(expected.items) > 8 and len(expected.strips) > 8
    assert int(check_plan(replace(layout, strips=None), 4).num_strips) > int(expected.num_strips)


@pytest.mark.parametrize(("head_dim", "dtype"), in_both([64, 80, 96, 128, 256], quick=[80, 128]), ids=str)
def test_attention_is_right_for_every_head_dim(head_dim, dtype):
    check(Problem.random([21, 40], width=2, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize(("kv_heads", "group"), [(3, 1), (1, 3), (2, 4), (1, 20)])
def test_query_heads_share_keys_in_groups_of_any_size(kv_heads, group):
    check(Problem.random([50], width=2, kv_heads=kv_heads, group=group))


@pytest.mark.parametrize(
    ("lengths", "window"),
    [
        *(([0, 33], window) for window in (1, 16)),
        *(([100, 130], window) for window in (30, 100, 200)),
        *(pytest.param([0, 33], window, marks=pytest.mark.slow) for window in (30, 100, 200)),
        *(pytest.param([100, 130], window, marks=pytest.mark.slow) for window in (1, 16)),
    ],
    ids=str,
)
def test_keys_outside_the_window_are_not_seen(lengths, window):
    check(Problem.random(lengths, width=4), window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_long_path_in_the_tiles_of_large_models(dtype):
    """Most of what a deep node sees is of its own forward, while plain decoding has it behind it, in whole blocks."""
    nodes = [4, 27, 28, 29, 63] if DEVICE == "cpu" else list(range(64))
    problem = Problem.make([100], [chain(64)], nodes=[nodes], group=4, head_dim=128, dtype=dtype)
    check(problem, tiles=attention_kernels.tiles_for(128, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strips_in_the_tiles_of_real_use(dtype):
    """A path of 20 nodes is cut, and crosses a split's border at 256."""
    problem = Problem.make([245], [SIDE_BRANCHES], group=4, head_dim=64, dtype=dtype)
    check(problem, tiles=attention_kernels.tiles_for(64, dtype), tokens=[0, 4, 7, 8, 10, 11, 15, 16, 19, 20, 21, 22])


@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 8), (8, 20)])
def test_values_may_be_of_another_size_than_keys(head_dim, value_dim):
    sizes = {"head_dim": head_dim, "value_dim": value_dim}
    check(forest(kv_heads=2, **sizes), tokens=[0, 1, 7, 13, 20, 22, 30, 31, 53, 54, 57, 61, 73])
    check(forest(group=20, **sizes), 20, tokens=[0, 7, 31])


def test_room_for_a_longer_context_changes_nothing():
    problem = Problem.random([3, 70])
    assert torch.equal(problem.attend(), problem.attend(max_context=200))


@pytest.mark.parametrize("window", [None, 24])
def test_leftovers_in_scratch_memory_change_nothing(window):
    problem = Problem.make([3, 70], [chain(60), some_tree(5)])
    size = scratch_size(problem.layout(), *problem.query.shape[1:], SMALL)
    first, second = (
        problem.attend(window=window, scratch=torch.full((size,), rubbish, device=DEVICE))
        for rubbish in (torch.nan, 1e30)
    )
    assert torch.equal(first, second)


def test_any_strides_of_queries_and_store():
    """As they come: queries beside keys and values in one product, and one layer of a store."""
    problem = Problem.random([3, 40])
    expected = problem.attend()
    product = torch.full((len(problem.query), 2 * problem.query.shape[1], 8), torch.nan, device=DEVICE)
    product[:, : problem.query.shape[1]] = problem.query
    problem.query = product[:, : problem.query.shape[1]]
    stored = torch.full((2, 2, *problem.keys.shape), torch.nan, device=DEVICE)  # [kind, layers, ...]
    stored[0, 1], stored[1, 1] = problem.keys, problem.values
    problem.keys, problem.values = stored[0, 1], stored[1, 1]
    assert torch.equal(problem.attend(), expected)


def test_models_of_transformers_attend_by_the_kernels_and_all_layers_share_a_plan(monkeypatch):
    problem = Problem.random([30, 70], head_dim=16)
    tiles = attention_kernels.tiles_for(16, torch.float32)
    expected = problem.attend(tiles, window=40)
    made = []
    make = attention_kernels.plan
    monkeypatch.setattr(attention_kernels, "plan", lambda *args: made.append(args) or make(*args))
    step = KernelStep(problem.layout())
    query = problem.query.transpose(0, 1)[None].contiguous()  # [1, heads, T, D]
    stored = [part.transpose(0, 1)[None] for part in (problem.keys, problem.values)]  # [1, kv_heads, slots, D]
    for _ in range(2):
        out = model_attention._by_kernels(query, *stored, step, model_attention.Scores(window=40))
    assert torch.equal(out.flatten(2)[0], expected) and out.shape == (1, len(problem.query), 2, 16)
    assert len(made) == 1


@pytest.mark.parametrize("num_positions", [1, 31, 32, 33, 63, 64, 65, 112, 113, 300])
def test_splits_are_counted_as_the_kernels_count_them(num_positions):
    starts = [0, 32, *range(64, 400, 48)]
    assert SMALL.count_splits(num_positions) == sum(start < num_positions for start in starts)


@pytest.mark.parametrize("places", [[[2, 3, 5], [1, 2]], [[7], []], [[1, 3, 4, 5, 6, 7], [4]], [[], []]], ids=str)
def test_committing_moves_accepted_tokens_behind_their_root_and_nothing_else(places):
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 6 * PAGE, 3, 8)
    tables, lines, lengths = ints([[0, 0], [3, 1], [5, 2], [4, 0]]), ints([2, 1]), ints([61, 5])  # one crosses a page
    table = ints([row + [NOBODY] * (8 - len(row)) for row in places])
    numbers = (tables, lines, lengths, table, ints([len(row) for row in places]))
    ours = keys.clone().to(DEVICE), values.clone().to(DEVICE)
    attention_kernels.commit(*ours, *numbers)

    def slot(row, index):
        return int(tables[lines[row], index // PAGE]) * PAGE + index % PAGE

    for stored in (keys, values):
        old = stored.clone()
        for row, length in enumerate(lengths.tolist()):
            for step, place in enumerate(places[row], start=1):
                stored[:, slot(row, length + step)] = old[:, slot(row, length + place)]
    assert torch.equal(ours[0].cpu(), keys) and torch.equal(ours[1].cpu(), values)


@pytest.mark.parametrize("width", [4, 11])
def test_a_block_that_sees_all_of_itself(width):
    """Whether it fits a tile, which has 8 tokens here, or not; over prefixes of several splits, and of none."""
    lengths = [70, 0, 31]
    problem = Problem.make(lengths, [chain(width)] * 3, kv_heads=2)
    places, depths, paths = bidirectional_columns(width, 3, SMALL.tokens(2), torch.device(DEVICE))
    layout = replace(problem.layout(), places=places, depths=depths, paths=paths, strips=None)
    plan = attention_kernels.plan(layout, 2, SMALL)
    assert plan.chains.tolist()[:3] == [int(width == 4)] * 3
    layout = replace(layout, only_chains=width == 4)  # nothing is missing without the tail's kernel
    out = tree_attention(problem.query, problem.keys, problem.values, layout, plan, tiles=SMALL).cpu()
    expected = []
    for row, length in enumerate(lengths):
        slots = [problem.slot(row, index) for index in range(length + width)]
        key, value = (part[slots].cpu().repeat_interleave(2, dim=1) for part in (problem.keys, problem.values))
        query = problem.query[row * width : (row + 1) * width].cpu()
        weights = (torch.einsum("thd,shd->ths", query, key) * query.shape[2] ** -0.5).softmax(dim=-1)
        expected.append(torch.einsum("ths,shd->thd", weights, value).flatten(1))
    torch.testing.assert_close(out, torch.cat(expected))
