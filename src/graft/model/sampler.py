"""From logits to tokens: the sampler that applies `SamplingSettings` with the keyed noise of `noise`.

The noise of a draw depends only on (seed, absolute position, token). So the same seed gives the same text with any
draft tree and without one. Acceptance is in `spec_decode.acceptance`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from graft.model.grammar import Constraint
from graft.model.noise import ComingDraws, RowDraws, draft_temperature, gumbel_noise
from graft.model.sampling_settings import SamplingSettings

# Exponentials as integers, see `weights`.
WEIGHT_BITS = 40  # the highest weight is 2^WEIGHT_BITS
LOWEST = 28.0  # scores this far below the highest have weight 0
EXP_BITS = 25  # fraction bits of an exponent of 2
_HALVINGS_PER_UNIT = 3098164009  # log2(e) in units of 2^-31: from units of 2^-26 to exponents of 2 in units of 2^-25
# The Taylor series of 2^-f for f from 0 to 1, in units of 2^-30. The signs alternate.
EXP_TERMS = (1073741824, 744261118, 257941248, 59597083, 10327387, 1431680, 165394, 16377, 1419, 109, 8)


def weights(scores: Tensor) -> Tensor:
    """Exponentials of scores [B, V] relative to the row's highest, as int64 in units of 2^-WEIGHT_BITS.

    Sums of integers are the same in any order, so every device finds the same truncation.
    """
    highest = scores.amax(dim=1, keepdim=True)
    below = torch.where(scores == highest, 0.0, highest - scores).clamp(max=LOWEST)  # infinities equal themselves
    units = (below * 2.0**26).long()
    halvings = units * _HALVINGS_PER_UNIT >> 32  # in parts of 2^EXP_BITS
    fraction = halvings & (1 << EXP_BITS) - 1
    power = torch.zeros_like(fraction)
    for term in reversed(EXP_TERMS):
        power = term - (power * fraction >> EXP_BITS)
    return (power >> 4 << WEIGHT_BITS - 26) >> (halvings >> EXP_BITS)


def truncated(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set the scores [B, V] that top-k, then top-p, then min-p [B] exclude to minus infinity. top_k 0 is off.

    Tokens are ranked by score; among equals, the first token wins. Top-k keeps the first k. Top-p keeps a token if the
    tokens before it have less than top_p of the remaining probability, so it always keeps the first. Min-p keeps tokens
    with at least min_p times the highest probability. `kernels.draw` does the same on GPUs.
    """
    vocab_size = scores.shape[1]
    ordered, order = scores.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(vocab_size, device=scores.device)
    top_k = torch.where(top_k > 0, top_k, vocab_size)
    keep = rank < top_k[:, None]
    weight = weights(scores).gather(1, order)
    through = (weight * keep).cumsum(dim=1)
    share = (top_p.double() * through[:, -1].double()).long().clamp(min=1)
    keep &= (through - weight < share[:, None]) | (top_p[:, None] >= 1)
    keep &= weight.double() >= min_p.double()[:, None] * 2.0**WEIGHT_BITS
    return torch.full_like(scores, -torch.inf).scatter(1, order, ordered.masked_fill(~keep, -torch.inf))


class Chooser(Protocol):
    """A sampler as acceptance sees it: it chooses each row's next token and adds it to the row's history."""

    def choose(self, logits: Tensor, walking: Sequence[bool]) -> Tensor:
        """Choose the next tokens [B] from logits [B, V]. Only `walking` rows advance by one token."""
        ...

    def coming_draws(self) -> ComingDraws | None:
        """What is known of the rows' next draws before the target has run; None: nothing, or all rows are greedy."""
        ...

    def select(self, rows: Sequence[int]) -> Self:
        """A chooser of only these rows, in this order."""
        ...

    def concat(self, other: Any) -> Self:
        """A chooser of this one's rows, then another's. Neither changes."""
        ...


class Sampler:
    """Chooses tokens for a batch of rows, each with its own settings and history (a `Chooser`)."""

    def __init__(
        self,
        settings: Sequence[SamplingSettings],
        histories: Sequence[Sequence[int]],
        eos_token_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
        constraints: Sequence[Constraint | None] | None = None,
        prompts: Sequence[int] | None = None,
    ) -> None:
        """prompts: how many tokens of each history are its prompt, and not its answer; None: all."""
        self._settings = list(settings)
        self._device = device
        self._columns: dict[str, Tensor] = {}  # [B] settings on the device, made on demand
        self._constraints = list(constraints or [None] * len(settings))
        self._vocab_size = vocab_size
        self._ends = [(*(() if s.ignore_eos else eos_token_ids), *s.stop_token_ids) for s in settings]
        # Values that change with every token are plain numbers on the host.
        self.positions = [len(h) for h in histories]  # of the token to choose
        prompts = prompts or list(map(len, histories))
        self._generated = [len(h) - prompt for h, prompt in zip(histories, prompts, strict=True)]

        shape = (len(settings), vocab_size)
        self._seen: Tensor | None = None  # [B, V] bool, in prompt or answer
        self._counts: Tensor | None = None  # [B, V] float, in the answer
        self._bias: Tensor | None = None  # [B, V] float
        self._endings: Tensor | None = None  # [B, V] bool, what min_tokens forbids
        if any(s.repetition_penalty != 1 for s in settings):
            self._seen = torch.zeros(shape, dtype=torch.bool, device=device)
            for row, history in enumerate(histories):
                self._seen[row, torch.tensor(history, device=device)] = True
        if any(s.presence_penalty or s.frequency_penalty for s in settings):
            self._counts = torch.zeros(shape, device=device)
            for row, (history, prompt) in enumerate(zip(histories, prompts, strict=True)):
                answer = torch.tensor(history[prompt:], dtype=torch.int64, device=device)
                self._counts[row] = answer.bincount(minlength=vocab_size)
        if any(s.logit_bias for s in settings):
            self._bias = torch.zeros(shape, device=device)
            for row, s in enumerate(settings):
                for token, bias in s.logit_bias.items():
                    self._bias[row, token] = bias
        if any(s.min_tokens for s in settings):
            self._endings = torch.zeros(shape, dtype=torch.bool, device=device)
            for row, ends in enumerate(self._ends):
                self._endings[row, list(ends)] = True

    def select(self, rows: Sequence[int]) -> Sampler:
        there = copy.copy(self)
        there._columns = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(there, name, value[torch.tensor(rows, dtype=torch.int64, device=value.device)])
            elif isinstance(value, list):
                setattr(there, name, [value[row] for row in rows])
        return there

    def concat(self, other: Sampler) -> Sampler:
        num_own, num_new = len(self._settings), len(other._settings)
        there = copy.copy(self)
        there._columns = {}
        for name, own in vars(self).items():
            new = getattr(other, name)
            if isinstance(own, list):
                setattr(there, name, own + new)
            elif isinstance(own, Tensor) or isinstance(new, Tensor):
                # If only one sampler has a penalty, bias or ending, it is zero in the other's rows.
                own = own if own is not None else new.new_zeros(num_own, self._vocab_size)
                new = new if new is not None else own.new_zeros(num_new, self._vocab_size)
                setattr(there, name, torch.cat([own, new]))
        return there

    def _column(self, name: str) -> Tensor:
        """A setting of all rows, [B] on the device."""
        if name not in self._columns:
            dtype = torch.int64 if name in ("seed", "top_k") else torch.float32
            values = [getattr(s, name) for s in self._settings]
            self._columns[name] = torch.tensor(values, dtype=dtype, device=self._device)
        return self._columns[name]

    def choose(self, logits: Tensor, walking: Sequence[bool]) -> Tensor:
        scores = self._constrained(self._penalized(logits.float()), walking)
        tokens = scores.argmax(dim=1)
        if any(s.temperature for s in self._settings):
            positions, temperature = torch.tensor(self.positions, device=logits.device), self._column("temperature")
            noise = gumbel_noise(self._column("seed"), positions, self._vocab_size)
            scores = scores / temperature.clamp(min=1e-6)[:, None]
            drawn = (self._truncated(scores) + noise).argmax(dim=1)
            tokens = torch.where(temperature > 0, drawn, tokens)
        self._remember(tokens, walking)
        return tokens

    def coming_draws(self) -> ComingDraws | None:
        rows = [self._coming_draws_of(row) for row in range(len(self._settings))]
        return ComingDraws(rows) if any(rows) else None

    def _coming_draws_of(self, row: int) -> RowDraws | None:
        s, num_unending = self._settings[row], max(self._settings[row].min_tokens - self._generated[row], 0)
        if s.temperature == 0 and not s.logit_bias and not num_unending:
            return None
        assert s.seed is not None
        temperature = draft_temperature(s.temperature, s.min_p)
        return RowDraws(s.seed, self.positions[row], temperature, s.logit_bias, self._ends[row], num_unending)

    def _penalized(self, logits: Tensor) -> Tensor:
        """Logits after bias, penalties and min_tokens."""
        if self._bias is not None:
            logits = logits + self._bias
        if self._seen is not None:
            penalty = self._column("repetition_penalty")[:, None]
            logits = torch.where(self._seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        if self._counts is not None:
            presence, frequency = (self._column(name)[:, None] for name in ("presence_penalty", "frequency_penalty"))
            logits = logits - presence * (self._counts > 0) - frequency * self._counts
        if self._endings is not None:
            pairs = zip(self._generated, self._settings, strict=True)
            too_early = torch.tensor([number < s.min_tokens for number, s in pairs], device=logits.device)
            logits = logits.masked_fill(self._endings & too_early[:, None], -torch.inf)
        return logits

    def _constrained(self, scores: Tensor, walking: Sequence[bool]) -> Tensor:
        """Set the scores that the rows' grammars forbid to minus infinity."""
        rows = [row for row, constraint in enumerate(self._constraints) if constraint is not None and walking[row]]
        if not rows:
            return scores
        scores = scores.clone()
        for row in rows:
            constraint = self._constraints[row]
            assert constraint is not None
            scores[row] = constraint.mask(scores[row])
        return scores

    def _truncated(self, scores: Tensor) -> Tensor:
        """Set the scores that the rows' settings exclude to minus infinity."""
        if not any(map(truncates, self._settings)):
            return scores
        return truncated(scores, *(self._column(name) for name in ("top_k", "top_p", "min_p")))

    def _remember(self, tokens: Tensor, walking: Sequence[bool]) -> None:
        rows = [row for row, walks in enumerate(walking) if walks]
        for row in rows:
            self.positions[row] += 1
            self._generated[row] += 1
        if self._seen is not None:
            self._seen[rows, tokens[rows]] = True
        if self._counts is not None:
            self._counts[rows, tokens[rows]] += 1
        if any(self._constraints):
            for row in rows:
                if (constraint := self._constraints[row]) is not None:
                    constraint.take(int(tokens[row]))


def truncates(s: SamplingSettings) -> bool:
    return bool(s.temperature > 0 and (s.top_k or s.top_p < 1 or s.min_p))


def is_adjusted(s: SamplingSettings) -> bool:
    """Whether the row's logits depend on its text so far, or on a bias."""
    has_penalty = s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty
    return bool(has_penalty or s.logit_bias or s.min_tokens)
