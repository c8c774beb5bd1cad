"""Mixtures of experts by kernels, on a GPU or in Triton's interpreter, against transformers' modules and PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")

import plain_kernels
from attention_problems import DEVICE
from families import EXPERTS, family_model
from graft.model.families import NotDescribedError, describe
from graft.model.kernels import experts as kernels
from graft.model.kernels import layer as layer_kernels
from graft.model.kernels import routing
from graft.model.kernels.experts import Tile
from graft.model.kernels.matmul import Products
from graft.model.kernels.mixed import Mixed
from graft.model.kernels.routing import Choice
from graft.model.llama import Dense, fuse_parameters
from graft.model.mixture import Mixture
from graft.model.network import Experts, Router

SIXTEEN_BITS = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter cannot multiply bfloat16


def described(name: str, dtype: torch.dtype = torch.float32) -> tuple[Experts, Callable[[Tensor], Tensor]]:
    """The experts of a tiny model's last layer, and the module that they describe."""
    model = family_model(name).to(DEVICE, dtype)
    if name == "ernie4_5_moe":  # as its checkpoints are loaded
        model.model.layers[-1].mlp.gate.float()
    experts, block = describe(model).layers[-1].mlp, model.model.layers[-1].mlp
    assert isinstance(experts, Experts)

    def run(x: Tensor) -> Tensor:
        result = block(x[None])
        return (result[0] if isinstance(result, tuple) else result)[0]

    return experts, run


def mixture(experts: Experts) -> Callable[[Tensor], Tensor]:
    gate, shared = experts.shared_gate, Dense.of(experts.shared) if experts.shared is not None else None
    weight = fuse_parameters([experts.router.weight, gate.weight]) if gate is not None else None
    run = Mixture(experts, shared, weight)
    return lambda x: summed(run(x, Products(torch.device(DEVICE), always=True)))


def summed(mixed: Mixed) -> Tensor:
    """The sum, added to nothing."""
    results, weights = mixed.results, mixed.weights
    return layer_kernels.add_norm(torch.zeros_like(results[: len(weights)]), mixed, None)[0]


def tokens(count: int, dtype: torch.dtype = torch.float32, size: int = 64) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(count, size).to(DEVICE, dtype)


# A layer's experts


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_give_what_transformers_modules_give(name):
    experts, block = described(name)
    x = tokens(9)
    expected = block(x)  # before the weights may be stored anew
    torch.testing.assert_close(mixture(experts)(x), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(block(x), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", EXPERTS)
def test_in_16_bits_experts_are_as_near_to_float32_as_transformers_modules(name):
    experts, block = described(name, SIXTEEN_BITS)
    x = tokens(12, SIXTEEN_BITS)
    expected, own = block(x).float(), mixture(experts)(x).float()
    exact = described(name)[1](x.float())
    error, usual = ((each - exact).norm() / exact.norm() for each in (own, expected))
    assert error < 1.5 * usual + 1e-4


@pytest.mark.parametrize("name", ["qwen2_moe", "glm4_moe", "gpt_oss"])
def test_a_token_has_the_same_bits_alone_and_in_any_company(name):
    experts = described(name, SIXTEEN_BITS)[0]
    run, x = mixture(experts), tokens(70, SIXTEEN_BITS)  # several items of some experts, and another tile
    together = run(x)
    assert torch.equal(run(x.flip(0)).flip(0), together)
    for place in (0, 33, 69):
        assert torch.equal(run(x[place : place + 1])[0], together[place])
    assert torch.equal(run(x[20:25]), together[20:25])


def test_weights_that_are_stored_anew_are_still_the_models_own(tmp_path):
    model = family_model("gpt_oss")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    experts = describe(model).layers[0].mlp
    Mixture(experts)
    address = experts.gate_up.data_ptr()
    Mixture(experts)
    assert experts.gate_up.data_ptr() == address, "once is enough"
    model.save_pretrained(tmp_path)
    for own in (model, type(model).from_pretrained(tmp_path)):
        assert all(torch.equal(weight, before[name]) for name, weight in own.named_parameters())


def test_experts_whose_rows_the_device_cannot_load_in_blocks_are_refused():
    model = family_model("qwen3_moe").half()
    for layer in model.model.layers:
        layer.mlp.experts.down_proj = torch.nn.Parameter(layer.mlp.experts.down_proj[:, :, :12].clone())
    with pytest.raises(NotDescribedError, match="its experts' sizes are no multiples of 8"):
        describe(model)


# The choice of experts


def choose(products: Tensor, **options: object) -> Choice:
    """Experts for tokens whose router gives these products [T, E]."""
    weight = torch.zeros(products.shape[1], 64, device=DEVICE)
    weight[:, : products.shape[1]] = torch.eye(products.shape[1], device=DEVICE)
    x = torch.zeros(len(products), 64, device=DEVICE)
    x[:, : products.shape[1]] = products.to(DEVICE)
    return routing.choose(x, replace(Router(weight, None, None, "softmax", 2), **options))


def test_of_equal_scores_the_lower_expert_is_chosen_first():
    products = torch.tensor([[0.0, 2.0, -1.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0, 1.0], [0.0, -0.0, -1.0, 3.0, 0.0]])
    assert choose(products, top_k=3).experts.tolist() == [[1, 3, 4], [0, 1, 2], [3, 0, 1]]
    assert choose(-products, top_k=3, scoring="sigmoid").experts.tolist() == [[2, 0, 1], [0, 1, 2], [2, 0, 1]]


def test_of_equal_groups_the_lower_is_chosen_from():
    products = torch.tensor([[2.0, 1.0, 3.0, 0.0, 1.5, 1.5]])
    options = {"groups": 3, "top_groups": 2, "scoring": "sigmoid"}
    # The third group's two best are together better than the second's; then the first and the second are equal.
    assert choose(products, **options).experts.tolist() == [[0, 4]]
    assert choose(products.flip(1)[:, [1, 0, 3, 2, 5, 4]], **options).experts.tolist() == [[4, 0]]
    same = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 1.0]])
    assert sorted(choose(same, **options).experts[0].tolist()) == [1, 3]


def test_there_are_always_experts_even_for_numbers_that_are_none():
    products = torch.tensor([[float("nan")] * 4, [float("inf"), 0.0, float("-inf"), 1.0]])
    experts = choose(products, top_k=3).experts
    assert all(sorted(set(row)) == sorted(row) and set(row) <= set(range(4)) for row in experts.tolist())
    lowest = torch.full((6,), -torch.inf, device=DEVICE)
    options = {"bias": lowest, "scoring": "softmax_of_chosen", "groups": 2, "top_groups": 2}
    assert choose(torch.zeros(1, 6), top_k=5, **options).experts.tolist() == [[0, 1, 2, 3, 4]]


def test_the_correction_moves_the_choice_and_not_the_weights():
    products, correction = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0.0, 0.0, 9.0], device=DEVICE)
    choice = choose(products, correction=correction, scoring="sigmoid")
    assert choice.experts.tolist() == [[2, 0]]
    torch.testing.assert_close(choice.weights.cpu(), torch.tensor([[0.0, 2.0]]).sigmoid())


# Groups


@pytest.mark.parametrize(("num_tokens", "top_k", "block"), [(2, 1, 16), (40, 3, 16), (700, 4, 32)])
def test_every_pair_is_in_one_item_of_its_expert_in_its_order(num_tokens, top_k, block):
    torch.manual_seed(0)
    num_experts = 9
    experts = torch.stack([torch.randperm(num_experts - 1)[:top_k] for _ in range(num_tokens)]).int()  # none for 8
    choice = Choice(experts.to(DEVICE), torch.zeros_like(experts), None)
    groups = routing.group(choice, num_experts, block)
    assert groups is not None
    items = groups.items[:, : int(groups.count)].T.tolist()
    members = groups.members.cpu()
    found = [(expert, members[first : min(first + block, end)].tolist()) for expert, first, end in items]
    expected = []
    for expert in range(num_experts):
        pairs = (experts.flatten() == expert).nonzero().flatten().tolist()
        expected += [(expert, pairs[place : place + block]) for place in range(0, len(pairs), block)]
    assert found == expected


def test_grids_hold_the_most_items_that_there_may_be():
    """As many experts as possible have one pair in their last item."""
    block, num_experts = 16, 4
    experts = torch.tensor([0] * 17 + [1] * 17 + [2] * 17 + [3] * 17, dtype=torch.int32)[:, None]
    groups = routing.group(Choice(experts.to(DEVICE), torch.zeros_like(experts), None), num_experts, block)
    assert groups is not None and int(groups.count) == 8 <= groups.items.shape[1]


# Products and sums


@pytest.mark.parametrize("by_descriptor", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
def test_every_pair_is_multiplied_by_its_experts_weight(by_descriptor, parts):
    """With outputs and inputs that fill no tile."""
    torch.manual_seed(0)
    num_experts, outputs, inputs, top_k, count = 3, 72, 40, 2, 25
    weight = torch.randn(num_experts, parts, outputs, inputs, device=DEVICE)
    experts = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(count)]).int().to(DEVICE)
    choice = Choice(experts, torch.zeros_like(experts).float(), None)
    groups = routing.group(choice, num_experts, 16)
    x = torch.randn(count * (1 if parts == 2 else top_k), inputs, device=DEVICE)
    own = kernels.multiply(x, weight, choice, groups, Tile(16, 64, 32, 4, 2), by_descriptor=by_descriptor)
    for pair, expert in enumerate(experts.flatten().tolist()):
        row = x[pair // top_k] if parts == 2 else x[pair]
        products = weight[expert] @ row
        expected = silu(products[0]) * products[1] if parts == 2 else products[0]
        torch.testing.assert_close(own[pair], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("wide", [False, True])
def test_results_are_added_in_the_order_of_the_tokens_own_experts(wide):
    torch.manual_seed(0)
    results = (
        torch.randn(3 * 4, 50, device=DEVICE).to(SIXTEEN_BITS)
        * torch.tensor([1, 300, 1, 0.01], device=DEVICE).repeat(3)[:, None]
    )
    results = results.to(SIXTEEN_BITS)
    weights = torch.rand(3, 4, device=DEVICE)
    shared = torch.randn(3, 50, device=DEVICE).to(SIXTEEN_BITS)
    gates = torch.randn(3, device=DEVICE)
    for given in (Mixed(results, weights, wide, shared, gates), Mixed(results, weights, wide)):
        assert torch.equal(summed(given), plain_kernels.summed(given))
    large = torch.tensor([1e8, 1, -1e8, 1], device=DEVICE).repeat(3)[:, None]  # in another order the sum is 0 or 2
    assert summed(Mixed(large, torch.ones_like(weights), wide)).tolist() == [[1]] * 3
