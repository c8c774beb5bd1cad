"""What every drafter promises: the text of plain decoding, no mixed-up requests, and the same drafts by CUDA graphs."""

from functools import cache

import pytest
import torch

import block_heads
from batches import graphs_of, prefilled
from drafted import drafts
from graft import Engine
from graft.drafters.block.drafter import BlockDrafter, BlockTreeSettings
from graft.drafters.drafter import TreeSettings
from graft.drafters.early_exit import EarlyExitDrafter
from graft.drafters.small_model import SmallModelDrafter
from graft.model import TargetRunner
from graft.model.kv_cache import PAGE
from graft.spec_decode.policies import make_policy
from scheduling import Asked, undisturbed, unsettled
from tiny import BYTE_VOCAB, VOCAB, byte_tokenizer, settled_model, tiny_model

PROMPT = [3, 17, 42, 9, 9, 30, 5, 21]
PROMPTS = [PROMPT, [5], (PROMPT * 9)[:67]]  # the last is longer than a page
TREE = TreeSettings(depth=3, topk=3, total_token=12)
CHAIN = TreeSettings(depth=3, topk=1, total_token=4)
SAMPLED = {"temperature": 1.2, "top_p": 0.9, "seed": 3, "frequency_penalty": 0.2}


@cache
def target_of(kind, name):
    return tiny_model(name, **({"num_hidden_layers": 6} if kind in block_heads.HEADS else {}))


def drafter_of(kind, model):
    if kind == "early exit":
        return EarlyExitDrafter(model, 2, TREE)
    if kind in block_heads.HEADS:
        head = block_heads.make_head(model, **block_heads.HEADS[kind])
        return BlockDrafter(head, BlockTreeSettings(width=8, nodes=20))
    draft, noise = tiny_model(), tiny_model(seed=1)  # a small model that is sometimes right
    with torch.no_grad():
        for own, more in zip(draft.parameters(), noise.parameters(), strict=True):
            own += 0.1 * more if own.dim() > 1 else 0
    return SmallModelDrafter(draft, VOCAB, TREE)


@pytest.mark.parametrize(
    ("kind", "name", "policy"),
    [
        *(("small model", "llama", policy) for policy in ("dense", "block", "graft")),
        *(("early exit", name, "dense") for name in ("llama", "qwen2_window", "gemma3_text", "gpt_neox")),
        ("early exit", "gemma3_text", "graft"),
        *(pytest.param("early exit", name, "graft", marks=pytest.mark.slow) for name in ("llama", "gpt_neox")),
        *(("marginal", "llama", policy) for policy in ("dense", "block")),
        *(("conditional", "llama", policy) for policy in ("graft", "block-paper")),
        *(("causal", "llama", "paper"), ("markov", "llama", "graft")),
    ],
)
def test_the_text_is_that_of_plain_decoding_whoever_drafts(kind, name, policy):
    """Greedy and sampled, alone and in a batch. Draft passes cost nothing, however fast this machine is."""
    model = target_of(kind, name)
    drafter = drafter_of(kind, model)
    own = make_policy(policy, TargetRunner(model, drafter.hidden_layers), drafter, budget=20, pass_cost=0.0)
    engine, plainly = Engine(model, policy=own, drafter=drafter), Engine(model, policy="off")
    for options in ({"max_new_tokens": 12}, {"max_new_tokens": 12, **SAMPLED}):
        plain = [answer.ids for answer in plainly.generate_batch(PROMPTS, **options)]
        answers = engine.generate_batch(PROMPTS, **options)
        assert [answer.ids for answer in answers] == plain
        assert engine.generate(PROMPT, **options).ids == plain[0]
        assert "drafted" in set().union(*(answer.stats.proposed_by_source for answer in answers))
        if kind not in block_heads.HEADS:  # those are random, and seldom right
            assert sum(answer.stats.accepted_by_source["drafted"] for answer in answers) > 0


@pytest.mark.parametrize("kind", ["small model", "early exit"])
def test_requests_that_come_and_go_are_drafted_as_if_alone(schedule, monkeypatch, kind):
    """They join, end, are preempted and share beginnings. Each drafter is the target's equal, so that whatever it knew
    wrongly would be rejected."""
    model, equal = settled_model(1), settled_model(1)
    drafter = EarlyExitDrafter(model, 1, CHAIN) if kind == "early exit" else SmallModelDrafter(equal, BYTE_VOCAB, CHAIN)
    monkeypatch.setattr("scheduling.new_model", lambda: model)
    options = [{"max_new_tokens": 31}, {"max_new_tokens": 16}, {"max_new_tokens": 21, "temperature": 1.0, "n": 2}]
    asked_for = [
        *((f"{'It was a dark and stormy night. ' * 4}{n}", own | {"seed": 4, "ignore_eos": True})
          for n, own in enumerate(options)),
        ("plain", {"max_new_tokens": 8}),
    ]  # fmt: skip
    plain = Engine(settled_model(1), byte_tokenizer(), policy="off")
    expected = [[choice.text for choice in plain.generate(prompt, **own).choices] for prompt, own in asked_for]
    scheduler, preempted = unsettled(schedule, monkeypatch, drafter, "dense")
    for _ in range(2):  # at the second time beginnings are known
        with undisturbed(scheduler):
            asked = [Asked(scheduler, prompt, speculates=prompt != "plain", **own) for prompt, own in asked_for]
        assert [request.wait() for request in asked] == expected
        assert [request.job.sequences[0].stats.rounds for request in asked][:2] == [7, 4], "five tokens a round"
    assert asked[0].job.num_cached_tokens == 2 * PAGE - 1 and preempted


@pytest.mark.parametrize("kind", ["small model", "early exit"])
def test_captured_steps_draft_the_same(plain, monkeypatch, kind):
    """With PyTorch in place of kernels. The small model is the target itself: its keys and values are others'."""
    from captured_parts import OneContext

    model = tiny_model()

    def made():
        drafter = SmallModelDrafter(model, VOCAB, TREE) if kind == "small model" else EarlyExitDrafter(model, 2, TREE)
        return Engine(model, policy="dense", drafter=drafter), drafter

    def first_levels(engine):
        batch = prefilled(engine, *PROMPTS)
        found = drafts(engine.drafter, batch.draft, batch.roots(), count=4)
        batch.cache.release()
        return found, batch.draft.runner

    expected = Engine(model, policy="off").generate_batch(PROMPTS, max_new_tokens=12)
    levels, _ = first_levels(made()[0])
    for place in ("engine.engine", "drafters.small_model", "drafters.early_exit.drafter"):
        monkeypatch.setattr(f"graft.{place}.target_for", OneContext)
    engine, drafter = made()
    drafter.warm_up(engine.target, 3)
    num_setups, (captured, runner) = drafter.num_setups, first_levels(engine)
    for level, same in zip(levels, captured, strict=True):
        assert torch.equal(level.tokens, same.tokens) and torch.equal(level.parents, same.parents)
    answers = engine.generate_batch(PROMPTS, max_new_tokens=12)
    assert [answer.ids for answer in answers] == [answer.ids for answer in expected]
    assert sum(answer.stats.accepted for answer in answers) > 0
    graphs = graphs_of(runner)
    assert graphs.failure is None and graphs.layers is not None and graphs is not graphs_of(engine.target)
    assert runner.pool is engine.target.pool and len(runner.pool.stores) == (2 if kind == "small model" else 1)
    assert drafter.num_setups == num_setups > 0, "no graph is made later"
