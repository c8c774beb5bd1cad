"""Tasks: named lists of prompts, from files or built in, and their token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from graft.errors import GraftError
from graft.prompt_files import PromptRow, read_prompts, user_message
from graft.settings import require

if TYPE_CHECKING:
    from graft.engine import Engine

PROMPTS_FOLDER = Path(__file__).parent / "prompts"
BUILT_IN = ("code", "math", "summary", "question", "chat", "edit")


@dataclass(frozen=True)
class Question:
    """A prompt as token ids, in the model's chat template."""

    id: str
    ids: list[int]


@dataclass(frozen=True)
class Task:
    name: str
    prompts: list[PromptRow]


def built_in_tasks(limit: int | None = None) -> list[Task]:
    """Six tasks of ten prompts, written for this benchmark."""
    return read_tasks([PROMPTS_FOLDER / f"{name}.jsonl" for name in BUILT_IN], limit)


def read_tasks(paths: Sequence[Path], limit: int | None = None) -> list[Task]:
    """One task for each file, named after it."""
    names = [path.stem for path in paths]
    for name in names:
        require(names.count(name) == 1, f"two data files are called {name!r}: results go by that name, so rename one")
    return [Task(path.stem, read_prompts(path, limit)) for path in paths]


def questions(task: Task, engine: Engine, max_new_tokens: int, max_prompt_tokens: int | None = None) -> list[Question]:
    """The task's prompts in the model's chat template, cut to `max_prompt_tokens`. All must fit the context."""
    room = engine.target.max_positions
    asked = []
    for prompt in task.prompts:
        place = f"{task.name}, prompt {prompt.id}"
        try:
            ids = engine.encode(user_message(prompt.text, engine.tokenizer))
        except GraftError as error:
            raise GraftError(f"{place}: {error}") from error
        ids = cut(ids, max_prompt_tokens)
        require(
            room is None or len(ids) + max_new_tokens <= room,
            f"{place}: {len(ids)} prompt tokens and {max_new_tokens} new ones exceed the model's context of {room}: "
            "cut long prompts with --max-prompt-tokens",
        )
        asked.append(Question(prompt.id, ids))
    return _numbered(asked)


def without_repeats(
    tasks: Mapping[str, list[Question]], lessons: Sequence[Question]
) -> tuple[dict[str, list[Question]], list[Question], int]:
    """The tasks and warm-up prompts without those that are asked elsewhere in the run, and how many were left out.

    A method that has seen a prompt recalls its answer instead of decoding it. A prompt of several tasks stays in the
    first, and a warm-up prompt that is also asked is not used to warm up.
    """
    seen: set[tuple[int, ...]] = set()
    kept: dict[str, list[Question]] = {}
    for name, asked in tasks.items():
        new = {tuple(question.ids): question for question in reversed(asked) if tuple(question.ids) not in seen}
        require(bool(new), f"{name}: all its prompts are in earlier tasks too, and would be recalled: leave it out")
        kept[name] = list(reversed(new.values()))
        seen |= new.keys()
    others = [question for question in lessons if tuple(question.ids) not in seen]
    words = "all warm-up prompts are asked in the run too, where they would be recalled: warm up with other prompts"
    require(bool(others) or not lessons, words)
    num_before, num_after = (sum(map(len, each.values())) for each in (tasks, kept))
    return kept, others, num_before - num_after + len(lessons) - len(others)


def cut(ids: list[int], most: int | None) -> list[int]:
    """Cut a prompt to `most` tokens by removing its middle, since template and question are at the ends."""
    if most is None or len(ids) <= most:
        return ids
    tail = most // 2
    return ids[: most - tail] + ids[len(ids) - tail :]


def _numbered(questions: Sequence[Question]) -> list[Question]:
    """Make the ids unique, since data files may repeat them."""
    ids = [question.id for question in questions]
    if len(set(ids)) == len(ids):
        return list(questions)
    return [replace(question, id=f"{number}: {question.id}") for number, question in enumerate(questions, start=1)]
