"""Families of models in fused layers on a GPU: the same logits as transformers, and a check on load that sees what
differs."""

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")

import plain_kernels
from captured_parts import DEVICE, SmallTarget
from families import FAMILIES, family_model, varied
from graft.model import TargetRunner, likeness
from graft.model.families import describe, why_not
from graft.model.kernels import attention as attention_kernels
from graft.model.kernels import layer as layer_kernels
from graft.model.llama import FastLayers
from graft.model.network import Experts
from graft.model.step import Chunk
from proposers import random_tree, tree_of
from tiny import tiny_multimodal

PROMPT = [3, 17, 42, 9, 9, 30, 5, 21, 17, 42, 9, 11]
DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]  # the interpreter has no bfloat16


@pytest.fixture
def plain(monkeypatch):
    """Without a GPU, PyTorch in place of kernels."""
    if DEVICE == "cpu":
        plain_kernels.use_plain_kernels(monkeypatch)


def logits_of(verified):
    return verified.logits[verified.index].clone()


def results_of(target):
    """Logits of two prompts in chunks and of trees behind them, and the hidden states of layers beside these."""
    cache = target.open(2, 64)
    chunks = [logits_of(chunk) for row in (0, 1) for chunk in target.prefill(cache, row, PROMPT[: 12 - 7 * row])]
    verified = target.verify(cache, random_tree(random.Random(1), [3, 4], 5, 61))
    return torch.cat(chunks, dim=1), logits_of(verified), verified.hidden[verified.index]


@pytest.mark.parametrize("name", FAMILIES)
def test_fused_layers_give_what_transformers_gives(name, plain):
    model = family_model(name).to(DEVICE)
    fast = SmallTarget(model, (0, 2, 4), chunk_size=7)
    found, expected = results_of(fast), results_of(TargetRunner(model, (0, 2, 4)))
    assert fast.not_fused is None
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_real_kernels_pass_the_check_on_load(name, dtype):
    model = family_model(name).to(DEVICE, dtype)
    what = describe(model)
    assert likeness.why_unlike(model, what, FastLayers(what, exact=True)) is None


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_the_text_model_of_one_that_sees_images_is_fused(kind, plain):
    model = varied(tiny_multimodal(kind)).to(DEVICE)
    fast = SmallTarget(model, chunk_size=7)
    found, expected = results_of(fast), results_of(TargetRunner(model))
    assert fast.not_fused is None
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_model_of_another_class_is_left_to_its_own_code():
    model = family_model("llama")
    model.__class__ = type("LlamaForCausalLM", (type(model),), {"__module__": "somewhere"})
    assert "not of a family" in why_not(model)


SOME = ["gemma2", "gpt_oss", "glm4_moe", "gemma4_shared", "olmo3", "cohere2", "phi3", "ministral3", "starcoder2"]


@pytest.mark.parametrize("name", [SOME[0], *(pytest.param(name, marks=pytest.mark.slow) for name in SOME[1:])])
def test_a_node_of_a_tree_has_the_bits_of_plain_decoding(name):
    target = SmallTarget(family_model(name, **two_layers(name)).to(DEVICE, DTYPES[1]), exact=True)
    prompt, tokens, parents = PROMPT[:9], [9, 10, 11, 12], [0, 0, 1, 0]
    cache = target.open(1, 64)
    list(target.prefill(cache, 0, prompt))
    nodes = logits_of(target.verify(cache, tree_of([tokens], [parents])))[0]
    for path in ([0, 1, 2], [0, 3]):
        cache = target.open(1, 64)
        list(target.prefill(cache, 0, prompt))
        for node in path:
            _, (step,) = target.step(None, None, [Chunk(cache.rows[0], [tokens[node]])])
            assert torch.equal(logits_of(step)[0, 0], nodes[node]), node


def two_layers(name):
    """Options of a model with one layer of each kind."""
    if "num_hidden_layers" in FAMILIES[name]:
        return {}
    types = {"layer_types": ["sliding_attention", "full_attention"]} if "layer_types" in FAMILIES[name] else {}
    return {"num_hidden_layers": 2, **types}


@pytest.mark.slow
def test_kernels_compile_for_a_gpu():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = str(Path(__file__).with_name("compiled.py"))
    done = subprocess.run([sys.executable, script, *SOME], env=environment, capture_output=True, text=True)
    if "ptxas" in done.stderr or "libtriton" in done.stderr:
        pytest.skip("this Triton cannot compile for NVIDIA GPUs")
    assert done.returncode == 0, done.stderr


# The check on load


def of_layers(change, only=lambda layer: True):
    """A fault in the description of layers."""
    return lambda what: replace(what, layers=tuple(change(layer) if only(layer) else layer for layer in what.layers))


def of_attention(**changes):
    return of_layers(lambda layer: replace(layer, mixer=replace(layer.mixer, **changes)))


def with_local_tables(what):
    tables = [layer.mixer.rotary for layer in what.layers if layer.mixer.window is not None]
    return of_attention(rotary=tables[0])(what)


def with_positions(what):
    return of_attention(rotary=what.layers[0].mixer.rotary)(what)


def with_half_the_dims(layer):
    rotary = replace(layer.mixer.rotary, dims=layer.mixer.rotary.dims // 2)
    return replace(layer, mixer=replace(layer.mixer, rotary=rotary))


def without_plus_one(name):
    return lambda layer: replace(layer, **{name: replace(getattr(layer, name), plus_one=False)})


def of_experts(**changes):
    return of_layers(
        lambda layer: replace(layer, mlp=replace(layer.mlp, **changes)), lambda layer: isinstance(layer.mlp, Experts)
    )


def of_routers(**changes):
    return of_layers(
        lambda layer: replace(layer, mlp=replace(layer.mlp, router=replace(layer.mlp.router, **changes))),
        lambda layer: isinstance(layer.mlp, Experts),
    )


FAULTS = {
    "norms without the one that is added to weights": ("gemma3_text", of_layers(without_plus_one("pre"))),
    "norms after attention without it": ("gemma2", of_layers(without_plus_one("post"))),
    "norms after attention left out": ("glm4", of_layers(lambda layer: replace(layer, post=None))),
    "norms after the MLP left out": ("olmo2", of_layers(lambda layer: replace(layer, post_mlp=None))),
    "norms before the MLP left out": ("gemma2", of_layers(lambda layer: replace(layer, pre_mlp=None))),
    "layer norms taken for RMS norms": (
        "starcoder2",
        of_layers(lambda layer: replace(layer, pre=replace(layer.pre, kind="rms"))),
    ),
    "local tables in global layers": ("gemma3_text", with_local_tables),
    "windows left out": ("gemma3_text", of_attention(window=None)),
    "windows one longer": ("mistral", of_attention(window=9)),
    "caps left out": ("gemma2", of_attention(softcap=None)),
    "another scale": ("granite", of_attention(scale=0.25)),
    "keys not normed": ("qwen3", of_attention(k_norm=None)),
    "values not normed": ("gemma4_text", of_attention(v_norm=None)),
    "norms before the rotation": ("hunyuan_v1_dense", of_attention(norms_turned=False)),
    "norms over each head": (
        "olmo2",
        of_layers(
            lambda layer: replace(layer, mixer=replace(layer.mixer, q_norm=replace(layer.mixer.q_norm, over_all=False)))
        ),
    ),
    "positions in layers that have none": ("smollm3", with_positions),
    "fewer rotary dimensions": ("llama", of_layers(with_half_the_dims)),
    "pairs that are no neighbours": (
        "glm",
        of_layers(
            lambda layer: replace(
                layer, mixer=replace(layer.mixer, rotary=replace(layer.mixer.rotary, interleaved=False))
            )
        ),
    ),
    "queries that do not grow": ("ministral3", of_attention(growth=None)),
    "keys and values of another layer": (
        "gemma4_shared",
        of_layers(
            lambda layer: replace(layer, mixer=replace(layer.mixer, kv_of=0)),
            lambda layer: layer.mixer.kv_of == 1,
        ),
    ),
    "branches one after the other": (
        "cohere",
        of_layers(lambda layer: replace(layer, parallel=None, pre_mlp=layer.pre)),
    ),
    "another activation": ("gemma", of_layers(lambda layer: replace(layer, mlp=replace(layer.mlp, activation="silu")))),
    "another scale of what layers add": ("granite", of_layers(lambda layer: replace(layer, residual_scale=1.0))),
    "another scale of what layers give": ("gemma4_text", of_layers(lambda layer: replace(layer, output_scale=1.0))),
    "sides left out": ("gemma4_shared", of_layers(lambda layer: replace(layer, side=None))),
    "experts' weights not normalised": ("qwen3_moe", of_routers(normalise=False)),
    "experts' weights normalised": ("olmoe", of_routers(normalise=True)),
    "experts' weights without their factor": ("glm4_moe", of_routers(factor=1.0)),
    "an expert too few": ("mixtral", of_routers(top_k=1)),
    "experts of all groups": ("glm4_moe", of_routers(top_groups=4)),
    "a choice that is not corrected": ("minimax_m2", of_routers(correction=None)),
    "another scoring of experts": ("ernie4_5_moe", of_routers(scoring="sigmoid")),
    "scores of all experts": ("gpt_oss", of_routers(scoring="softmax")),
    "routers without bias": ("gpt_oss", of_routers(bias=None)),
    "no shared expert": ("ernie4_5_moe", of_experts(shared=None)),
    "a shared expert that is not scaled": ("qwen2_moe", of_experts(shared_gate=None)),
    "gates before ups": ("gpt_oss", of_experts(interleaved=False)),
    "experts without biases": ("gpt_oss", of_experts(gate_up_bias=None)),
    "no clamp": ("gpt_oss", of_experts(limit=9.0)),
    "another alpha": ("gpt_oss", of_experts(alpha=1.0)),
    "another scale of embeddings": ("gemma", lambda what: replace(what, embedding_scale=1.0)),
    "another scale of logits": ("cohere", lambda what: replace(what, logit_scale=1.0)),
    "no cap of logits": ("gemma2", lambda what: replace(what, logit_softcap=None)),
    "another last norm": ("olmo2", lambda what: replace(what, norm=replace(what.norm, eps=0.5))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_description_is_refused_on_load(fault, plain, monkeypatch):
    name, change = FAULTS[fault]
    monkeypatch.setattr("graft.model.cuda_graphs.describe", lambda model: change(describe(model)))
    model = family_model(name).to(DEVICE)
    target, expected = SmallTarget(model), results_of(TargetRunner(model))[1]
    torch.testing.assert_close(results_of(target)[1], expected, atol=1e-4, rtol=1e-4)  # by transformers' own code
    assert "differ" in target.not_fused or "something else" in target.not_fused
    monkeypatch.setattr("graft.model.cuda_graphs.why_unlike", lambda *_: None)
    found = results_of(SmallTarget(family_model(name).to(DEVICE)))[1]
    assert (found - expected).abs().max() > 1e-3, "the fault matters"


@pytest.mark.parametrize("left_out", ["window", "softcap", "scale"])
def test_attention_that_leaves_something_out_is_refused_on_load(left_out, plain, monkeypatch):
    model = family_model("gemma2").to(DEVICE)
    what, attend = describe(model), attention_kernels.tree_attention
    monkeypatch.setattr(
        attention_kernels, "tree_attention", lambda *given, **more: attend(*given, **more | {left_out: None})
    )
    assert "something else" in likeness.why_unlike(model, what, FastLayers(what))


def test_layers_that_are_not_alike_are_all_checked(plain):
    model = family_model("llama").to(DEVICE)
    what, layers = describe(model), FastLayers(describe(model))
    tried, run = [], FastLayers.run_layer
    layers.run_layer = lambda number, *given: (tried.append(number), run(layers, number, *given))[1]
    assert likeness.why_unlike(model, what, layers) is None and tried == [0, 0]
    odd = of_layers(lambda layer: replace(layer, residual_scale=1.5), lambda layer: layer is what.layers[2])(what)
    layers.what = odd
    likeness.why_unlike(model, odd, layers)
    assert set(tried[2:]) == {0, 2}


def test_the_check_leaves_the_model_as_it_was(plain):
    model = family_model("gemma3_text").to(DEVICE)
    before, settings = dict(model.named_parameters()), vars(model.model.layers[0]).copy()
    kind, attention = type(model.model.layers), model.config._attn_implementation
    likeness.why_unlike(model, describe(model), FastLayers(describe(model)))
    assert vars(model.model.layers[0]) == settings and type(model.model.layers) is kind
    assert dict(model.named_parameters()).keys() == before.keys() and model.config._attn_implementation == attention
    assert not [module for module in model.modules() if type(module).__name__ == "_Probe"]


# Kernels beside those of a Llama


@pytest.mark.parametrize("name", ["llama", "gemma", "gemma4_text", "olmo2", "cohere", "nemotron", "starcoder2"])
def test_norms_round_where_their_modules_round(name):
    what = describe(family_model(name).to(DEVICE, DTYPES[1]))
    norm = what.layers[0].pre or what.layers[0].post
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE, DTYPES[1])

    def share_of_same_bits(norm):
        return float((layer_kernels.add_norm(x, None, norm)[1] == norm.module(x)).float().mean())

    assert share_of_same_bits(norm) > 0.99 > share_of_same_bits(replace(norm, rounds=not norm.rounds))


@pytest.mark.parametrize("size", [40, 64])
def test_logits_are_scaled_and_capped_as_pytorch_does(size):
    logits = 20 * torch.randn(3, size, generator=torch.Generator().manual_seed(0))
    for scale, cap in ((0.5, None), (1.0, 7.0), (0.5, 7.0)):
        ours, theirs = logits.clone().to(DEVICE), logits.clone()
        layer_kernels.finish_logits(ours, scale, cap)
        plain_kernels.finish_logits(theirs, scale, cap)
        torch.testing.assert_close(ours.cpu(), theirs)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu_squared"])
def test_activations_match_pytorch(activation, gated):
    x = 3 * torch.randn(2, 74, generator=torch.Generator().manual_seed(0))
    ours = layer_kernels.activate(x.to(DEVICE), activation, gated)
    torch.testing.assert_close(ours.cpu(), plain_kernels.activate(x, activation, gated))
