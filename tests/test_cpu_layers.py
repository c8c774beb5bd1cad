"""Fused layers on a CPU: what transformers computes, for any tree, and never with weights that have changed."""

import copy
import random

import pytest
import torch

from graft import Engine
from graft.model import cpu_layers, cpu_linear
from graft.model.kv_cache import PAGE
from graft.model.runner import TargetRunner
from graft.tree.tree import DraftTree
from proposers import random_tree
from test_captured import logits_of, model_of
from test_cpu_linear import CAPABILITIES, needs_kernel
from tiny import tiny_model

pytestmark = needs_kernel
TAPS = (0, 2, 3)
ANEW = cpu_linear.library.__wrapped__  # loads the library at every call


def run_as_on(capability, monkeypatch, has_threads=True):
    """The library of another processor, with or without threads."""
    for module in (cpu_layers, cpu_linear):
        monkeypatch.setattr(module, "library", ANEW)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    if not has_threads:
        monkeypatch.setattr(cpu_layers, "threads", lambda: None)


def fused(model, taps=TAPS, **options):
    """A runner that cannot run the model by transformers' code, and its model."""
    model = copy.deepcopy(model)
    assert cpu_linear.speed_up(model)

    class Fused(TargetRunner):
        def _with_tree_attention(self, *args):
            raise AssertionError("transformers ran the model")

    return Fused(model, taps, **options)


def run(target, lengths, num_nodes, num_already_run=0):
    """Outputs after prompts of these lengths and after a tree of each row, and the keys that were written."""
    prompts = random.Random(5)
    cache = target.open(len(lengths), max(lengths) + num_nodes + 1)
    outputs = []
    for row, length in enumerate(lengths):
        chunks = list(target.prefill(cache, row, [prompts.randrange(61) for _ in range(length)]))
        outputs += [torch.cat([logits_of(chunk) for chunk in chunks], dim=1), *(chunk.hidden for chunk in chunks)]
    tree = random_tree(random.Random(1), [3 + row for row in range(len(lengths))], num_nodes, 61)
    verified = target.verify(cache, tree)
    if num_already_run:
        verified = target.verify(cache, tree, num_already_run)
    counts = [count - num_already_run for count in verified.counts] if num_already_run else verified.counts
    for row, count in enumerate(counts):
        index = verified.index[row, -count:] if num_already_run else verified.index[row, :count]
        outputs += [verified.logits[index].clone(), verified.hidden[index].clone()]
    keys = cache.store.stored[0]
    for row in cache.rows:
        outputs.append(keys[:, cache.slots_of([(row, place) for place in range(row.length + 1)])].clone())
    return outputs


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("lengths", [(9,), (12, 5), (PAGE + 3, 2, 2 * PAGE - 4)])
def test_fused_layers_give_what_transformers_gives(name, lengths):
    model = model_of(name)
    model.config.sliding_window = None
    targets = fused(model, chunk_size=7), TargetRunner(model, TAPS, chunk_size=7)
    ours, theirs = (run(target, lengths, 6) for target in targets)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head_dim", [6, 40, 64])
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("has_threads", [True, False])
def test_odd_sizes_on_every_processor_with_and_without_threads(head_dim, capability, has_threads, monkeypatch):
    run_as_on(capability, monkeypatch, has_threads)
    model = model_of("qwen3", head_dim=head_dim, intermediate_size=37, num_hidden_layers=3)
    ours, theirs = (run(target, (11, 4), 9) for target in (fused(model), TargetRunner(model, TAPS)))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_nodes_that_were_run_before_serve_as_keys():
    model = model_of("qwen2")
    ours, theirs = (run(target, (10,), 8, num_already_run=4) for target in (fused(model), TargetRunner(model, TAPS)))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("head_dim", [6, 24])
def test_a_token_gets_the_same_bits_in_any_step(head_dim, capability, monkeypatch):
    run_as_on(capability, monkeypatch)
    model = model_of("qwen3", head_dim=head_dim, max_position_embeddings=512)
    assert_same_bits_in_any_step(model, monkeypatch)


def assert_same_bits_in_any_step(model, monkeypatch):
    """In a tree over the end of a page, in a step of its own, in chunks of a prompt, in a batch, and far behind."""
    text = [random.Random(7).randrange(61) for _ in range(PAGE + 40)]
    length = PAGE - 3

    def logits_in_chunks(*sizes, before=()):
        target = fused(model, chunk_size=max(sizes))
        cache = target.open(1 + len(before), 4 * PAGE)
        for row, ids in enumerate(before):
            list(target.prefill(cache, row, ids))
        parts, ids = [], text
        for size in sizes:
            (read,) = target.prefill(cache, len(before), ids[:size])
            parts.append(logits_of(read)[0])
            ids = ids[size:]
        return torch.cat(parts), target, cache

    expected, *_ = logits_in_chunks(*[1] * len(text))
    assert torch.equal(logits_in_chunks(len(text))[0], expected)
    assert torch.equal(logits_in_chunks(30, 1, 72, 1, before=[text[5:90], [3]])[0], expected)
    monkeypatch.setattr(cpu_layers, "_MOST", 11)  # a step of several calls
    assert torch.equal(logits_in_chunks(50, 50, 4)[0], expected)

    for before in ([], [[9] * 70]):
        _, target, cache = logits_in_chunks(length, before=before)
        verified = target.verify(cache, tree_around(text[length : length + 20], len(before) + 1))
        found = verified.logits[verified.index[-1, ::2]]  # nodes of the text's path
        assert torch.equal(found, expected[length : length + 20])


def tree_around(path, num_rows):
    """The same tree for each row: nodes of a path, each after a sibling that is not on it."""
    tokens = [path[0], *(token for own in path[1:] for token in (own ^ 1, own))]
    parents = [0, *(2 * depth for depth in range(len(path) - 1) for _ in range(2))]
    columns = (torch.tensor([own] * num_rows) for own in (tokens, parents))
    sources = torch.ones(num_rows, len(tokens), dtype=torch.int64)
    sources[:, 0] = 0
    return DraftTree(len(path) - 1, *columns, torch.ones(sources.shape), sources, torch.zeros_like(sources))


def test_other_models_are_left_to_transformers():
    for name, changes in (("gpt_neox", {}), ("deepseek_v3", {})):
        model = tiny_model(name, **changes)
        cpu_linear.speed_up(model)
        assert cpu_layers.why_not_on_cpu(model) is not None, name
    assert "load it by its name" in (cpu_layers.why_not_on_cpu(tiny_model()) or "")
    assert "in bfloat16" in (cpu_layers.why_not_on_cpu(cpu_sped(tiny_model()).bfloat16()) or "")


def cpu_sped(model):
    cpu_linear.speed_up(model)
    return model


def in_place(weight):
    with torch.no_grad():
        weight.mul_(1.5)


def unseen(weight):
    weight.data.mul_(1.5)


def moved(weight):
    weight.data = weight.data * 1.5


@pytest.mark.parametrize("change", [in_place, unseen, moved])
@pytest.mark.parametrize("part", ["mlp.down_proj", "self_attn.k_proj", "input_layernorm"])
def test_weights_that_change_while_a_text_is_decoded_are_used_at_once(change, part):
    model = cpu_sped(model_of("qwen2"))
    target, plain = TargetRunner(model, TAPS), TargetRunner(copy.deepcopy(model), TAPS)
    results = []
    for each in (target, plain):
        cache = each.open(1, 64)
        list(each.prefill(cache, 0, [5, 6, 7]))
        each.verify(cache, random_tree(random.Random(2), [4], 5, 61))
        change(each.model.model.layers[1].get_submodule(part).weight)
        if each is plain:
            each._fused.layers = None
        results.append(logits_of(each.verify(cache, random_tree(random.Random(2), [4], 5, 61))))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


def test_a_layer_that_is_replaced_or_hooked_is_not_left_out():
    model = cpu_sped(model_of("llama"))
    target = TargetRunner(model)
    assert target.mode == "fused, exact in any batch"
    target.open(1, 8).release()
    assert target._fused.layers is not None
    hook = model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output * 2)
    target.open(1, 8).release()
    assert target._fused.layers is None
    hook.remove()
    target.open(1, 8).release()
    assert target._fused.layers is not None
    layer = model.model.layers[0].mlp
    layer.up_proj = torch.nn.Linear(layer.up_proj.in_features, layer.up_proj.out_features, bias=False)
    target.open(1, 8).release()
    assert target._fused.layers is None


def other_norm(model):
    model.model.norm = copy.deepcopy(model.model.norm)
    model.model.norm.weight.data.mul_(2)


def swapped_layers(model):
    first, second = model.model.layers[:2]
    first.mlp, second.mlp = second.mlp, first.mlp


def other_activation(model):
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()


def other_eps(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 10.0


def other_last_eps(model):
    model.model.norm.variance_epsilon = 10.0


@pytest.mark.parametrize("change", [other_norm, swapped_layers, other_activation, other_eps, other_last_eps])
def test_a_changed_module_is_used_for_the_next_text(change):
    model = cpu_sped(model_of("llama"))
    target = TargetRunner(model, TAPS)
    run(target, (9,), 6)
    change(model)
    ours, theirs = run(target, (9,), 6), run(TargetRunner(copy.deepcopy(model), TAPS), (9,), 6)
    plain = TargetRunner(copy.deepcopy(model), TAPS)
    plain.refresh = lambda: None  # transformers runs it
    torch.testing.assert_close(ours, run(plain, (9,), 6), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_layers_of_other_shapes_or_a_repeated_layer_are_left_to_transformers():
    model, other = cpu_sped(model_of("llama")), cpu_sped(model_of("llama"))
    assert cpu_layers.why_not_on_cpu(model) is None and cpu_layers.why_not_on_cpu(other) is None
    model.config.vocab_size //= 2
    other.model.layers[1] = other.model.layers[0]
    assert cpu_layers.why_not_on_cpu(model) is not None and cpu_layers.why_not_on_cpu(other) is not None


def test_a_runner_that_has_run_can_be_copied():
    target = TargetRunner(cpu_sped(model_of("llama")), TAPS)
    expected = run(target, (9,), 6)
    other = copy.deepcopy(target._fused)
    other.refresh()
    assert other.layers is not None and other.layers is not target._fused.layers
    assert all(map(torch.equal, run(target, (9,), 6), expected))


def test_a_tap_that_no_layer_has_is_an_error():
    with pytest.raises(IndexError):
        run(fused(model_of("llama"), taps=(9,)), (9,), 6)


@pytest.mark.parametrize("policy", ["off", "graft"])
def test_texts_are_those_of_transformers_generate(policy):
    model = model_of("llama")
    prompt = [3, 17, 42, 9, 9, 30, 5, 21]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None)[0, 8:]
    engine = Engine(cpu_sped(copy.deepcopy(model)), policy=policy)
    assert engine.generate(prompt, max_new_tokens=40, ignore_eos=True).ids == expected.tolist()
    assert engine.target._fused.layers is not None
