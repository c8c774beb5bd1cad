"""The CPU kernel for few tokens: torch's results, the model's own parameters, and no harm where it cannot be had."""

import copy
import os

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from graft.model import cpu_linear as cpu
from tiny import tiny_model

ON_X86 = ["DEFAULT", "AVX2", "AVX512"]  # each runs what the ones before it run
_OWN = torch.backends.cpu.get_cpu_capability()
CAPABILITIES = ON_X86[: ON_X86.index(_OWN) + 1] if _OWN in ON_X86 else ["DEFAULT", _OWN]


def has_kernel():
    try:
        return cpu.few_tokens_linear(torch.ones(1, 1), torch.ones(1, 1)) is not None
    except AssertionError:
        return False


needs_kernel = pytest.mark.skipif(not has_kernel(), reason="the kernel was not built")


@pytest.fixture
def loaded_anew(monkeypatch):
    """The kernel is loaded at every call."""
    monkeypatch.setattr(cpu, "library", cpu.library.__wrapped__)


@pytest.fixture
def calls(monkeypatch):
    """Shapes of the inputs that reached the kernel."""
    shapes, real = [], cpu.few_tokens_linear
    monkeypatch.setattr(cpu, "few_tokens_linear", lambda *args: (shapes.append(tuple(args[0].shape)), real(*args))[1])
    return shapes


@needs_kernel
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (7, 5), (8, 4), (33, 19), (192, 576), (65, 1537)])
@pytest.mark.parametrize("is_exact_in_bf16", [False, True])
def test_kernel_equals_torch_for_odd_shapes_and_1_to_64_tokens(num_outputs, num_inputs, is_exact_in_bf16):
    torch.manual_seed(0)
    weight, bias = torch.randn(num_outputs, num_inputs), torch.randn(num_outputs)
    if is_exact_in_bf16:
        weight = weight.bfloat16().float()
    for num_tokens in range(1, 65):
        x = torch.randn(num_tokens, num_inputs)
        exact = linear(x.double(), weight.double(), bias.double())
        torch.testing.assert_close(
            cpu.few_tokens_linear(x, weight, bias).double(), exact, rtol=1e-5, atol=2e-5 * num_inputs**0.5
        )


@needs_kernel
@pytest.mark.parametrize("is_exact_in_bf16", [False, True])
def test_a_token_gets_the_same_bits_among_any_number_of_others(is_exact_in_bf16):
    x, weight = torch.randn(64, 577), torch.randn(31, 577)
    weight = weight.bfloat16().float() if is_exact_in_bf16 else weight
    together = cpu.few_tokens_linear(x, weight)
    for num_tokens in (1, 2, 4, 5, 8, 9, 31, 63):
        assert torch.equal(cpu.few_tokens_linear(x[:num_tokens], weight), together[:num_tokens])


@needs_kernel
def test_weights_that_are_exact_in_bfloat16_take_half_the_memory_and_give_the_same_bits():
    x, weight = torch.randn(5, 577), torch.randn(70, 577).bfloat16().float()
    inexact = torch.cat([weight, torch.full((1, 577), 0.1)])
    assert cpu.pack(weight).element_size() == 2 and cpu.pack(inexact).element_size() == 4
    assert torch.equal(cpu.few_tokens_linear(x, weight), cpu.few_tokens_linear(x, inexact)[:, :70])


@needs_kernel
@torch.no_grad()
def test_a_changed_weight_is_packed_anew():
    layer, x = cpu.FewTokensLinear.sharing(nn.Linear(6, 4)), torch.randn(3, 6)
    for change in ("none", "one number", "not counted", "other memory"):
        if change == "one number":
            layer.weight[1, 2] += 1
        elif change == "not counted":
            layer.weight.data.mul_(2)
        elif change == "other memory":
            layer.weight.data = torch.randn(4, 6)
        torch.testing.assert_close(layer(x), linear(x, layer.weight, layer.bias))
        assert cpu.pack(layer.weight) is cpu.pack(layer.weight)


@needs_kernel
@torch.no_grad()
def test_layer_sends_only_1_to_64_tokens_to_the_kernel(calls):
    layer = cpu.FewTokensLinear.sharing(nn.Linear(6, 4))
    for is_exact_in_bf16 in (True, False):
        layer.weight.copy_(layer.weight.bfloat16() if is_exact_in_bf16 else torch.randn(4, 6))
        for num_tokens in (0, 1, 2, 64, 65):
            x = torch.randn(1, num_tokens, 6)
            torch.testing.assert_close(layer(x), linear(x, layer.weight, layer.bias))
    assert calls == [(1, 1, 6), (1, 2, 6), (1, 64, 6), (1, 2, 6), (1, 64, 6)]  # torch is as fast for one token
    with pytest.raises(RuntimeError):
        layer(torch.randn(2, 5))


@needs_kernel
def test_layer_leaves_gradients_and_other_dtypes_to_torch(calls):
    layer = cpu.FewTokensLinear.sharing(nn.Linear(6, 4))
    layer(torch.randn(3, 6)).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        assert layer.bfloat16()(torch.randn(3, 6).bfloat16()).dtype is torch.bfloat16
    assert calls == []


@needs_kernel
@torch.no_grad()
def test_model_keeps_parameters_ties_and_results(calls):
    model = tiny_model(tie_word_embeddings=True)
    before = copy.deepcopy(model)
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    assert cpu.speed_up(model)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.state_dict().keys() == before.state_dict().keys()
    tokens = torch.randint(0, model.config.vocab_size, (1, 7))
    torch.testing.assert_close(model(tokens).logits, before(tokens).logits, rtol=1e-4, atol=1e-5)
    assert calls


def test_model_stays_as_it_is_without_a_kernel(loaded_anew, monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "HERE", tmp_path)  # an empty folder
    model = tiny_model()
    assert not cpu.speed_up(model)
    assert not any(isinstance(module, cpu.FewTokensLinear) for module in model.modules())


@needs_kernel
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("has_threads", [True, False])
@pytest.mark.parametrize("is_exact_in_bf16", [False, True])
def test_every_kernel_that_this_processor_can_run_gives_torchs_results(
    loaded_anew, monkeypatch, capability, has_threads, is_exact_in_bf16
):
    """Also those that older processors run."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    if not has_threads:
        monkeypatch.setattr(cpu, "threads", lambda: None)
    x, weight = torch.randn(11, 577), torch.randn(67, 577)
    weight = weight.bfloat16().float() if is_exact_in_bf16 else weight
    torch.testing.assert_close(cpu.few_tokens_linear(x, weight), linear(x, weight), rtol=1e-4, atol=1e-3)


def test_torchs_openmp_is_found_whatever_its_folder_is_called(monkeypatch, tmp_path):
    folder = os.fsencode(tmp_path / "my env") + b"\xe9"
    own, other = folder + b"/torch/lib/libgomp.so.1", b"/usr/lib/libgomp.so.1"
    lines = [b"7f00-7f01 r-xp 00000000 fe:00 1   %s" % path for path in (other, own, own, b"/usr/lib/libm.so.6")]
    maps = tmp_path / "maps"
    maps.write_bytes(b"\n".join([b"7e00-7e01 rw-p 00000000 00:00 0", *lines, b""]))
    monkeypatch.setattr(cpu, "MAPS", maps)
    assert cpu._openmp_libraries() == [os.fsdecode(own), os.fsdecode(other)]


def test_a_model_runs_by_torch_alone_for_a_while_and_then_by_our_layers_again():
    layer = cpu.FewTokensLinear.sharing(nn.Linear(8, 8))
    model = nn.Sequential(layer)
    with pytest.raises(RuntimeError, match="on the way"), cpu.torchs_linear(model):
        assert type(model[0]) is nn.Linear and model[0].weight is layer.weight
        raise RuntimeError("on the way")
    assert type(model[0]) is cpu.FewTokensLinear
