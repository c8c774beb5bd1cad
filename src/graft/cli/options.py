"""Options that several commands share, each declared once, and `takes`, which adds a group of them to a command.

An option that was not given is not passed on, so the library's own default holds. Help repeats that default as text,
since importing it would load torch; a test compares the two.
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
    from graft.model.sampler import SamplingSettings

Given = dict[str, Any]  # what the user gave of a group's options, by the library's names
Group = dict[str, Any]  # the library's name of a setting -> its annotation


def option(kind: Any, flag: str, help: str, default: str | None = None, **more: Any) -> Any:
    """An option that is None unless given; `default` is the library's default as shown in help."""
    shown = f"{help} [dim]\\[default: {default}][/]" if default else help
    return Annotated[kind | None, typer.Option(flag, help=shown, **more)]


_model = functools.partial(option, rich_help_panel="Model")
_sampling = functools.partial(option, rich_help_panel="Sampling")
_ending = functools.partial(option, rich_help_panel="Where an answer ends")

MODEL: Group = {
    "model": _model(str, "--model", "A packaged model, a folder, a .gguf file or a hub id.", DEFAULT_MODEL),
    "device": _model(str, "--device", "cpu, cuda, cuda:1 ...; auto takes a GPU if any.", "auto"),
    "dtype": _model(str, "--dtype", "fp32, bf16, fp16; auto is bf16 on a GPU.", "auto"),
}
LOADING: Group = MODEL | {
    "draft": _model(
        str,
        "--draft",
        "A draft head or a small model: folder, hub id, .gguf or packaged name; mtp; early-exit[:LAYER]; or none.",
        "auto",
        metavar="HEAD",
    ),
    "policy": _model(str, "--policy", "off, graft.", "graft"),
    "datastore": _model(str, "--datastore", "An index to retrieve from too; graft index build.", metavar="DIR"),
    "budget": _model(int, "--budget", "Nodes a round verifies.", "what pays on this machine"),
    "exact": _model(bool, "--exact/--no-exact", "On a GPU: the same bits in any batch.", "no-exact"),
    "keep_learned": _model(
        bool, "--keep-learned/--no-keep-learned", "Keep what is learned for later runs; generate and chat do."
    ),
    "profile": _model(str, "--profile", "What graft tune saved: auto, none or a file.", "auto", metavar="FILE"),
}
SAMPLING: Group = {
    "temperature": _sampling(float, "--temperature", "Higher is more varied; 0 is greedy.", "0"),
    "top_k": _sampling(int, "--top-k", "Draw from the K likeliest; 0 is off.", "0"),
    "top_p": _sampling(float, "--top-p", "Draw from the likeliest that add up to P.", "1"),
    "min_p": _sampling(float, "--min-p", "Leave out tokens below P times the likeliest.", "0"),
    "repetition_penalty": _sampling(float, "--repetition-penalty", "Above 1, prompt and answer repeat less.", "1"),
    "presence_penalty": _sampling(float, "--presence-penalty", "Lower each token the answer has.", "0"),
    "frequency_penalty": _sampling(float, "--frequency-penalty", "Lower it once per occurrence.", "0"),
    "logit_bias": _sampling(list[str], "--logit-bias", "Add VALUE to a token's logit; repeatable.", metavar="ID=VALUE"),
    "seed": _sampling(int, "--seed", "The same seed gives the same text.", "random"),
    "max_new_tokens": _ending(int, "--max-new-tokens", "After this many tokens.", "256, or the room there is"),
    "min_tokens": _ending(int, "--min-tokens", "Not before this many.", "0"),
    "stop": _ending(list[str], "--stop", "Before this text; repeatable.", metavar="TEXT"),
    "stop_token_ids": _ending(list[int], "--stop-token-id", "At this token; repeatable.", metavar="ID"),
    "ignore_eos": _ending(bool, "--ignore-eos", "Not at the model's own end of an answer."),
}


def takes(**groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds the options of each group to a command, which gets those that were given as a dict named like the group."""

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
        # What typer reads. A verb's own code stays a plain function of a few arguments.
        wrapped.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
        return wrapped

    return decorate


def sampling_settings(sampling: Given) -> SamplingSettings:
    """Sampling settings from options, validated; call it before the model is loaded, so that mistakes show at once."""
    from graft.model.sampler import SamplingSettings

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
