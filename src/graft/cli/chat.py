"""`graft chat`: a conversation in the terminal, or from a pipe with one message per line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from graft.cli.options import LOADING, SAMPLING, Given, sampling_settings, takes
from graft.cli.terminal import aside, load_engine, notes, utf8_stdin
from graft.errors import ContextError
from graft.settings import require

if TYPE_CHECKING:
    from graft.engine import Engine
    from graft.model.sampler import SamplingSettings

HELP = "/clear starts a new conversation, /quit, /exit or Ctrl-D quits, Ctrl-C stops an answer"


@takes(loading=LOADING, sampling=SAMPLING)
def chat(
    system: Annotated[str | None, typer.Option(help="A system message to start with.")] = None,
    *,
    loading: Given,
    sampling: Given,
) -> None:
    """Chat with a model. Ctrl-C stops an answer, Ctrl-D quits, /help lists the commands.

    [dim]Example:[/] graft chat --system "Answer in one sentence." --temperature 0.7
    """
    settings = sampling_settings(sampling)
    engine = load_engine(loading, keep_learned=None, max_new_tokens=settings.max_new_tokens)
    assert engine.tokenizer is not None
    require(bool(engine.tokenizer.chat_template), "this model has no chat template; try graft generate --raw")
    conversation = Conversation(engine, settings, system)
    for line in _lines():
        match line.strip():
            case "":
                pass
            case "/exit" | "/quit":
                break
            case "/clear":
                conversation.clear()
                aside("New conversation.")
            case command if command.startswith("/"):
                notes().print(HELP, style="dim")
            case message:
                conversation.say(message)


class Conversation:
    """The messages so far; `say` adds a question and its answer."""

    def __init__(self, engine: Engine, settings: SamplingSettings, system: str | None) -> None:
        self._engine = engine
        self._settings = settings
        self._system = [{"role": "system", "content": system}] if system is not None else []
        self.clear()

    def clear(self) -> None:
        self.messages = list(self._system)

    def say(self, text: str) -> None:
        """Stream the answer. An interrupted answer stays in the conversation as far as it got."""
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            stream = self._engine.stream(asked, **vars(self._settings))
        except ContextError as error:
            notes().print(f"{error}; /clear starts a new conversation", style="yellow", markup=False)
            return
        try:
            for piece in stream:
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            stream.cancel()
        print()
        answer = stream.result
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        stats = answer.stats
        cached = f"{stats.cached_tokens} of {len(answer.prompt_ids)} prompt tokens from the prefix cache"
        aside(f"{stats.tokens_per_second:.1f} tokens/s, mean accepted length {stats.mean_accepted:.2f}, {cached}")


def _lines() -> Iterator[str]:
    """The user's lines, until end of input. Ctrl-C at the prompt drops the line."""
    with utf8_stdin() as stdin:
        prompt = "> " if stdin.isatty() else ""
        if prompt:
            import readline  # noqa: F401 - gives input() editing and history

            aside(HELP)
        while True:
            try:
                yield input(prompt)
            except EOFError:
                aside("")  # so that the shell's prompt starts on a new line
                return
            except KeyboardInterrupt:
                aside(f"\n{HELP}")
