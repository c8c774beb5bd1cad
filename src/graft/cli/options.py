"""The options that several verbs share, each declared once, and `takes`, which gives a verb a group of them.

An option that was not given is not passed on, so that its default is the library's own.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from graft.errors import GraftError
from graft.models.registry import DEFAULT_MODEL

Given = dict[str, Any]  # what the user gave of a group's options, by the library's names
Group = Mapping[str, Any]  # the library's name of a setting -> its annotation


def _option(kind: Any, flag: str, help: str, default: str | bool = False, **more: Any) -> Any:
    return Annotated[kind | None, typer.Option(flag, help=help, show_default=default, **more)]


def _biases(words: list[str] | None) -> dict[int, float] | None:
    """`--logit-bias 5=-2 --logit-bias 7=1` as a mapping."""
    biases = {}
    for word in words or ():
        token, _, bias = word.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError as error:
            raise GraftError(f"--logit-bias takes ID=VALUE such as 42=-1.5, not {word!r}") from error
    return biases or None


_sampling = functools.partial(_option, rich_help_panel="Sampling")
_ending = functools.partial(_option, rich_help_panel="Where answers end")

LOADING: Group = {
    "model": _option(str, "--model", "A packaged model, a local folder or a hub id.", DEFAULT_MODEL),
    "policy": _option(str, "--policy", "What a round verifies: graft, or off for plain decoding.", "graft"),
    "device": _option(str, "--device", "cpu, cuda, cuda:1 ...; auto is a GPU if there is one.", "auto"),
    "dtype": _option(str, "--dtype", "fp32, bf16, fp16; auto is fp32 on a CPU, bf16 on a GPU.", "auto"),
}

SAMPLING: Group = {
    "temperature": _sampling(float, "--temperature", "0 is greedy; more is more varied.", "0"),
    "top_k": _sampling(int, "--top-k", "Draw from the K likeliest tokens; 0 is off.", "0"),
    "top_p": _sampling(float, "--top-p", "Draw from the likeliest tokens that hold this much together.", "1"),
    "min_p": _sampling(float, "--min-p", "Leave out tokens below this share of the likeliest one's.", "0"),
    "repetition_penalty": _sampling(
        float, "--repetition-penalty", "Above 1, tokens of prompt and answer come again less.", "1"
    ),
    "presence_penalty": _sampling(
        float, "--presence-penalty", "Taken off the logit of tokens that are in the answer.", "0"
    ),
    "frequency_penalty": _sampling(
        float, "--frequency-penalty", "Taken off it for each time they are in the answer.", "0"
    ),
    "logit_bias": _sampling(
        list[str],
        "--logit-bias",
        "Add VALUE to a token's logit; may be repeated.",
        metavar="ID=VALUE",
        callback=_biases,
    ),
    "seed": _sampling(int, "--seed", "The same seed gives the same text, with any policy.", "random"),
    "max_new_tokens": _ending(int, "--max-new-tokens", "At most this many tokens.", "256"),
    "min_tokens": _ending(int, "--min-tokens", "Nothing ends the answer before this many.", "0"),
    "stop": _ending(list[str], "--stop", "End before this text; may be repeated."),
    "stop_token_ids": _ending(list[int], "--stop-token-id", "End at this token; may be repeated."),
    "ignore_eos": _ending(bool, "--ignore-eos", "Go on past the model's own end."),
}


def takes(**groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a verb the options of each group, collected in its parameter of the group's name."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def wrapped(**arguments: Any) -> None:
            for name, group in groups.items():
                values = {option: arguments.pop(option) for option in group}
                arguments[name] = {option: value for option, value in values.items() if value not in (None, [])}
            verb(**arguments)

        own = [p for p in inspect.signature(verb).parameters.values() if p.name not in groups]
        shared = [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for group in groups.values()
            for option, annotation in group.items()
        ]
        wrapped.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
        return wrapped

    return decorate
