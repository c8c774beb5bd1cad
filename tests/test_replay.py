"""Replay: a policy does on a recorded answer what it does in live decoding, as far as the trace holds it."""

from itertools import islice, pairwise
from types import SimpleNamespace

import pytest
import torch

from batches import prefilled
from graft import Engine, GraftError
from graft.bench.replay import Recorder, ReplayedDrafter, read_traces, record, replay, replayed_target, save_traces
from graft.model import TargetRunner
from graft.spec_decode.policies import DraftResult, make_policy
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


def test_tables_learn_only_what_the_policys_own_tree_would_have_verified(recorded):
    traces, about = read_traces(recorded[2])
    policy = make_policy("recycle", replayed_target(about), ReplayedDrafter(TREE), 3)
    grown, learned, grow, learn = [], [], policy.grow, policy.learn_top_k
    policy.grow = lambda *given: (grown.append(grow(*given).tree), DraftResult(grown[-1], [0]))[1]
    policy.learn_top_k = lambda top_k: (learned.append(top_k) if not top_k.is_text else None, learn(top_k))[1]
    trace, place = traces[0], 0
    replay(policy, trace)
    assert len(grown) == len(learned) > 5 and max(top_k.tokens.shape[1] for top_k in learned) > 1
    for tree, top_k in zip(grown, learned, strict=True):
        own = set(zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True))
        assert top_k.tokens.shape[1] <= 4 and int(top_k.tokens[0, 0]) == int(tree.tokens[0, 0])
        assert set(top_k.tokens[0].tolist()) <= {token for token, _ in own}
        node = 0
        while True:  # along the answer: what the target says there is what was recorded a token later
            assert torch.equal(top_k.successors[0, node].long(), trace.successors[place, 0])
            place += 1
            rest = [n for n in range(1, top_k.tokens.shape[1]) if place < len(trace.answer)]
            below = [n for n in rest if top_k.parents[0, n] == node and top_k.tokens[0, n] == trace.answer[place - 1]]
            if not below:
                break
            node = below[0]


def test_a_replayed_chain_is_that_of_life_as_far_as_the_trace_knows_it(recorded):
    model, drafter, path = recorded
    whole = 0
    for trace in read_traces(path)[0]:
        for place in range(len(trace.answer)):
            text = [*trace.prompt.tolist(), *trace.answer[:place].tolist()]
            engine = Engine(model, policy="block", drafter=drafter)
            batch = prefilled(engine, text, max_new_tokens=9)
            lived = islice(drafter.levels(batch.draft, batch.roots(), keep=1), TREE.depth + 1)
            replayed = ReplayedDrafter(TREE).levels(SimpleNamespace(trace=trace, place=place), batch.roots(), keep=1)
            for one, other in zip(lived, replayed, strict=True):
                if bool((other.probabilities == 0).any()):  # fell out of the recorded beams
                    break
                assert torch.equal(one.tokens, other.tokens) and torch.equal(one.parents, other.parents)
                torch.testing.assert_close(one.path_probabilities, other.path_probabilities, rtol=1e-2, atol=1e-6)
            else:
                whole += 1
    assert whole > 10


def test_a_prompt_that_is_asked_twice_is_recorded_twice():
    model = tiny_model()
    drafter = Eagle3Drafter(make_head(model), TREE)
    engine = Engine(model, policy=Recorder(drafter), drafter=drafter)
    one, two = record(engine, [PROMPTS[0]] * 2, max_new_tokens=3)
    assert len(one.prompt_successors) == len(PROMPTS[0]) - 1
    assert all(torch.equal(value, vars(two)[name]) for name, value in vars(one).items())


def test_what_is_no_trace_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"nonsense")
    with pytest.raises(GraftError, match="cannot be read as traces"):
        read_traces(path)


def test_a_replayed_level_has_the_path_probabilities_that_were_drafted(recorded):
    _, _, path = recorded
    traces, _ = read_traces(path)
    levels = list(ReplayedDrafter(TREE).levels(SimpleNamespace(trace=traces[0], place=3), torch.tensor([0])))
    assert len(levels) == TREE.depth + 1
    for above, level in pairwise(levels):
        assert float(level.path_probabilities.max()) <= float(above.path_probabilities.max())
