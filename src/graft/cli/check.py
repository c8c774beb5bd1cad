"""`graft check`: check that speculation does not change a single token of the answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graft.cli.options import LIMIT, LOADING, PROMPTS, SAMPLING, Given, sampling_settings, takes
from graft.cli.terminal import load_engine, notes
from graft.errors import GraftError
from graft.prompt_files import PromptRow, read_prompts, user_message
from graft.settings import require

if TYPE_CHECKING:
    from graft.checking.compare import Candidate, Comparison
    from graft.engine import Engine
    from graft.model.sampler import SamplingSettings

_BUDGET = 16  # nodes of every tree
_TOKENS_PER_ACCEPTED = 20  # at least one token in 20 must come from a tree


@takes(loading=LOADING, sampling=SAMPLING)
def check(
    prompts: Annotated[list[Path], PROMPTS],
    limit: Annotated[int | None, LIMIT] = None,
    min_accepted: Annotated[
        int | None,
        typer.Option(
            help="Fail if fewer than N tokens are accepted from trees. [dim]\\[default: one for every 20 tokens; 0 "
            "with --policy off][/]",
            metavar="N",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    *,
    loading: Given,
    sampling: Given,
) -> None:
    """Decode prompts with and without speculation, and compare the answers token by token.

    A line of a file is {"prompt": TEXT} or {"turns": [TEXT, ...]}, of which only the first turn is used.

    In fp32 and without --stop, the answers are also compared with those of transformers' generate.

    Every round verifies a tree of 16 nodes, even if trees do not pay on this machine; --budget N changes that.

    Exits with 1 if an answer differs, unless the model scores both tokens exactly equal.

    Exits with 1 too if so few tokens were accepted from trees that the comparison says little about speculation.

    [dim]Example:[/] graft check --prompts questions.jsonl --limit 5 --max-new-tokens 64
    """
    require(min_accepted is None or min_accepted >= 0, f"--min-accepted must be at least 0, not {min_accepted}")
    settings = sampling_settings(sampling)
    files = {path: read_prompts(path, limit) for path in prompts}
    is_plain = loading.get("policy") == "off"
    wanted = loading if is_plain else {"budget": _BUDGET} | loading
    engine = load_engine(wanted, max_new_tokens=settings.max_new_tokens)
    rows = list(_compare(engine, files, settings))
    report = _report(rows, engine, settings)
    if min_accepted is None:
        min_accepted = 0 if is_plain else math.ceil(report["tokens"] / _TOKENS_PER_ACCEPTED)
    report["min_accepted"] = min_accepted
    if as_json:
        print(json.dumps(report))
    else:
        _print(report)
    if report["differ"] > report["ties"] or report["accepted"] < min_accepted:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Row:
    """One prompt, its position in its file, and its comparison."""

    path: Path
    number: int
    prompt: PromptRow
    result: Comparison


def _compare(engine: Engine, files: dict[Path, list[PromptRow]], settings: SamplingSettings) -> Iterator[Row]:
    from rich.markup import escape
    from rich.progress import track

    from graft.checking.compare import compare, plain_twin

    asked = {path: _encoded(engine, path, prompts, settings) for path, prompts in files.items()}
    plain, console = plain_twin(engine), notes()
    for path, prompts in files.items():
        shown = track(asked[path], escape(path.name), console=console, disable=not console.is_terminal)
        for number, (prompt, ids) in enumerate(zip(prompts, shown, strict=True), start=1):
            yield Row(path, number, prompt, compare(engine, plain, ids, settings))


def _encoded(engine: Engine, path: Path, prompts: list[PromptRow], settings: SamplingSettings) -> list[list[int]]:
    """Token ids of every prompt. All prompts are checked before any is decoded."""
    encoded = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            encoded.append(engine.encode(user_message(prompt.text, engine.tokenizer)))
            engine.new_sequences(encoded[-1], settings)
        except GraftError as error:
            raise GraftError(f"{path}, prompt {number} (id {prompt.id}): {error}") from error
    return encoded


def _report(rows: list[Row], engine: Engine, settings: SamplingSettings) -> dict[str, Any]:
    from graft.checking.compare import comparable_to_transformers
    from graft.request.stats import Stats

    different = [row for row in rows if row.result.difference is not None]
    ties = [row for row in rows if row.result.is_tie]
    stats = [row.result.stats for row in rows]
    total = Stats(rounds=sum(s.rounds for s in stats), accepted=sum(s.accepted for s in stats))
    # A real difference is shown before a tie.
    worst = min(different, key=lambda row: row.result.is_tie, default=None)
    return {
        "prompts": len(rows),
        "tokens": sum(row.result.num_tokens for row in rows),
        "differ": len(different),
        "ties": len(ties),
        "compared_with": ["plain decoding"] + ["transformers"] * comparable_to_transformers(engine, settings),
        "accepted": total.accepted,
        "mean_accepted": total.mean_accepted,
        "first_difference": worst and _explained(worst, engine.tokenizer),
    }


def _explained(row: Row, tokenizer: Any) -> dict[str, Any]:
    difference = row.result.difference
    assert difference is not None
    return {
        "file": str(row.path),
        "prompt": row.number,
        "id": row.prompt.id,
        "position": difference.position,
        "tie": difference.is_tie,
        "candidates": [_readable(candidate, tokenizer) for candidate in (difference.expected, difference.found)],
    }


def _readable(candidate: Candidate, tokenizer: Any) -> dict[str, Any]:
    ended = candidate.token is None
    return {**asdict(candidate), "text": None if ended else tokenizer.decode([candidate.token])}


def _print(report: dict[str, Any]) -> None:
    print(f"{report['prompts']} prompts, {report['tokens']} tokens, {report['differ']} differ")
    print(f"compared with {' and '.join(report['compared_with'])}")
    print(f"{report['accepted']} tokens accepted from trees, mean accepted length {report['mean_accepted']:.2f}")
    if report["accepted"] < report["min_accepted"]:
        print(
            f"not enough: with fewer than {report['min_accepted']} accepted tokens this check says little about "
            "speculation; give more prompts, longer answers or a drafter, or lower --min-accepted"
        )
    if (first := report["first_difference"]) is None:
        return
    place = f"prompt {first['prompt']} (id {first['id']}), new token {first['position']}"
    print(f"first difference: {first['file']}, {place}")
    names = "logits" if all(c["score"] == c["logit"] for c in first["candidates"]) else "scores"
    for candidate in first["candidates"]:
        print(f"  {candidate['decoder']}: {_described(candidate, with_score=names == 'scores')}")
    print(f"  an exact tie: the {names} are equal" if first["tie"] else f"  not a tie: the {names} are not equal")


def _described(candidate: dict[str, Any], with_score: bool) -> str:
    if candidate["token"] is None:
        return "had ended"
    words = f"token {candidate['token']} {candidate['text']!r}, logit {candidate['logit']!r}"
    if not with_score:
        return words
    excluded = candidate["score"] is None
    return f"{words}, {'excluded by the settings' if excluded else 'score ' + repr(candidate['score'])}"
