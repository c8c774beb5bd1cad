"""The target runner against transformers itself, for every architecture."""

import sys
import threading

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM

import graft
from families import EXPERTS, family_model
from graft import Engine, GraftError
from graft.model import TargetRunner
from graft.tree.tree import DraftTree
from proposers import Oracle, RandomTrees, tree_of
from tiny import ARCHITECTURES, UNUSUAL_ARCHITECTURES, VOCAB, tiny_model

PROMPT = [3, 17, 42, 9, 9, 30, 5, 21, 17, 42, 9, 11]


OTHER_EXPERTS = sorted(set(EXPERTS) - set(ARCHITECTURES))


def transformers_answer(model, prompt, count):
    output = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "name", [*ARCHITECTURES, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHER_EXPERTS)]
)
def test_greedy_text_is_that_of_transformers_generate_however_much_is_accepted(name):
    """An oracle's tree is accepted deep in every round, past wrong siblings, and past every sliding window."""
    model = family_model(name) if name in OTHER_EXPERTS else tiny_model(name)
    expected = transformers_answer(model, PROMPT, 40)
    for policy in ("off", RandomTrees(), "graft"):
        engine = Engine(model, policy=policy, budget=16 if policy == "graft" else None)
        assert engine.generate(PROMPT, max_new_tokens=16).ids == expected[:16]
    result = Engine(model, policy=Oracle(expected, len(PROMPT))).generate(PROMPT, max_new_tokens=40)
    assert result.ids == expected
    assert result.stats.rounds <= 8


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_nodes_logits_are_those_of_its_path_alone(name):
    model = tiny_model(name)
    target = TargetRunner(model)
    tree = tree_of([[7, 8, 9, 10, 11, 12]], [[0, 0, 0, 1, 2, 3]])
    cache = target.open(1, 64)
    list(target.prefill(cache, 0, PROMPT))
    logits = target.verify(cache, tree).logits
    for node, path in enumerate(([7], [7, 8], [7, 9], [7, 8, 10], [7, 9, 11], [7, 8, 10, 12])):
        alone = model(torch.tensor([PROMPT + path])).logits[0, -1]
        torch.testing.assert_close(logits[node], alone, atol=2e-5, rtol=1e-4)


_REPEATS = ("gemma2_uncapped", "stablelm")  # of what others do
_MARKED = [pytest.param(name, marks=[pytest.mark.slow] * (name in _REPEATS)) for name in UNUSUAL_ARCHITECTURES]


@pytest.mark.parametrize("name", _MARKED)
def test_unusual_attention_gives_the_text_of_transformers_generate_in_trees_and_batches(name):
    """Past windows, chunks and pages, with accepted paths moved in layers of every shape."""
    model = tiny_model(name, seed=2)
    if name == "nemotron" and Version(transformers.__version__) < Version("5.17"):
        with pytest.raises(GraftError, match="computes attention in code of its own"):
            Engine(model)
        return
    prompts = [PROMPT * 6, PROMPT[:3]]
    expected = [transformers_answer(model, prompt, 16) for prompt in prompts]
    assert len(set(expected[0])) > 6, "a text that repeats itself proves little"
    together = Engine(model, policy=RandomTrees(merge=True)).generate_batch(prompts, max_new_tokens=16)
    assert [answer.ids for answer in together] == expected
    result = Engine(model, policy=Oracle(expected[0], len(prompts[0]))).generate(prompts[0], max_new_tokens=16)
    assert result.ids == expected[0] and result.stats.rounds <= 4


def test_a_soft_cap_is_there_where_the_models_owner_chose_attention_that_has_one():
    model = tiny_model("gemma2")
    capped = transformers_answer(model, PROMPT, 12)
    assert Engine(model, policy="off").generate(PROMPT, max_new_tokens=12).ids == capped
    if model._supports_sdpa:  # newer versions of transformers refuse what leaves the cap out
        model.set_attn_implementation("sdpa")
        assert Engine(model, policy="off").generate(PROMPT, max_new_tokens=12).ids != capped


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_neox"])
def test_sequences_verified_together_give_what_they_give_alone(name):
    model = tiny_model(name)
    prompts = [PROMPT, PROMPT[:3], [5], PROMPT * 3, PROMPT[2:9]]
    expected = [transformers_answer(model, prompt, 20) for prompt in prompts]
    for policy in ("off", RandomTrees(merge=True), "graft"):
        engine = Engine(model, policy=policy, budget=12 if policy == "graft" else None)
        together = engine.generate_batch(prompts, max_new_tokens=20)
        assert [g.ids for g in together] == expected


def test_verified_tokens_that_are_not_committed_leave_no_trace():
    target = TargetRunner(tiny_model("mistral"))
    plain = DraftTree.roots(torch.tensor([4]))
    cache = target.open(1, 64)
    list(target.prefill(cache, 0, PROMPT))
    before = target.verify(cache, plain).logits
    target.verify(cache, tree_of([[4, 5, 6, 7]], [[0, 0, 1, 2]]))
    assert torch.equal(target.verify(cache, plain).logits, before)


@pytest.fixture
def impatient_threads():
    """Threads take turns so often that every forward is interrupted."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(*works):
    """What each of the works gives, all run at once."""
    results, errors = [None] * len(works), []

    def run(number):
        try:
            results[number] = works[number]()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return results


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_engines_in_several_threads_and_the_models_owner_do_not_disturb_each_other(attention, impatient_threads):
    """The owner's prompts are padded: a mask that was lost would show."""
    model = tiny_model("qwen2_window")
    model.set_attn_implementation(attention)
    prompts = torch.tensor([PROMPT, [0] * 5 + PROMPT[5:]])
    asked = {"attention_mask": (prompts > 0).long(), "max_new_tokens": 12, "do_sample": False}
    of_owner, expected = model.generate(prompts, **asked), transformers_answer(model, PROMPT, 20)

    def decode():
        engine = Engine(model, policy=RandomTrees())
        return all(engine.generate(PROMPT, max_new_tokens=20).ids == expected for _ in range(5))

    def own():
        return all(torch.equal(model.generate(prompts, **asked), of_owner) for _ in range(5))

    assert in_threads(decode, decode, own) == [True, True, True]
    assert model.config._attn_implementation == attention


def test_a_model_in_training_is_decoded_in_several_threads_and_goes_on_training(impatient_threads):
    model = tiny_model("gpt_neox", hidden_dropout=0.5, attention_dropout=0.5)
    expected = transformers_answer(model, PROMPT, 20)
    model.train()

    def decode():
        return [Engine(model, policy="off").generate(PROMPT, max_new_tokens=20).ids for _ in range(4)]

    assert in_threads(decode, decode) == [[expected] * 4] * 2
    assert all(module.training for module in model.modules())


def test_a_forward_that_fails_leaves_the_model_to_its_owner():
    model = tiny_model().train()
    attention, engine = model.config._attn_implementation, Engine(model, policy="off")
    hook = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPT, max_new_tokens=4)
    hook.remove()
    assert model.config._attn_implementation == attention and model.training
    assert engine.generate(PROMPT, max_new_tokens=4).ids == transformers_answer(model.eval(), PROMPT, 4)


def test_a_longrope_model_ends_where_its_rotation_would_change():
    """Past the original context transformers turns all positions otherwise; up to there texts are the same."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 32,
    }
    model = tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=32, sliding_window=None)
    expected = transformers_answer(model, PROMPT, 20)
    assert Engine(model, policy=RandomTrees(20)).generate(PROMPT, max_new_tokens=20).ids == expected
    with pytest.raises(GraftError, match="context of 32"):
        Engine(model).generate(PROMPT, max_new_tokens=21)


@pytest.mark.parametrize(
    ("model_type", "options", "words"),
    [
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, "rolled back"),
        (
            "qwen3_next",
            {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "layer_types": ["linear_attention", "full_attention"],
                "num_experts": 2,
                "num_experts_per_tok": 1,
                "moe_intermediate_size": 8,
                "intermediate_size": 16,
            },
            "rolled back",
        ),
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "attention in code of its own"),
    ],
)
def test_models_that_cannot_verify_trees_are_refused_with_a_reason(model_type, options, words):
    config = AutoConfig.for_model(model_type, vocab_size=VOCAB, **options)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(GraftError, match=words):
        Engine(model)


def test_a_model_split_by_a_tensor_parallel_plan_is_refused_before_anything_of_it_is_read():
    model = tiny_model()
    model._tp_size = 2  # what transformers sets when it splits a model over processes
    words = "LlamaForCausalLM was split over 2 processes .* for several GPUs use SGLang with our plugin"
    for load_it in (graft.load, Engine):
        with pytest.raises(GraftError, match=words) as error:
            load_it(model)
        assert "\n" not in str(error.value)
    model._tp_size = 1
    model.hf_device_map = {"model": "cpu", "lm_head": "cpu"}  # what accelerate places is one process's
    assert graft.load(model, draft=None, profile=None).generate(PROMPT, max_new_tokens=3).ids
