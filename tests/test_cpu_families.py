"""Families of models in the C layers of a CPU: what transformers computes, the same bits in any step, and a check on
load that sees a wrong description."""

import copy
from dataclasses import replace

import pytest
import torch

from families import EXPERTS, FAMILIES, LATENT, family_model, varied
from graft import Engine
from graft.model import attention, cpu_layers
from graft.model.families import NotDescribedError, describe
from graft.model.kv_cache import PAGE
from graft.model.runner import TargetRunner
from test_captured import logits_of
from test_cpu_layers import TAPS, assert_same_bits_in_any_step, cpu_sped, fused, run, run_as_on
from test_cpu_linear import CAPABILITIES, needs_kernel
from test_families import FAULTS, of_attention
from tiny import tiny_multimodal

pytestmark = needs_kernel
# Odd sizes, whose packed products do not begin where a panel does, and what no family's config has by itself.
ODD: dict[str, tuple[str, dict[str, object]]] = {
    "phi3": ("phi3", {"head_dim": 6, "intermediate_size": 37}),
    "glm4": ("glm4", {"head_dim": 40, "intermediate_size": 37, "num_hidden_layers": 3}),
    "gemma2": ("gemma2", {"head_dim": 6, "hidden_size": 28}),
    "cohere with norms of heads": ("cohere", {"use_qk_norm": True, "hidden_size": 60}),
    "experts": ("qwen2_moe", {"hidden_size": 36, "moe_intermediate_size": 44, "shared_expert_intermediate_size": 21}),
    "experts with gates and ups in turns": ("gpt_oss", {"hidden_size": 36, "intermediate_size": 44}),
    "a window of more than a page": ("mistral", {"sliding_window": PAGE + 9}),
}


def assert_alike(ours, theirs):
    """Hidden states are larger than logits, and transformers' own are 1e-3 from those in float64."""
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-4)


def both(model):
    """A runner by the C layers alone, and one by transformers' code."""
    return fused(model), TargetRunner(model, TAPS)


NAMES = [name for name in FAMILIES if name not in LATENT]


@pytest.mark.parametrize("name", NAMES)
def test_families_give_what_transformers_gives(name, monkeypatch):
    run_as_on(CAPABILITIES[0], monkeypatch)
    model = family_model(name)
    ours, theirs = (run(target, (12, PAGE + 3), 6) for target in both(model))
    assert_alike(ours, theirs)
    text = torch.randint(3, 61, (1, PAGE + 20), generator=torch.Generator().manual_seed(2))
    target = fused(model, chunk_size=256)
    (read,) = target.prefill(target.open(1, 2 * PAGE), 0, text[0].tolist())
    if name in EXPERTS:  # transformers has no float64 for them
        torch.testing.assert_close(logits_of(read), model(text).logits, atol=1e-3, rtol=1e-4)
        return
    expected = model.double()(text).logits  # with transformers' own attention
    torch.testing.assert_close(logits_of(read).double(), expected, atol=4e-4, rtol=1e-4)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", ODD)
def test_odd_sizes_on_every_processor(name, capability, monkeypatch):
    run_as_on(capability, monkeypatch)
    family, changes = ODD[name]
    ours, theirs = (run(target, (11, 2 * PAGE + 6), 9) for target in both(family_model(family, **changes)))
    assert_alike(ours, theirs)


def test_a_model_that_takes_images_runs_its_text_in_our_layers():
    model = varied(tiny_multimodal("gemma3"))
    ours, theirs = (run(target, (12, 5), 6) for target in both(model))
    assert_alike(ours, theirs)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu2"])
def test_activations_are_those_of_float64(activation, capability, monkeypatch):
    run_as_on(capability, monkeypatch)
    model = family_model("llama", hidden_act=activation, num_hidden_layers=1, intermediate_size=37)
    target, text = fused(model, (0, 1)), [3, 17, 42, 9, 9, 30, 5, 21]
    (read,) = target.prefill(target.open(1, 8), 0, text)
    expected = model.double()(torch.tensor([text])).logits
    torch.testing.assert_close(logits_of(read).double(), expected, atol=1e-5, rtol=1e-5)


SOME = [
    "gemma2",
    "gemma4_text",
    "gemma4_shared",
    "olmo3",
    "cohere2",
    "phi3",
    "ministral3",
    "granite",
    "gpt_oss",
    "glm4_moe",
]


@pytest.mark.parametrize("name", SOME)
def test_a_token_gets_the_same_bits_in_any_step(name, monkeypatch):
    assert_same_bits_in_any_step(family_model(name), monkeypatch)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("window", [5, PAGE, PAGE + 9])
def test_a_token_gets_the_same_bits_in_any_step_behind_a_window(window, capability, monkeypatch):
    run_as_on(capability, monkeypatch)
    assert_same_bits_in_any_step(family_model("mistral", sliding_window=window), monkeypatch)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_attention_in_chunks_of_positions(capability, monkeypatch):
    run_as_on(capability, monkeypatch)
    model, chunked = family_model("llama"), of_attention(chunk=10)
    monkeypatch.setattr(attention, "_reach", lambda module, window: (None, 10))
    monkeypatch.setattr(cpu_layers, "describe", lambda *given: chunked(describe(*given)))
    ours, theirs = (run(target, (9, PAGE + 3), 6) for target in both(model))
    assert_alike(ours, theirs)
    assert_same_bits_in_any_step(model, monkeypatch)


@pytest.mark.parametrize("name", ["gemma2", "cohere2"])
def test_texts_are_those_of_transformers_generate(name):
    model, prompt = family_model(name), [3, 17, 42, 9, 9, 30, 5, 21]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None)[0, 8:]
    engine = Engine(cpu_sped(copy.deepcopy(model)))
    assert engine.generate(prompt, max_new_tokens=40, ignore_eos=True).ids == expected.tolist()
    assert engine.target._fused.layers is not None


# The check on load


@pytest.mark.parametrize("fault", [fault for fault, (name, _) in FAULTS.items() if name in NAMES])
def test_a_wrong_description_is_refused_on_load(fault, monkeypatch):
    name, change = FAULTS[fault]
    model = cpu_sped(family_model(name))
    cpu_layers.CpuModel(model)
    monkeypatch.setattr(cpu_layers, "describe", lambda *given: change(describe(*given)))
    with pytest.raises(NotDescribedError, match=r"differ|something else"):
        cpu_layers.CpuModel(model)


def test_a_model_that_was_refused_is_run_by_its_own_code_and_not_tried_again(monkeypatch):
    tried, check = [], cpu_layers.why_unlike
    monkeypatch.setattr(cpu_layers, "why_unlike", lambda *given: (tried.append(given), check(*given))[1])
    model = cpu_sped(family_model("llama"))
    expected = run(TargetRunner(copy.deepcopy(model), TAPS), (9,), 6)
    with monkeypatch.context() as wrong:
        wrong.setattr(cpu_layers, "describe", lambda *given: replace(describe(*given), logit_scale=0.5))
        target = TargetRunner(model, TAPS)
        torch.testing.assert_close(run(target, (9,), 6), expected, atol=1e-4, rtol=1e-4)
        assert "logits differ" in target.not_fused and target.mode == "eager"
        count = len(tried)
        target.open(1, 8).release()
        assert len(tried) == count
    model.model.layers[0].mlp = copy.deepcopy(model.model.layers[0].mlp)
    assert target.not_fused is None


CHANGES = {
    "gemma4_shared": [
        lambda model: model.layers[1].layer_scalar.mul_(1.5),
        lambda model: model.per_layer_model_projection.weight.data.mul_(1.5),
        lambda model: model.per_layer_projection_norm.weight.mul_(1.5),
    ],
    "qwen2_moe": [
        lambda model: model.layers[1].mlp.experts.down_proj.data.mul_(1.5),
        lambda model: model.layers[1].mlp.experts.gate_up_proj[3].mul_(1.5),
        lambda model: model.layers[1].mlp.gate.weight.data.mul_(-1.0),
        lambda model: model.layers[1].mlp.shared_expert_gate.weight.data.mul_(-1.0),
    ],
}


@pytest.mark.parametrize("name", CHANGES)
def test_weights_that_change_are_used_at_once(name):
    model = cpu_sped(family_model(name))
    target = TargetRunner(model, TAPS)
    before = run(target, (9,), 6)
    for change in CHANGES[name]:
        with torch.no_grad():
            change(model.model)
        ours, theirs = run(target, (9,), 6), run(TargetRunner(copy.deepcopy(model), TAPS), (9,), 6)
        assert not torch.equal(ours[0], before[0])
        assert_alike(ours, theirs)
        before = ours


@pytest.mark.parametrize("name", ["down_proj", "gate_up_proj", "down_proj_bias", "gate_up_proj_bias"])
def test_the_next_text_uses_experts_that_changed_where_torch_does_not_count_it(name):
    model = cpu_sped(family_model("gpt_oss"))
    target = TargetRunner(model, TAPS)
    before = run(target, (9,), 6)
    getattr(model.model.layers[1].mlp.experts, name).data.mul_(-1.5)
    ours, theirs = run(target, (9,), 6), run(TargetRunner(copy.deepcopy(model), TAPS), (9,), 6)
    assert target.not_fused is None and not torch.equal(ours[0], before[0])
    assert_alike(ours, theirs)
