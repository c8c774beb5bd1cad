"""The benchmark's methods: how they become known, and how the gates of the published one are calibrated."""

import ast
from pathlib import Path

import numpy as np
import pytest

import graft
from graft.bench.baselines import ABLATIONS, BASELINES
from graft.bench.baselines.gate_calibration import best_threshold, chain_thresholds, thresholds
from graft.bench.baselines.gates import PUBLISHED
from graft.bench.methods import PolicyMethod
from graft.bench.settings import POLICY_METHODS
from graft.drafters.eagle3.drafter import Eagle3Drafter
from graft.model.sampler import SamplingSettings
from graft.spec_decode.policies import POLICIES
from heads import SMALL_TREE, make_head
from tiny import tiny_model

SOURCE = Path(graft.__file__).parent


# Registration


def test_importing_the_benchmark_adds_every_baseline_and_ablation():
    assert set(POLICIES) == {"off", "graft", *BASELINES, *ABLATIONS}
    assert ("off", *BASELINES, "graft", *ABLATIONS) == POLICY_METHODS, "the names that are known without torch"


def imported(path):
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


CORE = ("engine", "integrations", "model", "request", "server", "spec_decode", "tree", "tuning")


@pytest.mark.parametrize("room", [*CORE, ""])
def test_the_core_does_not_import_the_benchmark_so_users_know_off_and_graft_alone(room):
    files = list((SOURCE / room).rglob("*.py") if room else SOURCE.glob("*.py"))
    assert files
    assert not [path for path in files if any("graft.bench" in name for name in imported(path))]


# Gates


def test_warming_up_calibrates_the_gates_that_a_method_has():
    model = tiny_model(num_hidden_layers=6)
    drafter = Eagle3Drafter(make_head(model), SMALL_TREE)
    prompts = [[[5, 9, 5, 9, 5, 9, 7]], [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]]]
    settings = SamplingSettings(max_new_tokens=24)
    gates = {name: PolicyMethod(name, model, drafter).warm_up(prompts, settings) for name in ("prune", "dense")}
    assert gates["prune"]["gates/thresholds"].shape == (len(PUBLISHED),) and not gates["dense"]


def test_threshold_parts_the_rounds_worth_stopping_from_the_others():
    confidences = np.concatenate([np.linspace(0.0, 0.4, 30), np.linspace(0.6, 1.0, 30)])
    assert best_threshold(confidences, np.where(confidences > 0.5, 2.0, -0.5)) == pytest.approx(0.5)


def test_gate_with_too_few_rounds_of_a_kind_keeps_its_published_threshold():
    assert best_threshold(np.linspace(0, 1, 50), np.ones(50)) is None
    assert best_threshold(np.full(50, 0.5), np.where(np.arange(50) % 2, 1.0, -1.0)) is None  # nothing tells them apart
    assert thresholds([([0.5, 0.0, 0.0], 3)] * 40, 9) == list(PUBLISHED)


def test_stopping_is_regretted_when_the_round_came_deeper_by_more_than_the_passes_cost():
    """Behind the first gate the tree has one level: a round that accepted one node needed no more."""
    seen = [([0.2, 0.1, 0.0], 1)] * 20 + [([0.8, 0.1, 0.0], 4)] * 20
    assert thresholds(seen, 9)[0] == pytest.approx(0.5)


def test_gate_of_a_chain_separates_those_accepted_beyond_it_from_the_others():
    """However far beyond: one token counts as much as many, and passes cost nothing."""
    short, long = [([0.4, 0.1, 0.0], 1)] * 30, [([0.3, 0.1, 0.0], 9)] * 12
    surer = [([0.8, 0.1, 0.0], 2)] * 30
    assert chain_thresholds(short + long + surer)[0] == pytest.approx(0.6)
    assert thresholds(short + long + surer, 1)[0] == PUBLISHED[0]
    assert chain_thresholds(surer)[0] == PUBLISHED[0]
