"""The engine: the round of speculative decoding, and the loop around it.

A round: propose a tree (draft, prune, graft), verify it, accept a path, commit it, learn. Plain decoding is the same
round with a tree of one node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedModel

from graft.data import user_message
from graft.datastore.lookup import Datastore
from graft.engine.answers import Choice, Generation, Stream
from graft.engine.device_rows import ReadChunk
from graft.engine.prompts import Prompt, encode_prompt, render_chat, require_tokenizer
from graft.errors import ContextError, GraftError
from graft.model import Chunk, KVCache, VerifyOutput, target_for
from graft.model.grammar import pruned
from graft.model.sampler import Chooser, Sampler, SamplingSettings
from graft.model.support import usable_model
from graft.request.batch import Batch
from graft.request.round_trace import RoundRecord
from graft.request.sequence import Sequence as TokenSequence
from graft.request.sequence import TreeRow
from graft.request.stats import Clock
from graft.settings import check_size, require, require_known
from graft.spec_decode.acceptance import Accepted, walk
from graft.spec_decode.policies import DEFAULT_POLICY, MAX_BUDGET, POLICIES, Policy, make_policy
from graft.spec_decode.policies.base import DraftResult
from graft.spec_decode.policies.graft import Graft
from graft.spec_decode.proposers.drafter import Drafter, num_setups_of
from graft.tree.tree import DraftTree

if TYPE_CHECKING:
    from graft.engine.device_rounds import DeviceRounds

BY_ITSELF = ("cuda",)  # kinds of devices that make rounds by themselves


class PrefillChunk(NamedTuple):
    """The next tokens of a prompt to prefill, and the row that they belong to."""

    batch: Batch
    row: int
    chunk: Chunk


class Engine:
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
        datastore: Datastore | None = None,
        isolated: bool = False,
        exact: bool = False,
        prefix_cache: bool = False,
    ) -> None:
        """policy: a name, or a policy object made for this model. budget, datastore, isolated: see `make_policy`.

        prefix_cache: keep the pages of finished texts until their memory is needed. A prompt that begins like one of
        them is prefilled only from where it differs. The model's weights must not change meanwhile.

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
        self._device_rounds: tuple[Policy, DeviceRounds | None] | None = None
        self.eos_token_ids = [i for i in _eos_token_ids(model, tokenizer) if i < self.target.vocab_size]

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

        each: options of every prompt, which take precedence over those for all. How exactly the texts are the same, on
        which device and in which precision: docs/exactness.md.
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
            # Shielded: an event loop that ends cancels what it awaits, and the pages would never be freed.
            await asyncio.shield(asyncio.wrap_future(self._thread.submit(stream.cancel)))

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="graft-engine")

    def generate_group(self, prompt: Prompt, n: int, **options: Any) -> list[Choice]:
        """Sample `n` answers to one prompt, as reinforcement learning does.

        The prompt is prefilled once, and the answers learn from each other while they are decoded. Options are those of
        SamplingSettings, at temperature 1 unless one is given; answer i is that of seed + i.
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

        watch: called with a record of every round. Rejected nodes that may be other users' text are left out of it,
        unless `show_all`.
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
        # A context that is shorter here than the model's own needs a reason.
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

    # The round and its loop

    def rounds(
        self,
        sequences: list[TokenSequence],
        chooser: Chooser | None = None,
        prefill: Callable[[Batch], None] | None = None,
    ) -> Generator[list[TokenSequence], None, None]:
        """Decode the sequences together until all have ended; after every round, yield those that were in it.

        prefill: replaces the engine's own prefill, for prompts that are more than tokens. It commits every prompt but
        its last token. Closing the iterator early cancels what is left.
        """
        require(bool(sequences), "there is no prompt to decode")
        start = time.perf_counter()
        self.policy.prepare()
        setup_seconds = time.perf_counter() - start
        start += setup_seconds
        # Custom prefill (images): ids alone cannot key the prefix cache.
        shares = self.prefix_cache and prefill is None
        batch = self.open(sequences, chooser, shares)
        try:
            for sequence, count in zip(sequences, batch.cache.lengths, strict=True):
                sequence.stats.cached_tokens = count
            (prefill or self._prefill)(batch)
            prefill_seconds = time.perf_counter() - start
            clock = Clock()
            while batch.sequences:
                start = time.perf_counter()
                self.run_round(batch, clock)
                _raise_failure(batch)
                seconds = time.perf_counter() - start
                for sequence in batch.sequences:
                    sequence.stats.setup_seconds = setup_seconds
                    sequence.stats.prefill_seconds = prefill_seconds
                    sequence.stats.decode_seconds += seconds
                    sequence.stats.seconds_by_phase = clock.with_host(sequence.stats.decode_seconds)
                # Another batch's round may finish further ones meanwhile: they are dropped when they were shown too.
                finished = [row for row, own in enumerate(batch.sequences) if own.finish_reason is not None]
                yield batch.sequences
                self._drop(batch, finished, learns=prefill is None, shares=shares)
        finally:
            for sequence in batch.sequences:
                sequence.conclude()
            batch.release()

    def _drop(self, batch: Batch, finished: list[int], learns: bool, shares: bool) -> None:
        """Remove finished rows. learns, shares: whether the policy and the prefix cache may use them."""
        if not finished:
            return
        for row in finished:
            if learns:
                self.finish(batch, batch.sequences[row])
            if shares:
                self.keep_pages(batch, row)
        batch.keep(set(range(len(batch.sequences))).difference(finished))

    @torch.no_grad()
    def run_round(
        self,
        batch: Batch,
        clock: Clock,
        chunks: Sequence[PrefillChunk] = (),
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """The round: propose a tree for every row, verify all trees in one step, and extend each sequence.

        chunks: parts of other batches' prompts, prefilled in the same step.
        meanwhile: called while the device works, when the sequences' texts are those of the rounds before.
        """
        batch.begin_round(sum(len(part.chunk.tokens) for part in chunks))
        if batch.is_on_device:
            self._run_on_device(batch, clock, chunks, meanwhile)
            return
        speculates = any(sequence.speculates for sequence in batch.sequences)
        if speculates:
            draft_result = self.policy.grow(batch, batch.roots(), clock)
        else:
            draft_result = DraftResult.without_drafts(DraftTree.roots(batch.roots()))
        tree = self._allowed_tree(batch, draft_result.tree)
        with clock("verify") as verify_time:
            verified, read = self.target.step(batch.cache, tree, [part.chunk for part in chunks])
            assert verified is not None
            self._settle(batch)
            meanwhile()
            self.target.synchronize()  # the walk would wait for it; here the time counts as the verify's
        with clock("accept"):
            accepted = walk(tree, verified, batch.chooser)
            self.target.commit(batch.cache, accepted.nodes)
        with clock("learn"):
            if speculates:
                self.policy.learn(batch, tree, verified, accepted, verify_time())
            self._learn_prompts(chunks, read)
        self._extend(batch, tree, verified, accepted, draft_result)

    def _run_on_device(
        self, batch: Batch, clock: Clock, chunks: Sequence[PrefillChunk], meanwhile: Callable[[], None]
    ) -> None:
        """A round of the device: it is launched, and the one before is taken."""
        assert self.device_rounds is not None
        try:
            read = self.device_rounds.run(batch, clock, [part.chunk for part in chunks], meanwhile)
        except RuntimeError:
            if self.device_rounds.failure is None:
                raise
            # The device cannot make rounds here: the host takes over, with samplers that know the texts so far.
            self.device_rounds.flush(clock)
            batch.is_on_device, batch.chooser = False, self._sampler(batch.sequences)
            self.run_round(batch, clock, chunks, meanwhile)
            return
        if read is not None:
            self._learn_prompts(chunks, read)
        elif chunks:
            self.prefill(chunks)

    @property
    def device_rounds(self) -> DeviceRounds | None:
        """The rounds that the device makes by itself; None where it cannot."""
        if self._device_rounds is None or self._device_rounds[0] is not self.policy:
            rounds = None
            if self.target.device.type in BY_ITSELF:
                from graft.engine.device_rounds import DeviceRounds  # needs Triton

                rounds = DeviceRounds.of(self.target, self.policy, self.drafter)
            if isinstance(self.policy, Graft):
                self.policy.on_device = rounds
            self._device_rounds = (self.policy, rounds)
        return self._device_rounds[1]

    def finish(self, batch: Batch, sequence: TokenSequence) -> None:
        """Learn from a finished answer."""
        if batch.is_on_device and self.device_rounds is not None:
            self.policy.num_texts += 1
            self.device_rounds.finish_text(sequence)
        else:
            self.policy.finish(sequence)

    def _allowed_tree(self, batch: Batch, tree: DraftTree) -> DraftTree:
        """The nodes that grammars allow, and no more than fit a step."""
        sequences = batch.sequences
        tree = pruned(
            tree, [sequence.constraint for sequence in sequences], [sequence.speculates for sequence in sequences]
        )
        most = self.target.max_tokens
        if most is None:
            return tree
        # A fixed budget for many rows may ask for more than fits.
        return tree.first(max((most - batch.num_prefill_tokens) // len(sequences), 1))

    def _extend(
        self, batch: Batch, tree: DraftTree, verified: VerifyOutput, accepted: Accepted, draft_result: DraftResult
    ) -> None:
        """Append each row's accepted tokens to its sequence. A failure ends that sequence alone."""
        sources, common = self.policy.sources, self.policy.common_sources
        outcome = zip(batch.sequences, accepted.tokens, accepted.nodes, draft_result.passes, strict=True)
        for row, (sequence, tokens, nodes, passes) in enumerate(outcome):
            try:
                is_whole = sequence.speculates and sequence.constraint is None
                considered = draft_result.considered if is_whole else None
                knew_noise = draft_result.draws is not None and draft_result.draws.kinds[row] > 0
                seen = TreeRow(tree, verified, row, sources, considered, common, knew_noise)
                sequence.stats.draft_passes += passes
                sequence.extend(tokens, nodes, seen)
            except Exception as error:
                sequence.failure = error

    @torch.no_grad()
    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Run a step of prompt chunks alone."""
        _, read = self.target.step(None, None, [part.chunk for part in chunks])
        self._learn_prompts(chunks, read)
        self.target.synchronize()

    def _learn_prompts(self, chunks: Sequence[PrefillChunk], read: Sequence[VerifyOutput]) -> None:
        """Learn from prefilled chunks. A failure ends that sequence alone, or those that the device learns together."""
        together: list[tuple[PrefillChunk, VerifyOutput]] = []
        for part, verified in zip(chunks, read, strict=True):
            sequence, end = part.batch.sequences[part.row], part.chunk.row.length
            start = end - len(part.chunk.tokens)
            try:
                sequence.read_prompt(start, verified)
                if sequence.speculates and part.batch.is_on_device:
                    together.append((part, verified))
                elif sequence.speculates:
                    self.policy.read(part.batch, part.row, verified, sequence.ids[start + 1 : end + 1])
            except Exception as error:
                sequence.failure = error
        try:
            self._learn_on_device(together)
        except Exception as error:
            for part, _ in together:
                part.batch.sequences[part.row].failure = error

    def _learn_on_device(self, chunks: Sequence[tuple[PrefillChunk, VerifyOutput]]) -> None:
        """Let the device learn from all chunks of a step at once."""
        if not chunks:
            return
        assert self.device_rounds is not None
        texts, entries = [], []
        for part, verified in chunks:
            sequence, end = part.batch.sequences[part.row], part.chunk.row.length
            start = end - len(part.chunk.tokens)
            salt = self.policy.salt_of(sequence)
            texts.append(ReadChunk(verified, sequence.ids[max(start - 2, 0) : start], salt))
            entries.append((part.batch.draft, part.row, verified, sequence.ids[start + 1 : end + 1]))
        self.device_rounds.learn_prompts(texts)
        if self.policy.drafter is not None:
            self.policy.drafter.read_chunks(entries)

    def _settle(self, batch: Batch) -> None:
        """The texts of the rounds before, while the device computes. A failure ends that sequence alone."""
        for sequence in batch.sequences:
            try:
                sequence.settle()
            except Exception as error:
                sequence.failure = error

    def _prefill(self, batch: Batch) -> None:
        """Commit every prompt but its last token, which is the first round's root; many rows in a step."""
        row_of: dict[tuple[int, ...], int] = {}
        copies: list[tuple[int, int]] = []
        waiting: list[int] = []
        for row, sequence in enumerate(batch.sequences):
            first = row_of.setdefault(tuple(sequence.ids), row)
            if first != row:
                copies.append((first, row))
            elif batch.next_chunk(row, 1).tokens:
                waiting.append(row)
        while waiting:
            self.prefill(next_chunks(((batch, row) for row in waiting), self.target.chunk_size))
            _raise_failure(batch)
            waiting = [row for row in waiting if batch.next_chunk(row, 1).tokens]
        if self.prefix_cache:  # now, because a cancelled answer keeps nothing
            for row in row_of.values():
                self.keep_pages(batch, row)
        for source, target in copies:
            batch.copy_row(source, target)

    # Batches and their pages

    def open(self, sequences: list[TokenSequence], chooser: Chooser | None = None, shares: bool = False) -> Batch:
        """A batch of these sequences.

        chooser: replaces the sampler of their settings. shares: use the prefix cache for their prompts.
        """
        num_slots = max(s.num_prompt_tokens + s.settings.most_new_tokens for s in sequences) + MAX_BUDGET + 1
        if not shares:
            return self.batch_of(sequences, self.target.open(len(sequences), num_slots), chooser)
        salts = [self.page_salt(sequence) for sequence in sequences]
        cache = self.target.open_with_prefix([sequence.ids for sequence in sequences], salts, num_slots)
        return self.batch_of(sequences, cache, chooser)

    def batch_of(self, sequences: list[TokenSequence], cache: KVCache, chooser: Chooser | None = None) -> Batch:
        """A batch of these sequences on rows that may hold the beginnings of their texts already."""
        try:
            draft = self.policy.open(cache, [sequence.ids for sequence in sequences])
            rounds = self.device_rounds if chooser is None and not any(row.offset for row in cache.rows) else None
            is_on_device = rounds is not None and rounds.can_run(sequences, draft)
            return Batch(list(sequences), cache, chooser or self._sampler(sequences), draft, is_on_device)
        except Exception:
            cache.release()
            raise

    def _sampler(self, batch: list[TokenSequence]) -> Sampler:
        return Sampler(
            [s.settings for s in batch],
            [s.ids for s in batch],
            self.eos_token_ids,
            self.target.vocab_size,
            self.target.device,
            [s.constraint for s in batch],
        )

    def page_salt(self, sequence: TokenSequence, salt: str = "") -> str:
        """The key's prefix under which the prefix cache keeps a text's pages. salt: of those who may share them."""
        # Without speculation the drafter's pages stay empty, so these texts have keys of their own. A prompt whose
        # log-probabilities are wanted must be prefilled from its beginning, so it shares with nobody.
        own = f"{sequence.number}/" if sequence.num_prompt_logprobs is not None else ""
        return f"{own}{sequence.speculates and self.drafter is not None}/{salt}"

    def keep_pages(self, batch: Batch, row: int, salt: str = "") -> None:
        """Put a row's pages into the prefix cache."""
        sequence = batch.sequences[row]
        if sequence.num_prompt_logprobs is not None:
            return  # nobody else has its salt
        num_entries = batch.draft.lengths[row] if batch.draft is not None and sequence.speculates else None
        batch.cache.pool.keep_prefix(batch.cache.rows[row], sequence.ids, self.page_salt(sequence, salt), num_entries)

    # Set-up

    def warm_up(self, max_tokens: int, max_rows: int) -> None:
        """Do the one-time work now that would make the first requests wait.

        max_tokens: of the largest step; max_rows: of the largest batch. Progress is reported through
        `target.progress`.
        """
        self.target.warm_up(max_tokens)
        if self.drafter is not None:
            self.drafter.warm_up(self.target, max_rows)
        self.policy.prepare()
        self.policy.measure()
        if self.device_rounds is not None:
            self.device_rounds.warm_up(max_rows)

    @property
    def num_setups(self) -> int:
        return num_setups_of(self.target, self.drafter)


def next_chunks(rows: Iterable[tuple[Batch, int]], max_tokens: int) -> list[PrefillChunk]:
    """The next chunks of rows' prompts, in order, of at most `max_tokens` together."""
    chunks: list[PrefillChunk] = []
    for batch, row in rows:
        chunk = batch.next_chunk(row, max_tokens)
        if chunk.tokens:
            chunks.append(PrefillChunk(batch, row, chunk))
            max_tokens -= len(chunk.tokens)
        if max_tokens == 0:
            break
    return chunks


def _raise_failure(batch: Batch) -> None:
    """Raise the first failure of a sequence, if there is one."""
    for failure in (sequence.failure for sequence in batch.sequences if sequence.failure is not None):
        raise failure


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any | None) -> list[int]:
    """Every token that ends an answer: the generation config's and the tokenizer's."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = configured if isinstance(configured, list) else [configured]
    own = tokenizer.eos_token_id if tokenizer is not None else None
    return sorted({i for i in (*ids, own) if i is not None})
