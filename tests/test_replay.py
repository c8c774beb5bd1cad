"""Replay: a policy does on a recorded answer what it does in live decoding, as far as the trace holds it."""

import pytest

from graft import Engine, GraftError
from graft.bench.replay import Recorder, ReplayedDrafter, read_traces, record, replay, replayed_target, save_traces
from graft.model import TargetRunner
from graft.spec_decode.policies import make_policy
from graft.spec_decode.proposers.drafter import TreeSettings
from graft.spec_decode.proposers.eagle3.drafter import Eagle3Drafter
from heads import make_head
from tiny import VOCAB, tiny_model

TREE = TreeSettings(depth=5, topk=4, total_token=60)
PROMPTS = [[5, 9, 5, 9, 5, 9, 7], [3, 1, 4, 1, 5, 9, 2, 6]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    model = tiny_model()
    drafter = Eagle3Drafter(make_head(model), TREE)
    traces = record(Engine(model, policy=Recorder(drafter), drafter=drafter), PROMPTS, max_new_tokens=30)
    path = tmp_path_factory.mktemp("traces") / "task.safetensors"
    save_traces(path, traces, TREE, VOCAB, "task")
    return model, drafter, path


def test_recording_does_not_change_the_text(recorded):
    model, _, path = recorded
    plain = Engine(model, policy="off").generate_batch(PROMPTS, max_new_tokens=30)
    assert [trace.answer.tolist() for trace in read_traces(path)[0]] == [g.ids for g in plain]


@pytest.mark.parametrize("name", ["dense", "prune"])
def test_replayed_rounds_are_those_of_life(recorded, name):
    model, drafter, path = recorded
    traces, about = read_traces(path)
    for prompt, trace in zip(PROMPTS, traces, strict=True):
        live = make_policy(name, TargetRunner(model, drafter.hidden_layers), drafter, 60)
        lived = Engine(model, policy=live, drafter=drafter).generate(prompt, max_new_tokens=30).stats
        policy = make_policy(name, replayed_target(about), ReplayedDrafter(TREE), 60)
        seen = replay(policy, trace)
        assert (seen.rounds, seen.accepted, seen.draft_passes) == (lived.rounds, lived.accepted, lived.draft_passes)


@pytest.mark.parametrize("name", ["off", "lookup", "recycle", "root", "tail", "paper", "block", "block-paper", "graft"])
def test_every_policy_replays_to_the_end_of_the_answer(recorded, name):
    traces, about = read_traces(recorded[2])
    policy = make_policy(name, replayed_target(about), ReplayedDrafter(TREE), 20, pass_cost=0.03)
    for trace in traces:
        assert replay(policy, trace).tokens == len(trace.answer)


def test_a_file_that_holds_no_trace_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"nonsense")
    with pytest.raises(GraftError, match="cannot be read as traces"):
        read_traces(path)
