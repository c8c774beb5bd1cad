"""The engine: the round of speculative decoding, the loop around it, and streaming.

A round: propose a tree (draft, prune, graft), verify it, accept a path, commit it, learn. Plain decoding is the same
round with a tree of one node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedModel

from graft.data import user_message
from graft.datastore.lookup import Datastore
from graft.errors import ContextError, GraftError
from graft.model import Chunk, KVCache, VerifyOutput, target_for
from graft.model.grammar import pruned
from graft.model.sampler import Chooser, Sampler, SamplingSettings
from graft.model.support import usable_model
from graft.request.batch import Batch
from graft.request.round_trace import RoundRecord
from graft.request.sequence import FinishReason, TokenLogprob, TreeRow
from graft.request.sequence import Sequence as TokenSequence
from graft.request.stats import Clock, Stats
from graft.settings import check_size, require, require_known
from graft.spec_decode.acceptance import choose_ahead, walk
from graft.spec_decode.policies import DEFAULT_POLICY, MAX_BUDGET, POLICIES, Policy, make_policy
from graft.spec_decode.policies.base import DraftResult
from graft.spec_decode.proposers.drafter import Drafter, num_setups_of
from graft.tree.tree import DraftTree

Prompt = str | Sequence[int] | Tensor | np.ndarray | Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Choice:
    """One answer."""

    text: str  # "" when the engine has no tokenizer
    ids: list[int]  # the new tokens, the one that ended the answer included
    finish_reason: FinishReason | None  # None when it was cancelled
    seed: int  # with this seed, the same settings give the same answer
    logprobs: list[TokenLogprob]
    stats: Stats


@dataclass(frozen=True)
class Generation:
    """All answers to one prompt; `text`, `ids`, `finish_reason` and `stats` are those of the first."""

    prompt_ids: list[int]
    choices: list[Choice]

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def ids(self) -> list[int]:
        return self.choices[0].ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason

    @property
    def stats(self) -> Stats:
        return self.choices[0].stats


class Reading(NamedTuple):
    """A row whose prompt is being read, and the chunk of it that comes next."""

    batch: Batch
    row: int
    chunk: Chunk


class Engine:
    """A target model, what Graft has learned about it, and the verbs `generate`, `generate_batch`,
    `generate_group`, `stream`, `generate_async`, `stream_async`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any | None = None,
        policy: str | Policy = DEFAULT_POLICY,
        drafter: Drafter | None = None,
        budget: int | None = None,
        chunk_size: int = 256,
        datastore: Datastore | None = None,
        isolated: bool = False,
        exact: bool = False,
        prefix_cache: bool = False,
    ) -> None:
        """policy: a name, or a policy object made for this model. budget, datastore, isolated: see `make_policy`.

        prefix_cache: pages of texts that have ended are kept for as long as nobody needs them, and a prompt that begins
        like one of them is read from where it differs. The model's weights must not change meanwhile.

        exact: on a GPU, texts do not depend on the batch even by rounding, or a GraftError says why not; large batches
        are slower. What is promised without it: docs/exactness.md.
        """
        model = usable_model(model)
        good = tokenizer is None or hasattr(tokenizer, "decode")
        require(good, f"a tokenizer is an object such as AutoTokenizer gives, not {tokenizer!r}")
        check_size("chunk_size", chunk_size)
        self.target = target_for(model, drafter.hidden_layers if drafter is not None else (), chunk_size, exact)
        self.tokenizer = tokenizer
        self.drafter = drafter
        if not isinstance(policy, Policy):
            require_known("policy", policy, POLICIES)
            policy = make_policy(policy, self.target, drafter, budget, isolated=isolated, datastore=datastore)
        self.policy = policy
        self.prefix_cache = prefix_cache
        self.eos_token_ids = [i for i in _eos_token_ids(model, tokenizer) if i < self.target.vocab_size]

    def __repr__(self) -> str:
        model = self.target.model
        kind, dtype = type(model).__name__, str(model.dtype).removeprefix("torch.")
        policy = next((name for name, known in POLICIES.items() if type(self.policy) is known), repr(self.policy))
        drafter = type(self.drafter).__name__ if self.drafter is not None else None
        return f"Engine({kind} on {model.device} in {dtype}, policy={policy!r}, drafter={drafter})"

    # The verbs

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Answers one prompt: text, chat messages or token ids. Options are those of SamplingSettings."""
        return self.generate_batch([prompt], **options)[0]

    def generate_batch(
        self, prompts: Sequence[Prompt], *, each: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> list[Generation]:
        """Answers several prompts together; each gets the text it would get alone.

        each: options of every prompt, which go before those for all. How exactly the texts are the same, on which
        device and in which precision: docs/exactness.md.
        """
        several = not isinstance(prompts, str | bytes | Mapping)
        require(several, "generate_batch takes a list of prompts: put a single one into a list, or use generate")
        prompts = list(prompts)
        good = each is None or len(each) == len(prompts)
        require(good, f"each has options for {len(each or ())} prompts, and there are {len(prompts)}")
        groups = [
            self.new_sequences(self.encode(prompt), SamplingSettings.of({**options, **own}))
            for prompt, own in zip(prompts, each or [{}] * len(prompts), strict=True)
        ]
        for _ in self.rounds([sequence for group in groups for sequence in group]):
            pass
        return [_generation(group) for group in groups]

    async def generate_async(self, prompt: Prompt, **options: Any) -> Generation:
        """`generate` in a thread of the engine's own, which event loops do not wait for; asynchronous calls take turns.

        Not beside calls of the other verbs: an engine is for one thread at a time.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(self.generate, prompt, **options))

    async def stream_async(self, prompt: Prompt, **options: Any) -> AsyncGenerator[str, None]:
        """`stream` in that thread, for `async for`. What is left is cancelled if the loop over it ends early."""
        loop = asyncio.get_running_loop()
        stream = await loop.run_in_executor(self._thread, partial(self.stream, prompt, **options))
        try:
            while (piece := await loop.run_in_executor(self._thread, next, stream, None)) is not None:
                yield piece
        finally:
            # Shielded: an event loop that ends cancels what it waits for, and the pages would stay in use.
            await asyncio.shield(asyncio.wrap_future(self._thread.submit(stream.cancel)))

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="graft-engine")

    def generate_group(self, prompt: Prompt, n: int, **options: Any) -> list[Choice]:
        """`n` answers to one prompt, as reinforcement learning samples them: the prompt is read once, and answers learn
        from each other while they are decoded.

        Options are those of SamplingSettings, at temperature 1 unless one is given; answer i is that of seed + i.
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
        """Answers one prompt piece by piece, as tokens are accepted.

        watch: is called with a record of every round. Nodes that may be other users' text are in it only if they were
        accepted, unless `show_all`.
        """
        settings = SamplingSettings.of(options)
        require(settings.n == 1, f"a stream gives one answer, not n={settings.n}")
        require(self.tokenizer is not None, "a stream needs a tokenizer; pass one to the engine")
        sequence = self.new_sequences(self.encode(prompt), settings)[0]
        sequence.shows_all = show_all
        return Stream(self, sequence, watch)

    def encode(self, prompt: Prompt, is_rendered: bool = False) -> list[int]:
        """A prompt's token ids, checked. Chat messages go through the model's chat template.

        is_rendered: the text comes from the chat template, and has its special tokens already.
        """
        given: object = prompt
        if isinstance(prompt, str):
            given = _encode(self._tokenizer_for("text"), prompt, not is_rendered) if prompt else []
        elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            text = self.render_chat(cast(Sequence[Mapping[str, str]], prompt))
            given = _encode(self._tokenizer_for("chat"), text, add_special_tokens=False)
        ids = _token_ids(given, self.target.vocab_size)
        require(bool(ids), "the prompt is empty; give at least one token of text")
        return ids

    def user_message(self, text: str, system: str | None = None) -> str | list[dict[str, str]]:
        """A prompt that puts `text` as `graft generate` does: a user's chat message, if the model has a chat template.

        `generate(text)` continues the text as it is, as `graft generate --raw` does.
        """
        return user_message(text, self._tokenizer_for("chat"), system)

    # The round and its loop

    def rounds(
        self,
        sequences: list[TokenSequence],
        chooser: Chooser | None = None,
        prefill: Callable[[Batch], None] | None = None,
    ) -> Generator[list[TokenSequence], None, None]:
        """Decodes the sequences together until all have ended; yields, after every round, those that were in it.

        prefill: commits every prompt but its last token in the engine's stead, where there is more in it than tokens.
        Closing the iterator early cancels what is left.
        """
        require(bool(sequences), "there is no prompt to decode")
        start = time.perf_counter()
        self.policy.prepare()
        setup_seconds = time.perf_counter() - start
        start += setup_seconds
        # Who reads the prompt otherwise has more in it than its ids say: images.
        shares = self.prefix_cache and prefill is None
        batch = self.open(sequences, chooser, shares)
        try:
            cached_tokens = batch.cache.lengths
            (prefill or self._prefill)(batch)
            for sequence, count in zip(sequences, cached_tokens, strict=True):
                sequence.stats.cached_tokens = count
            prefill_seconds = time.perf_counter() - start
            clock = Clock()
            while batch.sequences:
                start = time.perf_counter()
                self.run_round(batch, clock)
                for failure in (sequence.failure for sequence in batch.sequences if sequence.failure is not None):
                    raise failure
                seconds = time.perf_counter() - start
                for sequence in batch.sequences:
                    sequence.stats.setup_seconds = setup_seconds
                    sequence.stats.prefill_seconds = prefill_seconds
                    sequence.stats.decode_seconds += seconds
                    sequence.stats.seconds_by_phase = clock.with_host(sequence.stats.decode_seconds)
                yield batch.sequences
                unfinished = [row for row, sequence in enumerate(batch.sequences) if sequence.finish_reason is None]
                if len(unfinished) < len(batch.sequences):
                    for row, sequence in enumerate(batch.sequences):
                        if sequence.finish_reason is not None:
                            if prefill is None:
                                self.policy.finish(sequence)
                            if shares:
                                self.keep_pages(batch, row)
                    batch.keep(unfinished)
        finally:
            for sequence in batch.sequences:
                sequence.conclude()
            batch.release()

    @torch.no_grad()
    def run_round(
        self,
        batch: Batch,
        clock: Clock,
        reading: Sequence[Reading] = (),
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """The round: proposes a tree for every row, verifies all in one step, and extends each sequence.

        reading: rows of other batches, chunks of whose prompts are read in the same step.
        meanwhile: is called while the device works, when the sequences' texts are those of the rounds before.
        """
        batch.begin_round(sum(len(part.chunk.tokens) for part in reading))
        speculating = [sequence.speculates for sequence in batch.sequences]
        speculates = any(speculating)  # else nothing is proposed, and nobody learns from the round
        if speculates:
            draft_result = self.policy.grow(batch, batch.roots(), clock)
        else:
            draft_result = DraftResult.without_drafts(DraftTree.roots(batch.roots()))
        tree = pruned(draft_result.tree, [sequence.constraint for sequence in batch.sequences], speculating)
        if (most := self.target.max_tokens) is not None:  # a fixed budget for many rows may ask for more than fits
            tree = tree.first(max((most - batch.num_other_tokens) // len(batch.sequences), 1))
        with clock("verify") as verify_time:
            verified, read = self.target.step(batch.cache, tree, [part.chunk for part in reading])
            assert verified is not None
            choices = choose_ahead(tree, verified, batch.chooser)
            if choices is not None and speculates:
                self.policy.draft_ahead(batch, verified, choices)
            self._catch_up(batch)
            meanwhile()
            self.target.wait_for(verified)  # the walk would wait for it; here the time counts as the verify's
        with clock("accept"):
            accepted = walk(tree, verified, batch.chooser, choices)
            self.target.commit(batch.cache, accepted.nodes)
        with clock("learn"):
            if speculates:
                self.policy.learn(batch, tree, verified, accepted, verify_time())
            self._learn_prompts(reading, read)

        sources, common = self.policy.sources, self.policy.common_sources
        outcome = zip(batch.sequences, accepted.tokens, accepted.nodes, draft_result.passes, strict=True)
        for row, (sequence, tokens, nodes, passes) in enumerate(outcome):
            try:
                is_whole = sequence.speculates and sequence.constraint is None
                considered = draft_result.considered if is_whole else None
                seen = TreeRow(tree, verified, row, sources, considered, common)
                sequence.stats.draft_passes += passes
                sequence.extend(tokens, nodes, seen)
            except Exception as error:  # of this row alone: the others are not affected
                sequence.failure = error

    @torch.no_grad()
    def read(self, reading: Sequence[Reading]) -> None:
        """A step of prompt chunks alone."""
        _, read = self.target.step(None, None, [part.chunk for part in reading])
        self.policy.catch_up()
        self.target.wait_for(read[0])
        self._learn_prompts(reading, read)

    def _learn_prompts(self, reading: Sequence[Reading], read: Sequence[VerifyOutput]) -> None:
        for part, verified in zip(reading, read, strict=True):
            sequence, end = part.batch.sequences[part.row], part.chunk.row.length
            try:
                sequence.read_prompt(end - len(part.chunk.tokens), verified)
                if not sequence.speculates:
                    continue
                following = sequence.ids[end - len(part.chunk.tokens) + 1 : end + 1]
                self.policy.read(part.batch, part.row, verified, following)
            except Exception as error:  # of this row alone, as in a round
                sequence.failure = error

    def _catch_up(self, batch: Batch) -> None:
        """What the host does while the device works: nobody waits for it."""
        self.policy.catch_up()
        for sequence in batch.sequences:
            try:
                sequence.settle()
            except Exception as error:
                sequence.failure = error

    def open(self, sequences: list[TokenSequence], chooser: Chooser | None = None, shares: bool = False) -> Batch:
        """A batch of these sequences.

        chooser: replaces the sampler of their settings. shares: the KV cache has what is kept of their prompts.
        """
        num_slots = max(s.num_prompt_tokens + s.settings.most_new_tokens for s in sequences) + MAX_BUDGET + 1
        if not shares:
            return self.batch_of(sequences, self.target.open(len(sequences), num_slots), chooser)
        salts = [self.page_salt(sequence) for sequence in sequences]
        cache = self.target.open_with_prefix([sequence.ids for sequence in sequences], salts, num_slots)
        return self.batch_of(sequences, cache, chooser)

    def page_salt(self, sequence: TokenSequence, salt: str = "") -> str:
        """Under which a text's pages are kept. salt: of those who may use them."""
        # What does not speculate leaves nothing for a drafter, so its pages are others. A prompt whose
        # log-probabilities are wanted is read from its beginning.
        own = f"{sequence.number}/" if sequence.num_prompt_logprobs is not None else ""
        return f"{own}{sequence.speculates and self.drafter is not None}/{salt}"

    def keep_pages(self, batch: Batch, row: int, salt: str = "") -> None:
        """Keeps what a row has read and written for others that begin alike."""
        sequence = batch.sequences[row]
        if sequence.num_prompt_logprobs is not None:
            return  # under a salt that nobody else has
        num_entries = batch.draft.lengths[row] if batch.draft is not None and sequence.speculates else None
        batch.cache.pool.keep_prefix(batch.cache.rows[row], sequence.ids, self.page_salt(sequence, salt), num_entries)

    def batch_of(self, sequences: list[TokenSequence], cache: KVCache, chooser: Chooser | None = None) -> Batch:
        """A batch of these sequences on rows that may know the beginnings of their texts already."""
        try:
            draft = self.policy.open(cache, [sequence.ids for sequence in sequences])
            return Batch(list(sequences), cache, chooser or self._sampler(sequences), draft)
        except Exception:
            cache.release()
            raise

    def _prefill(self, batch: Batch) -> None:
        """Prefill: commits every prompt but its last token, which is the first round's root; many rows in a step."""
        row_of: dict[tuple[int, ...], int] = {}
        copies: list[tuple[int, int]] = []
        waiting: list[int] = []
        for row, sequence in enumerate(batch.sequences):
            first = row_of.setdefault(tuple(sequence.ids), row)
            if first != row:
                copies.append((first, row))
            elif len(sequence.ids) > 1:
                waiting.append(row)
        while waiting:
            reading: list[Reading] = []
            room = self.target.chunk_size
            for row in waiting:
                chunk = batch.rest_of(row, room)
                reading.append(Reading(batch, row, chunk))
                room -= len(chunk.tokens)
                if room == 0:
                    break
            self.read(reading)
            for failure in (sequence.failure for sequence in batch.sequences if sequence.failure is not None):
                raise failure
            waiting = [row for row in waiting if batch.rest_of(row, 1).tokens]
        self.policy.catch_up()
        if self.prefix_cache:  # at once: an answer that is cancelled keeps nothing more
            for row in row_of.values():
                self.keep_pages(batch, row)
        for source, target in copies:
            batch.copy_row(source, target)

    def warm_up(self, max_tokens: int, max_rows: int) -> None:
        """Does, before there is anything to decode, what would otherwise make the first requests wait.

        max_tokens: of the largest step; max_rows: of the largest batch. What takes long is reported through
        `target.progress`.
        """
        self.target.warm_up(max_tokens)
        if self.drafter is not None:
            self.drafter.warm_up(self.target, max_rows, self.policy.kept_of_a_level)
        self.policy.prepare()
        self.policy.measure()

    @property
    def num_setups(self) -> int:
        return num_setups_of(self.target, self.drafter)

    # Small parts

    def new_sequences(
        self, prompt: list[int], settings: SamplingSettings, kept: frozenset[int] = frozenset()
    ) -> list[TokenSequence]:
        """`settings.n` sequences of a prompt, checked, with no new tokens yet. kept: special tokens of their texts."""
        settings.check_vocabulary(self.target.vocab_size)
        settings = settings.fitted(len(prompt), self.target.max_positions)
        require(self.tokenizer is not None or not settings.stop, "stop strings need a tokenizer")
        assert settings.seed is not None
        answers = [replace(settings, seed=settings.seed + rank) for rank in range(settings.n)]
        sequences = [TokenSequence(prompt, answer, self.eos_token_ids, self.tokenizer, kept) for answer in answers]
        for sequence in sequences if settings.n > 1 else ():
            sequence.group = sequences[0].number
        self.check_room(sequences[0])
        return sequences

    def _sampler(self, batch: list[TokenSequence]) -> Sampler:
        return Sampler(
            [s.settings for s in batch],
            [s.ids for s in batch],
            self.eos_token_ids,
            self.target.vocab_size,
            self.target.device,
            [s.constraint for s in batch],
        )

    def check_room(self, sequence: TokenSequence) -> None:
        """A prompt and its answer must fit the model's context."""
        limit, prompt, new = self.target.max_positions, sequence.num_prompt_tokens, sequence.num_remaining
        if limit is None or prompt + new <= limit:
            return
        if prompt >= limit:
            raise ContextError(
                f"the prompt has {prompt} tokens and the model's context holds {limit}: shorten the prompt"
                + self._why_so_short()
            )
        raise ContextError(
            f"{prompt} prompt tokens and max_new_tokens={new} exceed the model's context of {limit}: "
            f"ask for at most {limit - prompt} new tokens{self._why_so_short()}"
        )

    def _why_so_short(self) -> str:
        """Of a model whose context is cut here, words that say why."""
        config, limit = self.target.model.config.get_text_config(), self.target.max_positions
        own = getattr(config, "max_position_embeddings", None)
        if own is None or limit is None or own <= limit:
            return ""
        return f" (longrope turns all tokens otherwise once a text is longer, so {own} cannot be verified in trees)"

    def _tokenizer_for(self, what: str) -> Any:
        require(self.tokenizer is not None, f"{what} prompts need a tokenizer; pass one, or give token ids")
        return self.tokenizer

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Messages as text, by the model's chat template. options: the template's own, such as tools."""
        tokenizer = self._tokenizer_for("chat")
        plain = [_plain_message(message, number) for number, message in enumerate(messages, start=1)]
        require(bool(tokenizer.chat_template), "this model has no chat template; give the prompt as text")
        try:
            text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True, **options)
        except TemplateError as error:  # raised by the template itself, of roles that it does not take
            reason = str(error).partition("\n")[0]
            raise GraftError(f"the model's chat template refuses these messages: {reason}") from error
        return str(text)


class Stream(Iterator[str]):
    """An iterator over the pieces of an answer's text; `cancel` it or read `result` at any time."""

    def __init__(
        self, engine: Engine, sequence: TokenSequence, watch: Callable[[RoundRecord], None] | None = None
    ) -> None:
        self._sequence = sequence
        self._watch = watch
        sequence.is_recorded = watch is not None
        self._rounds = engine.rounds([sequence])

    def __next__(self) -> str:
        text = self._sequence.text
        assert text is not None
        for _ in self._rounds:
            if self._watch is not None and self._sequence.last_round is not None:
                self._watch(self._sequence.last_round)
            piece = text.take(final=self._sequence.finish_reason is not None)
            if piece:
                return piece
        raise StopIteration

    def cancel(self) -> None:
        """Ends the answer here and frees its KV cache; what was accepted stays in `result`."""
        self._rounds.close()

    @property
    def result(self) -> Generation:
        self._sequence.conclude()
        return _generation([self._sequence])


def _token_ids(prompt: object, vocab_size: int) -> list[int]:
    """Token ids given as a list, an array or a tensor, as a checked list."""
    if isinstance(prompt, Tensor | np.ndarray):
        one_row = prompt.ndim == 1 or (prompt.ndim == 2 and len(prompt) == 1)
        shape = list(prompt.shape)
        require(one_row, f"the prompt's token ids are of shape {shape}, not one row: generate_batch takes several")
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
        if type(value) is not int or not 0 <= value < vocab_size:  # True is an int too, and meant otherwise
            raise GraftError(f"the prompt holds {value!r}, which is no token id of this model (0 to {vocab_size - 1})")
        ids.append(value)
    return ids


def _plain_message(message: Any, number: int) -> dict[str, Any]:
    """A chat message with its content as text: parts of text are joined. number: of the message, from 1."""
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
    calls = content is None and bool(message.get("tool_calls"))
    require(isinstance(content, str) or calls, f"the content of message {number} is text, not {content!r}")
    _check_text(content or "", f"message {number}")
    return {**message, "content": content}


def _check_text(text: str, what: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise GraftError(f"{what} is not text: it holds half a character at place {error.start}") from error


def _encode(tokenizer: Any, text: str, add_special_tokens: bool = True) -> list[int]:
    _check_text(text, "the prompt")
    # verbose=False: no warning about the length, which the engine checks itself.
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))


def _generation(group: Sequence[TokenSequence]) -> Generation:
    first = group[0]
    choices = []
    for s in group:
        assert s.settings.seed is not None
        text = s.text.text if s.text is not None else ""
        choices.append(Choice(text, s.new_ids, s.finish_reason, s.settings.seed, s.logprobs, s.stats))
    return Generation(first.ids[: first.num_prompt_tokens], choices)


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any | None) -> list[int]:
    """Every token that ends an answer: the generation config's and the tokenizer's."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = configured if isinstance(configured, list) else [configured]
    own = tokenizer.eos_token_id if tokenizer is not None else None
    return sorted({i for i in (*ids, own) if i is not None})
