"""The training recipe of an EAGLE-3 head: generate answers, train, save, and write a model card.

Every stage writes under the head's folder and is skipped when its output is already there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from graft.data import user_message
from graft.engine import Engine
from graft.progress import Report
from graft.settings import require
from graft.spec_decode.proposers.eagle3.checkpoint import save_head
from graft.spec_decode.proposers.eagle3.head import Eagle3Config, Eagle3Head
from graft.train.generate_data import AnswerSettings, read_answers, write_answers
from graft.train.trainer import TrainSettings, draft_vocabulary, start_from_target, train

WORK = "work"  # answers, log and state, below the head's folder; may be deleted when the head is done


def train_head(
    engine: Engine,
    prompts: Sequence[str],
    folder: Path,
    draft_vocab_size: int,
    answering: AnswerSettings,
    training: TrainSettings,
    report: Callable[[Report], None] = lambda report: None,
) -> Path:
    """Trains a head for the engine's model on its own answers to the prompts, and saves it in `folder`."""
    model = engine.target.model
    work = folder / WORK
    encoded = [engine.encode(user_message(text, engine.tokenizer)) for text in prompts]
    require(bool(encoded), "there are no prompts to answer")
    most = engine.target.vocab_size
    require(1 <= draft_vocab_size <= most, f"draft_vocab_size must be between 1 and {most}, not {draft_vocab_size}")

    start = time.perf_counter()
    num_made = 0

    def answered(done: int, total: int, tokens: int) -> None:
        nonlocal num_made
        num_made += tokens
        rate = num_made / (time.perf_counter() - start)
        report(Report("answer", done, total, f"{num_made:,} tokens, {rate:,.0f} tokens/s"))

    write_answers(engine.target, encoded, engine.eos_token_ids, answering, work / "answers", answered)
    answers = list(read_answers(work / "answers"))

    vocabulary, coverage = draft_vocabulary(answers, engine.target.vocab_size, draft_vocab_size)
    head = new_head(model, vocabulary)

    def trained(record: dict[str, float]) -> None:
        words = ", ".join(f"{k} {v:.3f}" for k, v in record.items() if k not in ("step", "tokens", "norm"))
        report(Report("train", int(record["step"]) + 1, training.steps, words))

    train(head, model, answers, training, work / "training", trained)
    save_head(head.to(torch.bfloat16), folder)
    facts = {
        "prompts": len(prompts),
        "answers": len(answers),
        "answer_tokens": sum(len(a.tokens) - a.num_prompt_tokens for a in answers),
        "vocabulary_coverage": coverage,
        "answering": asdict(answering),
        "training": asdict(training),
    }
    write_card(folder, facts)
    return folder


def new_head(model: PreTrainedModel, vocabulary: torch.Tensor, **changes: Any) -> Eagle3Head:
    """An untrained head for this target, initialized from the target's weights. changes: to the default config."""
    text = model.config.get_text_config()
    config = Eagle3Config.for_target(
        model.config,
        draft_vocab_size=len(vocabulary),
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        rope=_rope(text),
        **changes,
    )
    head = Eagle3Head(config)
    head.set_vocabulary(vocabulary)
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    head.borrow_embedding(embedding)
    head = head.to(device=model.device)
    torch.manual_seed(0)
    start_from_target(head, model)
    return head


def write_card(folder: Path, facts: dict[str, Any]) -> None:
    """Writes the model card, README.md and loss.png, from the training log and `facts`."""
    log = [json.loads(line) for line in (folder / WORK / "training" / "log.jsonl").read_text().splitlines()]
    evaluations = [record for record in log if "held_back_right_0" in record]
    rights = [(k.rsplit("_", 1)[1], v) for k, v in evaluations[-1].items() if k.startswith("held_back_right_")]
    rows = "\n".join(f"| {int(step) + 1} | {right:.3f} |" for step, right in rights)
    picture = "\n![loss and right guesses over training](loss.png)\n" if _plot(log, folder / "loss.png") else ""
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    (folder / "README.md").write_text(
        f"""# An EAGLE-3 draft head, made with `graft train`

Trained on {facts["answer_tokens"]:,} tokens of the target's own answers ({facts["answers"]:,} answers to
{facts["prompts"]:,} prompts, temperatures {", ".join(map(str, facts["answering"]["temperatures"]))}), for
{facts["training"]["steps"]:,} steps of {facts["training"]["batch_tokens"]:,} tokens. Its draft vocabulary covers
{facts["vocabulary_coverage"]:.2%} of the answers' tokens. All settings are in `training.json`.

Share of right guesses on held-back answers, by drafted depth (top 1, the tokens before it right):

| depth | right |
|---|---|
{rows}
{picture}"""
    )


def _plot(log: list[dict[str, float]], path: Path) -> bool:
    """Plots the training curves; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False  # the card's picture is the one thing that needs it; `graft train` again, with it, adds it
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = [record for record in log if "loss" in record]
    left.plot([r["step"] for r in steps], [r["loss"] for r in steps], linewidth=0.8)
    left.set(xlabel="step", ylabel="loss", title="loss against the target's distribution")
    evaluations = [record for record in log if "held_back_right_0" in record]
    for name in (k for k in evaluations[-1] if k.startswith("held_back_right_")):
        depth = int(name.rsplit("_", 1)[1]) + 1
        right.plot([r["step"] for r in evaluations], [r[name] for r in evaluations], label=f"depth {depth}")
    right.set(xlabel="step", title="right guesses on held-back answers")
    right.legend()
    figure.savefig(path, dpi=120)
    return True


def _rope(text_config: Any) -> dict[str, Any]:
    """Rotary parameters with the target's base, without its scaling."""
    own = getattr(text_config, "rope_parameters", None) or {}
    return {"rope_type": "default", "rope_theta": float(own.get("rope_theta", 10_000.0))}
