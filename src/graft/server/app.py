"""The HTTP API: OpenAI's endpoints over the scheduler. Requests are checked here; decoding is the scheduler's."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from graft import __version__
from graft.core.scheduler import BusyError, Failure, FailureKind, Job, Scheduler, Update
from graft.engine import Engine, Prompt
from graft.errors import GraftError
from graft.model.sampler import SamplingSettings
from graft.server.answers import Answers, ChatShape, Json, Shape, TextShape
from graft.server.grammar import Grammars, SchemasBusyError
from graft.server.guard import Guard
from graft.server.metrics import Metrics
from graft.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from graft.server.settings import ServeSettings
from graft.settings import require

PAGE = Path(__file__).parent / "static"
_STATUS: dict[FailureKind, int] = {"request": 400, "timeout": 504, "server": 500}
# Seconds that an idle connection stays: longer than clients and proxies keep theirs (5 and 60 are usual), so that none
# asks on a connection that is just being closed.
_KEEP_ALIVE = 75
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

_LONG_TEXT = 20_000  # characters

log = logging.getLogger("graft.server")
T = TypeVar("T")


class RefusedError(Exception):
    """An HTTP error in OpenAI's format."""

    def __init__(self, status: int, message: str, param: str | None = None, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @property
    def body(self) -> Json:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


class AsciiJson(JSONResponse):
    """A JSON response in ASCII: it can repeat anything a request held, half characters too."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def make_server(app: FastAPI, settings: ServeSettings, **logging_options: Any) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=max(1, round(settings.shutdown_timeout)),
            server_header=False,
            ws="none",
            **logging_options,
        )
    )


def make_app(engine: Engine, settings: ServeSettings, model_name: str) -> FastAPI:
    """The FastAPI app for one engine. The scheduler lives from the app's start to its end."""
    name = settings.served_model_name or model_name
    is_apart = settings.shared_by == "all" or engine.policy.isolated or not engine.policy.retrievers
    require(is_apart, "users are to be kept apart, and the engine's texts learn from each other: load it with isolated")
    grammars = Grammars(engine.tokenizer, engine.target.vocab_size, engine.eos_token_ids)
    started = int(time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        scheduler = Scheduler(engine, settings)
        await asyncio.to_thread(scheduler.is_ready.wait)
        app.state.serving = Serving(engine, settings, name, grammars, scheduler)
        # What is there now stays. The collector need not look at hundreds of thousands of objects again, which takes
        # long in the middle of somebody's answer.
        gc.collect()
        gc.freeze()
        yield
        gc.unfreeze()
        await asyncio.to_thread(scheduler.close)

    # Its documentation pages would load scripts from elsewhere.
    app = FastAPI(title="Graft", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, keys=settings.api_keys, max_body_bytes=settings.max_body_bytes)
    if settings.is_local:  # no DNS rebinding: a web page whose name resolves to this address must not reach it
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]"])
    _add_errors(app)

    def serving(request: Request) -> Serving:
        found: Serving = request.app.state.serving
        return found

    refusals: dict[int | str, dict[str, Any]] = {
        status: {"description": words}
        for status, words in {
            400: "The request is not understood or not supported; the message says what.",
            401: "No API key, or a wrong one.",
            404: "No such model.",
            413: "The body is too large.",
            429: "Too many requests are waiting.",
            503: "The server is shutting down, or at work on JSON schemas that take long.",
            504: "The request took longer than allowed.",
        }.items()
    }

    @app.post("/v1/chat/completions", responses=refusals)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        here = serving(request)
        prompt = await here.encode([message.as_dict() for message in body.messages])
        return await here.answer(body, [prompt], ChatShape(name, grammars), request)

    @app.post("/v1/completions", responses=refusals)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        here = serving(request)
        prompts = [await here.encode(prompt) for prompt in body.prompts]
        return await here.answer(body, prompts, TextShape(name, grammars), request)

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [_model_card(name, started, engine)]}

    @app.get("/v1/models/{model:path}", responses={404: refusals[404]})
    async def model(model: str, request: Request) -> Json:
        serving(request).check_model(model)
        return _model_card(name, started, engine)

    @app.post("/tokenize", responses=refusals)
    async def tokenize(body: TokenizeRequest, request: Request) -> Json:
        here = serving(request)
        here.check_model(body.model)
        prompt: Any = body.prompt if body.messages is None else [message.as_dict() for message in body.messages]
        ids = await here.encode(prompt) if prompt else []
        return {"tokens": ids, "count": len(ids), "max_model_len": engine.target.max_positions}

    @app.post("/detokenize", responses=refusals)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Json:
        here = serving(request)
        here.check_model(body.model)
        tokenizer, ids = engine.tokenizer, await here.encode(body.tokens) if body.tokens else []
        assert tokenizer is not None
        text = await here.off_loop(lambda: tokenizer.decode(ids, clean_up_tokenization_spaces=False), len(ids))
        return {"prompt": text}

    @app.get("/health", responses={503: {"description": "The server no longer decodes."}})
    async def health(request: Request) -> Json:
        if not serving(request).scheduler.is_alive:
            raise RefusedError(503, "the server no longer decodes; its log says why")
        return {"status": "ok", "steps": engine.target.mode.partition(":")[0]}  # why is for the log

    @app.get("/version")
    async def version() -> Json:
        return {"version": __version__}

    @app.get("/metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        return Response(serving(request).metrics.text(), media_type="text/plain; version=0.0.4")

    if settings.page:
        _add_page(app)
    return app


@dataclass
class Serving:
    """State that the endpoints share: engine, scheduler, grammars, metrics."""

    engine: Engine
    settings: ServeSettings
    model_name: str
    grammars: Grammars
    scheduler: Scheduler

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.scheduler, self.model_name)
        # One thread each: texts come in turn, and long ones do not keep others waiting.
        self._workers = [ThreadPoolExecutor(max_workers=1, thread_name_prefix="graft-text") for _ in range(2)]

    async def off_loop(self, work: Callable[[], T], size: int = 0) -> T:
        """Runs slow work in a thread beside the event loop. size: of its texts, in characters."""
        worker = self._workers[size > _LONG_TEXT]
        try:
            return await asyncio.get_running_loop().run_in_executor(worker, work)
        except TemplateError as error:
            raise RefusedError(400, f"the model's chat template refuses these messages: {error}", "messages") from error

    async def encode(self, prompt: Prompt) -> list[int]:
        sizes = [len(part["content"]) if isinstance(part, dict) else 1 for part in prompt]
        return await self.off_loop(lambda: self.engine.encode(prompt), sum(sizes))

    def check_model(self, asked: str | None) -> None:
        if asked not in (None, self.model_name):
            raise RefusedError(404, f"the model {asked!r} is not served here; {self.model_name!r} is", "model")

    async def answer(
        self, body: ChatRequest | CompletionRequest, prompts: list[list[int]], shape: Shape, request: Request
    ) -> Response:
        """Submits the request to the scheduler, and passes its updates on to the client."""
        arrived = time.monotonic()
        self.check_model(body.model)
        news: asyncio.Queue[tuple[int, Update | Failure]] = asyncio.Queue()
        tenant = self._tenant(body, request)
        grammar = await self._grammar(body)
        size = sum(map(len, prompts))
        jobs = await self.off_loop(lambda: [self._job(body, prompt, tenant, grammar) for prompt in prompts], size)
        for number, job in enumerate(jobs):
            job.deadline = arrived + self.settings.timeout
            job.listener = _passing_on(news, number)
        if self.settings.log_prompts:
            for prompt in prompts:
                log.info("%s prompt %r", shape.id, self._decode(prompt))
        self._submit(jobs)
        answers = Answers(shape, jobs, self.engine.tokenizer, bool(body.return_rounds))
        chunks = self._chunks(answers, news, arrived)
        if body.stream:
            # A stream begins with its first token, so that what fails before it has a status of its own.
            first = await _unless_gone(request, anext(chunks))
            if first is None:
                return _nobody_there()
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            return StreamingResponse(_events(answers, first, chunks, with_usage), media_type="text/event-stream")
        whole = await _unless_gone(request, _drained(answers, chunks))
        return AsciiJson(whole) if whole is not None else _nobody_there()

    async def _grammar(self, body: ChatRequest | CompletionRequest) -> Any | None:
        """The grammar of the requested JSON schema, if there is one."""
        if body.wanted_schema is None:
            return None
        try:
            return await self.grammars.compile(body.wanted_schema)
        except SchemasBusyError as error:
            self.metrics.failed("busy")
            raise RefusedError(503, f"{error}; try again later", "response_format", Retry_After="5") from error

    def _job(self, body: ChatRequest | CompletionRequest, prompt: list[int], tenant: str, grammar: Any | None) -> Job:
        settings = SamplingSettings.of(body.settings(self._max_new_tokens(body, prompt), body.num_logprobs))
        sequences = self.engine.new_sequences(prompt, settings)
        for sequence in sequences:
            sequence.speculates = body.speculate is not False
            sequence.is_recorded = bool(body.return_rounds)
            sequence.owner = self._owner(tenant)
            if grammar is not None:
                sequence.constraint = self.grammars.constraint(grammar)
        job = Job(sequences, lambda news: None, salt=tenant)
        self.scheduler.check(job)
        return job

    def _max_new_tokens(self, body: ChatRequest | CompletionRequest, prompt: list[int]) -> int:
        asked: int | None = body.wanted_tokens
        most, settings = self.settings.max_prompt_tokens, self.settings
        if most is not None and len(prompt) > most:
            raise RefusedError(400, f"the prompt has {len(prompt)} tokens, more than the {most} allowed here", "prompt")
        if asked is not None:
            if asked > settings.max_tokens:
                what = f"max_tokens is {asked}, more than the {settings.max_tokens} allowed here"
                raise RefusedError(400, what, "max_tokens")
            return asked
        room = (self.engine.target.max_positions or 1 << 30) - len(prompt)
        # Where the prompt leaves no room, a token is asked for, and refused in words.
        return max(1, min(settings.default_max_tokens, settings.max_tokens, room))

    def _tenant(self, body: ChatRequest | CompletionRequest, request: Request) -> str:
        """The group with which a request shares prefix cache and learning: all, its key's, or its key's and user's."""
        shared_by = self.settings.shared_by
        if shared_by == "all":
            return ""
        return json.dumps([request.scope.get("graft.key"), None if shared_by == "key" else body.user])

    def _owner(self, tenant: str) -> int | None:
        """A tenant as a number for retrievers; None where all share or each text learns from itself alone."""
        if self.settings.shared_by in ("all", "none"):
            return None
        # Above all numbers of texts that have no owner.
        return 1 << 56 | int.from_bytes(hashlib.blake2b(tenant.encode(), digest_size=7).digest())

    def _submit(self, jobs: list[Job]) -> None:
        try:
            for job in jobs:
                self.scheduler.submit(job)
        except BusyError as error:
            for job in jobs:
                self.scheduler.cancel(job)
            self.metrics.failed("busy")
            status = 429 if self.scheduler.is_alive and "shutting down" not in str(error) else 503
            raise RefusedError(status, f"{error}; try again later", Retry_After="1") from error

    async def _chunks(
        self, answers: Answers, news: asyncio.Queue[tuple[int, Update | Failure]], arrived: float
    ) -> AsyncGenerator[Json, None]:
        """Yields chunks as they come and counts them in the metrics. Closing it before the end cancels the request."""
        for job in answers.jobs:
            self.metrics.asked(job.sequences[0].num_prompt_tokens)
        last: dict[tuple[int, int], float] = {}
        reason = "cancelled"
        try:
            while not answers.is_done:
                number, told = await news.get()
                now = time.monotonic()
                if isinstance(told, Failure):
                    reason = told.kind
                    raise RefusedError(_STATUS[told.kind], told.message)
                self._count(answers.jobs[number], (number, told.index), told, arrived, now, last)
                chunk = answers.take(number, told)
                if chunk is not None:
                    yield chunk
            reason = ""
            self.metrics.end_to_end.observe(time.monotonic() - arrived)
        finally:
            for job in answers.jobs:
                self.scheduler.cancel(job)  # those that have ended do not mind
                for sequence in job.sequences:
                    self.metrics.speculated(sequence.stats)
                    if not reason:
                        self.metrics.answered(str(sequence.finish_reason))
            if reason:
                self.metrics.failed(reason)
            self._log(answers, reason, time.monotonic() - arrived)

    def _count(
        self,
        job: Job,
        answer: tuple[int, int],
        update: Update,
        arrived: float,
        now: float,
        last: dict[tuple[int, int], float],
    ) -> None:
        self.metrics.written(len(update.ids))
        if answer not in last:
            self.metrics.time_to_first_token.observe(now - arrived)
            self.metrics.queue_time.observe((job.joined or now) - arrived)
        else:
            for _ in update.ids:
                self.metrics.inter_token_latency.observe((now - last[answer]) / len(update.ids))
        last[answer] = now

    def _log(self, answers: Answers, reason: str, seconds: float) -> None:
        sequences = [sequence for job in answers.jobs for sequence in job.sequences]
        reasons = reason or ",".join(str(sequence.finish_reason) for sequence in sequences)
        prompt = sum(job.sequences[0].num_prompt_tokens for job in answers.jobs)
        tokens, rounds = (sum(getattr(s.stats, what) for s in sequences) for what in ("tokens", "rounds"))
        log.info(
            "%s %s: %d prompt tokens, %d new in %d rounds, %.3f s",
            answers.shape.id, reasons, prompt, tokens, rounds, seconds,
        )  # fmt: skip

    def _decode(self, ids: list[int]) -> str:
        assert self.engine.tokenizer is not None
        return str(self.engine.tokenizer.decode(ids))


# Streaming


def _passing_on(news: asyncio.Queue[tuple[int, Update | Failure]], number: int) -> Callable[[Update | Failure], None]:
    """A listener, called in the scheduler's thread, that puts updates into a queue of this event loop."""
    loop = asyncio.get_running_loop()

    def listen(told: Update | Failure) -> None:
        loop.call_soon_threadsafe(news.put_nowait, (number, told))

    return listen


async def _events(
    answers: Answers, first: Json, chunks: AsyncGenerator[Json, None], with_usage: bool
) -> AsyncIterator[bytes]:
    """Server-sent events, one per chunk. An error after the first event can only be an event itself."""
    try:
        opening = answers.first()
        if opening is not None:
            yield _event(opening)
        yield _event(first)
        async for chunk in chunks:
            yield _event(chunk)
        if with_usage:
            yield _event(answers.shape.usage_chunk(answers.jobs))
        yield b"data: [DONE]\n\n"
    except RefusedError as error:
        yield _event(error.body)
    finally:
        await chunks.aclose()


def _event(content: Json) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


async def _drained(answers: Answers, chunks: AsyncGenerator[Json, None]) -> Json:
    """The whole response, once all chunks have come."""
    async for _ in chunks:
        pass
    return answers.whole()


async def _unless_gone(request: Request, work: Awaitable[Json]) -> Json | None:
    """The result of the work; None if the client disconnects first, which cancels the work."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _nobody_there() -> Response:
    return Response(status_code=499)  # nobody is there to read it


# Errors and static files


def _model_card(name: str, created: int, engine: Engine) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "graft",
        "max_model_len": engine.target.max_positions,
    }


def _add_errors(app: FastAPI) -> None:
    def refused(error: RefusedError) -> Response:
        return AsciiJson(error.body, error.status, error.headers)

    @app.exception_handler(RefusedError)
    async def on_refused(request: Request, error: RefusedError) -> Response:
        return refused(error)

    @app.exception_handler(GraftError)
    async def on_graft_error(request: Request, error: GraftError) -> Response:
        return refused(RefusedError(400, str(error)))

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        return refused(_named(error))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        return refused(RefusedError(error.status_code, str(error.detail), **dict(error.headers or {})))

    @app.exception_handler(Exception)
    async def on_crash(request: Request, error: Exception) -> Response:
        return refused(RefusedError(500, "the request failed; the server's log says why"))


def _named(error: RequestValidationError) -> RefusedError:
    """The first validation error, naming the field."""
    found = error.errors()[0]
    name = ".".join(str(part) for part in found["loc"][1:])
    if found["type"] == "extra_forbidden":
        return RefusedError(400, f"{name} is not supported", name)
    if found["type"] == "json_invalid":
        return RefusedError(400, f"the body is not JSON: {found.get('ctx', {}).get('error', found['msg'])}")
    if found["type"] == "model_attributes_type" and not name:
        return RefusedError(400, "the body is not a JSON object, or its Content-Type is not application/json")
    message = str(found["msg"]).removeprefix("Value error, ")
    return RefusedError(400, f"{name}: {message}" if name else message, name or None)


def _add_page(app: FastAPI) -> None:
    for file in PAGE.iterdir():
        _add_file(app, "/" if file.name == "index.html" else f"/{file.name}", file)


def _add_file(app: FastAPI, path: str, file: Path) -> None:
    def serve() -> Response:  # without parameters: they would be the query's, and name any file
        return FileResponse(file, headers=_PAGE_HEADERS)

    app.add_api_route(path, serve, include_in_schema=False, response_class=Response)
