"""`model.generate(custom_generate=graft.decode)` returns what `model.generate` returns."""

import copy
import gc
import pickle
import warnings
import weakref
from unittest import mock

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import graft
from graft import loading
from graft.integrations import transformers as decoding
from tiny import BYTE_VOCAB, byte_tokenizer, tiny_model, tiny_multimodal

PROMPT = torch.tensor([[3, 17, 42, 9, 9, 30, 5]])


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 10, "eos_token_id": list(range(20)), "pad_token_id": 0},
        {"eos_token_id": list(range(20)), "pad_token_id": 0},
        {"bad_words_ids": [[5], [9, 30]], "suppress_tokens": [7]},
        {"max_length": 20, "max_new_tokens": None},
        {"forced_eos_token_id": 2},
    ],
)
def test_greedy_arguments_mean_what_they_mean_in_generate(model, options):
    options = {"max_new_tokens": 30, "do_sample": False, **options}
    expected = model.generate(PROMPT, **options)
    assert torch.equal(model.generate(PROMPT, custom_generate=graft.decode, **options), expected)
    assert torch.equal(model.generate(PROMPT, custom_generate=graft.decode, policy="off", **options), expected)


def test_an_assistant_model_that_is_not_used_is_told(model):
    options = {"max_new_tokens": 6, "do_sample": False, "custom_generate": graft.decode}
    with pytest.warns(UserWarning, match="does not use assistant_model=: give the model as draft= to draft with it"):
        result = model.generate(PROMPT, assistant_model=tiny_model(seed=1), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(result, model.generate(PROMPT, **options))


def test_a_left_padded_batch_gives_what_generate_gives(model):
    ids = torch.tensor([[0, 0, 0, 5, 6, 7], [9, 8, 7, 6, 5, 4], [0, 3, 3, 3, 3, 3]])
    options = {
        "attention_mask": (ids != 0).long(),
        "max_new_tokens": 25,
        "do_sample": False,
        "eos_token_id": [11, 12, 13, 14, 15],
        "pad_token_id": 0,
    }
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, custom_generate=graft.decode, **options), expected)


def test_custom_stopping_criteria_see_every_token_in_order(model):
    class Fifth(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] == PROMPT.shape[1] + 5)

    options = {"max_new_tokens": 30, "do_sample": False, "stopping_criteria": StoppingCriteriaList([Fifth()])}
    result = model.generate(PROMPT, custom_generate=graft.decode, **options)
    assert torch.equal(result, model.generate(PROMPT, **options)) and result.shape[1] == PROMPT.shape[1] + 5


def test_scores_and_logits_are_returned_when_asked_for(model):
    options = {
        "max_new_tokens": 12,
        "do_sample": False,
        "repetition_penalty": 1.2,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    expected = model.generate(PROMPT, **options)
    result = model.generate(PROMPT, custom_generate=graft.decode, **options)
    assert torch.equal(result.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(result.scores), torch.stack(expected.scores), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(torch.stack(result.logits), torch.stack(expected.logits), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "ids", [PROMPT, torch.tensor([[0, 0, 5, 6], [9, 8, 7, 6], [0, 3, 3, 3]])], ids=["one", "batch"]
)
def test_sampled_text_is_that_of_generate_and_so_is_what_is_drawn_next(model, ids):
    options = {
        "max_new_tokens": 30,
        "do_sample": True,
        "temperature": 1.2,
        "top_p": 0.9,
        "attention_mask": (ids != 0) * 1,
    }
    options |= {"eos_token_id": list(range(9)), "pad_token_id": 0}  # rows end apart, some inside a tree
    for seed in range(2):
        torch.manual_seed(seed)
        expected, next_draw = model.generate(ids, **options), torch.rand(1)
        torch.manual_seed(seed)
        assert torch.equal(model.generate(ids, custom_generate=graft.decode, budget=8, **options), expected)
        assert torch.equal(torch.rand(1), next_draw)


def test_keyed_noise_follows_torchs_seed_and_not_the_rows_beside_it(model):
    options = {"max_new_tokens": 30, "do_sample": True, "temperature": 1.2, "custom_generate": graft.decode}
    texts = []
    for ids, policy in ((PROMPT, "off"), (PROMPT, "graft"), (PROMPT.repeat(2, 1), "graft")):
        torch.manual_seed(7)
        texts.append(model.generate(ids, noise="keyed", policy=policy, **options)[0].tolist())
    assert texts[0] == texts[1] == texts[2]
    torch.manual_seed(7)
    assert model.generate(PROMPT, **options)[0].tolist() != texts[0]


def test_settings_of_load_are_taken_and_statistics_returned(model):
    options = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
    expected = model.generate(PROMPT, **options).sequences
    given = {"custom_generate": graft.decode, "draft": tiny_model(num_hidden_layers=1), "budget": 5, "profile": None}
    given["policy"] = "dense"  # which always drafts
    result = model.generate(PROMPT, **given, **options)
    (stats,) = result.stats
    assert torch.equal(result.sequences, expected)
    assert stats.tokens == 30 and stats.draft_passes > 0
    assert stats.nodes <= 5 * stats.rounds


def test_stop_ends_an_answer_where_stop_strings_would():
    tokenizer, model = byte_tokenizer(), tiny_model(vocab_size=BYTE_VOCAB)
    ids = torch.tensor([tokenizer.encode("graft")])
    options = {"max_new_tokens": 40, "do_sample": False}
    text = tokenizer.decode(model.generate(ids, **options)[0, ids.shape[1] :])
    word = next(letter for letter in text[5:] if letter.isascii() and letter.isprintable())
    expected = model.generate(ids, stop_strings=[word], tokenizer=tokenizer, **options)
    own = {"custom_generate": graft.decode, "stop": word, "text_tokenizer": tokenizer}
    assert torch.equal(model.generate(ids, **own, **options), expected)
    assert expected.shape[1] < ids.shape[1] + 40


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_text_alone_is_taken_by_multimodal_models(kind):
    model, options = tiny_multimodal(kind), {"max_new_tokens": 20, "do_sample": False}
    ids = torch.tensor([[0, 0, 5, 6, 8, 9], [9, 8, 7, 6, 5, 4]])
    options |= {"attention_mask": (ids != 0) * 1, "pad_token_id": 0}
    if kind == "gemma3":
        options["token_type_ids"] = torch.zeros_like(ids)  # what its processor gives with text
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, custom_generate=graft.decode, **options), expected)


def image_inputs(kind):
    """Two prompts with an image each, of different lengths and, for qwen2_5_vl, images of different sizes."""
    generator = torch.Generator().manual_seed(0)
    if kind == "gemma3":
        images, counts = {"pixel_values": torch.randn(2, 3, 28, 28, generator=generator)}, (4, 4)
    else:
        grid = torch.tensor([[1, 4, 4], [1, 4, 8]])  # in patches, of which four make a token
        patches = torch.randn(int(grid.prod(dim=1).sum()), 3 * 2 * 14 * 14, generator=generator)
        images, counts = {"pixel_values": patches, "image_grid_thw": grid}, (4, 8)
    before, after = ([3, 17, 42, 57], [9]), ([56, 9, 30, 5, 9, 30], [56, 21, 9, 30, 5, 11, 40])
    rows = [[*before[i], *[58] * counts[i], *after[i]] for i in range(2)]
    longest = max(map(len, rows)) + 1
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    types = "token_type_ids" if kind == "gemma3" else "mm_token_type_ids"
    return ids, {"attention_mask": (ids != 0) * 1, types: (ids == 58) * 1, **images}


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_images_are_read_by_the_models_own_forward_and_answers_decoded_with_trees(kind):
    model = tiny_multimodal(kind)
    ids, inputs = image_inputs(kind)
    options = {"max_new_tokens": 16, "pad_token_id": 0, "return_dict_in_generate": True, **inputs}
    with torch.no_grad():
        seen, other = (
            model(ids, **{**inputs, "pixel_values": sign * inputs["pixel_values"]}).logits for sign in (1, -1)
        )
    assert not torch.allclose(seen, other, atol=0.1), "the images matter"
    for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 1.5}):
        texts = []
        for own in ({}, {"custom_generate": graft.decode, "budget": 8}):
            torch.manual_seed(3)
            result = model.generate(ids, **options, **sampling, **own)
            texts.append(result.sequences)
        assert torch.equal(*texts)
        assert sum(stats.nodes for stats in result.stats) > 0
    with pytest.raises(ValueError, match="a drafter reads tokens only"):
        model.generate(ids, custom_generate=graft.decode, draft="early-exit:1", **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, "beams"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
        ({"noise": "white", "do_sample": True}, "unknown noise"),
        ({"stop": "x"}, "text_tokenizer"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "hidden_states"),
        ({"policy": "nonsense"}, "unknown policy"),
        ({"max_new_tokens": 300}, "at most"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 1]])}, "left"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(model, options, words):
    with pytest.raises(ValueError, match=words):
        model.generate(PROMPT, custom_generate=graft.decode, **{"max_new_tokens": 4, **options})


def test_processors_that_know_the_whole_batch_are_refused_for_several_prompts(model):
    options = {"max_new_tokens": 4, "do_sample": False, "encoder_repetition_penalty": 1.3}
    expected = model.generate(PROMPT, **options)
    assert torch.equal(model.generate(PROMPT, custom_generate=graft.decode, **options), expected)
    with pytest.raises(ValueError, match="one prompt at a time"):
        model.generate(PROMPT.repeat(2, 1), custom_generate=graft.decode, **options)


@pytest.fixture
def loaded(monkeypatch):
    """The tokenizer of every engine that is made."""
    tokenizers, load = [], decoding.load

    def load_and_tell(model, **options):
        tokenizers.append(options["tokenizer"])
        return load(model, **options)

    monkeypatch.setattr(decoding, "load", load_and_tell)
    return tokenizers


def test_a_model_keeps_its_engine_and_can_still_be_copied_pickled_and_freed(loaded):
    model = tiny_model()
    for same, num_loaded in ((model, 1), (model, 1), (copy.deepcopy(model), 2), (pickle.loads(pickle.dumps(model)), 3)):
        same.generate(PROMPT, custom_generate=graft.decode, max_new_tokens=4, do_sample=False)
        assert len(loaded) == num_loaded
    gone = weakref.ref(model)
    del model, same
    gc.collect()
    assert gone() is None


def test_a_model_whose_weights_change_between_calls_gives_generates_text():
    model, options = tiny_model(), {"max_new_tokens": 20, "do_sample": False}
    ids = torch.randint(5, 50, (1, 150), generator=torch.Generator().manual_seed(0))  # more than a page
    for _ in range(2):
        expected = model.generate(ids, **options)
        assert torch.equal(model.generate(ids, custom_generate=graft.decode, **options), expected)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1.5)


def test_setting_up_an_engine_draws_nothing_from_torchs_generator():
    model, options = tiny_model(), {"max_new_tokens": 12, "do_sample": True}
    given = {"custom_generate": graft.decode, "draft": tiny_model(num_hidden_layers=1), "policy": "dense"}
    torch.manual_seed(3)
    expected = model.generate(PROMPT, **options)
    torch.manual_seed(3)
    with mock.patch.object(loading, "load_drafter", side_effect=_drawing(loading.load_drafter)):
        assert torch.equal(model.generate(PROMPT, **given, **options), expected)


def _drawing(function):
    def drawing(*arguments, **options):
        torch.rand(7)
        return function(*arguments, **options)

    return drawing
