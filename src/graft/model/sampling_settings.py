"""Sampling settings: how tokens are chosen and when an answer ends. They are checked without importing torch."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from graft.settings import Settings, require

_DEFAULT_NEW_TOKENS = 256


@dataclass(frozen=True)
class SamplingSettings(Settings):
    """How tokens are chosen and when an answer ends. The defaults are greedy."""

    max_new_tokens: int | None = None  # None: 256, or fewer if the model's context has less room after the prompt
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and answer; divides or multiplies the logit
    presence_penalty: float = 0.0  # over the answer; subtracted once per token seen
    frequency_penalty: float = 0.0  # over the answer; subtracted per occurrence
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: a random one, which the result reports
    min_tokens: int = 0  # the answer does not end before
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives to report beside each token's own log-probability
    n: int = 1  # answers per prompt

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, empty in (("stop", ()), ("stop_token_ids", ()), ("logit_bias", {})):
            if getattr(self, name) is None:
                object.__setattr__(self, name, empty)
        if self.seed is None:
            object.__setattr__(self, "seed", secrets.randbits(31))
        for name in ("max_new_tokens", "top_k", "min_tokens", "n", "seed"):
            if name == "max_new_tokens" and self.max_new_tokens is None:
                continue
            require(_is_int(getattr(self, name)), f"{name} must be a whole number, not {getattr(self, name)!r}")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            finite = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            require(finite, f"{name} must be a finite number, not {value!r}")
        longest = self.most_new_tokens
        require(longest >= 1, f"max_new_tokens must be at least 1, not {longest}")
        require(self.temperature >= 0, f"temperature must be 0 (greedy) or more, not {self.temperature}")
        require(self.top_k >= 0, f"top_k must be 0 (off) or more, not {self.top_k}")
        require(0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, not {self.top_p}")
        require(0 <= self.min_p <= 1, f"min_p must be between 0 and 1, not {self.min_p}")
        require(self.repetition_penalty > 0, f"repetition_penalty must be above 0, not {self.repetition_penalty}")
        require(self.min_tokens >= 0, f"min_tokens must be 0 or more, not {self.min_tokens}")
        require(self.min_tokens <= longest, f"min_tokens ({self.min_tokens}) is more than max_new_tokens ({longest})")
        texts = isinstance(self.stop, Sequence) and all(isinstance(text, str) for text in self.stop)
        require(texts, f"stop must be text, or a list of texts, not {self.stop!r}")
        require(isinstance(self.stop_token_ids, Sequence), "stop_token_ids must be a list of token ids")
        require(isinstance(self.logit_bias, Mapping), "logit_bias must map token ids to numbers")
        require(abs(self.seed) < 2**62, f"seed must be below 2**62, not {self.seed}")  # type: ignore[arg-type]
        require(self.top_k < 2**31, f"top_k must be below 2**31, not {self.top_k}")
        require(self.n >= 1, f"n must be at least 1, not {self.n}")
        require(all(isinstance(s, str) and s for s in self.stop), "stop strings must be non-empty text")
        require(all(_is_int(i) for i in self.stop_token_ids), "stop_token_ids must be whole numbers")
        require(
            all(_is_int(i) and isinstance(b, int | float) and b < math.inf for i, b in self.logit_bias.items()),
            "logit_bias must map token ids to numbers below infinity",
        )
        require(
            self.logprobs is None or (_is_int(self.logprobs) and self.logprobs >= 0),
            f"logprobs must be 0 or more, not {self.logprobs!r}",
        )

    @property
    def most_new_tokens(self) -> int:
        return _DEFAULT_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens

    def fitted(self, num_prompt_tokens: int, context: int | None) -> SamplingSettings:
        """Fill in `max_new_tokens` for a prompt and a context of these lengths (None: no limit)."""
        if self.max_new_tokens is not None:
            return self
        room = _DEFAULT_NEW_TOKENS if context is None else max(context - num_prompt_tokens, 1)
        return replace(self, max_new_tokens=min(max(room, self.min_tokens), _DEFAULT_NEW_TOKENS))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Require that the model has all token ids named in the settings."""
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(self, name):
                require(0 <= token < vocab_size, f"{name}: the model has no token {token} (ids go to {vocab_size - 1})")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
