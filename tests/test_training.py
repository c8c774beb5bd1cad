"""Training a head: the unroll does what drafting does, the loss falls, and an interrupted run resumes."""

import json
import math
import sys
from contextlib import suppress
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file

from graft import Engine, GraftError
from graft.drafters.eagle3 import Eagle3Config, Eagle3Head
from graft.model import TargetRunner
from graft.train import eagle3 as eagle3_training
from graft.train import packing
from graft.train.card import eagle3_text, read_log, write_card
from graft.train.eagle3 import (
    Eagle3Objective,
    count_tokens,
    draft_vocabulary,
    start_from_target,
    unrolled_attention,
    unrolled_backward,
)
from graft.train.generate_data import Answered, BatchDecoder, read_answers, write_answers
from graft.train.packing import PackedBatch
from graft.train.recipe import Eagle3Recipe, Outcome, Run, TimeIsUp, train_head
from graft.train.settings import AnswerSettings, Eagle3Settings
from graft.train.trainer import optimize, split_by_prompt
from heads import make_head, plain_draft
from tiny import VOCAB, tiny_model, tiny_multimodal

SETTINGS = Eagle3Settings(
    steps=12,
    batch_tokens=200,
    max_tokens=100,
    unroll=3,
    learning_rate=3e-3,
    warmup_steps=2,
    evaluate_every=4,
    held_back=0.2,
    bf16=False,
)


def train(head, model, answers, settings, folder, progress=lambda record: None):
    optimize(Eagle3Objective(head, model, answers, settings), settings, folder, len(answers), progress)
    return head


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=6)


def prompts(count=24):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (n % 7 + 2,), generator=generator).tolist() for n in range(count)]


@pytest.fixture(scope="module")
def answers(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("answers")
    settings = AnswerSettings(max_new_tokens=30, num_rows=8)
    write_answers(TargetRunner(model), prompts(), [], settings, folder)
    return list(read_answers(folder))


def test_the_answers_are_the_targets_own(model, answers):
    asked = [answer.tokens[: answer.num_prompt_tokens].tolist() for answer in answers]
    assert sorted(asked) == sorted(prompts())
    expected = Engine(model, policy="off").generate_batch(asked, max_new_tokens=30)
    for answer, own in zip(answers, expected, strict=True):
        assert answer.tokens[answer.num_prompt_tokens :].tolist() == own.ids


def test_answers_stop_at_an_ending_and_long_prompts_are_left_out(model, tmp_path):
    settings = AnswerSettings(max_new_tokens=40, num_rows=4, temperatures=(0.0, 1.0), max_prompt_tokens=6)
    endings = list(range(20))
    write_answers(TargetRunner(model), prompts(), endings, settings, tmp_path)
    found = list(read_answers(tmp_path))
    assert len(found) == 2 * sum(len(p) <= 6 for p in prompts())
    for answer in found:
        *inside, last = answer.tokens[answer.num_prompt_tokens :].tolist()
        assert not set(inside) & set(endings) and (last in endings or len(inside) == 39)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_decoder_reads_its_prompts_once_and_answers_them_alike_each_time(model, rows):
    asked = prompts()[3 : 3 + rows]
    decoder = BatchDecoder(TargetRunner(model), asked, 12)
    expected = [Engine(model, policy="off").generate(p, max_new_tokens=12).ids for p in asked]
    torch.manual_seed(0)
    sampled = decoder.answer(1.0, [])
    assert decoder.answer(0.0, []) == decoder.answer(0.0, []) == expected != sampled


def test_other_prompts_do_not_pass_for_those_already_answered(model, tmp_path):
    settings = AnswerSettings(max_new_tokens=4, num_rows=8)
    write_answers(TargetRunner(model), prompts(), [], settings, tmp_path)
    with pytest.raises(GraftError, match="prompts"):
        write_answers(TargetRunner(model), [p[::-1] for p in prompts()], [], settings, tmp_path)


def test_interrupted_answering_goes_on_and_gives_the_same(model, tmp_path):
    settings = AnswerSettings(max_new_tokens=10, num_rows=8, temperatures=(1.0,))
    target = TargetRunner(model)

    def interrupt(done, total, tokens):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_answers(target, prompts(), [], settings, tmp_path / "a", interrupt)
    again = []
    write_answers(target, prompts(), [], settings, tmp_path / "a", lambda done, total, tokens: again.append(tokens))
    assert again[:2] == [0, 0] and again[2] > 0, "only what was missing is made"
    write_answers(target, prompts(), [], settings, tmp_path / "b")
    for one, other in zip(read_answers(tmp_path / "a"), read_answers(tmp_path / "b"), strict=True):
        assert torch.equal(one.tokens, other.tokens)
    with pytest.raises(GraftError, match="other settings"):
        write_answers(target, prompts(), [], replace(settings, max_new_tokens=11), tmp_path / "a")


def test_the_layers_of_every_target_are_compiled_wherever_it_keeps_them_and_only_while_it_trains():
    model = tiny_multimodal("gemma3")

    def compiled():
        return [module for module in model.modules() if module._compiled_call_impl is not None]

    with pytest.raises(KeyboardInterrupt), packing.compiled_layers(model):
        assert compiled() == list(model.base_model.language_model.layers)
        raise KeyboardInterrupt
    assert compiled() == []


@pytest.mark.parametrize("error", [TimeIsUp(Outcome("measure", 1, 2)), KeyboardInterrupt()])
def test_an_engine_has_no_compiled_layers_when_training_has_ended(model, tmp_path, error):
    class Recipe(Eagle3Recipe):
        def prepare(self, run):
            run.until_trained.enter_context(packing.compiled_layers(model))
            raise error

    write_answers(TargetRunner(model), prompts(1), [], AnswerSettings(max_new_tokens=2), tmp_path)
    with suppress(KeyboardInterrupt):
        train_head(Engine(model, policy="off"), [], tmp_path, Recipe(SETTINGS), AnswerSettings(), answers_from=tmp_path)
    assert all(module._compiled_call_impl is None for module in model.modules())


@pytest.mark.slow
def test_unrolled_steps_share_one_compiled_attention_which_is_the_dense_one(monkeypatch):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    functions = packing.flex_functions(is_compiled=False)
    compiled = [torch.compile(function, backend=counter, dynamic=False) for function in functions]
    monkeypatch.setattr(eagle3_training, "flex_functions", lambda **_: compiled)
    starts = torch.tensor([0] * 60 + [60] * 68).expand(2, -1)
    keys, values, counts = [], [], []
    for step in range(4):
        query, key, value = (torch.randn(2, heads, 128, 16) for heads in (4, 2, 2))
        keys.append(key)
        values.append(value)
        flex, dense = (unrolled_attention(query, keys, values, starts, flex) for flex in (True, False))
        inside = (torch.arange(128) - starts >= step)[:, None, :, None]
        torch.testing.assert_close(flex * inside, dense * inside, rtol=1e-4, atol=1e-4)
        counts.append(counter.frame_count)
    assert counts[1] == counts[3], "a later step compiles nothing"


@pytest.mark.parametrize("greedy_weight", [0.0, 0.25])
def test_step_s_of_the_unroll_is_the_draft_s_tokens_past_the_last_true_feature(model, answers, greedy_weight):
    """The loss of every unrolled step is that of plain drafting along the same tokens, in the second of two texts."""
    head = make_head(model)
    first, tokens = (answers[n].tokens.long()[:16] for n in (1, 0))
    settings = replace(SETTINGS, unroll=4, greedy_weight=greedy_weight, chunk_tokens=4)
    starts = torch.tensor([0] * 16 + [16] * 16)[None]
    vocabulary = head.to_target(torch.arange(40))
    for place in range(9, 16):
        anchor = torch.tensor([[16 + place - 1]])
        one = torch.ones_like(anchor)
        batch = PackedBatch(torch.cat([first, tokens])[None], starts, anchor, 16 * one, one)
        with torch.no_grad():
            losses, rights = unrolled_backward(head, model, batch, settings)
            logits = model(tokens[None, :place]).logits[0, -1]
        wanted = logits[vocabulary].softmax(-1) * (1 - greedy_weight)
        wanted[wanted.argmax()] += greedy_weight
        for step in range(4):
            known = tokens[: place - step].tolist()
            path = tokens[place - step : place].tolist()
            q = plain_draft(head, model, known, path)
            expected = (wanted * (wanted.log() - q[vocabulary].log())).sum()
            assert float(losses[step]) == pytest.approx(float(expected), rel=1e-3)
            assert float(rights[step]) == float(q.argmax() == tokens[place])


def test_the_gradient_is_that_of_the_loss(model, answers):
    head = make_head(model)
    settings = replace(SETTINGS, chunk_tokens=16)
    objective = Eagle3Objective(head, model, answers, settings)
    objective.backward(0)
    torch.manual_seed(0)
    for weight in (head.fc.weight, head.midlayer.self_attn.k_proj.weight, head.lm_head.weight):
        direction = torch.randn_like(weight)
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                weight += sign * 1e-3 * direction
                losses.append(float(objective.backward(0)["loss"]))
                weight -= sign * 1e-3 * direction
        assert weight.grad is not None
        assert float((weight.grad * direction).sum()) == pytest.approx((losses[0] - losses[1]) / 2e-3, rel=0.02)


def test_a_head_learns(model, answers, tmp_path):
    head = make_head(model)
    start_from_target(head, model)
    log = []
    train(head, model, answers, replace(SETTINGS, steps=60, evaluate_every=30), tmp_path, log.append)
    losses = [record["loss"] for record in log if "loss" in record]
    assert losses[-1] < 0.9 * losses[0]
    assert any("held_back_right_0" in record for record in log)


def test_training_a_head_leaves_the_model_as_it_was(answers, tmp_path):
    model = tiny_model(num_hidden_layers=6, attention_dropout=0.5).train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    train(make_head(model), model, answers, replace(SETTINGS, steps=2), tmp_path / "training")
    assert all(module.training for module in model.modules())
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    train(make_head(model), model.eval(), answers, replace(SETTINGS, steps=2), tmp_path / "evaluation")
    logs = [(tmp_path / mode / "log.jsonl").read_text() for mode in ("training", "evaluation")]
    assert logs[0] == logs[1], "the head learned from the model without its dropout"


@pytest.mark.parametrize(("is_normed", "layers"), [(True, (2, 3, 5, 7, 8)), (False, (2, 5, 7))])
def test_a_plain_eagle3_head_reads_the_three_layers_that_every_engine_reads(answers, tmp_path, is_normed, layers):
    model = tiny_model(num_hidden_layers=10)
    run = Run(Engine(model, policy="off"), answers, tmp_path, report=lambda report: None, deadline=math.inf)
    objective, _ = Eagle3Recipe(SETTINGS, is_normed=is_normed).prepare(run)
    config = objective.head.config
    assert (config.target_layers, config.fc_norm, config.norm_output) == (layers, is_normed, is_normed)


@pytest.mark.parametrize("size", [40, 30])
def test_a_run_with_another_draft_vocabulary_is_refused(model, answers, tmp_path, size):
    settings = replace(SETTINGS, steps=4)
    train(make_head(model), model, answers, settings, tmp_path)
    other = Eagle3Head(Eagle3Config.for_target(model.config, draft_vocab_size=size))
    other.borrow_embedding(model.get_input_embeddings().weight)
    other.set_vocabulary(torch.arange(size))
    with pytest.raises(GraftError, match="another draft vocabulary: use its size of 40"):
        train(other, model, answers, settings, tmp_path)


@pytest.mark.parametrize("installed", [True, False])
def test_the_card_shows_the_curves_only_where_they_could_be_drawn(installed, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    if not installed:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    records = [{"step": 0, "loss": 2.0}, {"step": 0, "held_back_right_0": 0.25}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    facts = {"prompts": 1, "answers": 1, "answer_tokens": 9, "vocabulary_coverage": 1.0, "temperatures": [0.0]}
    facts |= {"steps": 12, "training": asdict(SETTINGS)}
    log = read_log(tmp_path / "log.jsonl")
    write_card(tmp_path, facts, log, eagle3_text(facts, log))
    card = (tmp_path / "README.md").read_text()
    assert ("(loss.png)" in card) == installed == (tmp_path / "loss.png").exists()
    assert "| 1 | 0.250 |\n" in card


def test_the_draft_vocabulary_is_what_answers_use_most():
    made = [Answered(torch.tensor([9, 9, 9, 5, 5, 5, 7, 7, 3], dtype=torch.int32), 3)]
    assert draft_vocabulary(count_tokens(made, VOCAB), 2).tolist() == [5, 7]


def test_without_a_size_the_draft_vocabulary_covers_almost_all_answer_tokens():
    counts = torch.zeros(10_000, dtype=torch.int64)
    counts[:1199], counts[1199:7199] = 200, 1  # 2,283 tokens cover 98 %
    chosen = draft_vocabulary(counts)
    assert len(chosen) == 3072 and set(range(1199)) < set(chosen.tolist())
    assert len(draft_vocabulary(torch.ones(60, dtype=torch.int64))) == 60


def test_all_answers_to_a_prompt_are_on_the_same_side_of_the_split():
    answers = [Answered(torch.tensor([p, p, a], dtype=torch.int32), 2) for a in range(3) for p in range(20)]
    held_back, training = split_by_prompt(answers, share=0.2)
    assert len(held_back) == 3 * 4 and len(training) == 3 * 16
    assert not {int(a.tokens[0]) for a in held_back} & {int(a.tokens[0]) for a in training}


def test_graft_train_makes_an_eagle3_head_and_trains_it_further(graft_tiny, graft, model_folder, tmp_path):
    prompts, first, second = tmp_path / "prompts.jsonl", tmp_path / "first", tmp_path / "second"
    prompts.write_text("".join(json.dumps({"prompt": f"What is {n} plus {n}?"}) + "\n" for n in range(12)))
    quick = ["--steps", "2", "--batch-tokens", "128", "--max-tokens", "64", "--held-back", "0.2"]
    assert graft_tiny("train", "--prompts", str(prompts), "--out", str(first), *quick).status == 0
    config = json.loads((first / "config.json").read_text())
    assert config["fc_norm"] and config["norm_output"] and not config["norm_before_residual"]
    weights = load_file(first / "model.safetensors")

    again = ["train", "--model", model_folder, "--answers", str(first / "work" / "answers"), "--out", str(second)]
    again += ["--start-from", str(first), *quick]
    wrong = graft(*again, "--draft-vocab-size", "20")
    assert wrong.status == 2 and "keeps its draft vocabulary and norms: drop their options" in wrong.err
    assert graft(*again, "--learning-rate", "1e-9").status == 0
    for name, weight in load_file(second / "model.safetensors").items():
        assert torch.allclose(weight.float(), weights[name].float(), atol=1e-3), name
    assert json.loads((second / "config.json").read_text()) == config
    facts = [json.loads((folder / "training.json").read_text()) for folder in (first, second)]
    assert facts[0]["vocabulary_coverage"] == facts[1]["vocabulary_coverage"] >= 0.98
