"""Every policy gives the text of plain decoding, builds the tree it describes, and can save and restore its state."""

from functools import cache

import pytest

from graft import Engine, SamplingSettings
from graft.bench.baselines import BASELINES
from graft.drafters.drafter import TreeSettings
from graft.drafters.eagle3.drafter import Eagle3Drafter
from graft.engine import direct_rounds
from graft.engine.flight import Flight
from graft.model import TargetRunner
from graft.spec_decode.policies import MAX_BUDGET, make_policy
from graft.tree.device.round import DeviceRound
from heads import make_head
from tiny import tiny_model

NAMES = ("off", *BASELINES, "graft")
PROMPTS = [[5, 9, 5, 9, 5, 9, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [11]]
GREEDY = {"max_new_tokens": 16}
SAMPLED = {"max_new_tokens": 14, "temperature": 0.9, "top_p": 0.9, "seed": 3, "repetition_penalty": 1.1}


def engine_for(name, budget=20, isolated=False, **tree):
    model = tiny_model()
    drafter = Eagle3Drafter(make_head(model), TreeSettings(**({"depth": 6, "topk": 4, "total_token": 20} | tree)))
    target = TargetRunner(model, drafter.hidden_layers)
    policy = make_policy(name, target, drafter, budget, pass_cost=0.03, isolated=isolated)
    return Engine(model, policy=policy, drafter=drafter)


@cache
def plain_answers(**options):
    """All of them decoded plainly; the same for every policy."""
    return [answer.ids for answer in engine_for("off").generate_batch(PROMPTS, **options)]


OFTEN = ("graft", "dense", "paper", "block-paper")  # sampled; the others too, among the slow tests
BOTH = [(name, GREEDY) for name in NAMES] + [
    pytest.param(name, SAMPLED, marks=[] if name in OFTEN else [pytest.mark.slow]) for name in NAMES
]


@pytest.mark.parametrize(("name", "options"), BOTH)
def test_policy_gives_the_text_of_plain_decoding(name, options):
    plain = plain_answers(**options)
    engine = engine_for(name)
    assert [g.ids for g in engine.generate_batch(PROMPTS, **options)] == plain
    assert engine.generate(PROMPTS[0], **options).ids == plain[0]  # with what it has learned by now


@pytest.mark.parametrize("budget", [1, MAX_BUDGET])
@pytest.mark.parametrize("name", NAMES)
def test_policy_gives_the_text_of_plain_decoding_at_the_limits(name, budget):
    """The least and the largest budget; answers of one token, of two (trees one deep) and of a few more."""
    engine = engine_for(name, budget, topk=1, depth=1)
    for count in (1, 2, 10):
        plain = plain_answers(max_new_tokens=count)
        for _ in range(2):
            answers = engine.generate_batch(PROMPTS, max_new_tokens=count)
            assert [answer.ids for answer in answers] == plain
            assert all(answer.stats.nodes <= budget * answer.stats.rounds for answer in answers)


@pytest.mark.parametrize("name", ["paper", "block-paper", "graft"])
def test_restored_policy_grows_the_trees_of_the_one_it_was_taken_from(name):
    taught, other = engine_for(name), engine_for(name)
    for prompt in PROMPTS:
        taught.generate(prompt, **GREEDY)
    state = taught.policy.state()
    other.policy.restore(state)
    taught.policy.restore(state)
    seen = [engine.generate([8, 5, 9, 5, 9], **GREEDY).stats.as_dict() for engine in (taught, other)]
    for stats in seen:
        del (
            stats["seconds"],
            stats["setup_seconds"],
            stats["prefill_seconds"],
            stats["decode_seconds"],
            stats["seconds_by_phase"],
            stats["tokens_per_second"],
        )
    assert seen[0] == seen[1]


def test_grafts_hang_under_drafted_nodes_too(monkeypatch):
    """With a drafter whose tokens the text has seen, some accepted path goes from a drafted node to a retrieved one."""
    engine = engine_for("graft")
    sources = set()
    tree_of = Flight.tree

    def watched(flight):
        tree = tree_of(flight)
        above = tree.sources.gather(1, tree.parents)
        sources.update(zip(above[0].tolist(), tree.sources[0].tolist(), strict=True))
        return tree

    monkeypatch.setattr(Flight, "tree", watched)
    engine.generate(PROMPTS[0], **GREEDY)
    drafted = engine.policy.sources.index("drafted")
    assert any(above == drafted and below > drafted for above, below in sources)


@pytest.mark.parametrize("name", ["paper", "block-paper"])
def test_isolated_rows_of_a_batch_do_what_each_would_alone(name, monkeypatch):
    # Trees are not cut by the limit of the row that may write most.
    monkeypatch.setattr(direct_rounds._Passes, "_max_depth", property(lambda own: 9, lambda own, depth: None), False)
    alone = [engine_for(name, isolated=True).generate(prompt, **GREEDY).stats for prompt in PROMPTS]
    together = [g.stats for g in engine_for(name, isolated=True).generate_batch(PROMPTS, **GREEDY)]
    assert [s.rounds for s in together] == [s.rounds for s in alone]
    for own, other in zip(together, alone, strict=True):
        cut = own.accepted_by_source - other.accepted_by_source  # the last token's, whose round is plain alone
        assert cut.total() <= other.plain_rounds <= 1 and not other.accepted_by_source - own.accepted_by_source


def test_isolated_texts_learn_nothing_from_each_other():
    engine = engine_for("graft", isolated=True)
    for prompt in PROMPTS:
        engine.generate(prompt, **GREEDY)
    again = engine.generate(PROMPTS[0], **GREEDY).stats
    assert "past" not in again.proposed_by_source
    shared = engine_for("graft")
    shared.generate(PROMPTS[0], **GREEDY)
    assert "past" in shared.generate(PROMPTS[0], **GREEDY).stats.proposed_by_source


@pytest.mark.parametrize(("isolated", "owner", "is_seen"), [(False, None, True), (True, None, False), (True, 3, True)])
def test_where_texts_are_isolated_answers_of_a_group_copy_each_other_only_if_they_have_an_owner(
    monkeypatch, isolated, owner, is_seen
):
    groups, propose = [], DeviceRound.propose

    def watched(self, *given, **choices):
        groups.append(self.inputs["groups"][:2].tolist())
        return propose(self, *given, **choices)

    monkeypatch.setattr(DeviceRound, "propose", watched)
    engine = Engine(tiny_model(), budget=6, isolated=isolated)
    sequences = [engine.new_sequences([5, 6, 7], SamplingSettings(max_new_tokens=3))[0] for _ in range(2)]
    for sequence in sequences:
        sequence.owner, sequence.group = owner, 1
    for _ in engine.rounds(sequences):
        pass
    assert groups[0] == [int(is_seen)] * 2
