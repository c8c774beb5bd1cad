"""Depth-pruned draft models: which layers go, what the saved checkpoint is, what is learned, and that it drafts."""

import json
import math
import time
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM

import graft as package
from graft import Engine, GraftError
from graft.drafters.head_kinds import kind_of
from graft.drafters.small_model import SmallModelDrafter
from graft.train.depth_pruned import DepthPrunedModel, DepthPrunedObjective, measured_text
from graft.train.generate_data import Answered
from graft.train.layer_pruning import LayerSubset, find_removal_order
from graft.train.recipe import DepthPrunedRecipe, Run
from graft.train.settings import DepthPrunedSettings
from graft.train.trainer import optimize
from tiny import VOCAB, byte_tokenizer, tiny_model

SETTINGS = DepthPrunedSettings(
    steps=6,
    batch_tokens=80,
    max_tokens=40,
    learning_rate=3e-3,
    warmup_steps=2,
    evaluate_every=3,
    held_back=0.25,
    ema_decay=0.9,
    measured=80,
)
TOKENS = torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(4))


def texts(count=12):
    generator = torch.Generator().manual_seed(0)
    return [
        Answered(torch.randint(3, VOCAB, (11 + 5 * (n % 4),), generator=generator, dtype=torch.int32), 2 + n % 5)
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def model():
    """A model whose layer 3 does nothing."""
    made = tiny_model(num_hidden_layers=6)
    with torch.no_grad():
        made.model.layers[3].self_attn.o_proj.weight.zero_()
        made.model.layers[3].mlp.down_proj.weight.zero_()
    return made


# Which layers go


def divergence_of(model, settings=SETTINGS):
    text = measured_text(model, texts(), settings)
    return lambda pruned: text.compare(pruned).divergence


def test_a_layer_that_does_nothing_goes_first(model, tmp_path):
    order = find_removal_order(model, 3, divergence_of(model), tmp_path / "layers.json", {})
    assert order.removed[0] == (3, pytest.approx(0.0, abs=1e-6))
    assert min(range(6), key=order.alone.__getitem__) == 3 and min(order.alone[:3] + order.alone[4:]) > 0.01
    gone = [layer for layer, _ in order.removed]
    assert len(set(gone)) == 3 and sorted({*gone, *order.kept(3)}) == list(range(6))


def test_the_measure_is_the_mean_divergence_over_the_tokens_of_answers(model):
    pruned = LayerSubset(model).keep([0, 2, 5])
    few = texts()[:4]  # of which the first is held back
    found = measured_text(model, few, replace(SETTINGS, max_tokens=80)).compare(pruned)
    total, right, count = 0.0, 0, 0
    with torch.no_grad():
        for answer in few[1:]:
            tokens, first = answer.tokens.long(), answer.num_prompt_tokens - 1
            wanted, own = (each(tokens[None]).logits[0, first:-1] for each in (model, pruned))
            total += float(kl_div(own.log_softmax(-1), wanted.softmax(-1), reduction="sum"))
            right += int((own.argmax(-1) == tokens[first + 1 :]).sum())
            count += len(own)
    assert found == (pytest.approx(total / count, rel=1e-4), pytest.approx(right / count))


def test_a_search_goes_on_where_it_stopped_and_to_fewer_layers(model, tmp_path):
    measure, path = divergence_of(model), tmp_path / "work" / "layers.json"
    whole = find_removal_order(model, 2, measure, tmp_path / "whole.json", {"answers": 12})
    late = time.perf_counter() - 1
    assert not find_removal_order(model, 2, measure, path, {"answers": 12}, deadline=late).removed
    find_removal_order(model, 4, measure, path, {"answers": 12})

    def never(pruned):
        raise AssertionError("measured again")

    again = find_removal_order(model, 4, never, path, {"answers": 12})
    assert again.removed == whole.removed[:2]
    assert find_removal_order(model, 2, measure, path, {"answers": 12}) == whole
    assert find_removal_order(model, 4, never, path, {"answers": 12}).kept(4) == again.kept(4)
    with pytest.raises(AssertionError, match="measured again"):
        find_removal_order(model, 4, never, path, {"answers": 13})
    path.write_text("{")
    with pytest.raises(GraftError, match=r"layers\.json is damaged: delete it to measure anew"):
        find_removal_order(model, 4, measure, path, {})


# The checkpoint


def without_layers(model, gone, tokens):
    """The model's logits when these layers pass on what they get."""
    hooks = []
    for number in gone:

        def pass_on(module, args, kwargs, output):
            hidden = args[0] if args else kwargs["hidden_states"]
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        hooks.append(model.base_model.layers[number].register_forward_hook(pass_on, with_kwargs=True))
    try:
        with torch.no_grad():
            return model(tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("llama", None),
        ("qwen2_window", ("layer_types", ["full_attention", "sliding_attention"])),
        ("qwen3_moe", None),
        ("phi3", None),
        ("gemma3_text", ("layer_types", ["sliding_attention", "sliding_attention"])),
        ("gpt_neox", None),
        ("olmo2", None),
    ],
)
def test_the_saved_checkpoint_is_the_target_without_the_layers(name, field, tmp_path):
    model = tiny_model(name, tie_word_embeddings=name == "llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())  # what the file can hold
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    config = model.config.to_dict()
    pruned = DepthPrunedModel(model, (0, 2))
    expected = without_layers(model, [1], TOKENS)
    pruned.save(tmp_path, byte_tokenizer())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
        whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
        assert torch.equal(whole(TOKENS).logits, pruned.model.eval()(TOKENS).logits), "in its own dtype, bit for bit"
    assert kind_of(tmp_path) == "model"
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["num_hidden_layers"] == 2 and saved["kept_layers"] == [0, 2]
    if field is not None:
        assert saved[field[0]] == field[1]
    if name == "qwen2_window":
        assert saved["max_window_layers"] == 1
    assert model.config.to_dict() == config
    assert [m.layer_idx for m in model.modules() if hasattr(m, "layer_idx")] == sorted(
        m.layer_idx for m in model.modules() if hasattr(m, "layer_idx")
    )
    for key, weight in model.state_dict().items():
        assert weight.dtype == torch.float32 and torch.equal(weight, before[key]), key


def test_layers_that_are_what_they_are_by_their_place_are_refused():
    """Every second layer has experts: the last of three would come second, where there are some."""
    model = tiny_model("qwen3_moe", decoder_sparse_step=2)
    with pytest.raises(GraftError, match="Qwen3MoeForCausalLM cannot lose layers: their kind depends on position"):
        DepthPrunedModel(model, (0, 2))
    listed = tiny_model("qwen3_moe", mlp_only_layers=[1, 2])
    assert DepthPrunedModel(listed, (0, 2)).model.config.mlp_only_layers == [1]


# What it learns


def objective_for(model, kept=(0, 2, 5), settings=SETTINGS):
    return DepthPrunedObjective(DepthPrunedModel(model, kept), model, texts(), settings)


def test_loss_and_gradients_are_those_of_one_text_at_a_time(model):
    objective = objective_for(model)
    found = objective.backward(0)
    head = objective.head
    names = {name for name, _ in head.named_parameters()}
    assert "parts.norm.weight" in names and sum(".o_proj." in name for name in names) == 3
    assert not any("embed" in name or "lm_head" in name for name in names)
    gradients = {name: p.grad.clone() for name, p in head.named_parameters()}
    head.zero_grad()
    batch = objective.training_batches.at(0)
    by_text = {tuple(a.tokens.tolist()): a for a in texts()}
    total, count = 0.0, 0
    for tokens, starts in zip(batch.tokens, batch.starts, strict=True):
        for document in tokens.split(starts.unique(return_counts=True)[1].tolist()):
            if tuple(document.tolist()) not in by_text:
                continue  # padding
            first = by_text[tuple(document.tolist())].num_prompt_tokens - 1
            with torch.no_grad():
                wanted = model(document[None]).logits[0, first:-1].softmax(-1)
            own = head.model(document[None]).logits[0, first:-1].log_softmax(-1)
            total, count = total + kl_div(own, wanted, reduction="sum"), count + len(own)
    (total / count).backward()
    assert float(found["loss"]) == pytest.approx(float(total.detach()) / count, rel=1e-4)
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=2e-3, atol=1e-5, msg=name)
    assert all(p.grad is None for p in model.parameters())


def run(model, folder, settings=SETTINGS, deadline=math.inf, progress=lambda record: None):
    objective = objective_for(model, settings=settings)
    done = optimize(objective, settings, folder, len(texts()), progress, deadline)
    return objective, done


def test_the_layers_that_stay_make_up_for_the_others_and_the_target_stays_as_it_was(model, tmp_path):
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    start = objective_for(model).evaluate()
    settings = replace(SETTINGS, steps=16, evaluate_every=16, ema_decay=0.0)
    log = []
    objective, _ = run(model, tmp_path, settings, progress=log.append)
    losses = [record["loss"] for record in log if "loss" in record]
    assert losses[-1] < 0.7 * losses[0]
    assert objective.evaluate()["held_back_divergence"] < start["held_back_divergence"]
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]), name
    embedding = objective.head.model.get_input_embeddings().weight
    assert torch.equal(embedding, model.get_input_embeddings().weight)


@pytest.mark.parametrize("count", [0, 6, 7])
def test_layers_that_the_model_does_not_have_are_refused(model, tmp_path, count):
    recipe = DepthPrunedRecipe(SETTINGS, count)
    with pytest.raises(GraftError, match=f"layers must be from 1 to 5, not {count}: the model has 6"):
        recipe.prepare(Run(Engine(model, policy="off"), texts(), tmp_path, lambda report: None, math.inf))


# The command


SMALL = ["--kind", "depth-pruned", "--batch-tokens", "128", "--max-tokens", "64", "--held-back", "0.2"]
SMALL += ["--measured", "128"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Tell me about {n}."}) + "\n" for n in range(10)))
    return str(path)


def test_ctrl_c_says_that_the_same_command_goes_on_and_words_of_the_progress_are_explained(
    graft_tiny, prompts, tmp_path, monkeypatch
):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("graft.train.recipe.train_head", interrupted)
    result = graft_tiny("train", *SMALL, "--prompts", prompts, "--out", str(tmp_path / "draft"))
    said = result.err.splitlines()
    assert result.status == 130 and len(said) == 2
    assert said[0].startswith("right_0 is the share of the model's next tokens that the head guesses right")
    assert said[1].startswith("Stopped. The same command continues from the last answers and steps that were saved in")


def test_graft_train_makes_a_draft_model_whose_text_is_the_targets(graft_tiny, graft, model_folder, prompts, tmp_path):
    out = tmp_path / "draft"
    asked = [*SMALL, "--prompts", prompts, "--out", str(out)]
    result = graft_tiny("train", *asked, "--steps", "0")
    assert result.status == 0 and f"The draft model is in {out}" in result.err.replace("\n", "")
    card, facts = (out / "README.md").read_text(), json.loads((out / "training.json").read_text())
    assert len(facts["kept_layers"]) == 1, "a third of three"
    assert [each["layer"] for each in facts["removed"]] == [n for n, _ in map(tuple, json_order(out)["removed"])]
    assert len(facts["divergence_without"]) == 3 and 0 <= facts["before"]["held_back_right_0"] <= 1
    assert "nothing was trained" in card and "| right | " in card and "after training" not in card
    assert f"1 of the target's 3 layers: {facts['kept_layers'][0]}." in card

    healed = graft_tiny("train", *asked, "--steps", "2")
    assert healed.status == 0
    assert "before training | after training" in (out / "README.md").read_text()
    assert "for\n2 steps of 128 tokens" in (out / "README.md").read_text()

    engine = package.load(model_folder, draft=str(out), policy="dense", dtype="fp32")
    assert isinstance(engine.drafter, SmallModelDrafter) and engine.drafter.model.config.num_hidden_layers == 1
    plain = package.load(model_folder, policy="off", dtype="fp32")
    for options in ({}, {"temperature": 1.1, "top_p": 0.9, "seed": 3}):
        answer = engine.generate("Tell me about 77.", max_new_tokens=24, **options)
        assert answer.ids == plain.generate("Tell me about 77.", max_new_tokens=24, **options).ids
        assert answer.stats.draft_passes > 0


def json_order(out):
    return json.loads((out / "work" / "layers.json").read_text())
