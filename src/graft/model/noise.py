"""The noise of draws, and what is known of coming draws before the target has run.

A sampled token is the argmax of log p / T + g. The noise g depends on (seed, position, token) alone, so a drafter can
add the same g to its own logits and guess the draw itself. The target's choice never depends on what was guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graft.hashing import GOLDEN, mix64

# Rows of one kind share their calibration. Kind 0 is greedy, or sampled with noise that is not known beforehand; the
# others are sampled rows, by temperature.
_TEMPERATURES = (0.5, 0.85)  # limits between the kinds of sampled rows
NUM_KINDS = len(_TEMPERATURES) + 2
NOT_SAMPLED = 0


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [B, V] in float64, keyed by (seed, position, token). seeds, positions [B] int64.

    The first 53 bits of mix(mix(mix(seed) + position) + token * GOLDEN) give a number u between 0 and 1. The noise is
    -log(-log(u)). mix is the finalizer of SplitMix64; all is modulo 2^64.
    """
    return noise_of_tokens(seeds, positions, torch.arange(vocab_size, device=seeds.device))


def noise_of_tokens(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """`gumbel_noise` of these tokens alone: [n], the same for all rows, or [B, n]. Returns [B, n]."""
    keys = mix64(mix64(seeds) + positions)
    bits = mix64(keys[:, None] + tokens * GOLDEN)
    uniform = ((bits >> 11 & (1 << 53) - 1).double() + 0.5) * 2.0**-53  # in (0, 1), never its ends
    return -torch.log(-torch.log(uniform))


def added(logits: Tensor, factors: Tensor, noise: Tensor) -> Tensor:
    """logits [B, ...] times factors [B], plus noise, in float32."""
    return torch.addcmul(noise, logits, factors.view(-1, *[1] * (logits.dim() - 1)))


@dataclass(frozen=True)
class RowDraws:
    """What is known of a row's coming draws."""

    seed: int
    position: int  # of the next draw
    temperature: float  # 0: greedy, without noise
    bias: Mapping[int, float] = field(default_factory=dict)  # added to logits; minus infinity: never drawn
    endings: Sequence[int] = ()  # tokens that the next `num_unending` draws cannot give
    num_unending: int = 0
    # Where the noise is not keyed: E = exp(-g) of all tokens, [V] float32 on the host, by depth. Deeper is unknown.
    times: Sequence[Tensor] | None = None

    @property
    def kind(self) -> int:
        if self.temperature <= 0:
            return NOT_SAMPLED
        return 1 + sum(self.temperature > limit for limit in _TEMPERATURES)

    def share_power(self, num_halvings: float) -> float:
        """How much less likely to be drawn a token is whose probability is halved so many times."""
        return float(0.5 ** (num_halvings / max(self.temperature, 1e-6))) if self.temperature else 0.0

    @property
    def banned(self) -> list[int]:
        """Tokens that are never drawn."""
        return [token for token, bias in self.bias.items() if bias == -torch.inf]


class ComingDraws:
    """What is known of the coming draws of a batch's rows. Depth 1 is the next draw."""

    def __init__(self, rows: Sequence[RowDraws | None]) -> None:
        """rows: None for a row of which nothing is known, such as a greedy one: its drafts are as ever."""
        self.rows = list(rows)
        self._columns: dict[torch.device, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def select(self, rows: Sequence[int]) -> ComingDraws:
        return ComingDraws([self.rows[row] for row in rows])

    @property
    def kinds(self) -> list[int]:
        """By row, the kind of its calibration."""
        return [row.kind if row is not None else NOT_SAMPLED for row in self.rows]

    def perturbed(self, logits: Tensor, tokens: Tensor, depth: int, sharpness: float = 1.0) -> Tensor:
        """A drafter's logits / T + g, whose softmax is the probability that the token is drawn.

        logits: [B, n, V], all of one depth. tokens: [V] target ids. Rows of which nothing is known stay as they are.
        sharpness: a factor of the logits of sampled rows, for a drafter that is less certain than its target.
        """
        noise = self.noise(tokens, range(depth, depth + 1), logits.device)
        return self.added(logits, noise, sharpness)

    def noise(self, tokens: Tensor, depths: Sequence[int], device: torch.device) -> Tensor:
        """The noise and bias over temperature, [B, depths, V] in float32. tokens: [V] or [B, depths, V] target ids."""
        num_rows, num_depths = len(self.rows), len(depths)
        seeds, positions, _, is_sampled = self._on(device)
        ids = tokens.to(device).expand(num_rows, num_depths, tokens.shape[-1])
        places = positions[:, None] + torch.tensor([depth - 1 for depth in depths], device=device)
        found = noise_of_tokens(seeds.repeat_interleave(num_depths), places.flatten(), ids.flatten(0, 1))
        found = found.view_as(ids).where(is_sampled[:, None, None], 0.0).float()
        for number, row in enumerate(self.rows):
            if row is None:
                continue
            if row.times is not None:
                for place, depth in enumerate(depths):
                    times = row.times[depth - 1].to(device)[ids[number, place]] if depth <= len(row.times) else None
                    found[number, place] = 0.0 if times is None else -times.log()
            for token, bias in row.bias.items():
                found[number] += torch.where(ids[number] == token, bias / (row.temperature or 1.0), 0.0)
            for place in (place for place, depth in enumerate(depths) if depth <= row.num_unending):
                ends = torch.isin(ids[number, place], torch.tensor(row.endings, device=device))
                found[number, place].masked_fill_(ends, -torch.inf)
        return found

    def added(self, logits: Tensor, noise: Tensor, sharpness: float = 1.0) -> Tensor:
        """logits [B, ...] / T + noise. A row of which nothing is known has no noise and a T of 1: it stays as it is."""
        _, _, factors, is_sampled = self._on(logits.device)
        if sharpness != 1.0:
            factors = torch.where(is_sampled, sharpness * factors, factors)
        return added(logits, factors, noise)

    def factors(self, device: torch.device) -> Tensor:
        """[B] 1 / T; 1 for a row of which nothing is known."""
        return self._on(device)[2]

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Seeds, positions, 1 / temperature (1 for greedy rows) and whether the row is sampled, [B] on a device."""
        if device not in self._columns:
            known = [row or RowDraws(0, 0, 0.0) for row in self.rows]
            self._columns[device] = (
                torch.tensor([row.seed for row in known], device=device),
                torch.tensor([row.position for row in known], device=device),
                torch.tensor(
                    [1 / max(row.temperature, 1e-6) if row.temperature else 1.0 for row in known], device=device
                ),
                torch.tensor([row.temperature > 0 for row in known], device=device),
            )
        return self._columns[device]
