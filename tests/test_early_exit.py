"""Early exit: the target's first layers draft in its own KV cache, and the text is the target's."""

import json

import pytest
import torch

import graft
from batches import prefilled
from drafted import drafts
from graft import Engine, GraftError
from graft.drafters.drafter import TreeSettings
from graft.drafters.early_exit import EarlyExitDrafter, choose_exit_layer, exit_layer
from graft.drafters.early_exit.exit_layer import ExitEstimate, estimate_exits
from graft.tree.tree import DraftTree
from graft.tuning.profile import About
from tiny import byte_tokenizer, settled_model, tiny_model

PROMPT = [3, 17, 42, 9, 9, 30, 5, 21]
PROMPTS = [PROMPT, [5], (PROMPT * 9)[:67]]  # the last is longer than a page
TREE = TreeSettings(depth=3, topk=3, total_token=12)
CHAIN = TreeSettings(depth=3, topk=1, total_token=4)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def draft(drafter, batch, num_passes=4):
    return drafts(drafter, batch.draft, batch.roots(), count=num_passes)


@pytest.mark.parametrize("name", ["llama", "mistral"])  # the latter's windows are shorter than the text
def test_a_step_gives_what_it_gives_without_drafts(name):
    """Of a tree with drafted nodes, in another order, and others; the keys and values that it leaves too."""
    model = tiny_model(name)
    outputs = []
    for num_passes in (0, 3):
        drafter = EarlyExitDrafter(model, 2, CHAIN)
        engine = Engine(model, policy="dense", drafter=drafter)
        batch = prefilled(engine, PROMPT)
        chain = [int(level.tokens[0, 0]) for level in draft(drafter, batch, 3)]
        if num_passes == 0:
            batch = prefilled(engine, PROMPT)
        other = (chain[0] + 1) % 61
        #        root  0: other  1: drafted  2: drafted  3: below the other  4: drafted, not run
        tokens = torch.tensor([[PROMPT[-1], other, chain[0], chain[1], chain[0], chain[2]]])
        parents = torch.tensor([[0, 0, 0, 2, 1, 3]])
        rest = torch.ones(tokens.shape), torch.zeros_like(tokens)
        verified = engine.target.verify(batch.cache, DraftTree(tokens, parents, *rest))
        first = verified.logits.clone()
        engine.target.commit(batch.cache, [[2, 3, 5]])
        later = engine.target.verify(batch.cache, DraftTree.roots(torch.tensor([7]))).logits
        outputs.append((first, later))
    for expected, found in zip(*outputs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_an_exit_that_is_right_has_all_its_drafts_accepted_and_reads_no_prompt():
    model = settled_model(1)
    engine = Engine(model, policy="dense", drafter=EarlyExitDrafter(model, 1, CHAIN))
    answer = engine.generate(PROMPT, max_new_tokens=20)
    assert answer.ids == Engine(model, policy="off").generate(PROMPT, max_new_tokens=20).ids
    assert answer.stats.mean_accepted == CHAIN.depth + 2
    pool = engine.target.pool
    assert pool.num_free == pool.num_pages and len(pool.stores) == 1, "no pages and no store of its own"


# What cannot be an exit


def refusal(model, draft, **options):
    with pytest.raises(GraftError) as caught:
        graft.load(model, draft=draft, policy="dense", **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("layer", [-1, 0, 3, 99])
def test_a_layer_that_is_none_is_refused_with_those_that_are(model, layer):
    message = f"the exit layer is {layer}, and must be between 1 and 2: the model has 3 layers"
    assert refusal(model, f"early-exit:{layer}") == message


def test_words_that_name_no_layer_are_refused(model):
    assert refusal(model, "early-exit:half") == "--draft early-exit:LAYER takes a whole number, not 'half'"
    assert "name one, early-exit:1 to early-exit:2" in refusal(model, "early-exit")
    assert "early exit needs two layers or more" in refusal(tiny_model(num_hidden_layers=1), "early-exit:1")


def test_a_model_that_cannot_be_cut_is_refused():
    model = tiny_model()
    model.config.num_hidden_layers = 7
    assert "LlamaForCausalLM has no list of its 7 layers" in refusal(model, "early-exit:1")
    model = tiny_model()
    forward = model.model.forward
    model.model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    assert "LlamaModel has a forward of its own, so it cannot be run in part" in refusal(model, "early-exit:1")


# Which layer


def test_the_layer_is_chosen_by_what_it_says_and_costs():
    model = settled_model(2, num_hidden_layers=8)
    estimates = {each.layer: each for each in estimate_exits(model, PROMPTS)}
    assert list(estimates) == [1, 2, 3, 4, 5, 6, 7]
    assert estimates[2].acceptance == estimates[6].acceptance == 1 > estimates[1].acceptance
    assert estimates[2].cost < estimates[6].cost < 1
    assert choose_exit_layer(model, PROMPTS) == 2


def test_answers_end_where_the_model_ends_them_and_at_the_end_of_its_context():
    model = tiny_model(max_position_embeddings=len(PROMPT) + 6)
    (estimate,) = estimate_exits(model, [PROMPT], [2])
    answer = Engine(model, policy="off").generate(PROMPT, max_new_tokens=6).ids
    model.generation_config.eos_token_id = [answer[1]]
    (shorter,) = estimate_exits(model, [PROMPT], [2])
    with torch.no_grad():
        hidden = model(torch.tensor([PROMPT + answer]), output_hidden_states=True).hidden_states[2]
        likeliest = model.lm_head(model.model.norm(hidden))[0].argsort(descending=True)[len(PROMPT) - 1 : -1, :4]
    held = [token in row for token, row in zip(answer, likeliest.tolist(), strict=True)]
    assert estimate.acceptance == pytest.approx(sum(held) / 6)
    assert shorter.acceptance == pytest.approx(sum(held[:2]) / 2)
    with pytest.raises(GraftError, match="a prompt of 14 tokens leaves no room for an answer in a context of 14"):
        estimate_exits(model, [PROMPT + answer], [2])


def test_if_no_exit_layer_pays_the_one_that_comes_closest_is_taken(model, monkeypatch):
    # Measured with smollm2-135m, which was not trained for early exit.
    measured = [ExitEstimate(4, 0.03, 0.32), ExitEstimate(15, 0.08, 0.61), ExitEstimate(26, 0.44, 0.89)]
    assert max(measured, key=lambda each: each.speed).layer == 4, "the least slow"
    monkeypatch.setattr(exit_layer, "estimate_exits", lambda *arguments: measured)
    with pytest.warns(UserWarning, match="26, would have 44% of its guesses accepted, and guessing costs 89% of a for"):
        assert choose_exit_layer(model, PROMPTS) == 26
    paying = ExitEstimate(8, 0.8, 0.42)
    assert paying.speed > 1
    monkeypatch.setattr(exit_layer, "estimate_exits", lambda *arguments: [*measured, paying])
    assert choose_exit_layer(model, PROMPTS) == 8


def test_a_measured_layer_is_taken_before_others_are_tried():
    from graft.tuning.drafters import Measured, drafts_for, remember

    model, tokenizer = settled_model(2, num_hidden_layers=8), byte_tokenizer()
    about = About.of_model(model)
    assert "early-exit" in drafts_for("some-model", model)
    assert graft.load(model, tokenizer=tokenizer, draft="early-exit", profile=None).drafter.num_layers == 2
    remember(about, Measured("early-exit:3", 1.5, 15.0, 2.5, 3.0, 4, "2026-01-31"))
    assert graft.load(model, tokenizer=tokenizer, draft="early-exit", profile=None).drafter.num_layers == 3
    assert graft.load(model, profile=None).drafter.num_layers == 3, "as auto takes the fastest"
    assert "early-exit" not in drafts_for("some-model", model) and "early-exit:3" in drafts_for("some-model", model)


def test_the_commands_take_an_early_exit(graft, tmp_path):
    model = settled_model(2, num_hidden_layers=4)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    data = tmp_path / "task.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"abc {number} abc"}) + "\n" for number in range(5)))
    named = ("--model", str(tmp_path / "model"), "--device", "cpu", "--max-new-tokens", "8")
    check = graft("check", "--prompts", str(data), "--limit", "2", *named, "--draft", "early-exit:2", "--budget", "7")
    assert check.status == 0 and "0 differ" in check.out, check.err
    far = graft("generate", "abc", *named, "--draft", "early-exit:4")
    assert far.status == 2 and far.err.strip().endswith("must be between 1 and 3: the model has 4 layers")
    assert "its first layers" in graft("drafters", str(tmp_path / "model"), "--device", "cpu").out
    tuned = graft("tune", "--prompts", str(data), "--draft", "early-exit", *named)
    assert "early-exit:2 is the best of those tried" in tuned.err and "Drafter early-exit:2: " in tuned.err, tuned.err
    assert "early-exit:2" in graft("drafters", str(tmp_path / "model"), "--device", "cpu").out
