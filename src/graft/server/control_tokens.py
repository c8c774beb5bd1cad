"""Control tokens in what clients write, such as `<|im_start|>`, are encoded as ordinary text.

The chat template writes control tokens too, and those must stay. So the client's are replaced by placeholders before
the template is rendered. The rendered text is then encoded by a copy of the tokenizer, in which control tokens have
secret names: the template's are renamed, and the client's are put back as text that the copy has no token for. Texts
without control tokens of the client are not touched by any of this.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from graft.server.refusals import Json
from graft.server.tool_parsers import THINK_MARKERS

_SAMPLE = "Hello, World!  12 \n\n\tna\u00efve \u4f60\u597d \U0001f642 end"


@dataclass(frozen=True)
class Hidden:
    """What a template is rendered with. placeholders: one for each control token."""

    given: Json
    placeholders: dict[str, str]
    nonce: str = ""


class ControlTokens:
    """The control tokens of one tokenizer: its special tokens, but for the markers of reasoning.

    Templates look for the markers of reasoning in earlier answers, so these cannot be replaced.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)  # None: it is not a fast one
        added = self._backend.get_added_tokens_decoder() if self._backend is not None else {}
        names = [token.content for token in added.values() if token.special and token.content not in THINK_MARKERS]
        names.sort(key=len, reverse=True)  # tokenizers take the longest, too
        self._pattern = re.compile("|".join(map(re.escape, names))) if names else None
        nonce = secrets.token_hex(8)
        self._secret_names = {name: f"q{nonce}c{number}q" for number, name in enumerate(names)}
        self._lock = threading.Lock()
        self._copy: _Copy | None = None  # made when it is first needed
        self._has_failed = False

    def hide(self, given: Json) -> Hidden:
        """Replace the control tokens in all texts of a JSON object by placeholders."""
        pattern, nonce, placeholders = self._pattern, secrets.token_hex(8), dict[str, str]()
        if pattern is None:
            return Hidden(given, {})

        def placeholder(found: re.Match[str]) -> str:
            return placeholders.setdefault(found[0], f"q{nonce}u{len(placeholders)}q")

        def replaced(value: Any) -> Any:
            if isinstance(value, str):
                return pattern.sub(placeholder, value)
            if isinstance(value, list):
                return [replaced(part) for part in value]
            if isinstance(value, dict):
                return {replaced(key): replaced(part) for key, part in value.items()}
            return value

        return Hidden(replaced(given), placeholders, nonce)

    def encode(self, text: str, hidden: Hidden) -> list[int] | None:
        """Token ids of a text that was rendered with placeholders; None if it has to be rendered without them.

        That is so if nothing was hidden, if the template changed a placeholder, if the tokenizer cannot be copied,
        or if the text is invalid.
        """
        if not hidden.placeholders or self._pattern is None:
            return None
        copy = self._copied()
        if copy is None:
            return None
        named = self._pattern.sub(lambda found: self._secret_names[found[0]], text)
        for name, placeholder in hidden.placeholders.items():
            named = named.replace(placeholder, name)
        if hidden.nonce in named.lower():
            return None
        try:
            return copy.encode(named)
        except UnicodeEncodeError:  # half a character, which is refused with its place
            return None

    def _copied(self) -> _Copy | None:
        with self._lock:
            if self._copy is None and not self._has_failed:
                try:
                    self._copy = _Copy(self._backend, self._secret_names)
                    self._has_failed = not self._is_faithful(self._copy)
                except Exception:  # an unusual tokenizer, whose control tokens are part of its merges, for instance
                    self._has_failed = True
            return None if self._has_failed else self._copy

    def _is_faithful(self, copy: _Copy) -> bool:
        """Whether the copy gives the tokenizer's own ids for a text with every control token."""
        own = "".join(f"{_SAMPLE}{name}{_SAMPLE}\n{name}" for name in self._secret_names)
        renamed = "".join(f"{_SAMPLE}{name}{_SAMPLE}\n{name}" for name in self._secret_names.values())
        expected = self._tokenizer.encode(own, add_special_tokens=False, verbose=False)
        return copy.encode(renamed) == list(expected)


class _Copy:
    """A copy of a tokenizer in which some added tokens have other names."""

    def __init__(self, backend: Any, names: dict[str, str]) -> None:
        """names: new names by old names."""
        spec = json.loads(backend.to_str())
        spec |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        model = spec["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(token, token): number for token, number in model["vocab"].items()}
        else:  # a list of pairs of a piece and its score
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        self._tokenizer = Tokenizer.from_str(json.dumps(spec))
        self._ids: dict[int, int] = {}  # by the copy's ids of added tokens, the original's
        for number, token in sorted(backend.get_added_tokens_decoder().items()):
            name = names.get(token.content, token.content)
            flags = {key: getattr(token, key) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
            added = AddedToken(name, **flags)
            (self._tokenizer.add_special_tokens if token.special else self._tokenizer.add_tokens)([added])
            new = self._tokenizer.token_to_id(name)
            assert new is not None
            self._ids[new] = number

    def encode(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [self._ids.get(token, token) for token in ids]
