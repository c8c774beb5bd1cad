"""Load test of an OpenAI-compatible server: throughput and latencies of many concurrent requests."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx

from graft.errors import GraftError
from graft.settings import Settings, require

_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class LoadSettings(Settings):
    """Settings of a load test: requests, concurrency or rate, and latency targets (SLO)."""

    requests: int = 64
    concurrency: int = 8  # concurrent requests; with a rate, the most at once
    rate: float | None = None  # requests per second, at random times; None: a request starts when another has ended
    max_tokens: int = 128
    temperature: float = 0.0
    plain: bool = False  # ask a Graft server to decode without speculation
    slo_first: float = 2.0  # most seconds to the first token, to be within the service level
    slo_token: float = 0.2  # most seconds per further token

    def __post_init__(self) -> None:
        require(self.requests >= 1, f"requests must be at least 1, not {self.requests}")
        require(self.concurrency >= 1, f"concurrency must be at least 1, not {self.concurrency}")
        require(self.rate is None or self.rate > 0, f"rate must be above 0, not {self.rate}")


@dataclass
class Answered:
    """One request as its client saw it. Times are in seconds since it was sent."""

    status: int
    pieces: list[float] = field(default_factory=list)  # when each piece of text came
    seconds: float = 0.0
    num_tokens: int = 0
    speculation: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> float:
        return self.pieces[0] if self.pieces else self.seconds

    @property
    def per_token(self) -> float:
        return (self.seconds - self.first) / max(self.num_tokens - 1, 1)


async def load_test(
    url: str, prompts: Sequence[str], settings: LoadSettings, key: str | None, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Send `settings.requests` requests with the prompts in turn, and return the summary."""
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    limits = httpx.Limits(max_connections=settings.concurrency + 1)
    answers: list[Answered] = []
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits) as client:
        room = asyncio.Semaphore(settings.concurrency)

        async def ask(number: int) -> None:
            try:
                answers.append(await _ask(client, prompts[number % len(prompts)], number, settings))
            finally:
                room.release()
            progress(len(answers))

        failure: BaseException | None = None
        start = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                async for number in _starts(settings):
                    await room.acquire()
                    group.create_task(ask(number))
        except* httpx.HTTPError as errors:
            failure = errors.exceptions[0]
        if failure is not None:  # some versions of Python would wrap it again if it were raised above
            raise GraftError(f"cannot ask {url}: {failure}") from failure
        seconds = time.perf_counter() - start
    return summary(answers, seconds, settings)


async def _starts(settings: LoadSettings) -> AsyncIterator[int]:
    """Yields the number of each request when it may start."""
    rng = random.Random(0)
    due = time.perf_counter()
    for number in range(settings.requests):
        if settings.rate is not None:
            due += rng.expovariate(settings.rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        yield number


async def _ask(client: httpx.AsyncClient, prompt: str, number: int, settings: LoadSettings) -> Answered:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"speculate": False} if settings.plain else {}),
    }
    start = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        answer = Answered(response.status_code)
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            answer.status = 500 if "error" in chunk else answer.status
            for choice in chunk.get("choices", []):
                if choice["delta"].get("content"):
                    answer.pieces.append(time.perf_counter() - start)
                answer.speculation = choice.get("speculation") or answer.speculation
            if chunk.get("usage"):
                answer.num_tokens = chunk["usage"]["completion_tokens"]
    answer.seconds = time.perf_counter() - start
    return answer


def summary(answers: Sequence[Answered], seconds: float, settings: LoadSettings) -> dict[str, Any]:
    """The figures of a load test that took `seconds`."""
    done = [answer for answer in answers if answer.status == 200 and answer.num_tokens]
    good = [a for a in done if a.first <= settings.slo_first and a.per_token <= settings.slo_token]
    gaps = [b - a for answer in done for a, b in zip(answer.pieces, answer.pieces[1:], strict=False)]
    rounds = sum(answer.speculation.get("num_rounds", 0) for answer in done)
    accepted = sum(answer.speculation.get("num_accepted_tokens", 0) for answer in done)
    return {
        "settings": vars(settings),
        "seconds": seconds,
        "answered": len(done),
        "refused": sum(answer.status == 429 for answer in answers),
        "failed": sum(answer.status not in (200, 429) for answer in answers),
        "requests_per_second": len(done) / seconds,
        "tokens_per_second": sum(answer.num_tokens for answer in done) / seconds,
        "good_requests_per_second": len(good) / seconds,
        "time_to_first_token": percentiles([answer.first for answer in done]),
        "time_per_token": percentiles([answer.per_token for answer in done]),
        "time_between_pieces": percentiles(gaps),
        "time_to_last_token": percentiles([answer.seconds for answer in done]),
        "mean_acceptance_length": 1 + accepted / rounds if rounds else None,
    }


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and percentiles by nearest rank, or None for an empty list."""
    ordered = sorted(values)
    found = {f"p{p}": ordered[-(-p * len(ordered) // 100) - 1] if ordered else None for p in _PERCENTILES}
    return {"mean": sum(ordered) / len(ordered) if ordered else None, **found}
