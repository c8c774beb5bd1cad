"""The engine: a target model and everything learned about it, with the verbs of the library.

The round is in `rounds.py`. Every verb (`generate`, `stream` ...) submits its prompts to a decode loop, the same class
that a server's thread runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from transformers import PreTrainedModel

from graft.drafters.drafter import Drafter
from graft.engine.answers import Choice, Generation, Stream
from graft.engine.decode_loop import DecodeLoop
from graft.engine.jobs import Job
from graft.engine.prompts import Prompt, encode_prompt, render_chat, require_tokenizer
from graft.engine.rounds import Rounds
from graft.engine.settings import SchedulerSettings
from graft.errors import ContextError, GraftError
from graft.model import target_for
from graft.model.sampler import Chooser, SamplingSettings
from graft.model.support import usable_model
from graft.model.unusual_layers import check_tokens_apart
from graft.prompt_files import user_message
from graft.request.batch import Batch
from graft.request.round_trace import RoundRecord
from graft.request.sequence import Sequence as TokenSequence
from graft.settings import check_size, require, require_known
from graft.spec_decode.policies import DEFAULT_POLICY, POLICIES, Policy, make_policy


class Engine(Rounds):
    """A target model and everything learned about it.

    Its verbs are `generate`, `generate_batch`, `generate_group`, `stream`, `generate_async` and `stream_async`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any | None = None,
        policy: str | Policy = DEFAULT_POLICY,
        drafter: Drafter | None = None,
        budget: int | None = None,
        chunk_size: int = 256,
        isolated: bool = False,
        exact: bool = False,
        prefix_cache: bool = False,
    ) -> None:
        """policy: a name, or a policy object made for this model. budget, isolated: see `make_policy`.

        prefix_cache: keep the pages of finished texts until their memory is needed. A prompt that begins like one of
        them is prefilled only from where it differs. The model's weights must not change meanwhile.

        exact: on a GPU, no text depends on its batch, not even by rounding. If that is impossible, a GraftError says
        why. Large batches are slower. What is promised without it: docs/exactness.md.
        """
        model = usable_model(model)
        good = tokenizer is None or hasattr(tokenizer, "decode")
        require(good, f"expected a tokenizer such as AutoTokenizer returns, not {tokenizer!r}")
        check_size("chunk_size", chunk_size)
        check_tokens_apart(model)
        target = target_for(model, drafter.hidden_layers if drafter is not None else (), chunk_size, exact)
        if not isinstance(policy, Policy):
            require_known("policy", policy, POLICIES)
            policy = make_policy(policy, target, drafter, budget, isolated=isolated)
        endings = [i for i in _eos_token_ids(model, tokenizer) if i < target.vocab_size]
        super().__init__(target, policy, drafter, endings)
        self.tokenizer = tokenizer
        self.prefix_cache = prefix_cache

    def __repr__(self) -> str:
        model = self.target.model
        kind, dtype = type(model).__name__, str(model.dtype).removeprefix("torch.")
        policy = next((name for name, known in POLICIES.items() if type(self.policy) is known), repr(self.policy))
        drafter = type(self.drafter).__name__ if self.drafter is not None else None
        return f"Engine({kind} on {model.device} in {dtype}, policy={policy!r}, drafter={drafter})"

    # The verbs

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Answer one prompt: text, chat messages or token ids. Options are those of SamplingSettings."""
        return self.generate_batch([prompt], **options)[0]

    def generate_batch(
        self, prompts: Sequence[Prompt], *, each: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> list[Generation]:
        """Answer several prompts together; each gets the text that it would get alone.

        each: options of every prompt, which take precedence over those for all. docs/exactness.md says how exactly the
        texts are the same, by device and precision.
        """
        several = not isinstance(prompts, str | bytes | Mapping)
        require(several, "generate_batch takes a list of prompts: put a single one into a list, or use generate")
        prompts = list(prompts)
        good = each is None or len(each) == len(prompts)
        require(good, f"each has options for {len(each or ())} prompts, and there are {len(prompts)}")
        groups = []
        for number, (prompt, own) in enumerate(zip(prompts, each or [{}] * len(prompts), strict=True), start=1):
            settings = SamplingSettings.of({**options, **own})
            try:
                groups.append(self.new_sequences(self.encode(prompt), settings))
            except GraftError as error:
                if len(prompts) == 1:
                    raise
                raise type(error)(f"prompt {number} of {len(prompts)}: {error}") from error
        for _ in self.rounds([sequence for group in groups for sequence in group]):
            pass
        return [Generation.of(group) for group in groups]

    async def generate_async(self, prompt: Prompt, **options: Any) -> Generation:
        """`generate` in a thread of the engine's own, so that the event loop is free; asynchronous calls take turns.

        Do not call the other verbs at the same time: an engine serves one thread at a time.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(self.generate, prompt, **options))

    async def stream_async(self, prompt: Prompt, **options: Any) -> AsyncGenerator[str, None]:
        """`stream` in that thread, for `async for`. Leaving the loop early cancels the answer."""
        loop = asyncio.get_running_loop()
        stream = await loop.run_in_executor(self._thread, partial(self.stream, prompt, **options))
        try:
            while (piece := await loop.run_in_executor(self._thread, next, stream, None)) is not None:
                yield piece
        finally:
            # Shielded: an event loop that ends cancels its tasks, and the pages would never be freed.
            await asyncio.shield(asyncio.wrap_future(self._thread.submit(stream.cancel)))

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="graft-engine")

    def generate_group(self, prompt: Prompt, n: int, **options: Any) -> list[Choice]:
        """Sample `n` answers to one prompt, as reinforcement learning does.

        The prompt is prefilled once, and the answers learn from each other while they are decoded. Options are those of
        SamplingSettings; the default temperature is 1. Answer i is the one that seed + i would give alone.
        """
        return self.generate(prompt, **{"temperature": 1.0, **options, "n": n}).choices

    def stream(
        self,
        prompt: Prompt,
        *,
        watch: Callable[[RoundRecord], None] | None = None,
        show_all: bool = False,
        **options: Any,
    ) -> Stream:
        """Answer one prompt piece by piece, as tokens are accepted.

        watch: called with a record of every round. Unless `show_all`, the record leaves out rejected nodes that may be
        other users' text.
        """
        settings = SamplingSettings.of(options)
        require(settings.n == 1, f"a stream gives one answer, not n={settings.n}")
        require(self.tokenizer is not None, "a stream needs a tokenizer; pass one to the engine")
        sequence = self.new_sequences(self.encode(prompt), settings)[0]
        sequence.shows_all = show_all
        return Stream(sequence, self.rounds([sequence]), watch)

    # Prompts

    def encode(self, prompt: Prompt, is_rendered: bool = False) -> list[int]:
        """Token ids of a prompt, checked. Chat messages are rendered by the model's chat template.

        is_rendered: the text was rendered by the chat template, so it has its special tokens already.
        """
        return encode_prompt(prompt, self.tokenizer, self.target.vocab_size, is_rendered)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Chat messages as text, rendered by the model's chat template. options: the template's own, such as tools."""
        return render_chat(messages, self.tokenizer, **options)

    def user_message(self, text: str, system: str | None = None) -> str | list[dict[str, str]]:
        """The prompt that `graft generate` makes of `text`: a user's chat message, if the model has a chat template.

        `generate(text)` continues the text as it is, like `graft generate --raw`.
        """
        return user_message(text, require_tokenizer(self.tokenizer, "chat"), system)

    def new_sequences(
        self, prompt: list[int], settings: SamplingSettings, kept: frozenset[int] = frozenset()
    ) -> list[TokenSequence]:
        """`settings.n` sequences of a prompt, checked. kept: special tokens that are part of their texts."""
        settings.check_vocabulary(self.target.vocab_size)
        settings = settings.fitted(len(prompt), self.target.max_positions)
        require(self.tokenizer is not None or not settings.stop, "stop strings need a tokenizer")
        assert settings.seed is not None
        answers = [replace(settings, seed=settings.seed + rank) for rank in range(settings.n)]
        sequences = [TokenSequence(prompt, answer, self.eos_token_ids, self.tokenizer, kept) for answer in answers]
        for sequence in sequences if settings.n > 1 else ():
            sequence.group = sequences[0].number
        self.check_context(sequences[0])
        return sequences

    def check_context(self, sequence: TokenSequence) -> None:
        """Raise a ContextError unless the prompt and its answer fit the model's context."""
        limit, prompt, new = self.target.max_positions, sequence.num_prompt_tokens, sequence.num_remaining
        if limit is None or prompt + new <= limit:
            return
        # If the limit is shorter than the model's own context, the message must say why.
        own = getattr(self.target.model.config.get_text_config(), "max_position_embeddings", None)
        why = ""
        if own is not None and own > limit:
            why = f" (longrope rotates all tokens differently once a text is longer, so trees cannot use all {own})"
        if prompt >= limit:
            raise ContextError(
                f"the prompt has {prompt} tokens and the model's context holds {limit}: shorten the prompt{why}"
            )
        raise ContextError(
            f"{prompt} prompt tokens and max_new_tokens={new} exceed the model's context of {limit}: "
            f"ask for at most {limit - prompt} new tokens{why}"
        )

    # The loop

    def rounds(
        self,
        sequences: list[TokenSequence],
        chooser: Chooser | None = None,
        prefill: Callable[[Batch], None] | None = None,
    ) -> Generator[list[TokenSequence], None, None]:
        """Decode the sequences together until all have ended. After every round, yield those that were in it.

        chooser: replaces the sampler of their settings. prefill: replaces the engine's own prefill, for prompts that
        are more than tokens; it commits all but the last token of every prompt. Closing the iterator early cancels the
        remaining sequences.
        """
        require(bool(sequences), "there is no prompt to decode")
        start = time.perf_counter()
        self.policy.prepare()
        self.target.refresh()
        setup_seconds = time.perf_counter() - start
        settings = SchedulerSettings(max_rows=len(sequences), prefix_cache_tokens=None if self.prefix_cache else 0)
        loop = DecodeLoop(self, settings, self.target.chunk_size)
        job = Job(sequences, choosers=[chooser] if chooser is not None else [], prefill=prefill)
        loop.submit(job)
        try:
            while loop.has_work:
                decoded = loop.decoded
                loop.step()
                if job.error is not None:
                    raise job.error
                for sequence in decoded:
                    sequence.stats.setup_seconds = setup_seconds
                    sequence.stats.seconds_by_phase = loop.clock.with_host(sequence.stats.decode_seconds)
                if decoded:
                    yield decoded
        finally:
            loop.release()
            if job.error is None:
                for sequence in job.open_answers:
                    sequence.conclude()


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any | None) -> list[int]:
    """Every token that ends an answer: the generation config's and the tokenizer's."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = configured if isinstance(configured, list) else [configured]
    own = tokenizer.eos_token_id if tokenizer is not None else None
    return sorted({i for i in (*ids, own) if i is not None})
