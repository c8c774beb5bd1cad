"""Layers that are quantised, adapted or changed: they keep their own code, and are refused if tokens share a scale."""

import functools
import json
import logging
import types
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaModel
from transformers.models.llama import modeling_llama

import graft
from block_heads import make_head
from graft.drafters.block.checkpoint import save_head
from graft.drafters.block.fused_head import why_not as why_not_head
from graft.errors import GraftError
from graft.hub.drafters import load_drafter
from graft.model import TargetRunner, cpu_layers, cpu_linear
from graft.model.families import why_not
from graft.model.plain_modules import settings_of
from graft.model.unusual_layers import (
    cast_plain_weights,
    check_tokens_apart,
    output_weight,
    readable_weights,
    unusual_layers,
    weights_in_words,
)
from tiny import byte_tokenizer, tiny_model

TOKENS = torch.tensor([[3, 17, 42, 9]])


class Packed(nn.Module):
    """Weights of 8 bits with a scale for each output, as many libraries keep them: there is no `weight`."""

    def __init__(self, layer):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("packed", (layer.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x):
        return nn.functional.linear(x, self.packed.to(x.dtype) * self.scale.to(x.dtype))


def rounded(x, largest):
    largest = largest.clamp(min=1e-6)
    return (x / largest * 127).round() * largest / 127


class ByToken(nn.Linear):
    """Activations of 8 bits with a scale for each token."""

    def forward(self, x):
        return super().forward(rounded(x, x.abs().amax(-1, keepdim=True)))


class Together(nn.Linear):
    """Activations of 8 bits with one scale for all tokens of a forward."""

    def forward(self, x):
        return super().forward(rounded(x, x.abs().amax()))


class Outliers(nn.Linear):
    """Activations of 8 bits by token, but for the inputs that are large for any token."""

    def forward(self, x):
        small = x * (x.abs() < 6).flatten(0, -2).all(0)
        return super().forward(rounded(small, small.abs().amax(-1, keepdim=True).clamp(min=1e-9)) + (x - small))


def replaced(kind, name="llama", parts=("mlp.up_proj", "self_attn.v_proj"), dtype=torch.float32):
    """A tiny model in which these parts of all layers are of another kind."""
    model = tiny_model(name).to(dtype)
    for layer in model.model.layers:
        for part in parts:
            old = layer.get_submodule(part)
            if issubclass(kind, Packed):
                layer.set_submodule(part, kind(old))
            else:
                old.__class__ = kind
    return model


def with_own_forward(model):
    """As compressed-tensors does it: the layer stays an nn.Linear, and its instance has a forward."""
    for layer in model.model.layers:
        part = layer.mlp.up_proj
        part.forward = types.MethodType(lambda self, x: nn.functional.linear(2 * x, self.weight), part)


def with_hook(model):
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, inputs, output: 2 * output)


def with_a_scale(model):
    for layer in model.model.layers:
        layer.mlp.up_proj.register_buffer("input_scale", torch.ones(1))


def with_a_subclass(model):
    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = ByToken


@pytest.mark.parametrize("change", [with_own_forward, with_hook, with_a_scale, with_a_subclass])
def test_a_layer_that_does_more_than_pytorchs_keeps_its_code(change):
    model = tiny_model()
    change(model)
    before, kinds = model(TOKENS).logits, {name: type(part) for name, part in unusual_layers(model).items()}
    assert kinds, "the change shows"
    cpu_linear.speed_up(model)
    assert {name: type(model.get_submodule(name)) for name in kinds} == kinds
    torch.testing.assert_close(model(TOKENS).logits, before, rtol=1e-4, atol=1e-5)
    assert cpu_layers.why_not_on_cpu(model) is not None and why_not(model) is not None


def test_a_forward_given_to_a_whole_class_is_not_left_out(monkeypatch):
    model = tiny_model()
    cpu_linear.speed_up(model)
    norm = type(model.model.norm)
    own = norm.forward
    monkeypatch.setattr(norm, "forward", lambda self, x: 2 * own(self, x))
    assert "forward of its own" in (cpu_layers.why_not_on_cpu(model) or "")
    assert "forward of its own" in (why_not(tiny_model()) or "")


def test_a_forward_wrapped_under_its_old_name_is_not_left_out(monkeypatch):
    own = nn.Linear.forward

    @functools.wraps(own)
    def doubled(self, x):
        return 2 * own(self, x)

    monkeypatch.setattr(nn.Linear, "forward", doubled)
    model = tiny_model()
    assert "forward of its own" in (why_not(model) or "")
    assert not cpu_linear.speed_up(model)


class Doubled(nn.SiLU):
    def forward(self, x):
        return 2 * super().forward(x)


class Rolled(LlamaModel):
    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.last_hidden_state = found.last_hidden_state.roll(1, -1)
        return found


def with_another_activation(model):
    for layer in model.model.layers:
        layer.mlp.act_fn = Doubled()


def with_a_subclass_of_the_network(model):
    model.model.__class__ = Rolled


def with_another_call(model):
    part = model.model.layers[0].mlp.up_proj
    own = part._call_impl
    part._call_impl = lambda x: 2 * own(x)


def with_other_norms(model):
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.5


def with_another_scale_of_attention(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 3


@pytest.mark.parametrize("is_in_use", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        with_another_activation,
        with_a_subclass_of_the_network,
        with_another_call,
        with_other_norms,
        with_another_scale_of_attention,
    ],
)
def test_text_follows_a_change_of_the_model_before_and_after_it_is_in_use(change, is_in_use):
    model, prompt = tiny_model(), [*TOKENS[0].tolist() * 2, 5]
    cpu_linear.speed_up(model)
    engine = graft.load(model=model, tokenizer=byte_tokenizer(), draft=None, budget=8, profile=None)
    if is_in_use:
        engine.generate(prompt, max_new_tokens=2)
        assert engine.target.not_fused is None
    unchanged = engine.generate(prompt, max_new_tokens=24, ignore_eos=True).ids if is_in_use else None
    change(model)
    ids = engine.generate(prompt, max_new_tokens=24, ignore_eos=True).ids
    asked = torch.tensor([prompt])
    expected = model.generate(asked, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert ids == expected[0, len(prompt) :].tolist()
    assert ids != unchanged


def test_a_function_of_the_models_file_that_was_replaced_is_not_left_out(monkeypatch):
    own = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: own(2 * q, k, cos, sin))
    assert "was replaced" in (why_not(tiny_model()) or "")


def test_layers_are_not_made_anew_while_the_model_stays_the_same():
    model = tiny_model()
    cpu_linear.speed_up(model)
    target = TargetRunner(model)
    target.refresh()
    layers = target._fused.layers
    model.eval()(TOKENS)
    target.refresh()
    assert layers is not None and target._fused.layers is layers


def test_captured_code_is_out_of_date_when_a_module_is_given_another_hook_or_setting():
    model = tiny_model()
    before = settings_of(model)
    model.train().eval()
    assert settings_of(model) == before
    for change in (with_hook, with_hook, with_other_norms, with_own_forward):
        change(model)
        assert settings_of(model) != before
        before = settings_of(model)


def test_a_hook_on_every_module_is_not_left_out():
    hook = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    try:
        assert "every module" in (why_not(tiny_model()) or "")
    finally:
        hook.remove()
    assert why_not(tiny_model()) is None


def test_other_norms_and_embeddings_are_left_to_transformers():
    model = tiny_model()
    model.model.layers[1].input_layernorm = torch.nn.RMSNorm(32)
    assert "RMSNorm in place of its family's own" in (why_not(model) or "")
    model = tiny_model()
    model.model.embed_tokens.max_norm = 1.0
    assert "embedding" in (why_not(model) or "")


def test_a_draft_head_with_a_hook_runs_its_own_code():
    head = make_head(tiny_model(num_hidden_layers=6), shifted=False)
    assert why_not_head(head) is None
    head.layers[0].mlp.register_forward_hook(lambda module, inputs, output: 2 * output)
    assert "hook" in (why_not_head(head) or "")


@pytest.mark.parametrize("kind", [Together, Outliers])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_scales_all_tokens_together_is_refused_with_what_to_do(kind, dtype):
    model = replaced(kind, dtype=dtype)
    said = r"model\.layers\.0\.self_attn\.v_proj \(" + kind.__name__ + r"\) .*a scale for each token"
    with pytest.raises(GraftError, match=said):
        graft.load(model, tokenizer=byte_tokenizer(), draft=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_that_treats_a_token_alone_is_taken_with_a_warning_if_it_rounds_activations(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_tokens_apart(replaced(Packed, dtype=dtype))
    with pytest.warns(UserWarning, match=r"rounds activations to few bits, in model.layers.0.self_attn.v_proj \(ByTok"):
        check_tokens_apart(replaced(ByToken, dtype=dtype))


def at_the_last_token(module, inputs, output):
    return torch.cat([output[:, :-1], 3 * output[:, -1:]], 1)


def less_their_mean(module, inputs, output):
    return output - output.mean(1, keepdim=True)


def by_the_largest(module, inputs):
    return (inputs[0] / inputs[0].abs().amax(),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.model.layers[0].mlp.register_forward_hook(at_the_last_token),
        lambda model: model.model.embed_tokens.register_forward_hook(less_their_mean),
        lambda model: model.model.layers[1].mlp.register_forward_pre_hook(by_the_largest),
    ],
)
def test_a_hook_that_lets_tokens_change_each_other_is_refused(change, dtype):
    model = tiny_model().to(dtype)
    change(model)
    with pytest.raises(GraftError, match=r"layers\.[01]\.mlp \(LlamaMLP\) changes|embed_tokens \(Embedding\) changes"):
        check_tokens_apart(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hooks_that_treat_each_token_alone_are_taken_on_all_modules(dtype):
    model = replaced(ByToken, dtype=dtype)
    for module in model.modules():
        module.register_forward_hook(lambda module, inputs, output: None)
    with pytest.warns(UserWarning, match="rounds activations"):
        check_tokens_apart(model)
    assert all(len(module._forward_hooks) == 1 and not module._forward_pre_hooks for module in model.modules())


def test_a_hooked_model_whose_numbers_overflow_also_with_one_token_is_not_blamed_for_others():
    model = tiny_model()
    model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output / 0)
    check_tokens_apart(model)


def test_a_model_that_transformers_itself_cannot_run_is_one_line():
    class Broken(nn.Linear):
        def forward(self, x):
            raise RuntimeError("expected m1 and m2 to have the same dtype")

    with pytest.raises(
        GraftError, match=r"cannot run this LlamaForCausalLM .* in float32 on cpu: RuntimeError: expected"
    ):
        check_tokens_apart(replaced(Broken))


def test_a_library_that_repeats_itself_in_every_step_is_heard_once(caplog):
    class Talkative(Packed):
        def forward(self, x):
            logging.getLogger("bitsandbytes.autograd._functions").warning("inputs will be cast")
            return super().forward(x)

    model = replaced(Talkative)
    graft.load(model, tokenizer=byte_tokenizer(), draft=None).generate([3, 17, 42], max_new_tokens=4)
    assert [record.getMessage() for record in caplog.records].count("inputs will be cast") == 1


def test_weights_are_named_as_they_are():
    assert weights_in_words(tiny_model()) == "float32"
    assert weights_in_words(replaced(Packed)) == "6 Packed layers; else float32"
    model = replaced(ByToken)
    model.config.quantization_config = {"quant_method": "some-method"}
    assert weights_in_words(model) == "some-method: 6 ByToken layers; else float32"


def test_text_is_that_of_generate_with_packed_weights_and_a_packed_output_layer():
    model = replaced(Packed)
    model.lm_head = Packed(model.lm_head)
    model.generation_config.eos_token_id = None
    expected = model.generate(TOKENS, max_new_tokens=16, do_sample=False, pad_token_id=0)[0, 4:].tolist()
    engine = graft.load(model, tokenizer=byte_tokenizer(), draft=None, budget=12, profile=None)
    assert engine.target.vocab_size == model.config.vocab_size
    assert engine.generate(TOKENS[0].tolist(), max_new_tokens=16, ignore_eos=True).ids == expected
    assert engine.target.describe()["weights"] == "7 Packed layers; else float32"


def test_a_larger_output_weight_is_read_as_it_is_now():
    model, prompt = tiny_model(), [3, 5, 7, 3, 5, 7]
    for layer in (model.lm_head, model.model.embed_tokens):
        layer.weight = nn.Parameter(torch.randn(len(layer.weight) + 64, layer.weight.shape[1]))
    engine = graft.load(model=model, tokenizer=byte_tokenizer(), draft=None, budget=8, profile=None)
    ids = engine.generate(prompt, max_new_tokens=12, ignore_eos=True).ids
    asked = torch.tensor([prompt])
    expected = model.generate(asked, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert ids == expected[0, len(prompt) :].tolist()


def test_a_head_borrows_the_numbers_of_a_packed_output_layer(tmp_path):
    model = tiny_model(num_hidden_layers=6)
    save_head(make_head(model, shifted=False), tmp_path)
    dense = model.lm_head.weight.detach()
    assert output_weight(model) is model.lm_head.weight
    model.lm_head = Packed(model.lm_head)
    borrowed = load_drafter(str(tmp_path), model).head.target_lm_head
    torch.testing.assert_close(borrowed, dense, rtol=0, atol=float(model.lm_head.scale.max()))
    assert output_weight(model) is output_weight(model), "it is computed once"


def test_training_starts_from_no_number_of_a_quantised_layer():
    model = replaced(ByToken, parts=("mlp.up_proj",))
    names = readable_weights(model)
    assert "model.layers.0.mlp.down_proj.weight" in names and "model.layers.0.mlp.up_proj.weight" not in names


def test_an_attention_function_of_the_owners_is_refused_not_replaced():
    def doubled(module, query, key, value, mask, **kwargs):
        return 2 * query.transpose(1, 2), None

    AttentionInterface.register("doubled", doubled)
    model = tiny_model()
    model.set_attn_implementation("doubled")
    with pytest.raises(GraftError, match=r"attention function of its own, 'doubled'.*set_attn_implementation"):
        TargetRunner(model)
    model.set_attn_implementation("sdpa")
    TargetRunner(model)


@pytest.fixture
def stored_in_fp8(tmp_path):
    """A tiny model in the format of DeepSeek's and Qwen's FP8 checkpoints, in blocks of 16."""
    model = tiny_model()
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        blocks = tensors[name].float().unflatten(1, (-1, 16)).unflatten(0, (-1, 16))
        scale = blocks.abs().amax((1, 3)) / 448
        packed = (blocks / scale[:, None, :, None]).flatten(0, 1).flatten(1)
        tensors |= {name: packed.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        **{"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [16, 16]},
        "modules_to_not_convert": ["lm_head"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.skipif(torch.cuda.is_available(), reason="transformers unpacks such a checkpoint on a CPU only")
def test_unpacking_is_said_with_its_memory_before_it_happens(stored_in_fp8, monkeypatch):
    real, order = AutoModelForCausalLM.from_pretrained, []
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *args, **kw: (order.append("load"), real(*args, **kw))[1]
    )
    monkeypatch.setattr("graft.hub.load.warnings.warn", lambda words, **kw: order.append(words))
    engine = graft.load(stored_in_fp8, draft=None, profile=None)
    assert order[1:] == ["load"]
    assert "is stored in fp8 and unpacked to float32 here: its weights take 0.0 GB of memory" in order[0]
    assert engine.target.describe()["weights"] == "float32"
    assert len(engine.generate([1, 2, 3], max_new_tokens=4, ignore_eos=True).ids) == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="transformers unpacks such a checkpoint on a CPU only")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_unpacked_weights_run_in_the_dtype_asked_for(stored_in_fp8, dtype):
    reference = AutoModelForCausalLM.from_pretrained(stored_in_fp8, dtype=dtype).to(dtype)
    engine = graft.load(stored_in_fp8, dtype=dtype, draft=None, profile=None, budget=12)
    assert {weight.dtype for weight in engine.target.model.parameters()} == {dtype}
    torch.testing.assert_close(engine.target.model.state_dict(), reference.state_dict(), rtol=0, atol=0)
    if dtype == torch.float32:
        reference.generation_config.eos_token_id = None
        expected = reference.generate(TOKENS, max_new_tokens=16, do_sample=False, pad_token_id=0)[0, 4:].tolist()
        assert engine.generate(TOKENS[0].tolist(), max_new_tokens=16, ignore_eos=True).ids == expected


def test_a_cast_leaves_the_numbers_of_quantised_layers_and_what_is_kept_in_float32():
    model = replaced(ByToken, parts=("mlp.up_proj",), dtype=torch.bfloat16)
    model.model.norm.float()
    cast_plain_weights(model, torch.float16)
    dtypes = {name: weight.dtype for name, weight in model.named_parameters() if weight.dtype != torch.float16}
    assert dtypes.pop("model.norm.weight") == torch.float32
    assert set(dtypes) == {f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(len(model.model.layers))}
    assert set(dtypes.values()) == {torch.bfloat16}


def test_an_adapted_output_layer_is_read_with_its_adapter():
    model = tiny_model()
    expected = 2 * model.lm_head.weight.detach()
    model.lm_head.register_forward_hook(lambda module, inputs, output: 2 * output)
    torch.testing.assert_close(output_weight(model), expected)
