"""Training of block heads: what a block may see, what it learns, exact resumption, and the offline simulator."""

import heapq
import itertools
import json
import math
import time
from dataclasses import fields, replace
from typing import get_args

import pytest
import torch
from torch.nn.functional import kl_div

from graft import GraftError
from graft.cli.train import ANSWERING, BLOCK, EAGLE3, LAYERS, PRUNED, TRAINING
from graft.cli.train import SHAPE as SHAPE_OPTIONS
from graft.drafters.block import load_head
from graft.drafters.block.drafter import BlockTreeSettings
from graft.train.block import (
    BlockObjective,
    block_attention,
    block_backward,
    block_hidden,
    config_for,
    unused_token,
)
from graft.train.generate_data import Answered
from graft.train.packing import PackedBatches, target_states
from graft.train.recipe import new_block_head
from graft.train.settings import AnswerSettings, BlockSettings, BlockShape, DepthPrunedSettings, Eagle3Settings
from graft.train.simulate import Simulated, num_accepted, simulate, table_for
from graft.train.trainer import optimize
from tiny import VOCAB, tiny_model

SHAPE = BlockShape(num_layers=2, num_taps=3, num_drafts=4)
SETTINGS = BlockSettings(
    steps=6,
    batch_tokens=80,
    max_tokens=40,
    anchors=6,
    learning_rate=3e-3,
    warmup_steps=2,
    evaluate_every=3,
    held_back=0.25,
    chunk_slots=8,
    simulated=2,
    nodes=6,
)


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=6)


def texts(count=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = [11 + 5 * (n % 4) for n in range(count)]
    return [
        Answered(torch.randint(3, VOCAB, (length,), generator=generator, dtype=torch.int32), 2 + n % 5)
        for n, length in enumerate(lengths)
    ]


def make_head(model, shape=SHAPE, conditional=True, seed=3, **changes):
    """A head with random weights everywhere: where a new one has zeros, mistakes would not show."""
    head = new_block_head(model, replace(shape, **changes), conditional, 5, texts(), SETTINGS)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2, generator=generator)
    return head


def batch_of(answers=None, **changes):
    """A batch whose rows have blocks in several documents."""
    settings = replace(SETTINGS, **changes)
    batches = PackedBatches(answers or texts(), settings, settings.anchors)
    made = (batches.at(step) for step in range(len(batches)))
    return next(b for b in made if bool(((b.anchor_starts > 0) & (b.num_labels > 0)).any(dim=1).all()))


# What a batch is


def test_every_answer_is_seen_once_an_epoch_whatever_the_epoch():
    batches = PackedBatches(texts(), SETTINGS, num_anchors=6)
    for epoch in range(3):
        seen = []
        for step in range(len(batches)):
            batch = batches.at(epoch * len(batches) + step)
            for tokens, starts in zip(batch.tokens, batch.starts, strict=True):
                documents = starts.unique(return_counts=True)[1].tolist()
                seen += [tuple(d.tolist()) for d in tokens.split(documents) if d.any()]
        assert sorted(seen) == sorted(tuple(a.tokens.tolist()) for a in texts())


def test_anchors_are_distinct_and_have_as_many_labels_as_the_answer_goes_on():
    answers = texts()
    batch = batch_of(answers, anchors=30)
    by_text = {tuple(a.tokens.tolist()): a for a in answers}
    num_anchors = 0
    for row in range(len(batch.tokens)):
        assert len(batch.anchors[row].unique()) == 30
        for anchor, start, labels in zip(
            *(x[row].tolist() for x in (batch.anchors, batch.anchor_starts, batch.num_labels)), strict=True
        ):
            if not labels:
                continue
            num_anchors += 1
            answer = by_text[tuple(batch.tokens[row, start : anchor + 1 + labels].tolist())]
            assert anchor - start >= answer.num_prompt_tokens - 1, "the token behind it is answer"
    assert num_anchors > 30


@pytest.mark.parametrize("name", ["llama", "qwen2_window", "qwen3", "gemma3_text", "olmo2"])
def test_documents_of_a_row_do_not_see_each_other_in_the_target(name):
    model = tiny_model(name)
    answers = texts()
    batch = batch_of(answers)
    states = target_states(model, (0, 2), batch)
    for answer in answers:
        place = (batch.tokens.unfold(1, len(answer.tokens), 1) == answer.tokens).all(dim=-1).nonzero()
        if not len(place):
            continue  # in another batch
        row, start = place[0].tolist()
        with torch.no_grad():
            alone = model.base_model(input_ids=answer.tokens.long()[None], output_hidden_states=True)
        packed = states.features[row, start : start + len(answer.tokens)]
        expected = torch.cat([alone.hidden_states[0], alone.hidden_states[2]], dim=-1)[0]
        torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-4)


# What a block sees


@pytest.fixture(scope="module", params=[{}, {"causal": True}, {"slots": "shifted"}], ids=["plain", "causal", "shifted"])
def head(request, model):
    return make_head(model, **request.param)


@torch.no_grad()
def test_a_block_in_a_packed_row_computes_what_drafting_computes(model, head):
    batch = batch_of()
    hidden = block_hidden(head, target_states(model, head.config.target_layers, batch).features, batch, flex=False)
    for row, block in itertools.product(range(2), range(6)):
        torch.testing.assert_close(hidden[row, block], drafted(head, model, batch, row, block), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without")  # on a GPU it is compiled
@pytest.mark.parametrize("head", [{}, {"causal": True}], ids=["plain", "causal"], indirect=True)
@pytest.mark.parametrize("windows", [pytest.param(None, marks=pytest.mark.slow), 7])
def test_flexattention_and_the_dense_mask_agree(model, head, windows):
    head.requires_grad_(False)  # FlexAttention computes no gradients on a CPU
    config = head.config
    head.config = replace(config, windows=(None, windows))
    batch = batch_of()
    features = target_states(model, config.target_layers, batch).features
    past = head.context(features, batch.positions)
    generator = torch.Generator().manual_seed(1)
    width = 6 * config.block_size
    query, key, value = (torch.randn(2, heads, width, 8, generator=generator) for heads in (4, 2, 2))
    try:
        for layer in range(2):
            dense, flex = (block_attention(head, batch, past, flex)(layer, query, key, value) for flex in (False, True))
            torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-5)
    finally:
        head.config = config
        head.requires_grad_(True)


def drafted(head, model, batch, row, block):
    """Hidden states [K, H] of one block, by the calls that drafting makes: its document alone, one root."""
    anchor, start = int(batch.anchors[row, block]), int(batch.anchor_starts[row, block])
    text = batch.tokens[row, start : anchor + 1]
    with torch.no_grad():
        states = model.base_model(input_ids=text[None], output_hidden_states=True).hidden_states
    features = torch.cat([states[layer] for layer in head.config.target_layers], dim=-1)
    past = head.context(features, torch.arange(len(text))[None])
    return head.block(text[-1:], torch.tensor([len(text) - 1]), past)[0]


# What it learns


def reference_loss(head, model, batch, settings):
    """Block by block, slot by slot."""
    total = weight_sum = 0.0
    drafts = head.config.num_drafts
    for row, block in itertools.product(range(len(batch.tokens)), range(batch.anchors.shape[1])):
        anchor, start = int(batch.anchors[row, block]), int(batch.anchor_starts[row, block])
        count = min(int(batch.num_labels[row, block]), drafts)
        hidden = drafted(head, model, batch, row, block)
        logits = {"marginal": head.marginals(hidden)}
        shares = {"marginal": 1.0}
        if head.config.conditional:
            parents = batch.tokens[row, anchor : anchor + drafts]
            parents = torch.nn.functional.pad(parents, (0, drafts - len(parents)))
            logits["conditional"] = head.conditionals(hidden[None], parents[None, :, None])[0, :, 0]
            shares = {"marginal": settings.marginal_weight, "conditional": 1.0}
        for name, share in shares.items():
            sure = []
            for slot in range(count):
                label = batch.tokens[row, anchor + slot + 1]
                sure.append(0.5 + 0.5 * float(logits[name][slot].detach().softmax(-1)[label]))
            for slot in range(count):
                with torch.no_grad():
                    wanted = model(batch.tokens[row, start : anchor + slot + 1][None]).logits[0, -1].softmax(-1)
                weight = math.exp(-slot / settings.gamma)
                if settings.weighting == "pace":
                    weight = sum(math.prod(sure[: last + 1]) for last in range(slot, count))
                divergence = kl_div(logits[name][slot].log_softmax(-1), wanted, reduction="sum")
                total = total + share * weight * divergence
                if name == "marginal":
                    weight_sum += weight if settings.weighting == "decay" else 1.0
    return total / weight_sum


@pytest.mark.parametrize(
    ("conditional", "weighting", "changes"),
    [
        (True, "decay", {}),
        (True, "pace", {"slots": "shifted"}),
        (False, "decay", {"causal": True}),
        (False, "pace", {}),
    ],
)
def test_loss_and_gradients_are_those_of_one_block_at_a_time(model, conditional, weighting, changes):
    head = make_head(model, conditional=conditional, **changes)
    settings = replace(SETTINGS, weighting=weighting, anchors=5)
    batch = batch_of(anchors=5)
    expected = reference_loss(head, model, batch, settings)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in head.named_parameters()}
    head.zero_grad()
    found = block_backward(head, model, batch, settings)
    assert float(found["loss"]) == pytest.approx(float(expected.detach()), rel=1e-4)
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=2e-3, atol=1e-5, msg=name)


def test_the_mask_stands_for_a_token_that_texts_do_not_have():
    made = [Answered(torch.tensor([9, 7, 5, 4, 2, 1, 0], dtype=torch.int32), 1)]
    assert unused_token(made, 11, special=[10]) == 8
    assert unused_token(made, 10, special=[3, 6, 8]) == 9, "where all are used, of the rarest the last"


# Runs


def run(model, folder, settings=SETTINGS, progress=lambda record: None, deadline=math.inf, seed=3, **changes):
    head = make_head(model, seed=seed, **changes)
    objective = BlockObjective(head, model, texts(), settings)
    return head, optimize(objective, settings, folder, len(texts()), progress, deadline)


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A run that nothing interrupts: its folder, and the head."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(model, folder)[0]


def test_a_run_in_parts_ends_with_the_weights_of_an_uninterrupted_one(model, whole, tmp_path):
    done = 0
    for seed in (3, 7, 8, 9, 10, 11):  # later heads' own weights do not matter
        parts, now = run(model, tmp_path, deadline=time.perf_counter() - 1, seed=seed)  # over at once: a step a call
        assert now == done + 1
        done = now
    assert run(model, tmp_path)[1] == SETTINGS.steps, "a run that has ended stays as it is"
    assert_same(parts, whole[1])
    last = [json.loads((folder / "log.jsonl").read_text().splitlines()[-1]) for folder in (tmp_path, whole[0])]
    assert last[0] == last[1] and last[0]["step"] == 5 and last[0]["accepted_conditional"] >= 1


def assert_same(head, other):
    for name, weight in head.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name]), name


def test_averaged_weights_are_saved_and_the_last_ones_trained_on(model, whole, tmp_path):
    folder, averaged = whole
    last, _ = run(model, tmp_path, replace(SETTINGS, ema_decay=0.0))
    state = torch.load(folder / "state.pt", weights_only=True)
    assert torch.equal(state["head"]["fc.weight"], last.fc.weight)
    assert torch.equal(state["average"]["fc.weight"], averaged.fc.weight)
    assert not torch.equal(averaged.fc.weight, last.fc.weight)


def test_a_run_of_another_head_or_with_other_settings_is_refused(model, tmp_path):
    run(model, tmp_path, replace(SETTINGS, steps=1))
    with pytest.raises(GraftError, match="another head"):
        run(model, tmp_path, replace(SETTINGS, steps=1), num_drafts=5)
    with pytest.raises(GraftError, match="other settings"):
        run(model, tmp_path, replace(SETTINGS, steps=1, gamma=3.0))


def test_a_run_may_go_on_with_another_number_of_steps_and_ends_with_its_learning_rate(model, whole, tmp_path):
    for _ in range(2):
        run(model, tmp_path, replace(SETTINGS, steps=60), deadline=time.perf_counter() - 1)
    _, done = run(model, tmp_path)
    assert done == SETTINGS.steps
    state, other = (torch.load(folder / "state.pt", weights_only=True) for folder in (tmp_path, whole[0]))
    rates = [each["optimizer"]["param_groups"][0]["lr"] for each in (state, other)]
    assert rates[0] == rates[1] < SETTINGS.learning_rate / 3
    with pytest.raises(GraftError, match="a run that already has 6 steps: set steps to at least as many"):
        run(model, tmp_path, replace(SETTINGS, steps=5))


def test_a_damaged_state_or_a_missing_log_is_said_in_one_line(model, tmp_path):
    run(model, tmp_path, deadline=time.perf_counter() - 1)
    (tmp_path / "log.jsonl").rename(tmp_path / "elsewhere")
    with pytest.raises(GraftError, match=r"log.jsonl is missing: delete state.pt too"):
        run(model, tmp_path)
    (tmp_path / "state.pt").write_bytes((tmp_path / "state.pt").read_bytes()[:3000])
    with pytest.raises(GraftError, match=r"state\.pt is damaged: delete it to train anew"):
        run(model, tmp_path)


def test_a_head_learns_a_text_by_heart_and_then_accepts_more_than_three_tokens_a_round(tmp_path):
    """The target's own greedy text, of which a new head knows nothing."""
    model = tiny_model(num_hidden_layers=6)
    with torch.no_grad():
        model.lm_head.weight.mul_(3)  # a target that is sure of its text, as trained ones are
    greedy = model.generate(torch.tensor([[7, 30, 12, 41]]), max_new_tokens=60, do_sample=False)[0].int()
    answer, held_back = Answered(greedy, 4), Answered(greedy[5:], 4)
    head = new_block_head(model, SHAPE, True, 5, [answer], SETTINGS)
    settings = replace(SETTINGS, steps=80, evaluate_every=80, learning_rate=1e-2, warmup_steps=10, ema_decay=0.0)
    settings = replace(settings, max_tokens=64, batch_tokens=64, anchors=24, chunk_slots=200, simulated=0)
    before = simulate(head, model, [answer], BlockTreeSettings(nodes=12))
    optimize(BlockObjective(head, model, [held_back, answer], settings), settings, tmp_path, 2)
    after = simulate(head, model, [answer], BlockTreeSettings(nodes=12))
    assert all(before[kind].mean_accepted < 2 for kind in before)
    assert all(after[kind].mean_accepted > 3 for kind in after), after


# The simulator


def best_nodes(table, row, num_nodes, num_levels):
    """Paths of the likeliest nodes, best first by a heap: the published way."""
    tokens, probabilities, entries = (part[row].tolist() for part in table)

    def children(score, path, entry):
        if len(path) == num_levels or entry < 0:
            return []
        rows = zip(probabilities[entry], tokens[entry], entries[entry], strict=True)
        return [(score * p, (*path, token), following) for p, token, following in rows]

    heap, found = children(-1.0, (), 0), set()
    heapq.heapify(heap)
    while heap and len(found) < num_nodes:
        score, path, entry = heapq.heappop(heap)
        found.add(path)
        for child in children(score, path, entry):
            heapq.heappush(heap, child)
    return found


@torch.no_grad()
@pytest.mark.parametrize("kind", ["chain", "marginal", "conditional"])
def test_the_simulators_tree_is_the_best_first_one(model, kind):
    head = make_head(model, num_drafts=5)
    settings = BlockTreeSettings(nodes=9, width=61, children=2)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(20, 5, 32, generator=generator)
    table = table_for(kind, head, hidden, torch.arange(3, 23), settings)
    depths = []
    for row in range(20):
        nodes = best_nodes(table, row, settings.nodes if kind != "chain" else 5, 5)
        for path in nodes:
            truth = torch.tensor([*path, *[-1] * (5 - len(path))]).expand(20, -1)
            assert int(num_accepted(table, truth, 5 if kind == "chain" else 9)[row]) == len(path)
        depths.append(max(map(len, nodes)))
        wrong = torch.full((20, 5), -1)
        assert int(num_accepted(table, wrong, 9)[row]) == 0
    assert max(depths) >= 3


@torch.no_grad()
def test_the_simulation_is_the_walk_of_one_text_after_the_other(model):
    head = make_head(model)
    answers = texts(3)
    settings = BlockTreeSettings(nodes=20, width=8)
    found = simulate(head, model, answers, settings, num_rows=2)
    for kind in ("chain", "marginal", "conditional"):
        rounds, depths = 0, []
        for answer in answers:
            tokens, root = answer.tokens.long(), answer.num_prompt_tokens - 1
            states = model.base_model(input_ids=tokens[None], output_hidden_states=True).hidden_states
            past = head.context(
                torch.cat([states[layer] for layer in head.config.target_layers], dim=-1),
                torch.arange(len(tokens))[None],
            )
            while root < len(tokens) - 1:
                hidden = head.block(tokens[root : root + 1], torch.tensor([root]), past)
                table = table_for(kind, head, hidden, tokens[root : root + 1], settings)
                paths = best_nodes(table, 0, 20 if kind != "chain" else 4, 4)
                rest = tokens[root + 1 :].tolist()
                accepted = max((len(p) for p in paths if list(p) == rest[: len(p)]), default=0)
                depths.append(accepted)
                root += accepted + 1
                rounds += 1
        reached = tuple(sum(d >= depth for d in depths) / rounds for depth in range(1, 5))
        assert found[kind] == Simulated(rounds, reached)
        assert found[kind].mean_accepted == pytest.approx(1 + sum(depths) / rounds), "as the engine counts"


# The command


PROMPTS = [{"prompt": f"Tell me about {n}."} for n in range(12)]
SMALL = ["--layers", "1", "--drafts", "3", "--target-layer", "1", "--target-layer", "2", "--steps", "2"]
SMALL += ["--batch-tokens", "128", "--max-tokens", "64", "--anchors", "4", "--held-back", "0.2", "--nodes", "4"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return str(path)


def test_graft_train_makes_a_head_that_loads_with_a_card(graft_tiny, model_folder, prompts, tmp_path):
    from transformers import AutoConfig

    out = tmp_path / "head"
    asked = ["--kind", "treeflash", *SMALL, "--prompts", prompts, "--out", str(out)]
    result = graft_tiny("train", *asked, "--max-file-mib", "1")
    assert result.status == 0 and f"The head is in {out}" in result.err.replace("\n", "")
    head = load_head(out, AutoConfig.from_pretrained(model_folder), torch.float32, "cpu")
    assert (head.config.num_drafts, head.config.shifted, head.config.conditional) == (3, False, True)
    assert head.config.target_layers == (1, 2) and head.config.own_mask
    card = (out / "README.md").read_text()
    assert "TreeFlash" in card and "for\n2 steps of 128 tokens" in card
    assert card.count("\n| 3 | ") == 1 and "conditional, hit16" in card
    assert "tree of the likeliest paths, given the token before each slot | " in card
    assert json.loads((out / "training.json").read_text())["answers"] == 12


def test_a_limited_run_goes_on_and_answers_serve_another_head(graft_tiny, graft, model_folder, prompts, tmp_path):
    asked = ["--kind", "dflash", *SMALL, "--prompts", prompts, "--out", str(tmp_path / "a"), "--rows", "4"]
    first = graft_tiny("train", *asked, "--max-seconds", "1e-9")
    assert first.status == 0 and "after 0 of 0 groups of answers. The same command resumes." in first.err
    assert graft_tiny("train", *asked).status == 0
    answers = tmp_path / "a" / "work" / "answers"
    model = ["--model", model_folder]
    again = [*model, "--answers", str(answers), "--kind", "treeflash", *SMALL, "--out", str(tmp_path / "b")]
    again += ["--start-from", str(tmp_path / "a")]
    limited = graft("train", *again, "--max-seconds", "1e-9")
    assert limited.status == 0 and "1 of 2 steps. The head so far is in" in limited.err
    assert "1 steps of 2 planned" in (tmp_path / "b" / "README.md").read_text()
    assert graft("train", *again).status == 0
    wrong = graft("train", *model, "--answers", str(answers), "--out", str(tmp_path / "c"), "--kind", "dflash")
    assert wrong.status == 2 and "no default layers to read: name them" in wrong.err
    other = [*model, "--answers", str(answers), "--out", str(tmp_path / "c"), "--kind", "dflash", *SMALL]
    wrong = graft("train", *other, "--causal", "--start-from", str(tmp_path / "a"))
    assert wrong.status == 2 and "its causal is (False,), not (True,)" in wrong.err


def test_target_layers_that_the_model_lacks_are_refused(model):
    with pytest.raises(GraftError, match="target layers 2, 6 are not all among the model's 0 to 5"):
        config_for(replace(SHAPE, target_layers=(2, 6)), model, 5)


@pytest.mark.parametrize(
    ("settings", "group", "kind"),
    [
        (AnswerSettings, ANSWERING, ""),
        (Eagle3Settings, TRAINING | EAGLE3, "eagle3"),
        (BlockSettings, TRAINING | BLOCK, "block heads"),
        (BlockShape, LAYERS | SHAPE_OPTIONS, "block heads"),
        (DepthPrunedSettings, TRAINING | PRUNED, "depth-pruned"),
    ],
)
def test_help_tells_the_defaults_of_training(settings, group, kind):
    """A default, or several: the first, then those of some kinds."""
    own = {field.name: field.default for field in fields(settings)}
    for name, annotation in group.items():
        if name in own and type(own[name]) in (int, float):
            _, option = get_args(annotation)
            first, *others = option.help.partition("[default: ")[2].removesuffix("][/]").split(", ")
            shown = next((words.removeprefix(kind) for words in others if words.startswith(kind)), first)
            assert float(shown) == own[name], name
