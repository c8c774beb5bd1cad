"""What experts add to the cost of a step, before and while steps are timed."""

from __future__ import annotations

import pytest
import torch

from families import family_model
from graft.model import TargetRunner
from graft.spec_decode.expert_costs import ExpertShare, shape_for
from graft.spec_decode.step_times import time_step, usual_shape
from tiny import tiny_model


def test_tokens_touch_as_many_experts_as_random_choices_do():
    qwen = ExpertShare(128, 8, 0.5)  # Qwen3-30B-A3B's
    assert [round(qwen.touched(count)) for count in (1, 8, 64)] == [8, 52, 126]
    torch.manual_seed(0)
    chosen = torch.rand(1000, 8, 128).argsort(dim=2)[..., :8].flatten(1)
    assert torch.tensor([len(row.unique()) for row in chosen]).float().mean().item() == pytest.approx(
        qwen.touched(8), rel=0.01
    )


def test_a_step_costs_what_its_tokens_experts_add():
    """Half of what one token reads are its 2 experts. Very many tokens read all 8."""
    shape = ExpertShare(8, 2, 0.5).shape(usual_shape("cuda"))
    assert shape(1) == pytest.approx(1)
    assert shape(2) == pytest.approx(0.5 + 0.5 * (2 + 1.5) / 2)
    assert shape(64) == pytest.approx(0.5 + 0.5 * 4)
    assert shape(320) == pytest.approx(2 * (0.5 + 0.5 * 4))


@pytest.mark.parametrize(("name", "counts"), [("qwen3_moe", (6, 3)), ("ernie4_5_moe", (6, 3)), ("gpt_oss", (5, 2))])
def test_the_share_of_the_experts_is_read_from_the_model(name, counts):
    model = family_model(name)
    share = ExpertShare.of(model)
    assert share is not None and (share.num_experts, share.chosen) == counts
    experts = sum(each.nbytes for layer in model.model.layers for each in layer.mlp.experts.parameters())
    read = sum(each.nbytes for each in model.parameters()) - experts - model.model.embed_tokens.weight.nbytes
    read_of_experts = experts * counts[1] / counts[0]
    assert share.share == pytest.approx(read_of_experts / (read + read_of_experts))


def test_models_without_experts_have_the_usual_shape():
    usual = usual_shape("cpu")
    assert shape_for(tiny_model(), usual) is usual


def test_steps_are_timed_with_tokens_that_differ(monkeypatch):
    """A mixture of experts reads few weights for equal tokens, so a time measured with them would be too short."""
    target, seen = TargetRunner(family_model("qwen3_moe")), []
    monkeypatch.setattr(TargetRunner, "verify", lambda self, cache, tree: seen.append(tree.tokens))
    read = TargetRunner.prefill

    def prefill(self, cache, row, prompt):
        seen.append(torch.tensor([prompt]))
        return read(self, cache, row, prompt)

    monkeypatch.setattr(TargetRunner, "prefill", prefill)
    time_step(target, 160)
    texts = [set(row.tolist()) for tokens in seen for row in tokens]
    assert all(len(text) > 30 for text in texts) and len({frozenset(text) for text in texts}) > 2
