"""From a valid request to its answer, whole or streamed. The scheduler does the decoding."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Scope

from graft.engine import Engine
from graft.engine.jobs import BusyError, Failure, FailureKind, Job, Update
from graft.engine.scheduler import Scheduler
from graft.errors import GraftError
from graft.model.sampler import SamplingSettings
from graft.server.answers import Answers, ChatAnswers, TextAnswers
from graft.server.chat import ChatTemplate, Thinks
from graft.server.grammar import GrammarConstraint, Grammars, GrammarSpec, SchemasBusyError
from graft.server.logs import log_request
from graft.server.metrics import Metrics
from graft.server.refusals import AsciiJson, FailedError, RefusedError
from graft.server.schema import ChatRequest, CompletionRequest, StreamOptions, TokenizeRequest
from graft.server.settings import ServeSettings
from graft.server.startup import Startup
from graft.server.tool_formats import Function, call_grammar
from graft.server.tool_parsers import CallsOnly, Parser, PlainText, Thinking

_STATUS: dict[FailureKind, int] = {"request": 400, "timeout": 504, "shutdown": 503, "server": 500}
_LONG_TEXT = 20_000  # characters
_BYTES_PER_TOKEN = 16  # limit for a prompt before it is tokenized; usual texts have far fewer
_CLIENT_GONE = 499  # for the log: no client reads this status
_STATUSES_BY_REASON: dict[str, int] = {"cancelled": _CLIENT_GONE, **{str(kind): _STATUS[kind] for kind in _STATUS}}
_WARM_UP_TOKENS = 6
_MAX_PROMPT_LOGPROBS = 1 << 20  # in one response, alternatives included

log = logging.getLogger("graft.server")
T = TypeVar("T")
MakeAnswers = Callable[..., Answers]
NewConstraint = Callable[[], GrammarConstraint]


@dataclass
class Serving:
    """State that the endpoints share: engine, scheduler, grammars, metrics."""

    engine: Engine
    settings: ServeSettings
    model_name: str
    grammars: Grammars
    template: ChatTemplate
    scheduler: Scheduler
    metrics: Metrics
    startup: Startup

    def __post_init__(self) -> None:
        self.is_warm = False
        # One thread for short texts and one for long texts, so that short ones need not wait.
        self._workers = [ThreadPoolExecutor(max_workers=1, thread_name_prefix="graft-text") for _ in range(2)]

    @property
    def status(self) -> Literal["starting", "ok", "stopping"]:
        if not self.scheduler.is_alive or self.scheduler.is_closing:
            return "stopping"
        return "ok" if self.is_warm else "starting"

    def check_ready(self) -> None:
        """Refuse a request unless it can be decoded now."""
        if self.status == "starting":
            raise self.startup.refusal("starting")
        self.check_alive()
        if self.scheduler.is_closing:
            raise RefusedError(503, "the server is shutting down; try again later", Retry_After="1")

    def check_alive(self) -> None:
        """Refuse a request if decoding has stopped and the server is not shutting down."""
        if not self.scheduler.is_alive and not self.scheduler.is_closing:
            raise RefusedError(503, "the server no longer decodes; its log says why")

    async def warm_up(self) -> None:
        """Decode a few tokens of an answer and throw it away. Nothing of it is cached or learned."""
        assert self.engine.tokenizer is not None
        chats = bool(self.engine.tokenizer.chat_template)
        hello = {"role": "user", "content": "Hello"}
        prompt = await self.off_loop(lambda: self.engine.encode([hello] if chats else hello["content"]))
        most = self.engine.target.max_positions
        num_tokens = min(2 * _WARM_UP_TOKENS, (most or 1 << 30) - len(prompt))
        if num_tokens < 1:
            return
        settings = SamplingSettings(max_new_tokens=num_tokens, temperature=1.0, seed=0, ignore_eos=True)
        updates: asyncio.Queue[tuple[int, Update | Failure]] = asyncio.Queue()
        job = Job(self.engine.new_sequences(prompt, settings), _forward_to(updates, 0), salt="warm-up")
        self.scheduler.submit(job)
        try:
            count = 0
            while count < _WARM_UP_TOKENS:
                _, update = await updates.get()
                if isinstance(update, Failure) or update.finish_reason is not None:
                    return
                count += len(update.ids)
        finally:
            self.scheduler.cancel(job)

    async def off_loop(self, work: Callable[[], T], size: int = 0) -> T:
        """Run slow work in a thread beside the event loop. size: characters of its texts."""
        worker = self._workers[size > _LONG_TEXT]
        return await asyncio.get_running_loop().run_in_executor(worker, work)

    async def encode(self, prompt: str | list[int], field: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, or ids that are checked. field: where the request has them."""
        self.check_size(prompt if isinstance(prompt, str) else "", field)
        try:
            return await self.off_loop(
                lambda: self.engine.encode(prompt, is_rendered=not add_special_tokens), len(prompt)
            )
        except GraftError as error:
            raise RefusedError(400, str(error), field) from error

    def check_size(self, text: str, field: str) -> None:
        """Refuse a prompt so long that tokenizing it would keep other requests waiting."""
        most = self.settings.max_prompt_bytes
        if most is None:
            num_tokens = self.settings.max_prompt_tokens or self.engine.target.max_positions
            most = _BYTES_PER_TOKEN * num_tokens if num_tokens is not None else None
        # Lone surrogates are refused later, with their place.
        size = len(text.encode("utf-8", "surrogatepass"))
        if most is not None and size > most:
            message = f"the prompt has {size} bytes, more than the {most} allowed here (--max-prompt-bytes)"
            context = self.engine.target.max_positions
            if context is not None:
                message += f": the model's context holds {context} tokens"
            raise RefusedError(400, message, field)

    def check_model(self, asked: str | None) -> None:
        if asked not in (None, self.model_name):
            raise RefusedError(404, f"the model {asked!r} is not served here; {self.model_name!r} is", "model")

    async def encode_chat(self, body: ChatRequest | TokenizeRequest) -> tuple[list[int], Thinks | None]:
        """Token ids of messages and tools, and whether the answer begins with reasoning."""
        size = sum(len(message.text) for message in body.messages or ())
        chat = await self.off_loop(lambda: self.template.render(body), size)
        self.check_size(chat.text, body.prompt_field)
        return await self.off_loop(lambda: self.template.encode(chat), len(chat.text)), chat.thinks

    async def answer_chat(self, body: ChatRequest, request: Request, kind: MakeAnswers = ChatAnswers) -> Response:
        """Answer messages. kind: makes the answers, by default those of a chat completion."""
        arrived = time.monotonic()
        self.check_model(body.model)
        prompt, thinks = await self.encode_chat(body)
        spec = await self.grammar_of_calls(body, thinks) or body.grammar_spec
        make = partial(kind, parser=self.parser_for(body, thinks), is_one_call=body.must_call and body.max_calls == 1)
        kept = self.template.kept_ids(bool(body.callable), thinks)
        return await self.answer(body, [prompt], request, spec, make, arrived, kept)

    async def grammar_of_calls(self, body: ChatRequest, thinks: Thinks | None) -> GrammarSpec | None:
        """The grammar of an answer with tool calls, if one is needed: for forced, strict or single calls."""
        tools = body.callable
        if not tools or not (body.constrains_calls or body.response_schema is not None):
            return None
        fits = [body.must_call or bool(tool.function.strict) for tool in tools]
        functions = [
            Function(tool.function.name, (tool.function.parameters or {}) if constrained else None)
            for tool, constrained in zip(tools, fits, strict=True)
        ]
        write = partial(
            call_grammar,
            self.template.format,
            functions,
            is_forced=body.must_call,
            max_calls=body.max_calls,
            # A forced call needs no reasoning first.
            thinks=None if body.must_call and thinks == "may" else thinks,
            answer=body.response_schema,
            marker_ids=self.template.marker_ids,
        )
        try:
            return GrammarSpec("grammar", await self.off_loop(write), "tools")
        except GraftError as error:
            raise RefusedError(400, str(error), "tools") from error

    def parser_for(self, body: ChatRequest, thinks: Thinks | None) -> Callable[[], Parser]:
        functions = [Function(tool.function.name, tool.function.parameters) for tool in body.callable]

        def make() -> Parser:
            calls = self.template.format.parser(functions) if functions else None
            if calls is not None and body.must_call:
                calls = CallsOnly(calls)
            return Thinking(thinks == "does", calls) if thinks is not None else calls or PlainText()

        return make

    async def answer_text(self, body: CompletionRequest, request: Request) -> Response:
        arrived = time.monotonic()
        self.check_model(body.model)
        adds = body.add_special_tokens is not False
        prompts = [await self.encode(prompt, body.prompt_field, adds) for prompt in body.prompts]
        echoed: list[str] = []
        if body.echo:
            echoed = [prompt for prompt in body.prompts if isinstance(prompt, str)]
            echoed = echoed or await self.off_loop(lambda: list(map(self._decode, prompts)), sum(map(len, prompts)))
        make = partial(TextAnswers, echoed=echoed, is_prompt_only=body.is_prompt_only)
        return await self.answer(body, prompts, request, body.grammar_spec, make, arrived)

    async def answer(
        self,
        body: ChatRequest | CompletionRequest,
        prompts: list[list[int]],
        request: Request,
        spec: GrammarSpec | None,
        make_answers: MakeAnswers,
        arrived: float,
        kept: frozenset[int] = frozenset(),
    ) -> Response:
        """Submit the request to the scheduler and pass its updates on to the client.

        spec: the grammar of the answers. make_answers: gives them their form. arrived: time.monotonic() when the
        request came. kept: special tokens that stay in the text of the answers.
        """
        num_scores = self._num_prompt_logprobs(body, prompts)
        updates: asyncio.Queue[tuple[int, Update | Failure]] = asyncio.Queue()
        tenant = self._tenant(body, request)
        new_constraint = await self._grammar(spec, body.is_lenient)
        size = sum(map(len, prompts))
        jobs = await self.off_loop(
            lambda: [self._job(body, prompt, tenant, new_constraint, kept) for prompt in prompts], size
        )
        for number, job in enumerate(jobs):
            job.deadline = arrived + self.settings.timeout
            job.listener = _forward_to(updates, number)
        answers = make_answers(
            self.model_name,
            self.grammars,
            jobs,
            tokenizer=self.engine.tokenizer if body.return_rounds else None,
            with_prompt_logprobs=body.prompt_logprobs is not None,
            is_streamed=bool(body.stream),
        )
        if self.settings.log_prompts:
            for prompt in prompts:
                log.info("%s prompt %r", answers.id, await self.off_loop(partial(self._decode, prompt), size))
        self._submit(jobs)
        options = (body.stream_options or StreamOptions()) if body.stream else None
        events = self._events(answers, updates, arrived, request.scope, options)
        if options is not None:
            # Wait for the first token: an error before it still gets its own status.
            first = await _unless_disconnected(request, anext(events))
            if first is None:
                return Response(status_code=_CLIENT_GONE)
            return StreamingResponse(_stream(answers, first, events, options), media_type="text/event-stream")
        whole = await _unless_disconnected(request, self._whole_response(answers, events, num_scores))
        return whole if whole is not None else Response(status_code=_CLIENT_GONE)

    async def _whole_response(self, answers: Answers, events: AsyncGenerator[bytes, None], size: int) -> Response:
        """The response, once the answers are complete. Many log-probabilities are serialised beside the event loop."""
        async for _ in events:
            pass
        sequences = answers.sequences
        size += sum(1 + len(each.alternatives) for sequence in sequences for each in sequence.logprobs)
        return await self.off_loop(lambda: AsciiJson(answers.whole()), size)

    def _num_prompt_logprobs(self, body: ChatRequest | CompletionRequest, prompts: list[list[int]]) -> int:
        """Number of prompt log-probabilities in the response. Refuses a request for too many."""
        if body.num_prompt_logprobs is None:
            return 0
        count = (body.num_prompt_logprobs + 1) * (body.n or 1) * sum(map(len, prompts))
        if count > _MAX_PROMPT_LOGPROBS:
            message = f"the response would hold {count} log-probabilities of prompts, more than {_MAX_PROMPT_LOGPROBS}"
            name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
            raise RefusedError(400, f"{message}: ask for fewer alternatives, answers or prompts", name)
        return count

    async def _grammar(self, spec: GrammarSpec | None, is_lenient: bool) -> NewConstraint | None:
        """Makes the constraint of an answer, if it has a grammar. is_lenient: if that is invalid, allow any JSON."""
        if spec is None:
            return None
        try:
            try:
                compiled = await self.grammars.compile(spec)
            except GraftError as error:
                if not is_lenient:
                    raise RefusedError(400, str(error), spec.param) from error
                compiled = await self.grammars.compile(GrammarSpec.schema({}))
            return partial(self.grammars.constraint, compiled, spec.param)
        except SchemasBusyError as error:
            raise RefusedError(503, f"{error}; try again later", spec.param, Retry_After="5") from error

    def _job(
        self,
        body: ChatRequest | CompletionRequest,
        prompt: list[int],
        tenant: str,
        new_constraint: NewConstraint | None,
        kept: frozenset[int],
    ) -> Job:
        num_tokens = self._max_new_tokens(body, prompt)
        self._check_context(body, len(prompt), num_tokens)
        settings = SamplingSettings.of(body.settings(num_tokens, body.num_logprobs))
        sequences = self.engine.new_sequences(prompt, settings, kept)
        for sequence in sequences:
            sequence.speculates = body.speculate is not False
            sequence.is_recorded = bool(body.return_rounds)
            sequence.shows_all = self.settings.shows_all_guesses
            sequence.owner = self._owner(tenant)
            sequence.num_prompt_logprobs = body.num_prompt_logprobs
            if new_constraint is not None:
                sequence.constraint = new_constraint()
        job = Job(sequences, lambda updates: None, salt=tenant)
        self.scheduler.check(job)
        return job

    def _max_new_tokens(self, body: ChatRequest | CompletionRequest, prompt: list[int]) -> int:
        asked: int | None = body.requested_tokens
        most, settings = self.settings.max_prompt_tokens, self.settings
        if most is not None and len(prompt) > most:
            message = f"the prompt has {len(prompt)} tokens, more than the {most} allowed here"
            raise RefusedError(400, message, body.prompt_field)
        if asked is not None:
            if asked > settings.max_tokens:
                message = f"{body.length_field} is {asked}, more than the {settings.max_tokens} allowed here"
                raise RefusedError(400, message, body.length_field)
            return asked
        room = (self.engine.target.max_positions or 1 << 30) - len(prompt)
        return max(1, min(settings.default_max_tokens, settings.max_tokens, room))

    def _check_context(self, body: ChatRequest | CompletionRequest, num_prompt_tokens: int, num_tokens: int) -> None:
        """Refuse a prompt that is longer, with its answer, than the model's context, in the words of OpenAI's API."""
        limit = self.engine.target.max_positions
        if limit is None or num_prompt_tokens + num_tokens <= limit:
            return
        message = f"this model's maximum context length is {limit} tokens, and the prompt has {num_prompt_tokens}"
        if num_prompt_tokens < limit:
            message += f": {body.length_field} can be at most {limit - num_prompt_tokens}, not {num_tokens}"
        field = body.prompt_field if num_prompt_tokens >= limit else body.length_field
        raise RefusedError(400, message, field, code="context_length_exceeded")

    def _tenant(self, body: ChatRequest | CompletionRequest, request: Request) -> str:
        """The group that shares prefix cache and learning: everybody, one key, or one user of a key."""
        sharing = self.settings.sharing
        if sharing == "shared":
            return ""
        return json.dumps([request.scope.get("graft.key"), None if sharing == "key" else body.user])

    def _owner(self, tenant: str) -> int | None:
        """The tenant as a number for retrievers; None if everybody shares or nobody does."""
        if self.settings.sharing in ("shared", "off"):
            return None
        # Larger than the numbers of texts without an owner.
        return 1 << 56 | int.from_bytes(hashlib.blake2b(tenant.encode(), digest_size=7).digest())

    def _submit(self, jobs: list[Job]) -> None:
        try:
            self.scheduler.submit(*jobs)
        except BusyError as error:
            status = 503 if error.is_closing else 429
            raise RefusedError(status, f"{error}; try again later", Retry_After="1") from error

    async def _events(
        self,
        answers: Answers,
        updates: asyncio.Queue[tuple[int, Update | Failure]],
        arrived: float,
        scope: Scope,
        options: StreamOptions | None,
    ) -> AsyncGenerator[bytes, None]:
        """Events of the updates as they come; also counts them in the metrics.

        options: of the stream; None: the answers are not streamed, and there are no events. Closing the generator
        early cancels the request.
        """
        for job in answers.jobs:
            self.metrics.prompt_tokens.inc(job.sequences[0].num_prompt_tokens)
        reason = "cancelled"
        try:
            while not answers.is_done:
                number, update = await updates.get()
                if isinstance(update, Failure):
                    reason = update.kind
                    raise FailedError(_STATUS[update.kind], update.message)
                self._count(answers, number, update, arrived)
                for event in await self._events_for(answers, number, update, options):
                    yield event
            reason = ""
            self.metrics.end_to_end.observe(time.monotonic() - arrived)
        finally:
            for job in answers.jobs:
                self.scheduler.cancel(job)  # no effect on finished jobs
                for sequence in job.sequences:
                    self.metrics.speculated(sequence.stats)
                    if not reason:
                        self.metrics.answered(str(sequence.finish_reason))
            if reason:
                self.metrics.failed(reason)
            self._log(answers, reason, time.monotonic() - arrived, scope)

    async def _events_for(
        self, answers: Answers, number: int, update: Update, options: StreamOptions | None
    ) -> list[bytes]:
        """The events of an update. A long echoed prompt is serialised beside the event loop."""

        def make() -> list[bytes]:
            chunks = answers.chunks_for(number, update)
            return [answers.event(chunk, options) for chunk in chunks] if options is not None else []

        size = answers.size_of_echo(number, update) if options is not None else 0
        return await self.off_loop(make, size) if size else make()

    def _count(self, answers: Answers, number: int, update: Update, arrived: float) -> None:
        answer, now = answers.answer_of(number, update), time.monotonic()
        self.metrics.new_tokens.inc(len(update.ids))
        if answer.is_fresh:
            self.metrics.time_to_first_token.observe(now - arrived)
            self.metrics.queue_time.observe((answers.jobs[number].joined or now) - arrived)
        else:
            for _ in update.ids:
                self.metrics.inter_token_latency.observe((now - answer.updated) / len(update.ids))
        answer.updated = now

    def _log(self, answers: Answers, reason: str, seconds: float, scope: Scope) -> None:
        """The log line of a request that was decoded, whether it was answered or failed."""
        sequences = answers.sequences
        reasons = reason or ",".join(str(sequence.finish_reason) for sequence in sequences)
        prompt = sum(job.sequences[0].num_prompt_tokens for job in answers.jobs)
        tokens, rounds = (sum(getattr(s.stats, what) for s in sequences) for what in ("tokens", "rounds"))
        status = _STATUSES_BY_REASON.get(reason, 200)
        words = f"{answers.id} {reasons}: {prompt} prompt tokens, {tokens} new in {rounds} rounds, {seconds:.3f} s"
        log_request(
            scope["graft.id"], scope.get("graft.key_name"), status, words, answer=answers.id, reason=reasons,
            prompt_tokens=prompt, new_tokens=tokens, rounds=rounds, seconds=round(seconds, 3),
        )  # fmt: skip
        scope["graft.is_logged"] = True

    def _decode(self, ids: list[int]) -> str:
        assert self.engine.tokenizer is not None
        return str(self.engine.tokenizer.decode(ids))


# Streaming


def _forward_to(
    updates: asyncio.Queue[tuple[int, Update | Failure]], number: int
) -> Callable[[Update | Failure], None]:
    """A listener for the scheduler's thread that puts updates into a queue of this event loop."""
    loop = asyncio.get_running_loop()

    def listen(update: Update | Failure) -> None:
        loop.call_soon_threadsafe(updates.put_nowait, (number, update))

    return listen


async def _stream(
    answers: Answers, first: bytes, events: AsyncGenerator[bytes, None], options: StreamOptions
) -> AsyncIterator[bytes]:
    """All events of a stream. The status is sent already, so an error becomes an event."""
    try:
        for chunk in answers.opening():
            yield answers.event(chunk, options)
        yield first
        async for event in events:
            yield event
        for chunk in answers.closing(bool(options.include_usage)):
            yield answers.event(chunk, StreamOptions())
        yield answers.ending
    except RefusedError as error:
        for chunk in answers.failure(error):
            yield answers.event(chunk, StreamOptions())
    except Exception:  # some clients take a stream that just stops for a complete answer
        log.exception("%s failed", answers.id)
        for chunk in answers.failure(FailedError(500, "the server failed to write this answer; its log says why")):
            yield answers.event(chunk, StreamOptions())
    finally:
        await events.aclose()


async def _unless_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """The result of the work, or None if the client disconnects first, which cancels the work."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
