"""Rows with penalties, biases, min_tokens, log-probabilities and grammars have the texts of plain decoding on the device.

Here the interpreter runs the kernels. What each kernel computes: test_adjust.py.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")

import plain_kernels
from captured_parts import Small
from graft import Engine
from graft.model import TargetRunner
from graft.request.sequence import TreeRow
from tiny import tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT = [3, 17, 42, 9, 9, 30, 5, 21, 17, 42, 9, 11]
PROMPTS = [PROMPT, PROMPT[:5], PROMPT[3:9]]


class OneContext(Small):
    sizes = (1, 2, 4, 8, 16, 64, 256)
    contexts = (64, 128)


@pytest.fixture
def on_device(monkeypatch):
    """Engines whose rounds the device makes; without a GPU that is the interpreter, with PyTorch for the layers."""
    if DEVICE == "cpu":
        plain_kernels.use_plain_kernels(monkeypatch)
    monkeypatch.setattr("graft.engine.engine.target_for", lambda *given: OneContext(*given))
    monkeypatch.setattr("graft.engine.rounds.BY_ITSELF", ("cpu", "cuda"))
    monkeypatch.setattr("graft.engine.device_rounds._PAST_TOKENS", 1024)
    monkeypatch.setattr("graft.engine.device_rounds.DeviceRounds.contexts", (64, 128))
    monkeypatch.setattr("graft.model.kernels.adjust._CHUNK", 32)  # several of them


def plain_answers(model, prompts, monkeypatch, **options):
    """What plain decoding on the host gives, by transformers' own layers."""
    with monkeypatch.context() as eager:
        eager.setattr("graft.engine.engine.target_for", lambda model, hidden, chunk, exact: TargetRunner(model))
        eager.setattr("graft.engine.rounds.BY_ITSELF", ())
        return Engine(model, policy="off").generate_batch(prompts, **options)


ROWS = {
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 1.1},
    "frequency": {"frequency_penalty": 0.7},
    "bias": {"logit_bias": {3: 2.0, 17: -torch.inf, 60: 1.5}},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": list(range(40))},
    "all": {
        "repetition_penalty": 0.8,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.4,
        "logit_bias": {9: 1.0, 5: -1.0},
        "min_tokens": 5,
        "stop_token_ids": list(range(20)),
        "logprobs": 3,
    },
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_adjusted_rows_have_the_texts_of_plain_decoding(name, temperature, on_device, monkeypatch):
    model = tiny_model("llama").to(DEVICE)
    options = {"max_new_tokens": 10, "temperature": temperature, "seed": 5}
    each = [ROWS[name], {}, ROWS[name]]
    engine = Engine(model, policy="graft", budget=5)
    answers = engine.generate_batch(PROMPTS, each=each, **options)
    expected = plain_answers(model, PROMPTS, monkeypatch, each=each, **options)
    assert [answer.ids for answer in answers] == [answer.ids for answer in expected]
    assert all("propose" in answer.stats.seconds_by_phase for answer in answers), "the device has made the rounds"
    free = plain_answers(model, PROMPTS, monkeypatch, **options)
    assert [answer.ids for answer in free] != [answer.ids for answer in expected]
    print([a.stats.accepted for a in answers])
