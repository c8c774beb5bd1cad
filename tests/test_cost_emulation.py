"""Cost emulation: a widened model and its head give the same output as before, and every table names the emulation."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from batches import prefilled
from block_heads import make_head as make_block_head
from drafted import drafts
from graft import Engine, GraftError
from graft.bench.cost_emulation import widen, widen_head
from graft.bench.shapes import SHAPES, ModelShape
from graft.drafters.block import BlockHead
from graft.drafters.block.drafter import BlockDrafter, BlockTreeSettings
from graft.drafters.eagle3 import Eagle3Config, Eagle3Head, save_head
from graft.drafters.eagle3.drafter import Eagle3Drafter
from heads import SMALL_TREE, make_head
from tiny import BYTE_VOCAB, tiny_model

PROMPT = [3, 17, 42, 9, 9, 30, 5, 21]
TINY = ModelShape(layers=6, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=8)
WIDE = ModelShape(layers=9, hidden=72, intermediate=108, heads=12, kv_heads=3, head_dim=16)
WITH_EXPERTS = replace(WIDE, intermediate=112, experts=40, experts_per_token=2, neurons=56)
SPEC = "layers=5,hidden=72,intermediate=96,heads=12,kv_heads=4,head_dim=16"

ROPE = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}


@pytest.fixture(scope="module")
def model():
    model = tiny_model(num_hidden_layers=TINY.layers)
    with torch.no_grad():  # norms of trained models are not all ones, and eps is felt where vectors are short
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
        model.model.embed_tokens.weight.mul_(0.01)
    return model


# The model


@pytest.mark.parametrize("rope", ROPE)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shape", [WIDE, WITH_EXPERTS], ids=["dense", "experts"])
def test_widened_model_has_the_same_logits_and_the_same_text(rope, tied, shape):
    parameters = {"rope_type": rope, "rope_theta": 10000.0, **ROPE[rope]}
    small = tiny_model(num_hidden_layers=2, rope_parameters=parameters, tie_word_embeddings=tied)
    widened = widen(small, shape)
    tokens = torch.randint(3, 60, (2, 100), generator=torch.manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(widened(tokens).logits, small(tokens).logits, atol=1e-4, rtol=1e-4)
    expected = Engine(small, policy="off").generate(PROMPT, max_new_tokens=24).ids
    assert Engine(widened, policy="off").generate(PROMPT, max_new_tokens=24).ids == expected


def test_different_tokens_have_different_experts_though_their_hidden_states_have_much_in_common():
    small = tiny_model(num_hidden_layers=2)
    with torch.no_grad():
        small.model.embed_tokens.weight += 3 * small.model.embed_tokens.weight.std()
    widened, chosen = widen(small, WITH_EXPERTS), []
    for layer in widened.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
    with torch.no_grad():
        widened(torch.randperm(60, generator=torch.manual_seed(0))[None, :50])
    expected = 40 * (1 - (1 - 2 / 40) ** 50)
    touched = [len(experts.unique()) for experts in chosen]
    assert len(touched) == WIDE.layers
    assert min(touched) > 0.6 * expected  # at most 7, if routers saw what hidden states have in common
    assert not torch.equal(*chosen[-2:]), "each layer has a router of its own"


def test_shapes_with_experts_read_what_a_token_of_their_models_reads():
    experts = {name: shape for name, shape in SHAPES.items() if shape.experts}
    read = {name: shape.intermediate + shape.experts_per_token * shape.neurons for name, shape in experts.items()}
    assert read == {"qwen3-30b-a3b": 8 * 768, "gpt-oss-20b": 4 * 2880}


# The head


def assert_draft_alike(*pairs, max_new_tokens=16):
    """Two models, each with a drafter: they draft the same and answer the same. Returns their answers."""
    drafted, answers = [], []
    for its_model, drafter in pairs:
        engine = Engine(its_model, policy="dense", drafter=drafter)
        batch = prefilled(engine, PROMPT)
        drafted.append(drafts(drafter, batch.draft, batch.roots(), count=4))
        answers.append(engine.generate(PROMPT, max_new_tokens=max_new_tokens))
    for own, wide in zip(*drafted, strict=True):
        assert torch.equal(own.tokens, wide.tokens) and torch.equal(own.parents, wide.parents)
        torch.testing.assert_close(own.probabilities, wide.probabilities, atol=1e-5, rtol=1e-3)
    assert answers[0].ids == answers[1].ids
    assert answers[0].stats.accepted_by_depth == answers[1].stats.accepted_by_depth
    return answers


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"norm_before_fc": True, "norm_output": True}, marks=pytest.mark.slow),
        {
            "fc_norm": True,
            "norm_before_residual": True,
            "own_embedding": True,
            "sliding_window": 5,
        },
    ],
)
def test_widened_head_drafts_the_same_and_as_much_is_accepted(model, changes):
    head = Eagle3Head(replace(make_head(model).config, **changes))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.uniform_(0.5, 1.5) if parameter.dim() == 1 else parameter.normal_(0, 0.2)
    head.set_vocabulary(torch.randperm(61)[:40].sort().values)
    if not head.config.own_embedding:
        head.borrow_embedding(model.model.embed_tokens.weight)
    widened = widen(model, WIDE)
    wide_head = widen_head(head, model, WIDE, widened)
    assert ModelShape.of_config(wide_head.config) == replace(WIDE, layers=1)

    drafters = Eagle3Drafter(head, SMALL_TREE), Eagle3Drafter(wide_head, SMALL_TREE)
    own, _ = assert_draft_alike((model, drafters[0]), (widened, drafters[1]), max_new_tokens=32)
    assert own.stats.accepted > 0, "some drafts were right"


@pytest.mark.parametrize(("size", "expected"), [(100, 256), (24, 64)])  # 108 / 48 times as much, in multiples of 64
def test_an_mlp_that_is_larger_or_smaller_than_the_targets_stays_so(model, size, expected):
    small = make_head(model)
    head = Eagle3Head(replace(small.config, intermediate_size=size))
    head.set_vocabulary(small.target_ids)
    head.borrow_embedding(model.model.embed_tokens.weight)
    widened = widen(model, WIDE)
    wide_head = widen_head(head, model, WIDE, widened)
    assert wide_head.config.intermediate_size == expected
    assert_draft_alike((model, Eagle3Drafter(head, SMALL_TREE)), (widened, Eagle3Drafter(wide_head, SMALL_TREE)))


BLOCK_HEADS = {
    "conditional": {"shifted": True, "conditional": True, "own_mask": True},
    "sized conditional": {"shifted": False, "conditional": True, "conditional_size": 20, "own_embedding": True},
    "gated": {"shifted": False, "markov": "gated", "markov_rank": 5, "causal": (True, False), "windows": (6, None)},
    "recurrent": {"shifted": True, "markov": "rnn", "markov_rank": 5, "head_norms": False, "own_lm_head": True},
    "vanilla": {"shifted": True, "markov": "vanilla", "markov_rank": 5},
}


@pytest.mark.parametrize("kind", BLOCK_HEADS)
def test_widened_block_head_drafts_the_same_and_as_much_is_accepted(model, kind):
    head = make_block_head(model, **BLOCK_HEADS[kind])
    widened = widen(model, WIDE)
    wide_head = widen_head(head, model, WIDE, widened)
    assert isinstance(wide_head, BlockHead)
    assert ModelShape.of_config(wide_head.config) == replace(WIDE, layers=2)
    assert wide_head.config.conditional_size == (64 if kind == "sized conditional" else None)
    assert not any(parameter.is_meta for parameter in wide_head.parameters())

    tree = BlockTreeSettings(width=8, nodes=12)
    assert_draft_alike((model, BlockDrafter(head, tree)), (widened, BlockDrafter(wide_head, tree)))


# Shapes


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lama-8b", "unknown shape 'lama-8b': did you mean 'llama-8b'?"),
        ("layers=3,hidden=64", "lacks intermediate, heads, kv_heads, head_dim"),
        (f"{SPEC},depth=3", "unknown setting 'depth'"),
        (SPEC.replace("hidden=72", "hidden=many"), "hidden must be a positive whole number, not 'many'"),
        (SPEC.replace("kv_heads=4", "kv_heads=5"), "heads must be a multiple of kv_heads, but 12 is not one of 5"),
        (SPEC.replace("hidden=72", "hidden=70"), "hidden must be a multiple of heads, but 70 is not one of 12"),
        (SPEC.replace("head_dim=16", "head_dim=9"), "head_dim must be even"),
        (f"{SPEC},experts=4,experts_per_token=5,neurons=48", "experts_per_token=5 is more than the 4 experts"),
        (f"{SPEC},experts=4,experts_per_token=2,neurons=50", "intermediate=96 must be a multiple of neurons=50"),
        (f"{SPEC},experts=4", "experts_per_token must be a positive whole number, not 0"),
    ],
)
def test_shape_that_cannot_be_says_why(spec, message):
    with pytest.raises(GraftError) as caught:
        ModelShape.named(spec)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 5}, "layers=5 is too small a shape: the model itself has 6"),
        ({"intermediate": 40}, "intermediate=40 is too small"),
        ({"heads": 12, "kv_heads": 12}, "2 query heads to a key head, the shape only 1"),
        ({"head_dim": 12}, "head_dim=12 must be a multiple of the model's 8"),
        ({"intermediate": 10**12}, "GB are free"),
    ],
)
def test_shape_that_does_not_fit_the_model_says_why(model, changes, message):
    with pytest.raises(GraftError, match=message):
        widen(model, replace(WIDE, **changes))


# The command


@pytest.fixture
def data(tmp_path):
    (tmp_path / "first.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    return ["--prompts", str(tmp_path / "first.jsonl")]


@pytest.fixture
def head(model_folder, tmp_path):
    torch.manual_seed(0)
    config = tiny_model(vocab_size=BYTE_VOCAB, max_position_embeddings=1024).config
    save_head(Eagle3Head(Eagle3Config.for_target(config)), tmp_path / "head")
    return str(tmp_path / "head")


def test_bench_counts_the_same_under_cost_emulation_and_says_so_in_every_title(
    graft_tiny, data, head, model_folder, tmp_path
):
    words = ["bench", *data, "--methods", "off,dense", "--draft", head]
    plain, widened = tmp_path / "plain", tmp_path / "widened"
    assert graft_tiny(*words, "--out", str(plain)).status == 0
    result = graft_tiny(*words, "--as-cost-of", SPEC, "--out", str(widened))
    assert result.status == 0, result.err
    title = f"at the cost of {SPEC} (widened {Path(model_folder).name})"
    assert title in " ".join(result.out.split())
    page = (widened / "report.html").read_text()
    assert f"<h1>Graft benchmark {title}</h1>" in page and f"All numbers {title}" in page
    assert "at the cost of" not in (plain / "report.html").read_text()

    own, wide = (json.loads((folder / "results.json").read_text()) for folder in (plain, widened))
    assert own["settings"]["as_cost_of"] is None and wide["settings"]["as_cost_of"] == SPEC
    assert wide["settings"]["shape"]["hidden"] == 72 and wide["settings"]["shape"]["parameters"] > 100_000
    for before, after in zip(own["runs"], wide["runs"], strict=True):
        for count in ("method", "tokens", "rounds", "accepted_by_depth", "differ"):
            assert before[count] == after[count]
    rows = list(csv.DictReader((widened / "results.csv").read_text().splitlines()))
    assert {row["as_cost_of"] for row in rows} == {SPEC}
