"""Prompts: text, chat messages or token ids become a checked list of token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from jinja2 import TemplateError
from torch import Tensor

from graft.errors import GraftError
from graft.settings import require

Prompt = str | Sequence[int] | Tensor | np.ndarray | Sequence[Mapping[str, str]]


def encode_prompt(prompt: Prompt, tokenizer: Any | None, vocab_size: int, is_rendered: bool = False) -> list[int]:
    """Token ids of a prompt, checked; see `Engine.encode`."""
    given: object = prompt
    if isinstance(prompt, str):
        given = _encode(require_tokenizer(tokenizer, "text"), prompt, not is_rendered) if prompt else []
    elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        text = render_chat(cast(Sequence[Mapping[str, str]], prompt), tokenizer)
        given = _encode(tokenizer, text, add_special_tokens=False)
    ids = _token_ids(given, vocab_size)
    require(bool(ids), "the prompt is empty; give at least one token of text")
    return ids


def render_chat(messages: Sequence[Mapping[str, Any]], tokenizer: Any | None, **options: Any) -> str:
    """Chat messages as text, rendered by the tokenizer's chat template; see `Engine.render_chat`."""
    tokenizer = require_tokenizer(tokenizer, "chat")
    plain = [_plain_message(message, number) for number, message in enumerate(messages, start=1)]
    require(bool(tokenizer.chat_template), "this model has no chat template; give the prompt as text")
    try:
        text = tokenizer.apply_chat_template(plain, tokenize=False, **{"add_generation_prompt": True, **options})
    except TemplateError as error:  # raised by the template itself, for example for a role that it does not support
        reason = str(error).partition("\n")[0]
        raise GraftError(f"the model's chat template refuses these messages: {reason}") from error
    return str(text)


def require_tokenizer(tokenizer: Any | None, what: str) -> Any:
    """The tokenizer, or a GraftError that says which kind of prompt needs one."""
    require(tokenizer is not None, f"{what} prompts need a tokenizer; pass one, or give token ids")
    return tokenizer


def _encode(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    _check_text(text, "the prompt")
    # verbose=False: no warning about the length, which the engine checks itself.
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))


def _token_ids(prompt: object, vocab_size: int) -> list[int]:
    """Token ids given as a list, an array or a tensor, as a checked list."""
    if isinstance(prompt, Tensor | np.ndarray):
        one_row = prompt.ndim == 1 or (prompt.ndim == 2 and len(prompt) == 1)
        shape = list(prompt.shape)
        require(one_row, f"the prompt's token ids have shape {shape}, not one row: generate_batch takes several")
        prompt = prompt.reshape(-1).tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise GraftError(
            f"a prompt is text, token ids or a list of chat messages, not {type(prompt).__name__}: put a single "
            "message into a list; of a tokenizer's output give the input_ids"
        )
    ids = []
    for token in prompt:
        if isinstance(token, Sequence | np.ndarray) or (isinstance(token, Tensor) and token.ndim > 0):
            raise GraftError(f"the prompt holds {token!r} in place of a token id: generate_batch takes several prompts")
        value = token.item() if isinstance(token, Tensor | np.generic) else token
        if type(value) is not int or not 0 <= value < vocab_size:  # `type`, because True is an int too
            raise GraftError(f"the prompt holds {value!r}, but token ids of this model are 0 to {vocab_size - 1}")
        ids.append(value)
    return ids


def _plain_message(message: Any, number: int) -> dict[str, Any]:
    """A chat message whose content is one text: text parts are concatenated. number: the message's, from 1."""
    good = isinstance(message, Mapping) and {"role", "content"} <= set(message)
    require(good, f"a chat message needs 'role' and 'content', got {message!r}")
    role, content = message["role"], message["content"]
    require(isinstance(role, str), f"the role of a chat message is text, not {role!r}")
    if isinstance(content, list | tuple):
        for part in content:
            good = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
            kind = part.get("type") if isinstance(part, Mapping) else part
            require(good, f"message {number} has a part {kind!r}: parts of a chat message are of type 'text' here")
        content = "".join(part["text"] for part in content)
    has_calls = content is None and bool(message.get("tool_calls"))
    require(isinstance(content, str) or has_calls, f"the content of message {number} is text, not {content!r}")
    _check_text(content or "", f"message {number}")
    return {**message, "content": content}


def _check_text(text: str, what: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise GraftError(f"{what} is not text: it holds half a character at place {error.start}") from error
