"""Options shared by several commands, and `takes`, which adds groups of them to a command.

Options that the user leaves out are not passed on, so the library's defaults apply. `--help` repeats those defaults as
text because importing them would load torch; a test compares the two.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graft.errors import GraftError
from graft.hub.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from graft.model.sampling_settings import SamplingSettings

Given = dict[str, Any]  # the options of a group that the user gave, by setting name
Group = dict[str, Any]  # setting name in the library -> typer annotation


def option(kind: Any, help: str, default: str | None = None, *, flag: str | None = None, **more: Any) -> Any:
    """An option that is None unless given.

    default: the library's default, for `--help` only. flag: if it is not the setting's name.
    """
    shown = f"{help} [dim]\\[default: {default}][/]" if default else help
    return Annotated[kind | None, typer.Option(*([flag] if flag else []), help=shown, **more)]


# Files of prompts have these names in every verb.
PROMPTS = typer.Option("--prompts", help="A JSON-lines file of prompts; repeatable.", metavar="FILE")
LIMIT = typer.Option("--limit", help="Use only this many prompts of each file.", metavar="N")

_model = functools.partial(option, rich_help_panel="Model")
_sampling = functools.partial(option, rich_help_panel="Sampling")
_ending = functools.partial(option, rich_help_panel="Stopping")

MODEL: Group = {
    "model": _model(str, "A packaged model, a folder, a .gguf file or a hub id.", DEFAULT_MODEL),
    "device": _model(str, "cpu, cuda, cuda:1 ...; auto uses a GPU if there is one.", "auto"),
    "dtype": _model(str, "fp32, bf16 or fp16; auto is bf16 on a GPU, fp32 on a CPU.", "auto"),
}
LOADING: Group = MODEL | {
    "draft": _model(
        str,
        "The drafter: a draft head or small model (folder, hub id, .gguf or packaged name), mtp, early-exit[:LAYER] "
        "or none.",
        "auto",
        metavar="HEAD",
    ),
    "policy": _model(str, "off, graft. off is plain decoding.", "graft"),
    "budget": _model(int, "Draft nodes verified per round.", "the fastest on this machine"),
    "exact": _model(bool, "On a GPU, compute the same bits whatever else is in the batch.", "no-exact"),
    "keep_learned": _model(
        bool, "Save what this run learns, for later runs.", "on for generate and chat, off elsewhere"
    ),
    "profile": _model(str, "The profile that graft tune saved: auto, none or a file.", "auto", metavar="FILE"),
}
SAMPLING: Group = {
    "temperature": _sampling(float, "Higher is more varied; 0 is greedy.", "0"),
    "top_k": _sampling(int, "Sample from the K likeliest tokens; 0 is off.", "0"),
    "top_p": _sampling(float, "Sample from the likeliest tokens whose probabilities add up to P.", "1"),
    "min_p": _sampling(float, "Drop tokens less likely than P times the likeliest.", "0"),
    "repetition_penalty": _sampling(float, "Above 1, make tokens of the prompt and the answer less likely.", "1"),
    "presence_penalty": _sampling(float, "Subtract this from the logit of each token in the answer so far.", "0"),
    "frequency_penalty": _sampling(float, "Subtract this once per occurrence of a token in the answer so far.", "0"),
    "logit_bias": _sampling(list[str], "Add VALUE to a token's logit; repeatable.", metavar="ID=VALUE"),
    "seed": _sampling(int, "The same seed gives the same text.", "random"),
    "max_new_tokens": _ending(int, "Stop after this many tokens.", "256, or what the context has room for"),
    "min_tokens": _ending(int, "Do not stop before this many tokens.", "0"),
    "stop": _ending(list[str], "Stop before this text; repeatable.", metavar="TEXT"),
    "stop_token_ids": _ending(list[int], "Stop at this token; repeatable.", metavar="ID", flag="--stop-token-id"),
    "ignore_eos": _ending(bool, "Do not stop at the model's end-of-text token.", flag="--ignore-eos"),
}


def takes(**groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add groups of options to a command. It receives those the user gave as one dict per group, named as here."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def wrapped(**arguments: Any) -> None:
            for name, group in groups.items():
                values = {setting: arguments.pop(setting) for setting in group}
                arguments[name] = {setting: v for setting, v in values.items() if v not in (None, [])}
            verb(**arguments)

        own = [p for p in inspect.signature(verb, eval_str=True).parameters.values() if p.name not in groups]
        shared = [
            inspect.Parameter(setting, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for group in groups.values()
            for setting, annotation in group.items()
        ]
        # Typer reads this signature.
        wrapped.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
        return wrapped

    return decorate


def sampling_settings(sampling: Given) -> SamplingSettings:
    """Validated sampling settings. Call this before loading the model, so that mistakes show at once."""
    from graft.model.sampling_settings import SamplingSettings

    return SamplingSettings.of({**sampling, "logit_bias": _biases(sampling.get("logit_bias", []))})


def _biases(words: list[str]) -> dict[int, float]:
    biases = {}
    for word in words:
        token, _, bias = word.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError as error:
            raise GraftError(f"--logit-bias takes ID=VALUE such as 42=-1.5, not {word!r}") from error
    return biases
