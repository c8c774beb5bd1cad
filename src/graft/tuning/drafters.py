"""Drafters of a model: their speed when `graft tune` measured them on this machine, and the fastest one.

Each result is kept in the file of its drafter, see `learned`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from graft.engine import Engine
from graft.errors import GraftError
from graft.home import is_gguf
from graft.hub.draft_names import NONE, is_here, packaged_head_of, smaller_models
from graft.hub.drafters import NAMED, name_of
from graft.hub.registry import PACKAGED_MODELS
from graft.progress import Report
from graft.tuning import MIN_PROMPTS, learned
from graft.tuning.profile import About, Profile
from graft.tuning.profile_header import ANEW, read_speeds
from graft.tuning.turns import measure_turns, speed_of


@dataclass(frozen=True)
class Measured:
    """Speed of a drafter, with grafts, on prompts that it had not seen."""

    draft: str  # as `--draft` takes it; an absolute path for a folder
    speed: float  # tokens per second / those of plain decoding
    tokens_per_second: float
    mean_accepted: float
    passes: float  # per round
    prompts: int
    date: str  # ISO 8601


def measure(
    engine: Engine,
    draft: str,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    progress: Callable[[Report], None] = lambda report: None,
) -> Measured:
    """Answer the prompts in turns, plainly and with the engine, and compare. draft: the name of its drafter."""
    # One-time work. Not with a whole prompt, whose answer would be recalled when the prompt comes again.
    engine.generate(prompts[0][: (len(prompts[0]) + 1) // 2], max_new_tokens=min(max_new_tokens, 8))
    turns = measure_turns(engine, prompts, max_new_tokens, progress)
    speed, stats = speed_of(turns), [turn.stats for turn in turns]
    return Measured(
        draft=draft,
        speed=speed.ratio,
        tokens_per_second=sum(each.tokens for each in stats) / sum(turn.ours for turn in turns),
        mean_accepted=speed.mean_accepted,
        passes=sum(each.draft_passes for each in stats) / sum(each.rounds for each in stats),
        prompts=len(prompts),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def split_prompts(prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts to learn from and prompts to measure with; if there are few, all are for learning.

    Repeated prompts are left out: a prompt that was asked before is recalled, not decoded.
    """
    prompts = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))]
    if len(prompts) < MIN_PROMPTS:
        return list(prompts), []
    parts: tuple[list[list[int]], list[list[int]]] = ([], [])
    for number, prompt in enumerate(prompts, start=1):
        parts[number % MIN_PROMPTS == 0].append(prompt)
    return parts


def remember(about: About, result: Measured) -> None:
    """Store a result, which replaces an earlier one of the same drafter."""
    learned.add(Profile(about, {}, speeds=speeds_of(result)))


def speeds_of(result: Measured) -> dict[str, Any]:
    """A result as a profile holds it."""
    return {result.draft: asdict(result)}


def known_results(about: About) -> list[Measured]:
    """Stored results for this model on this machine, the fastest first."""
    results: list[Measured] = []
    for path in learned.files_of_model(about):
        try:
            results += map(_read, read_speeds(path).values())
        except GraftError as error:
            learned.ignore(error)
        except (ValueError, TypeError, KeyError):
            learned.ignore(GraftError(f"a speed in {path} is damaged: {ANEW}"))
    latest = {each.draft: each for each in sorted(results, key=lambda each: each.date)}  # heads may share a name
    return sorted(latest.values(), key=lambda each: -each.speed)


def best_draft(about: About) -> str | None:
    """The fastest drafter that is still available; None if nothing was measured."""
    return next((each.draft for each in known_results(about) if is_here(each.draft)), None)


def best_variant(about: About, name: str) -> str | None:
    """The fastest drafter NAME:VARIANT; None if none was measured."""
    return next((each.draft for each in known_results(about) if each.draft.startswith(f"{name}:")), None)


def drafts_for(name: str, model: PreTrainedModel) -> list[str]:
    """Names of drafters that fit a model: none, its packaged head, those made of the model itself, smaller packaged
    models, and those measured before."""
    heads = [head] if (head := packaged_head_of(name)) is not None else []
    smaller = smaller_models(name, 2 * model.num_parameters())  # packaged models are in bf16
    measured = [each.draft for each in known_results(About.of_model(model))]
    own = [name for name in NAMED if NAMED[name].is_for(model) and name not in map(name_of, measured)]
    return list(dict.fromkeys([NONE, *heads, *own, *smaller, *measured]))


def full_name(draft: str | None) -> str:
    """A drafter's name, with paths made absolute."""
    if draft is None:
        return NONE
    path = Path(draft).expanduser()
    is_path = draft not in (*PACKAGED_MODELS, *NAMED) and (path.is_dir() or is_gguf(path))
    return str(path.resolve()) if is_path else draft


def _read(facts: dict[str, Any]) -> Measured:
    result = Measured(**{field.name: facts[field.name] for field in fields(Measured)})
    speed = float(result.speed)
    if not isinstance(result.draft, str) or not isinstance(result.date, str) or not math.isfinite(speed):
        raise ValueError("a drafter needs a name, a speed and a date")
    return replace(result, speed=speed)
