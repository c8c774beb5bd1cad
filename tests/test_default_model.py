"""The real default model and its head: what the demo promises, on a few tokens."""

import pytest
import torch

from graft import Engine, load
from graft.engine.scheduler import Scheduler
from graft.hub.registry import DEFAULT_MODEL
from graft.loading import load_drafter
from scheduling import Asked

QUESTION = [{"role": "user", "content": "Repeat exactly, twice: the cat sat on the mat, the dog lay by the door."}]


@pytest.fixture(scope="module")
def loaded():
    """With the head and the policy that come with the model."""
    return load(DEFAULT_MODEL, dtype="fp32", device="cpu", budget=7)


@pytest.fixture(scope="module")
def plain(loaded):
    return Engine(loaded.target.model, loaded.tokenizer, policy="off")


@pytest.fixture(scope="module")
def engines(plain):
    model = plain.target.model
    return {
        "graft": Engine(model, plain.tokenizer, budget=7),
        "dense": Engine(model, plain.tokenizer, policy="dense", drafter=load_drafter(DEFAULT_MODEL, model), budget=15),
    }


def test_greedy_text_is_that_of_transformers_with_every_policy(plain, engines):
    ids = plain.encode(QUESTION)
    expected = plain.target.model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, len(ids) :]
    for name, engine in {"off": plain, **engines}.items():
        result = engine.generate(QUESTION, max_new_tokens=16)
        assert result.ids == expected.tolist(), name
        assert name == "off" or result.stats.mean_accepted > 1.5, "the trees took part"


def test_sampled_text_is_that_of_plain_decoding_with_the_same_seed(plain, engines):
    options = {"max_new_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 3, "frequency_penalty": 0.3}
    expected = plain.generate(QUESTION, **options).ids
    for name, engine in engines.items():
        assert engine.generate(QUESTION, **options).ids == expected, name


def test_requests_decoded_together_get_what_each_gets_alone(plain, loaded):
    prompts = ["Name three colours.", "Count to five."]
    questions = [[{"role": "user", "content": prompt}] for prompt in prompts]
    options = [{"max_new_tokens": 7, "temperature": 0.9 * i, "seed": i} for i in range(2)]
    expected = [plain.generate(q, **o).text for q, o in zip(questions, options, strict=True)]
    scheduler = Scheduler(loaded)  # whose thread alone runs the model now
    together = [Asked(scheduler, q, **o) for q, o in zip(questions, options, strict=True)]
    assert [request.wait() for request in together] == [[text] for text in expected]
    scheduler.close()


def test_answers_end_by_themselves(plain):
    result = plain.generate([{"role": "user", "content": "What is 2+2? Answer with one word."}], max_new_tokens=60)
    assert result.finish_reason == "stop" and result.ids[-1] in plain.eos_token_ids
    assert "<|" not in result.text
