"""Trainer of an EAGLE-3 head on the target's answers, with training-time test.

At step s of the unroll every position is `s` drafted tokens past the last true feature, and attends to what it would
see when drafting: true entries up to there, then the head's own. All steps learn the target's distribution.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from graft.errors import GraftError
from graft.model import evaluating
from graft.settings import Settings, require
from graft.spec_decode.proposers.eagle3.head import Eagle3Head
from graft.train.generate_data import Answered

_ALIGNMENT = 64  # batches have a multiple of this many entries: matrix products over odd lengths take twice the time


@dataclass(frozen=True)
class TrainSettings(Settings):
    """Settings of the training. Defaults suit a small head on one GPU."""

    steps: int = 2000
    batch_tokens: int = 32_768  # tokens of a step, padding included
    max_tokens: int = 2048  # of a prompt and its answer; the rest is cut off
    unroll: int = 5  # drafted steps that are trained
    step_weight: float = 0.8  # weight of each further step's loss, relative to the one before
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0
    evaluate_every: int = 200
    held_back: float = 0.01  # share of the answers that only evaluations see
    bf16: bool = True  # on a GPU; a CPU computes in fp32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_tokens", "max_tokens", "unroll", "evaluate_every"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}")
        require(0 < self.held_back < 1, f"held_back must be between 0 and 1, not {self.held_back}")
        require(self.learning_rate > 0, f"learning_rate must be above 0, not {self.learning_rate}")


def draft_vocabulary(answers: Sequence[Answered], vocab_size: int, size: int) -> tuple[Tensor, float]:
    """The `size` tokens most frequent in the answers, ascending, and the share of answer tokens they cover."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for answer in answers:
        counts += answer.tokens[answer.num_prompt_tokens :].long().bincount(minlength=vocab_size)
    chosen = counts.topk(size).indices.sort().values
    return chosen, float(counts[chosen].sum() / counts.sum())


@torch.no_grad()
def start_from_target(head: Eagle3Head, model: PreTrainedModel) -> None:
    """Initializes a head with the target's last layer, final norm and output rows, as far as shapes agree.

    The head then starts as a rough continuation of the last target layer it reads, not as noise.
    """
    ids = head.to_target(torch.arange(head.config.draft_vocab_size, device=head.d2t.device))
    output = model.get_output_embeddings().weight
    head.lm_head.weight.copy_(output[ids.to(output.device)])
    width, late = head.config.target_hidden_size, (len(head.config.target_layers) - 1) * head.config.target_hidden_size
    if head.config.hidden_size == width:
        # Not noise: some of a target's features are hundreds of times larger than others.
        head.fc.weight.zero_()[:, late:].fill_diagonal_(1.0)
    target = dict(model.base_model.named_parameters())
    if "norm.weight" in target and target["norm.weight"].shape == head.norm.weight.shape:
        head.norm.weight.copy_(target["norm.weight"])
    own = dict(head.midlayer.named_parameters())
    last_layer = f"layers.{model.config.get_text_config().num_hidden_layers - 1}."
    for name, weight in ((n.removeprefix(last_layer), w) for n, w in target.items() if n.startswith(last_layer)):
        if name not in own:
            continue
        if own[name].shape == weight.shape:
            own[name].copy_(weight)
        elif own[name].shape == (weight.shape[0], 2 * weight.shape[1]):  # q, k, v: the half that reads the hidden
            own[name].normal_(0, 0.02)
            own[name][:, weight.shape[1] :] = weight
    own["hidden_norm.weight"].copy_(own["input_layernorm.weight"])
    own["input_layernorm.weight"].fill_(1.0)  # it norms embeddings, which the target's layer never saw


class Batches:
    """Training batches: answers of similar length together, in an order fixed by the seed."""

    def __init__(self, answers: Sequence[Answered], settings: TrainSettings) -> None:
        self._answers = [Answered(a.tokens[: settings.max_tokens], a.num_prompt_tokens) for a in answers]
        self._answers = [a for a in self._answers if len(a.tokens) >= max(a.num_prompt_tokens, 1) + 2]
        require(bool(self._answers), "no answer is long enough to train on")
        self._settings = settings
        self._epoch, self._plan = 0, self._plan_epoch(0)

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """The batch of a step: tokens [B, T], and a mask of those that are answer [B, T]."""
        epoch, place = divmod(step, len(self))
        if epoch != self._epoch:
            # Plans differ by a batch or two between epochs; the first one's count is kept, so a step names a batch.
            plan, count = self._plan_epoch(epoch), len(self)
            self._plan, self._epoch = [plan[i % len(plan)] for i in range(count)], epoch
        return self._padded([self._answers[i] for i in self._plan[place]])

    @property
    def num_tokens(self) -> int:
        return sum(len(a.tokens) for a in self._answers)

    def __len__(self) -> int:
        return len(self._plan)

    def _plan_epoch(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self._settings.seed * 1_000_003 + epoch)
        # A little noise on the lengths: neighbours differ from epoch to epoch, padding stays small.
        noise = torch.rand(len(self._answers), generator=generator) * 0.1 + 1
        order = sorted(range(len(self._answers)), key=lambda i: len(self._answers[i].tokens) * float(noise[i]))
        plan: list[list[int]] = [[]]
        longest = 0
        for i in order:
            longest = max(longest, _padded_length(len(self._answers[i].tokens)))
            if plan[-1] and longest * (len(plan[-1]) + 1) > self._settings.batch_tokens:
                plan.append([])
                longest = _padded_length(len(self._answers[i].tokens))
            plan[-1].append(i)
        return [plan[i] for i in torch.randperm(len(plan), generator=generator).tolist()]

    @staticmethod
    def _padded(answers: list[Answered]) -> tuple[Tensor, Tensor]:
        longest = _padded_length(max(len(a.tokens) for a in answers))
        tokens = torch.zeros(len(answers), longest, dtype=torch.int64)
        is_answer = torch.zeros(len(answers), longest, dtype=torch.bool)
        for row, answer in enumerate(answers):
            tokens[row, : len(answer.tokens)] = answer.tokens
            is_answer[row, answer.num_prompt_tokens : len(answer.tokens)] = True
        return tokens, is_answer


def _padded_length(num_tokens: int) -> int:
    """Padded length of a batch. Two of its tokens have no entry (see `unrolled_losses`)."""
    return -(-(num_tokens - 2) // _ALIGNMENT) * _ALIGNMENT + 2


def unrolled_losses(
    head: Eagle3Head, model: PreTrainedModel, tokens: Tensor, is_answer: Tensor, unroll: int
) -> tuple[Tensor, Tensor]:
    """Loss and top-1 accuracy of each unrolled step, both [unroll].

    Entry i has the feature of token i and the embedding of token i + 1, and guesses token i + 2.
    """
    with torch.no_grad(), evaluating(model):
        states = model.base_model(input_ids=tokens, output_hidden_states=True, use_cache=False)
        features = torch.cat([states.hidden_states[layer] for layer in head.config.target_layers], dim=-1)
        scored = is_answer[:, 2:].flatten().nonzero().squeeze(1)  # [J] indices into [B * E] of entries in the loss
        ids = head.to_target(torch.arange(head.config.draft_vocab_size, device=tokens.device))
        rows = model.get_output_embeddings().weight[ids]  # [draft vocabulary, H]
        wanted = nn.functional.linear(_taken(states.last_hidden_state[:, 1:-1], scored), rows).float().softmax(dim=-1)
        truth = tokens[:, 2:].flatten()[scored]
        embeddings = head.embed(tokens[:, 1:-1])

    positions = torch.arange(tokens.shape[1] - 2, device=tokens.device).expand(len(tokens), -1)
    hidden = head.fuse(features[:, :-2].to(head.fc.weight.dtype))
    keys: list[Tensor] = []
    values: list[Tensor] = []
    losses, rights = [], []
    for _ in range(unroll):
        query, key, value = head.qkv(embeddings, hidden, positions)
        keys.append(key)
        values.append(value)
        output = head.finish(_unrolled_attention(query, keys, values), hidden)
        logits = head.logits(_taken(output, scored)).float()
        losses.append(-(wanted * logits.log_softmax(dim=-1)).sum(dim=-1).mean())
        rights.append((head.to_target(logits.argmax(dim=-1)) == truth).float().mean())
        hidden = _shifted(output, 1, dim=1)  # the head's own output stands in for the next token's feature
    return torch.stack(losses), torch.stack(rights)


def _taken(values: Tensor, index: Tensor) -> Tensor:
    """Rows [J, H] of values [B, E, H], by indices into [B * E]."""
    return values.flatten(0, 1).index_select(0, index)


def _unrolled_attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of unroll step s = len(keys) - 1: position i sees true entries up to i - s, then one per later step.

    query [B, heads, E, D]; keys, values by step, [B, kv_heads, E, D].
    """
    batch, heads, length, head_dim = query.shape
    step = len(keys) - 1
    grouped = query.view(batch, keys[0].shape[1], -1, length, head_dim)  # [B, kv, groups, E, D]
    if step == 0:
        key, value = (x[:, :, None].expand_as(grouped).flatten(1, 2) for x in (keys[0], values[0]))
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    scale = head_dim**-0.5
    place = torch.arange(length, device=query.device)
    far = (grouped @ keys[0][:, :, None].transpose(-1, -2)) * scale  # [B, kv, groups, E, E]
    far = far.masked_fill(place[:, None] - step < place, -torch.inf)
    own = [_shifted(k, step - m, dim=2)[:, :, None] for m, k in enumerate(keys)][1:]
    near = torch.stack([(grouped * k).sum(dim=-1) * scale for k in own], dim=-1)  # [B, kv, groups, E, step]
    # The few own entries take a place of 8 in front, so that the others stay where matrix products like them.
    front = nn.functional.pad(near, (0, -step % 8), value=-torch.inf)
    shares = torch.cat([front.to(far.dtype), far], dim=-1).softmax(dim=-1).to(query.dtype)
    out = shares[..., front.shape[-1] :] @ values[0][:, :, None]
    for m, value in enumerate(values[1:]):
        out = out + shares[..., m, None] * _shifted(value, step - 1 - m, dim=2)[:, :, None]
    return out.reshape(batch, heads, length, head_dim)


def _shifted(x: Tensor, count: int, dim: int) -> Tensor:
    """x shifted along `dim` by `count`, zeros coming in."""
    if count == 0:
        return x
    zeros = torch.zeros_like(x.narrow(dim, 0, count))
    return torch.cat([zeros, x.narrow(dim, 0, x.shape[dim] - count)], dim=dim)


def train(
    head: Eagle3Head,
    model: PreTrainedModel,
    answers: Sequence[Answered],
    settings: TrainSettings,
    folder: Path,
    progress: Callable[[dict[str, float]], None] = lambda record: None,
) -> Eagle3Head:
    """Trains the head in place; `folder` gets a log, and a checkpoint from which an interrupted run resumes."""
    device = head.fc.weight.device
    folder.mkdir(parents=True, exist_ok=True)
    held_back, training = (Batches(part, settings) for part in _split_by_prompt(answers, settings.held_back))
    head.float().train()
    decayed = [p for p in head.parameters() if p.dim() > 1]
    others = [p for p in head.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
    )
    state_path, log_path = folder / "state.pt", folder / "log.jsonl"
    start = _resume(state_path, log_path, head, optimizer, settings, len(answers))
    weights = torch.tensor([settings.step_weight**s for s in range(settings.unroll)], device=device)
    with log_path.open("a") as log:
        for step in range(start, settings.steps):
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * _schedule(step, settings)
            tokens, is_answer = (x.to(device) for x in training.at(step))
            with _autocast(device, settings):
                losses, rights = unrolled_losses(head, model, tokens, is_answer, settings.unroll)
            loss = (losses * weights).sum() / weights.sum()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(head.parameters(), settings.max_gradient_norm)
            optimizer.step()
            if step % 10 == 0 or step == settings.steps - 1:
                record = {"step": step, "loss": loss.item(), "norm": float(norm), "tokens": tokens.numel()}
                record |= {f"right_{s}": float(r) for s, r in enumerate(rights)}
                if not math.isfinite(record["loss"]):
                    raise GraftError(f"the loss is no longer a number at step {step}: lower learning_rate")
                log.write(json.dumps(record) + "\n")
                progress(record)
            if (step + 1) % settings.evaluate_every == 0 or step == settings.steps - 1:
                record = {"step": step, **evaluate(head, model, held_back, settings)}
                log.write(json.dumps(record) + "\n")
                log.flush()
                progress(record)
                _save_state(state_path, head, optimizer, step + 1, settings, len(answers))
    return head.eval()


@torch.no_grad()
def evaluate(
    head: Eagle3Head, model: PreTrainedModel, batches: Batches, settings: TrainSettings, limit: int = 8
) -> dict[str, float]:
    """Top-1 accuracy by unrolled step on held-back answers."""
    device = head.fc.weight.device
    total = torch.zeros(settings.unroll, device=device)
    count = min(limit, len(batches))
    for step in range(count):
        tokens, is_answer = (x.to(device) for x in batches.at(step))
        with _autocast(device, settings):
            total += unrolled_losses(head, model, tokens, is_answer, settings.unroll)[1]
    return {f"held_back_right_{s}": float(r) for s, r in enumerate(total / count)}


def _split_by_prompt(answers: Sequence[Answered], share: float) -> tuple[list[Answered], list[Answered]]:
    """Held-back answers and the others; all answers to a prompt are on the same side."""
    every = max(2, round(1 / share))
    prompts = [a.tokens[: a.num_prompt_tokens].numpy().tobytes() for a in answers]
    rank = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    parts: tuple[list[Answered], list[Answered]] = ([], [])
    for prompt, answer in zip(prompts, answers, strict=True):
        parts[rank[prompt] % every != 0].append(answer)
    return parts


def _autocast(device: torch.device, settings: TrainSettings) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=settings.bf16 and device.type != "cpu")


def _schedule(step: int, settings: TrainSettings) -> float:
    """Learning-rate factor: linear warm-up, then a cosine decay to 0.05."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))


def _save_state(
    path: Path,
    head: Eagle3Head,
    optimizer: torch.optim.Optimizer,
    step: int,
    settings: TrainSettings,
    num_answers: int,
) -> None:
    partial = path.with_suffix(".partial")
    run = {**asdict(settings), "num_answers": num_answers}
    torch.save(
        {"head": head.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "run": run},
        partial,
    )
    partial.replace(path)


def _resume(
    state_path: Path,
    log_path: Path,
    head: Eagle3Head,
    optimizer: torch.optim.Optimizer,
    settings: TrainSettings,
    num_answers: int,
) -> int:
    """Loads the checkpoint and returns the step to resume from; later log lines are dropped."""
    if not state_path.exists():
        log_path.unlink(missing_ok=True)
        return 0
    state = torch.load(state_path, map_location=head.fc.weight.device, weights_only=True)
    if state["run"] != {**asdict(settings), "num_answers": num_answers}:
        raise GraftError(f"{state_path.parent} holds a run with other settings or answers: choose another folder")
    if not torch.equal(state["head"]["d2t"], head.d2t):
        raise GraftError(
            f"{state_path.parent} holds a run with another draft vocabulary: ask for its {len(state['head']['d2t'])} "
            "tokens again, or choose another folder"
        )
    head.load_state_dict(state["head"])
    optimizer.load_state_dict(state["optimizer"])
    lines = [line for line in log_path.read_text().splitlines() if line.endswith("}")]  # the last may be torn
    lines = [line for line in lines if json.loads(line)["step"] < state["step"]]
    log_path.write_text("".join(line + "\n" for line in lines))
    return int(state["step"])
