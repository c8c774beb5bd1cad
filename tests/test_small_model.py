"""A small model as drafter: what it drafts is what it would say, the text is the target's, and what cannot draft is
refused in one line."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModel

import graft
from batches import counting_tokens, plain_rounds, prefilled
from drafted import drafts
from graft import Engine, GraftError
from graft.drafters.drafter import TreeSettings
from graft.drafters.other_tokenizer import OtherTokenizerDrafter
from graft.drafters.small_model import SmallModelDrafter
from graft.hub import drafters as registry
from graft.loading import load_drafter
from graft.request.stats import Clock
from tiny import BYTE_VOCAB, VOCAB, byte_tokenizer, tiny_model

PROMPT = [3, 17, 42, 9, 9, 30, 5, 21]
PROMPTS = [PROMPT, [5], (PROMPT * 9)[:67]]  # the last is longer than a page
TREE = TreeSettings(depth=3, topk=3, total_token=12)
CHAIN = TreeSettings(depth=3, topk=1, total_token=4)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def other():
    """A draft model that is sometimes right: the target with other numbers added."""
    draft, noise = tiny_model(), tiny_model(seed=1)
    with torch.no_grad():
        for own, more in zip(draft.parameters(), noise.parameters(), strict=True):
            own += 0.1 * more if own.dim() > 1 else 0
    return draft


def drafted(drafter, batch, keep=None, num_passes=4):
    """By row, (token, parent, q) of every node, the root first."""
    roots = batch.roots()
    trees = [[(int(root), 0, 1.0)] for root in roots]
    for level in drafts(drafter, batch.draft, roots, keep, count=num_passes):
        for row, tree in enumerate(trees):
            columns = (level.tokens[row], level.parents[row], level.probabilities[row])
            tree += zip(*(column.tolist() for column in columns), strict=True)
    return trees


@torch.no_grad()
def assert_is_what_the_model_says(draft, text, tree):
    paths, said = [()], {}  # by node its path, and by path what the model says behind it
    for token, parent, q in tree[1:]:
        above = paths[parent]
        if above not in said:
            said[above] = draft(torch.tensor([[*text, *above]])).logits[0, -1].softmax(-1)
        assert q == pytest.approx(float(said[above][token]), rel=1e-3)
        paths.append((*above, token))


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_every_drafted_node_has_the_probability_that_the_model_gives_it(model, name):
    """After rounds whose nodes were accepted and rejected, in all rows, with all nodes of a level and the best."""
    draft = tiny_model(name, seed=0 if name == "llama" else 2)
    drafter = SmallModelDrafter(draft, VOCAB, TREE)
    engine = Engine(model, policy="dense", drafter=drafter)
    batch = prefilled(engine, *PROMPTS)
    for _ in range(3):
        engine.run_round(batch, Clock())
    for keep, width in ((None, 1 + 3 + 3 * 9), (5, 1 + 3 + 3 * 5)):
        for sequence, tree in zip(batch.sequences, drafted(drafter, batch, keep), strict=True):
            assert len(tree) == width
            assert_is_what_the_model_says(draft, sequence.ids, tree)


def test_a_draft_model_equal_to_the_target_has_all_its_drafts_accepted(model):
    """And it runs no token twice: of a round it reads, before the next root, the last drafted token alone."""
    same = tiny_model()
    engine = Engine(model, policy="dense", drafter=SmallModelDrafter(same, VOCAB, CHAIN))
    batch = prefilled(engine, *PROMPTS)
    with counting_tokens(same) as sizes:
        for _ in range(4):
            engine.run_round(batch, Clock())
    rows = len(PROMPTS)
    assert [len(sequence.new_ids) for sequence in batch.sequences] == [4 * (CHAIN.depth + 2)] * rows
    assert sizes == [rows] * 4 + [2 * rows, rows, rows, rows] * 3
    assert batch.draft.lengths == [length - 1 for length in batch.cache.lengths]


def test_tokens_of_plain_rounds_are_read_with_the_next_root_also_after_a_row_joins(model, other):
    drafter = SmallModelDrafter(other, VOCAB, TREE)
    dense = Engine(model, policy="dense", drafter=drafter)
    batch = prefilled(dense, PROMPT)
    with plain_rounds(dense):
        for _ in range(4):
            dense.run_round(batch, Clock())
    assert batch.draft.lengths == [len(PROMPT) - 1] and len(batch.draft.rows[0].pending) == 4
    batch.join(prefilled(dense, PROMPTS[2]))
    for sequence, tree in zip(batch.sequences, drafted(drafter, batch), strict=True):
        assert_is_what_the_model_says(other, sequence.ids, tree)
    batch.keep([1])
    dense.run_round(batch, Clock())
    assert_is_what_the_model_says(other, batch.sequences[0].ids, drafted(drafter, batch)[0])


@pytest.mark.parametrize("size", [VOCAB + 7, VOCAB - 11])
def test_only_tokens_that_both_models_have_are_drafted(model, size):
    """Padding of the output layer is never proposed; tokens that the draft model lacks are read all the same."""
    drafter = SmallModelDrafter(tiny_model(vocab_size=size), VOCAB, TREE)
    engine = Engine(model, policy="dense", drafter=drafter)
    prompt = [*PROMPT, VOCAB - 1, VOCAB - 2]
    batch = prefilled(engine, prompt)
    tokens = [token for token, _, _ in drafted(drafter, batch)[0][1:]]
    assert max(tokens) < min(size, VOCAB)
    plain = Engine(model, policy="off").generate(prompt, max_new_tokens=12)
    assert engine.generate(prompt, max_new_tokens=12).ids == plain.ids


def test_text_beyond_the_draft_models_context_is_decoded_too(model):
    drafter = SmallModelDrafter(tiny_model(max_position_embeddings=16), VOCAB, TREE)
    engine = Engine(model, policy="dense", drafter=drafter)
    plain = Engine(model, policy="off").generate(PROMPT, max_new_tokens=24)
    assert engine.generate(PROMPT, max_new_tokens=24).ids == plain.ids


# Loading


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models in folders: a target, one with another tokenizer, one without a causal head."""
    root = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": BYTE_VOCAB, "max_position_embeddings": 512}
    tiny_model(**sizes).save_pretrained(root / "target")
    tiny_model("qwen2", num_hidden_layers=2, **sizes).save_pretrained(root / "foreign")
    for name in ("target", "foreign"):
        byte_tokenizer().save_pretrained(root / name)
    path = root / "foreign" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content))
    config = AutoConfig.from_pretrained(root / "target")
    AutoModel.from_config(config).save_pretrained(root / "headless")
    return root


def refusal(target, draft, **options):
    with pytest.raises(GraftError) as caught:
        graft.load(target, draft=draft, policy="dense", **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_token_ids_that_mean_something_else_are_not_drafted_as_they_are(folders):
    drafter = graft.load(str(folders / "target"), draft=str(folders / "foreign"), policy="dense").drafter
    assert isinstance(drafter, OtherTokenizerDrafter)


def test_vocabularies_of_other_sizes_need_their_tokenizers(folders, model):
    assert "61 tokens and the target 259" in refusal(tiny_model(vocab_size=BYTE_VOCAB), model)


def test_a_model_without_a_causal_head_is_refused(folders):
    message = refusal(str(folders / "target"), str(folders / "headless"))
    assert "architecture LlamaModel is neither a known draft head" in message
    assert "nor a causal language model" in message


def test_a_draft_model_that_cannot_be_rolled_back_is_refused(model):
    stateful = tiny_model()
    stateful._is_stateful = True
    assert "LlamaForCausalLM keeps a recurrent state" in refusal(model, stateful)


def test_a_packaged_name_is_the_head_for_its_own_model_and_the_model_for_others(monkeypatch, model):
    named = []
    monkeypatch.setattr(registry, "load_small_model", lambda name, *rest: named.append(name))
    load_drafter("smollm2-135m", model)
    assert named == ["smollm2-135m"]


def test_more_beams_than_tokens_are_refused(model):
    with pytest.raises(GraftError, match="topk is 62, but the draft model drafts from 61 tokens"):
        SmallModelDrafter(model, VOCAB, TreeSettings(topk=62))
