"""Weights of 8 bits: what products compute with them, and that drafts with them stay what they are in 16 bits."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")

from attention_problems import Problem
from captured_parts import DEVICE, PROMPT, SmallDrafter, SmallTarget, Text
from graft import Engine
from graft.drafters.drafter import TreeSettings
from graft.drafters.eagle3 import fused_head
from graft.drafters.eagle3 import kernels as eagle3_kernels
from graft.model.kernels import layer as layer_kernels
from graft.model.kernels.eight_bits import EIGHT_BITS, in_eight_bits
from graft.model.kernels.matmul import EightBits, Products, Tile, tile_for
from graft.spec_decode.policies import make_policy
from tiny import tiny_model

# Triton's interpreter rounds to 8 bits less well than a GPU does.
ROUNDING = 0.02 if DEVICE == "cuda" else 0.12
PLAIN = {"norm_output": False, "fc_norm": False}
DEFAULT = {"norm_output": True, "fc_norm": True}


def error(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def test_weights_keep_three_bits_of_mantissa_whatever_their_size():
    torch.manual_seed(0)
    weight = torch.randn(192, 64).to(DEVICE, torch.bfloat16) * torch.logspace(-6, 6, 192, device=DEVICE)[:, None]
    weight = weight.to(torch.bfloat16)
    weight[5] = 0
    eight = EightBits.of(weight)
    assert eight.values.dtype is EIGHT_BITS and eight.dtype is torch.bfloat16
    restored = eight.values.double() * eight.factors.double()[:, None]
    largest = weight.double().abs().amax(dim=1, keepdim=True)
    assert ((restored - weight.double()).abs() <= weight.double().abs() / 16 + largest / 2**17).all()


def test_numbers_too_large_for_8_bits_become_the_largest():
    x = torch.tensor([[1.0, -2.5, 448.0, 1e4, -1e30, 0.0]], device=DEVICE)
    assert in_eight_bits(x).float().tolist() == [[1.0, -2.5, 448.0, 448.0, -448.0, 0.0]]


def normed(dtype):
    x, delta, weight = torch.randn(3, 3, 40, device=DEVICE)
    out = torch.empty_like(x, dtype=dtype)
    return layer_kernels.add_norm(x, delta, weight[0], 1e-5, normed=out)[1]


def entered(dtype):
    embedding, hidden, norms = torch.randn(3, 6, 40, device=DEVICE)
    tokens = torch.tensor([4, 0, 5], dtype=torch.int32, device=DEVICE)
    return eagle3_kernels.enter(tokens, embedding, hidden, tokens, (norms[0], norms[1]), 1e-5, False, dtype)[0]


def attended(dtype):
    return Problem.random([5, 63], head_dim=16).attend(dtype=dtype)


@pytest.mark.parametrize("kernel", [normed, entered, attended])
def test_kernels_write_the_same_numbers_in_8_bits(kernel):
    found = []
    for dtype in (torch.float32, EIGHT_BITS):
        torch.manual_seed(0)
        found.append(kernel(dtype))
    expected, ours = found
    assert ours.dtype is EIGHT_BITS
    assert float((ours.float() / expected - 1).abs().quantile(0.75)) < 0.07, "the interpreter gets some wrong"


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("number", [10, 40])
def test_products_are_right(is_gated, number):
    torch.manual_seed(0)
    x = torch.randn(number, 256).to(DEVICE, torch.bfloat16)
    weight = torch.randn(512, 256).to(DEVICE, torch.bfloat16) * torch.logspace(-3, 0, 512, device=DEVICE)[:, None]
    eight, x8 = EightBits.of(weight.to(torch.bfloat16)), in_eight_bits(x)
    products = Products(x.device)
    found = products.activate(x8, eight) if is_gated else products(x8, eight)
    expected = x8.double() @ (eight.values.double() * eight.factors.double()[:, None]).T
    if is_gated:
        gates, ups = expected.chunk(2, dim=1)
        expected = torch.nn.functional.silu(gates) * ups
    assert found.dtype is (EIGHT_BITS if is_gated else torch.bfloat16)
    assert error(found, expected) < (ROUNDING + 0.02 if is_gated else 0.01)


def test_halves_of_tiles_take_their_own_factors():
    torch.manual_seed(0)
    x, weight = torch.randn(150, 128), torch.randn(512, 128) * torch.logspace(-3, 0, 512)[:, None]
    x8, eight = in_eight_bits(x.to(DEVICE)), EightBits.of(weight.to(DEVICE, torch.bfloat16))
    products, whole = Products(x8.device), Tile(64, 16, 128, warps=4, stages=2, num_whole=8)
    halves = Tile(128, 16, 128, warps=4, stages=2, num_whole=1)
    expected = products.multiply(x8, eight, tile=whole)
    torch.testing.assert_close(products.multiply(x8, eight, tile=halves), expected)


@pytest.mark.parametrize("shape", [(6144, 8192), (28672, 4096), (4096, 14336), (13312, 4096), (64, 64)], ids=str)
def test_tiles_fit(shape):
    for number in (1, 10, 17, 64, 100, 128, 512, 4096):
        tile = tile_for(number, shape, EIGHT_BITS)
        assert shape[0] % tile.outputs == 0 and shape[1] % tile.inputs == 0
        assert tile.stages >= 2 and tile.stages * (tile.outputs + tile.tokens) * tile.inputs <= 227 * 1024


@pytest.fixture
def small_heads(monkeypatch):
    monkeypatch.setattr(fused_head, "_LARGE", 0)


def model_of_16_bits():
    return tiny_model(hidden_size=64, intermediate_size=128, head_dim=16, vocab_size=64).to(DEVICE, torch.float16)


def text_of(model, eight_bits, config):
    settings = TreeSettings(depth=2, topk=4, eight_bits=eight_bits)
    text = Text(model, SmallDrafter, settings, draft_vocab_size=64, dtype=torch.float16, **config)
    assert text.drafter.fast.has_eight_bits == eight_bits
    return text


@pytest.mark.parametrize("config", [PLAIN, DEFAULT], ids=["plain", "default"])
def test_drafts_are_about_those_of_16_bits(config, plain, small_heads):
    """The head's outputs differ by rounding alone. A wrong scale or norm changes them altogether."""
    model, outputs, likeliest = model_of_16_bits(), [], []
    for eight_bits in (False, True):
        text = text_of(model, eight_bits, config)
        _, state = text.open(PROMPT, [5, 6], PROMPT * 7)
        likeliest.append([set(row) for row in text.levels(state, count=1)[0].tokens.tolist()])
        buffers = text.drafter._buffers[state.pool]
        outputs.append(buffers.root[[row.row.block_table_row for row in state.rows]])
    assert 0.001 < error(*reversed(outputs)) < 0.12
    assert all(len(usual & eight) >= 2 for usual, eight in zip(*likeliest, strict=True)), "of 4 in 64 tokens"


@pytest.mark.parametrize("config", [PLAIN, DEFAULT], ids=["plain", "default"])
def test_texts_are_those_of_plain_decoding(config, plain, small_heads, monkeypatch):
    monkeypatch.setattr("graft.engine.engine.target_for", SmallTarget)
    model = model_of_16_bits()
    drafter = text_of(model, True, config).drafter
    policy = make_policy("graft", SmallTarget(model), drafter, budget=9, pass_cost=0.0)
    engine = Engine(model, policy=policy, drafter=drafter)
    expected = Engine(model, policy="off").generate(PROMPT, max_new_tokens=12).ids
    answer = engine.generate(PROMPT, max_new_tokens=12)
    assert answer.ids == expected and answer.stats.draft_passes > 0


def test_small_heads_float32_and_odd_sizes_keep_their_bits(monkeypatch):
    weight = torch.zeros(128, 64, dtype=torch.bfloat16)
    assert EightBits.why_not(weight) is None
    assert "float32" in str(EightBits.why_not(weight.float()))
    assert "multiples of 64" in str(EightBits.why_not(weight[:, :60]))
    model = model_of_16_bits()
    text = Text(model, SmallDrafter, TreeSettings(), draft_vocab_size=64, dtype=torch.float16, **DEFAULT)
    assert not text.drafter.fast.has_eight_bits, "small heads gain nothing"
