"""`graft plan`: predictions are monotonic where physics is, say what does not fit, and are as far off as docs say."""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from graft import Engine
from graft.bench.replay import Recorder, record, save_traces
from graft.cli.plan import PLANNED, assumptions
from graft.errors import GraftError
from graft.plan.acceptance import Acceptance
from graft.plan.cost import Costs
from graft.plan.gpus import GPUS
from graft.plan.models import MODELS, ModelShape
from graft.plan.planner import PlanSettings, make_plan
from graft.spec_decode.proposers import NgramTables
from graft.spec_decode.proposers.drafter import TreeSettings
from graft.spec_decode.proposers.eagle3.drafter import Eagle3Drafter
from heads import make_head
from plan_measurements import checked_points, summary
from tiny import VOCAB, tiny_model

H200 = GPUS["h200"]
CONFIG = {
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151_936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


def test_a_step_is_faster_with_more_bandwidth_and_slower_with_more_of_anything():
    costs = Costs(MODELS["llama-8b"], H200)
    usual = costs.step(4, 16, 2000)
    assert replace(costs, gpu=replace(H200, bandwidth=2 * H200.bandwidth)).step(4, 16, 2000) < usual
    assert replace(costs, gpu=replace(H200, flops=2 * H200.flops)).step(4, 16, 2000) < usual
    assert costs.step(8, 16, 2000) > usual
    assert costs.step(4, 32, 2000) > usual
    assert costs.step(4, 16, 4000) > usual


def test_experts_touched_are_those_of_a_token_at_first_and_in_the_end_all():
    model = MODELS["qwen3-235b"]
    assert model.experts_touched(1) == pytest.approx(8 / 128)
    assert model.weights_read(1) == pytest.approx(model.active_parameters)
    assert model.experts_touched(2) == pytest.approx(8 / 128 + 8 / 128 * 120 / 128)
    assert 0.99 < model.experts_touched(128) < 1
    assert MODELS["llama-8b"].weights_read(1) == MODELS["llama-8b"].weights_read(128)


def test_a_plan_never_loses_against_plain_decoding_and_verifies_less_for_each_of_many():
    plan = make_plan(PlanSettings(batch=(1, 16, 128), context=300))
    assert all(row.speedup >= 1 for row in plan.rows)
    assert plan.rows[0].nodes > plan.rows[1].nodes > plan.rows[2].nodes
    assert plan.rows[0].speedup > plan.rows[1].speedup


def test_the_fit_to_a_head_meets_its_accepted_length():
    acceptance = Acceptance.of_head(2.5)
    assert acceptance.dense.accepted(acceptance.exponent) == pytest.approx(2.5)
    with pytest.raises(GraftError, match="must be above"):
        Acceptance.of_head(0.9)


def test_acceptance_is_taken_from_the_results_of_a_benchmark(tmp_path):
    path = tmp_path / "results.json"
    run = {"method": "graft", "mean_accepted": 3.0, "nodes_per_round": 61.5, "draft_passes_per_round": 9}
    path.write_text(json.dumps({"averages": [run]}))
    fitted = Acceptance.of_results(path)
    assert fitted.exponent > 1
    lengths = [p.accepted(fitted.exponent) for p in fitted.points if p.nodes == 63]
    assert min(abs(length - 3.0) for length in lengths) < 1e-6
    for content, words in (("[]", "no averages"), ('{"averages": []}', "no results of graft or dense"), ("{", "JSON")):
        path.write_text(content)
        with pytest.raises(GraftError, match=words):
            Acceptance.of_results(path)


def test_a_model_that_does_not_fit_is_told_how_many_gpus_would_do():
    with pytest.raises(GraftError, match=r"llama-70b does not fit on 1 x h200.*; 2 would do"):
        make_plan(PlanSettings(model="llama-70b"))
    make_plan(PlanSettings(model="llama-70b", gpus=2))
    with pytest.raises(GraftError, match="no number of them up to 64 would do"):
        make_plan(PlanSettings(model="qwen3-235b", gpu="rtx4090", context=4_000_000))


def test_a_batch_whose_cache_has_no_room_is_marked():
    rows = make_plan(PlanSettings(batch=(1, 128), context=20_000)).rows
    assert [row.fits for row in rows] == [True, False]
    assert rows[1].memory_bytes > 0.85 * H200.memory_bytes


def test_a_folder_is_read_by_its_config_and_numbers_spell_the_same_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    expected = MODELS["qwen3-235b"]
    assert replace(ModelShape.named(str(tmp_path)), name=expected.name) == expected
    words = "layers=94,hidden=4096,intermediate=1536,heads=64,kv_heads=4,head_dim=128"
    words += ",vocab=151936,experts=128,active_experts=8"
    assert replace(ModelShape.named(words), name=expected.name) == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"n_shared_experts": 1}, "does not cover shared experts"),
        ({"hidden_size": "wide"}, "hidden_size must be a whole number"),
        ({"vocab_size": None}, "does not say vocab_size"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number of at least 1"),
    ],
)
def test_a_config_that_cannot_be_planned_for_says_why(change, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(GraftError, match=words):
        ModelShape.named(str(tmp_path))


def test_predictions_are_as_far_from_measurements_as_the_documentation_says():
    text = (Path(__file__).parents[1] / "docs" / "plan.md").read_text()
    for group, count, middle, worst in summary(checked_points()):
        assert f"| {group} | {count} | {middle:.0%} | {worst:+.0%} |" in text
        assert middle < 0.25


def test_the_command_prints_predictions_and_assumptions(graft):
    out = graft("plan", "--model", "qwen3-235b", "--gpus", "8", "--gpu", "h200").out
    assert out.startswith("PREDICTED, not measured: qwen3-235b (235.1 B parameters, bf16) on 8 x h200")
    plan = make_plan(PlanSettings(model="qwen3-235b", gpus=8))
    assert all(f"- {line}\n" in out for line in assumptions(plan))
    assert f"{plan.rows[0].tokens_per_second:,.0f}" in out
    facts = json.loads(graft("plan", "--model", "qwen3-235b", "--gpus", "8", "--batch", "2", "--json").out)
    assert facts["predicted"] is True
    assert [row["batch"] for row in facts["rows"]] == [2]


@pytest.mark.parametrize(
    ("words", "known"),
    [(["--model", "llama-9b"], "qwen3-235b"), (["--gpu", "h2000"], "h100-sxm"), (["--gpus", "3"], "32 query heads")],
)
def test_bad_names_and_numbers_are_one_line(words, known, graft):
    result = graft("plan", *words)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1) and known in result.err


def test_help_names_every_model_and_gpu():
    """Help is written out, since it must not wait for imports."""
    model, gpu = (PLANNED[name].__metadata__[0].help for name in ("model", "gpu"))
    assert all(name in model for name in MODELS)
    assert all(name in gpu for name in GPUS)


def test_curves_are_made_from_traces_and_small_trees_learn_only_what_they_verified(tmp_path, monkeypatch):
    tree = TreeSettings(depth=5, topk=4, total_token=60)
    model = tiny_model()
    drafter = Eagle3Drafter(make_head(model), tree)
    prompts = [[5, 9, 5, 9, 5, 9, 7], [3, 1, 4, 1, 5, 9, 2, 6]]
    traces = record(Engine(model, policy=Recorder(drafter), drafter=drafter), prompts, max_new_tokens=12)
    facts = {"model": "tiny", "draft": "tiny", "max_new_tokens": 12}
    save_traces(tmp_path / "task.safetensors", traces, tree, VOCAB, "task", **facts)
    num_learned = []
    learn = NgramTables.learn

    def counted(self, top_k):
        if not top_k.is_text:
            num_learned.append(top_k.tokens.shape[1])
        learn(self, top_k)

    monkeypatch.setattr(NgramTables, "learn", counted)
    out = tmp_path / "curve.json"
    monkeypatch.setattr(sys, "argv", ["acceptance_curve.py", str(tmp_path), "--out", str(out), "--budgets", "2"])
    scripts = Path(__file__).parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(scripts)
    runpy.run_path(str(scripts / "acceptance_curve.py"), run_name="__main__")
    points = json.loads(out.read_text())["points"]
    assert [point["adapts"] for point in points] == [False] * 3 + [True] * 2
    assert points[0]["passes"] == 0 < points[1]["passes"] <= 1 < points[2]["passes"] <= 2
    assert max(num_learned) == 3  # the root and both nodes; the recorded tree has 61
