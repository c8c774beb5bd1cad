"""The noise of sampling draws, and what is known of coming draws before the target has run.

A sampled token is the argmax of log p / T + g. The noise g depends only on (seed, position, token), so a drafter can
add the same g to its own logits to guess the token that will be drawn. The guess never changes the target's choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from graft.model.hashing import GOLDEN, mix64

# Rows of one kind share their calibration. Kind 0 is greedy, or sampled with unknown noise; the other kinds are sampled
# rows, by temperature.
_TEMPERATURES = (0.5, 0.85)  # limits between the kinds of sampled rows
NUM_KINDS = len(_TEMPERATURES) + 2
NOT_SAMPLED = 0


def draft_temperature(temperature: float, min_p: float = 0.0) -> float:
    """The temperature at which drafts guess the draws of a row with these settings.

    Which tokens min-p excludes depends on the target's probabilities, which a drafter knows only roughly. So drafts use
    a lower temperature, which makes such tokens less likely without excluding any. docs/benchmarks.md says how the
    factor was fitted, and why there is none for top-p.
    """
    return max(temperature / (1 + math.sqrt(min_p)), 1e-6) if temperature else 0.0


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [B, V] in float64, keyed by (seed, position, token). seeds, positions [B] int64.

    The first 53 bits of mix(mix(mix(seed) + position) + token * GOLDEN) give a number u between 0 and 1. The noise is
    -log(-log(u)). mix is the finalizer of SplitMix64; all is modulo 2^64.
    """
    return noise_of_tokens(seeds, positions, torch.arange(vocab_size, device=seeds.device))


def noise_of_tokens(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """`gumbel_noise` of only these tokens [n]. Returns [B, n]."""
    keys = mix64(mix64(seeds) + positions)
    bits = mix64(keys[:, None] + tokens * GOLDEN)
    uniform = ((bits >> 11 & (1 << 53) - 1).double() + 0.5) * 2.0**-53  # never 0, and 1 once in 10^16 tokens
    return -torch.log(-torch.log(uniform))


def added(logits: Tensor, factors: Tensor, noise: Tensor) -> Tensor:
    """logits [B, ...] times factors [B], plus noise, in float32."""
    return torch.addcmul(noise, logits, factors.view(-1, *[1] * (logits.dim() - 1)))


@dataclass(frozen=True)
class RowDraws:
    """What is known of a row's coming draws."""

    seed: int
    position: int  # of the next draw
    temperature: float  # at which drafts guess, see `draft_temperature`; 0: greedy, without noise
    bias: Mapping[int, float] = field(default_factory=dict)  # added to logits; minus infinity: never drawn
    endings: Sequence[int] = ()  # tokens that the next `num_unending` draws cannot give
    num_unending: int = 0
    # If the noise is not keyed: by depth, E = exp(-g) of all tokens, [V] float32 on the host. Deeper noise is unknown.
    times: Sequence[Tensor] | None = None

    @property
    def kind(self) -> int:
        if self.temperature <= 0:
            return NOT_SAMPLED
        return 1 + sum(self.temperature > limit for limit in _TEMPERATURES)

    def share_power(self, num_halvings: float) -> float:
        """How much less likely a token is drawn if its probability is halved so many times: 2^(-num_halvings / T)."""
        return float(0.5 ** (num_halvings / self.temperature)) if self.temperature else 0.0

    @property
    def banned(self) -> list[int]:
        """Tokens that are never drawn."""
        return [token for token, bias in self.bias.items() if bias == -torch.inf]

    def add_to(self, noise: Tensor, tokens: Tensor, depth: int) -> None:
        """Add biases and bans to the noise [V] of a draw, whose noise is replaced first if it is not keyed.

        tokens: [V] target ids.
        """
        if self.times is not None:
            is_known = depth <= len(self.times)
            noise.copy_(-self.times[depth - 1].to(noise.device)[tokens].log() if is_known else torch.zeros_like(noise))
        for token, bias in self.bias.items():
            noise += torch.where(tokens == token, bias / (self.temperature or 1.0), 0.0)
        if depth <= self.num_unending:
            noise.masked_fill_(torch.isin(tokens, torch.tensor(self.endings, device=noise.device)), -torch.inf)


@lru_cache(maxsize=64)
def share_powers(temperature: float, count: int) -> list[float]:
    """`RowDraws.share_power` of 0, 1/2, 1, ... halvings. Cached, since most rows have the same few temperatures."""
    draws = RowDraws(0, 0, temperature)
    return [draws.share_power(number / 2) for number in range(count)]


class ComingDraws:
    """What is known of the coming draws of a batch's rows. Depth 1 is the next draw."""

    def __init__(self, rows: Sequence[RowDraws | None]) -> None:
        """rows: None for a row without known draws, such as a greedy one, which is drafted without noise."""
        self.rows = list(rows)
        self._columns: dict[torch.device, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def select(self, rows: Sequence[int]) -> ComingDraws:
        return ComingDraws([self.rows[row] for row in rows])

    @property
    def is_keyed(self) -> bool:
        """Whether all noise is a function of seed, position and token."""
        return all(row is None or row.times is None for row in self.rows)

    def keys(self) -> tuple[Tensor, Tensor]:
        """By row, the seed and the temperature, which is 0 for a row without known draws."""
        known = [row or RowDraws(0, 0, 0.0) for row in self.rows]
        return torch.tensor([row.seed for row in known]), torch.tensor([row.temperature for row in known])

    @property
    def kinds(self) -> list[int]:
        """By row, the kind of its calibration."""
        return [row.kind if row is not None else NOT_SAMPLED for row in self.rows]

    def perturbed(self, logits: Tensor, tokens: Tensor, depth: int, sharpness: float = 1.0) -> Tensor:
        """A drafter's logits / T + g, whose softmax is the probability that the token is drawn.

        logits: [B, n, V], all of one depth. tokens: [V] target ids. Rows without known draws stay unchanged.
        sharpness: a factor on the logits of sampled rows, for a drafter that is less certain than its target.
        """
        seeds, positions, factors, is_sampled = self._on(logits.device)
        noise = noise_of_tokens(seeds, positions + depth - 1, tokens)  # [B, V]
        noise = noise.where(is_sampled[:, None], 0.0).float()
        for row, own in enumerate(self.rows):
            if own is not None:
                own.add_to(noise[row], tokens, depth)
        factors = torch.where(is_sampled, sharpness * factors, factors)
        return added(logits, factors, noise[:, None])

    def factors(self, device: torch.device) -> Tensor:
        """[B] 1 / T; 1 for a row without known draws."""
        return self._on(device)[2]

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Seeds, positions, 1 / temperature (1 for greedy rows) and whether the row is sampled, [B] on a device."""
        if device not in self._columns:
            seeds, temperatures = (part.to(device) for part in self.keys())
            positions = torch.tensor([row.position if row is not None else 0 for row in self.rows], device=device)
            factors = torch.where(temperatures > 0, 1 / temperatures, 1.0)
            self._columns[device] = seeds, positions, factors, temperatures > 0
        return self._columns[device]
