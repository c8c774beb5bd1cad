"""Layers of narrow models as kernels, on a GPU or in Triton's interpreter: against the generic layers, and bit for bit
between widths."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")

import plain_kernels
from graft.target import narrow_layers
from graft.target.attention import Paths
from graft.target.fast_layers import FastLayers
from graft.tree import DraftTree
from proposers import tree_of
from test_captured import model_of
from test_kernels import DEVICE, DTYPES

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def alike(ours, expected, dtype):
    torch.testing.assert_close(ours.cpu(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def random(*shape, dtype):
    return (torch.randn(*shape) * 0.3).to(dtype)


# A hidden size that is no power of two, and numbers of tokens, neurons and words that fill no tile.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_and_what_they_are_added_to(dtype):
    torch.manual_seed(0)
    stream, inputs, weight = (random(*shape, dtype=dtype) for shape in ((18, 48), (18, 96), (48, 96)))
    ours = narrow_layers.add_product(*(t.to(DEVICE) for t in (stream, inputs, weight)))
    alike(ours, plain_kernels.add_product(stream, inputs, weight), dtype)
    head = random(61, 48, dtype=dtype)
    alike(narrow_layers.logits(stream.to(DEVICE), head.to(DEVICE)), plain_kernels.logits(stream, head), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_gates_and_activation(dtype):
    torch.manual_seed(0)
    stream, norm, gate_up = (random(*shape, dtype=dtype) for shape in ((18, 48), (48,), (2 * 80, 48)))
    ours = narrow_layers.norm_mlp(stream.to(DEVICE), norm.to(DEVICE), 1e-5, gate_up.to(DEVICE))
    alike(ours, plain_kernels.norm_mlp(stream, norm, 1e-5, gate_up), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("biased", "normed"), [(False, False), (True, False), (False, True)])
def test_norm_queries_keys_and_values(biased, normed, dtype):
    """Ragged rows, a head dimension that is no power of two, and a position past the tables."""
    torch.manual_seed(0)
    heads, kv_heads, head_dim, rows, width, size = 5, 3, 12, 2, 9, 48
    num_outputs = (heads + 2 * kv_heads) * head_dim
    stream, norm, weight, bias = (
        random(*shape, dtype=dtype) for shape in ((rows * width, size), (size,), (num_outputs, size), (num_outputs,))
    )
    keys, values = random(2, rows, 20, kv_heads, head_dim, dtype=dtype)
    cos, sin = random(2, 12, head_dim // 2, dtype=dtype)
    lengths, depths = torch.tensor([3, 8], dtype=torch.int32), torch.arange(width, dtype=torch.int32).repeat(2, 1)
    head_norms = random(2, head_dim, dtype=dtype) if normed else None
    results = []
    for module, device in ((plain_kernels, "cpu"), (narrow_layers, DEVICE)):
        cache = [t.clone().to(device) for t in (keys, values)]
        seen = Paths(lengths.to(device), depths.to(device), depths[:, :, None].to(device), 8)
        inputs = (stream.to(device), norm.to(device), 1e-5, weight.to(device), bias.to(device) if biased else None)
        norms = (*head_norms.to(device), 1e-5) if head_norms is not None else None
        queries = module.norm_qkv(*inputs, *cache, seen, cos.to(device), sin.to(device), norms)
        results.append([t.cpu() for t in (queries, *cache)])
    for ours, expected in zip(results[1], results[0], strict=True):
        alike(ours, expected, dtype)


def step(layers: FastLayers, tree: DraftTree, length: int):
    """Logits [W, V] and hidden states [W, H], before and behind all layers, over a text of random keys and values."""
    generator = torch.Generator().manual_seed(0)
    shape = (layers.num_layers, 1, 128, layers.kv_heads, layers.head_dim)
    dtype = layers._embedding.dtype
    keys, values = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(2))
    lengths = torch.tensor([length], dtype=torch.int32, device=DEVICE)
    depths, paths = (numbers.int().contiguous().to(DEVICE) for numbers in (tree.depths(), tree.paths()))
    tokens = tree.tokens.to(DEVICE)
    seen, asked = Paths(lengths, depths, paths, length), (0, layers.num_layers)
    logits, hidden = layers(tokens, seen, keys, values, layers.rotary(128), asked)
    return logits[0], hidden[0][0], hidden[1][0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_nodes_bits_are_the_same_at_every_width(dtype):
    """A chain of 8 nodes, alone and with 56 others around it, and its root alone."""
    layers = FastLayers(model_of("qwen3", num_hidden_layers=1).to(dtype))
    tokens, parents = [7, 9, 4, 4, 30, 2, 5, 6], [0, 0, 1, 2, 3, 4, 5, 6]
    places = [0, 3, 10, 17, 22, 40, 41, 63]  # of the chain in the wide tree
    wide_tokens, wide_parents = [place % 60 for place in range(64)], [0] * 64
    for number, place in enumerate(places):
        wide_tokens[place], wide_parents[place] = tokens[number], places[parents[number]]
    chain, wide = (
        step(layers, tree_of([tokens], [parents]), 40),
        step(layers, tree_of([wide_tokens], [wide_parents]), 40),
    )
    root = step(layers, tree_of([tokens[:1]], [[0]]), 40)
    for one, eight, many in zip(root, chain, wide, strict=True):
        assert torch.equal(one[0], eight[0])
        assert torch.equal(eight, many[places])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_narrow_layers_give_what_the_generic_ones_give(dtype, monkeypatch):
    layers = FastLayers(model_of("qwen2", num_hidden_layers=2).to(dtype))
    tree = tree_of([[7, 9, 4, 5, 8]], [[0, 0, 0, 1, 3]])
    narrow = step(layers, tree, 21)
    monkeypatch.setattr(FastLayers, "narrow", False)
    generic = step(layers, tree, 21)
    assert torch.equal(narrow[0].argmax(-1), generic[0].argmax(-1))
    for ours, expected in zip(narrow, generic, strict=True):
        torch.testing.assert_close(ours, expected, atol=10 * TOLERANCES[dtype], rtol=10 * TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("sizes", "fit"),
    [
        ((576, 1536, 576, 64), True),
        ((576, 1536, 576, 129), False),
        ((2048, 8192, 2048, 1), False),
        ((570, 1536, 576, 1), False),
        ((576, 1500, 576, 1), False),
    ],
)
def test_which_steps_are_narrow(sizes, fit):
    assert narrow_layers.fits(*sizes) == fit
