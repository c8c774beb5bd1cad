"""Answers that must be JSON: grammars made by llguidance, as constraints on the walk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from torch import Tensor

from graft.errors import GraftError

# One space where people put one, and none elsewhere: a model in doubt could write spaces for ever.
_SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANY_OBJECT = {"type": "object"}


class Grammars:
    """Makes constraints for one model."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)

    def compile(self, schema: Any) -> str:
        """The grammar of a JSON schema; a GraftError if there is none, or nothing could ever fit it."""
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_SPACING)
            error = LLMatcher.validate_grammar(grammar, self._tokenizer)
        except Exception as caught:  # the library's errors are of many kinds
            error = str(caught)
        if error:
            raise GraftError(f"this JSON schema cannot be used: {' '.join(error.split())}")
        return grammar

    def constraint(self, grammar: str) -> JsonConstraint:
        return JsonConstraint(LLMatcher(self._tokenizer, grammar, log_level=0))

    def bytes_of(self, token: int) -> bytes:
        """What a token writes; it may be part of a character."""
        return bytes(self._tokenizer.decode_bytes([token]))


class JsonConstraint:
    """One answer's place in its grammar; see `graft.constraint`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._ended = False
        self.error: str | None = None

    def mask(self, scores: Tensor) -> Tensor:
        if self._ended or self.error is not None:
            return scores
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            self.error = f"the grammar failed: {self._matcher.get_error()}"
            return scores
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")[: len(scores)].astype(bool))
        masked = scores.masked_fill(~allowed.to(scores.device), -torch.inf)
        if not bool(masked.isfinite().any()):
            self.error = "response_format cannot be met: nothing that it allows here may be written"
            return scores
        return masked

    def take(self, token: int) -> None:
        if self._ended or self.error is not None:
            return
        self._ended = self._matcher.is_stopped()  # then the token is the answer's end
        if not self._ended and not self._matcher.consume_token(token):
            self.error = f"the grammar failed: {self._matcher.get_error()}"

    def num_allowed(self, tokens: Sequence[int]) -> int:
        return int(self._matcher.validate_tokens(list(tokens)))
