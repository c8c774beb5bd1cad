"""The HTTP app: OpenAI's endpoints, errors and the page's files. `serving` answers the requests."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, Response
from starlette.exceptions import HTTPException

from graft.engine import Engine
from graft.engine.jobs import BusyError
from graft.engine.scheduler import Scheduler
from graft.errors import ContextError, GraftError
from graft.server import openapi
from graft.server.chat import ChatTemplate
from graft.server.grammar import Grammars
from graft.server.guard import OPEN, PAGE_FILES, PAGE_HEADERS, Guard, record_refusal
from graft.server.metrics import Metrics
from graft.server.refusals import Json, RefusedError
from graft.server.responses import ResponseAnswers, ResponsesRequest
from graft.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from graft.server.serving import Serving
from graft.server.settings import ServeSettings
from graft.server.startup import Startup
from graft.settings import require
from graft.version import __version__

_MAX_NAME = 64  # characters of an unknown field's name in an error
_PLAIN_TYPES = ("str", "int", "float", "bool")
_MESSAGES = {  # by the type of a validation error
    "missing": "it is missing",
    "too_long": "at most {max_length} entries are allowed, not {actual_length}",
    "too_short": "it is empty",
    "string_too_short": "it is empty",
    "string_too_long": "at most {max_length} characters are allowed",
}

log = logging.getLogger("graft.server")


def make_app(
    engine: Engine,
    settings: ServeSettings,
    model_name: str,
    startup: Startup | None = None,
    metrics: Metrics | None = None,
) -> FastAPI:
    """The FastAPI app for one engine. The scheduler starts and ends with the app.

    startup, metrics: those of the gateway, which has used them since the server began to listen.
    """
    name = settings.served_model_name or model_name
    startup, counts = startup or Startup(), metrics or Metrics(name)
    is_apart = settings.sharing == "shared" or engine.policy.isolated or not engine.policy.common_sources
    require(is_apart, "the server isolates its users, but the engine learns across texts: load it with isolated")
    grammars = Grammars(engine.tokenizer, engine.target.vocab_size, engine.eos_token_ids)
    template = ChatTemplate(engine, settings.tool_parser, settings.reasoning_parser)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        startup.enter("preparing")
        scheduler = await asyncio.to_thread(Scheduler, engine, settings)
        counts.watch(scheduler)
        app.state.serving = Serving(engine, settings, name, grammars, template, scheduler, counts, startup)
        starting = asyncio.create_task(_start(app.state.serving))  # meanwhile the server answers that it is starting
        yield
        starting.cancel()
        gc.unfreeze()
        await asyncio.to_thread(scheduler.close)

    # FastAPI's documentation pages would load scripts from other hosts.
    app = FastAPI(title="Graft", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.openapi = lambda: openapi.document(app, bool(settings.api_keys), OPEN)  # type: ignore[method-assign]
    app.add_middleware(Guard, settings=settings, metrics=counts)
    for kind in (RefusedError, GraftError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)

    def serving(request: Request) -> Serving:
        found: Serving = request.app.state.serving
        found.check_ready()
        return found

    @app.post("/v1/chat/completions", responses=openapi.streamable("a chat.completion.chunk"))
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await serving(request).answer_chat(body, request)

    @app.post("/v1/completions", responses=openapi.streamable("a text_completion"))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await serving(request).answer_text(body, request)

    @app.post("/v1/responses", responses=openapi.streamable("an event of its type"))
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        return await serving(request).answer_chat(body.as_chat(), request, functools.partial(ResponseAnswers, body))

    errors, limit = openapi.errors, engine.target.max_positions
    card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "graft", "max_model_len": limit}

    @app.get("/v1/models", responses=errors(401))
    async def models() -> Json:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}", responses=errors(401, 404))
    async def model(model: str, request: Request) -> Json:
        request.app.state.serving.check_model(model)
        return card

    @app.post("/tokenize", responses=errors())
    async def tokenize(body: TokenizeRequest, request: Request) -> Json:
        here = serving(request)
        here.check_model(body.model)
        if body.messages is not None:
            ids, _ = await here.encode_chat(body)
        else:
            adds = body.add_special_tokens is not False
            ids = await here.encode(body.prompt, "prompt", adds) if body.prompt else []
        return {"tokens": ids, "count": len(ids), "max_model_len": limit}

    @app.post("/detokenize", responses=errors())
    async def detokenize(body: DetokenizeRequest, request: Request) -> Json:
        here = serving(request)
        here.check_model(body.model)
        tokenizer, ids = engine.tokenizer, await here.encode(body.tokens, "tokens") if body.tokens else []
        assert tokenizer is not None
        text = await here.off_loop(lambda: tokenizer.decode(ids, clean_up_tokenization_spaces=False), len(ids))
        return {"prompt": text}

    @app.get("/health", responses=errors(503))
    async def health(request: Request) -> Json:
        serving(request)
        facts = engine.target.describe()
        steps = facts["steps"].partition(":")[0]  # a reason there may be a driver's words; it is in the log
        return {"status": "ok", "weights": facts["weights"], "steps": steps, "not_fused": facts.get("not fused")}

    @app.get("/live", responses=errors(503))
    async def live(request: Request) -> Json:
        here: Serving = request.app.state.serving
        here.check_alive()
        return {"status": here.status}

    @app.get("/version")
    async def version() -> Json:
        return {"version": __version__}

    text = {"text/plain": {"schema": {"type": "string"}}}

    @app.get("/metrics", response_class=Response, responses={**errors(401), 200: {"content": text}})
    async def metrics_text() -> Response:
        return counts.response()

    if settings.page:
        for path, file in PAGE_FILES.items():
            _add_file(app, path, file)
    return app


async def _start(serving: Serving) -> None:
    """Warm up before the first request."""
    try:
        await asyncio.to_thread(serving.scheduler.is_ready.wait)
        serving.startup.enter("warming up")
        await serving.warm_up()
    except BusyError:
        return  # the server is stopping already
    except Exception:
        log.exception("the warm-up failed")
    # Exclude the objects of the start from garbage collection: a full pass over them would stall answers.
    gc.collect()
    gc.freeze()
    serving.is_warm = True
    log.info("ready")


async def _on_error(request: Request, error: Exception) -> Response:
    """Any error as a response in OpenAI's format."""
    if isinstance(error, RefusedError):
        refusal = error
    elif isinstance(error, ContextError):  # its message has numbers and no text of the client
        refusal = RefusedError(400, str(error), reason=str(error))
    elif isinstance(error, GraftError):
        refusal = RefusedError(400, str(error))
    elif isinstance(error, RequestValidationError):
        refusal = _named(error)
    elif isinstance(error, HTTPException):
        reason = {404: "no such path", 405: "no such method"}.get(error.status_code)
        refusal = RefusedError(error.status_code, str(error.detail), reason=reason, **dict(error.headers or {}))
    else:  # this runs outside the middleware that adds request ids
        name = request.scope.get("graft.id", "")
        refusal = RefusedError(500, "the request failed; the server's log says why", x_request_id=name)
    record_refusal(request.scope, refusal)
    return refusal.response


def _named(error: RequestValidationError) -> RefusedError:
    """The most helpful validation error: in a union, the one of the member that fitted best.

    An error about a value helps more than one about a type. Among equals, the one with the longest path is taken.
    """
    found = max(error.errors(), key=lambda each: (not each["type"].endswith("_type"), len(each["loc"])))
    parts = [str(part) for part in found["loc"][1:]]
    # For the log, which must not hold the client's words: names below the first one and of unknown fields are its own.
    is_ours = parts and not (found["type"] == "extra_forbidden" and len(parts) == 1)
    reason = f"request, {found['type']}" + (f", field {parts[0]}" if is_ours else "")
    # A location also contains the types of a union's members.
    known = [part for part in parts if re.fullmatch(r"[a-z0-9_]+", part) and part not in _PLAIN_TYPES]
    name = ".".join(known)
    if found["type"] == "extra_forbidden":
        # The last part is chosen by the client and can be anything.
        name = ".".join([*(known[:-1] if known and known[-1] == parts[-1] else known), parts[-1][:_MAX_NAME]])
        return RefusedError(400, f"{name} is not supported", name, reason=reason)
    if found["type"] == "json_invalid":
        return RefusedError(400, f"the body is not JSON: {found.get('ctx', {}).get('error', found['msg'])}")
    if found["type"] == "model_attributes_type" and not name:
        return RefusedError(400, "the body is not a JSON object, or its Content-Type is not application/json")
    message = str(found["msg"]).removeprefix("Value error, ")
    if found["type"] in _MESSAGES:
        message = _MESSAGES[found["type"]].format(**found.get("ctx", {}))
    return RefusedError(400, f"{name}: {message}" if name else message, name or None, reason=reason)


def _add_file(app: FastAPI, path: str, file: Path) -> None:
    def serve() -> Response:  # takes no parameters: a query could set them to name any file
        return FileResponse(file, headers=PAGE_HEADERS)

    app.add_api_route(path, serve, include_in_schema=False, response_class=Response)
