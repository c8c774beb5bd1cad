"""Training data of draft heads: the target's own answers to many prompts, decoded in large batches.

Answers are saved in shards, each written completely or not at all, so an interrupted run resumes where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from graft.errors import GraftError
from graft.files import replacing
from graft.model import Chunk, TargetRunner
from graft.settings import require
from graft.train.settings import AnswerSettings
from graft.tree.tree import DraftTree

_SETTINGS = "answers.json"


@dataclass(frozen=True)
class Answered:
    """A prompt and the target's answer to it."""

    tokens: Tensor  # [T] int32, prompt then answer
    num_prompt_tokens: int
    temperature: float = 0.0


class BatchDecoder:
    """Plain decoding of a batch of prompts, which are read once and may be answered several times."""

    def __init__(self, target: TargetRunner, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        self._target, self._prompts, self._max_new_tokens = target, prompts, max_new_tokens
        self._cache = target.open(len(prompts), max(map(len, prompts)) + max_new_tokens)
        self._prefill(prompts)

    @torch.no_grad()
    def answer(self, temperature: float, eos_token_ids: Sequence[int]) -> list[list[int]]:
        """One answer per prompt, including its end token; greedy at temperature 0."""
        for row, prompt in zip(self._cache.rows, self._prompts, strict=True):
            row.length = len(prompt) - 1
        tokens = torch.tensor([prompt[-1] for prompt in self._prompts])
        endings = torch.tensor(list(eos_token_ids), dtype=torch.int64)
        ended = torch.zeros_like(tokens, dtype=torch.bool)
        answers = []
        for _ in range(self._max_new_tokens):
            tokens = self._next(tokens, temperature)
            answers.append(tokens)
            ended |= torch.isin(tokens, endings)
            if bool(ended.all()):
                break
        return [_cut(row, eos_token_ids) for row in torch.stack(answers, dim=1).tolist()]

    def release(self) -> None:
        self._cache.release()

    @torch.no_grad()
    def _prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Prefill every prompt except its last token, several prompts per step."""
        while True:
            room, chunks = self._target.chunk_size, []
            for row, prompt in zip(self._cache.rows, prompts, strict=True):
                end = min(row.length + room, len(prompt) - 1)
                if end > row.length:
                    chunks.append(Chunk(row, prompt[row.length : end]))
                    room -= end - row.length
            if not chunks:
                return
            self._target.step(None, None, chunks)
            self._target.synchronize()

    def _next(self, tokens: Tensor, temperature: float) -> Tensor:
        """The next tokens [B], on the host."""
        verified = self._target.verify(self._cache, DraftTree.roots(tokens))
        logits = verified.logits[verified.index[:, 0].to(verified.logits.device)]
        noise = -torch.empty_like(logits).exponential_().clamp_(min=1e-12).log()
        chosen = (logits + temperature * noise).argmax(dim=1).cpu()
        self._target.commit(self._cache, [[] for _ in tokens])
        return chosen


def write_answers(
    target: TargetRunner,
    prompts: Sequence[Sequence[int]],
    eos_token_ids: Sequence[int],
    settings: AnswerSettings,
    folder: Path,
    progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
    deadline: float = math.inf,
) -> bool:
    """Answer all prompts at every temperature into `folder`, calling progress(shards done, shards, new tokens).

    Returns False if `deadline`, in `time.perf_counter` seconds, came before the last shard was started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fingerprint = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
    _same_settings(folder / _SETTINGS, {**asdict(settings), "prompts": fingerprint})
    most = settings.max_prompt_tokens
    if target.max_positions is not None:
        most = min(most, target.max_positions - settings.max_new_tokens)
    fitting = [prompt for prompt in prompts if len(prompt) <= most]
    require(bool(fitting), f"no prompt has at most {most} tokens, the most that fits with its answer")
    by_length = sorted(fitting, key=len)
    groups = [by_length[i : i + settings.num_rows] for i in range(0, len(by_length), settings.num_rows)]
    total, done = len(groups) * len(settings.temperatures), 0
    for group, prompt_group in enumerate(groups):
        decoder = None  # all temperatures answer after the same prompts
        for rank, temperature in enumerate(settings.temperatures):
            path = folder / f"answers-{group:05d}-{rank:02d}.safetensors"
            num_tokens = 0
            if not path.exists():
                if time.perf_counter() >= deadline:
                    return False
                decoder = decoder or BatchDecoder(target, prompt_group, settings.max_new_tokens)
                torch.manual_seed(settings.seed + 1_000_003 * group + rank)
                answers = decoder.answer(temperature, eos_token_ids)
                _save_shard(path, prompt_group, answers)
                num_tokens = sum(map(len, answers))
            done += 1
            progress(done, total, num_tokens)
        if decoder is not None:
            decoder.release()
    return True


def read_answers(folder: Path) -> Iterator[Answered]:
    """Every answer in a folder, in a fixed order."""
    paths = sorted(folder.glob("answers-*.safetensors"))
    require(bool(paths), f"{folder} holds no answers")
    damage = (OSError, ValueError, KeyError, TypeError, IndexError, RuntimeError, SafetensorError)
    try:
        temperatures = list(map(float, json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))["temperatures"]))
    except damage as error:
        raise GraftError(f"{folder / _SETTINGS} is missing or damaged: make the answers anew") from error
    for path in paths:
        try:
            shard = load_file(path)
            temperature = temperatures[int(path.stem.rsplit("-", 1)[1])]
            texts = shard["tokens"].int().split(shard["lengths"].tolist())
            answers = list(zip(texts, shard["num_prompt_tokens"].tolist(), strict=True))
        except damage as error:
            raise GraftError(f"{path} is damaged: delete it, and its answers are made anew") from error
        for tokens, num_prompt in answers:
            yield Answered(tokens, num_prompt, temperature)


def spread(answers: Sequence[Answered], count: int) -> list[Answered]:
    """At most `count` answers, evenly spread, because they are stored in order of prompt length."""
    return [answers[i * len(answers) // count] for i in range(count)] if len(answers) > count else list(answers)


def _save_shard(path: Path, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    tokens = [token for row in rows for token in row]
    small = max(tokens) < 2**16
    tensors = {
        "tokens": torch.tensor(tokens, dtype=torch.uint16 if small else torch.int32),
        "lengths": torch.tensor([len(row) for row in rows], dtype=torch.int32),
        "num_prompt_tokens": torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32),
    }
    with replacing(path, is_private=True) as file:
        file.write(save(tensors))


def _same_settings(path: Path, settings: dict[str, object]) -> None:
    """Raise a GraftError if the folder holds answers made with other settings."""
    text = json.dumps(settings, indent=1)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise GraftError(f"{path.parent} holds answers made with other settings or prompts: choose another folder")
    path.write_text(text, encoding="utf-8")


def _cut(tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    """Tokens up to and including the first end token."""
    end = next((i for i, token in enumerate(tokens) if token in eos_token_ids), len(tokens) - 1)
    return tokens[: end + 1]
