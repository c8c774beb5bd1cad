"""Does a real `graft serve` process survive disconnects, floods, malformed requests and being killed, and leak nothing?

    python benchmarks/server_faults.py [--soak 20] [serve options ...]

Each line says what was done, what happened, and whether that is right. The exit status is the number of wrong lines.

`--soak` adds minutes of mixed load: requests that are streamed or whole, greedy or sampled, constrained, plain,
cancelled or invalid. It prints the server's resident memory every minute, to find leaks. After the load no request may
be running and no page of the KV cache may be in use.
"""

import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import httpx2 as httpx
from common import CHAT, command_line, free_port, metric, server

from graft.bench.tasks import built_in_tasks

STORY = {"messages": [{"role": "user", "content": "Tell me a long story about the sea."}], "ignore_eos": True}
wrong: list[str] = []


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--soak", type=float, default=0, metavar="MINUTES", help="add mixed load for this long")
    arguments, options = parser.parse_known_args()
    port = free_port()
    with server(options, port) as (process, client):
        malformed(client)
        gone_clients(client)
        flood(client, 500)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with server(options, port) as (process, client):
        say("killed and started again on the same port", client.get("/health").status_code, 200)
        say("it answers", status(client, {**STORY, "max_tokens": 4}), 200)
        if arguments.soak:
            soak(process, client, arguments.soak)
        terminated(process, client)
    sys.exit(len(wrong))


def malformed(client: httpx.Client) -> None:
    def post(body: bytes, path: str = CHAT) -> int:
        return client.post(path, content=body, headers={"content-type": "application/json"}).status_code

    say("half of a JSON object", post(b'{"messages": ['), 400)
    say("not UTF-8", post(b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}'), 400)
    say("half a character", post(b'{"messages": [{"role": "user", "content": "\\ud800"}]}'), 400)
    say("a body of 10 MB", post(b'{"messages": "' + b"x" * 10_000_000 + b'"}'), 413)
    say("lists 100,000 deep", post(b'{"messages": ' + b"[" * 100_000), 400)
    long = [{"role": "user", "content": "word " * 20_000}]
    say("a prompt beyond the context", status(client, {"messages": long}), 400)
    say("something unknown", status(client, {**STORY, "verbosity": "low"}), 400)
    never = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "minLength": 5, "maxLength": 2}}}
    say("a schema that nothing fits", status(client, {"messages": STORY["messages"], "response_format": never}), 400)
    say("afterwards it answers", status(client, {**STORY, "max_tokens": 4}), 200)


def gone_clients(client: httpx.Client) -> None:
    for _ in range(4):
        with client.stream("POST", CHAT, json={**STORY, "stream": True, "max_tokens": 2000}) as response:
            list(islice(response.iter_lines(), 6))
    with suppress(httpx.TimeoutException):
        client.post(CHAT, json={**STORY, "max_tokens": 2000}, timeout=2)
    deadline = time.monotonic() + 10
    while metric(client, "num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.2)
    say("after 5 clients went: running", metric(client, "num_requests_running"), 0)
    say("and cache in use", metric(client, "kv_cache_usage_perc"), 0)


def flood(client: httpx.Client, count: int) -> None:
    seen: Counter[Any] = Counter()
    together = threading.Barrier(count)

    def ask(number: int) -> None:
        together.wait()
        with httpx.Client(base_url=client.base_url, timeout=600) as own:
            response = own.post(CHAT, json={**STORY, "max_tokens": 4, "seed": number})
        retry = "retry-after" in response.headers
        seen[response.status_code if response.status_code != 429 or retry else "429 without Retry-After"] += 1

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(ask, range(count)))
    right = set(seen) == {200, 429} and seen[200] >= 64
    say(f"{count} requests at once", dict(seen), dict(seen) if right else "200s, and 429s with Retry-After")
    say("afterwards it answers", status(client, {**STORY, "max_tokens": 4}), 200)


def terminated(process: subprocess.Popen[bytes], client: httpx.Client) -> None:
    """Checks that a stream which runs when the server is told to stop is completed."""
    lines: list[str] = []
    with client.stream("POST", CHAT, json={**STORY, "stream": True, "max_tokens": 100}) as response:
        for line in response.iter_lines():
            lines.append(line)
            if len(lines) == 5:
                os.kill(process.pid, signal.SIGTERM)
    say("SIGTERM while streaming: last line", [line for line in lines if line][-1], "data: [DONE]")
    say("and its exit status", process.wait(60), -signal.SIGTERM, 0)


def soak(process: subprocess.Popen[bytes], client: httpx.Client, minutes: float) -> None:
    """Mixed load by six users. Freed memory is returned at the next request, so each minute's minimum counts."""
    end, seen = time.monotonic() + 60 * minutes, Counter[Any]()
    users = [threading.Thread(target=use, args=(str(client.base_url), number, end, seen)) for number in range(6)]
    for user in users:
        user.start()
    for minute in range(1, math.ceil(minutes) + 1):
        lowest, until = resident_megabytes(process.pid), min(time.monotonic() + 60, end)
        while time.monotonic() < until:
            time.sleep(2)
            lowest = min(lowest, resident_megabytes(process.pid))
        print(f"{minute:4} min {lowest:8.1f} MB  {dict(seen)}", flush=True)
    for user in users:
        user.join()
    for _ in range(3):
        status(client, {**STORY, "max_tokens": 4})
    print(f"after the load: {resident_megabytes(process.pid):.0f} MB")
    for name in ("num_requests_running", "kv_cache_usage_perc"):
        say(f"after the load: {name}", metric(client, name), 0)


def use(url: str, number: int, end: float, seen: Counter[Any]) -> None:
    """Sends one request of a random kind after the other, until the end."""
    rng = random.Random(number)
    prompts = [prompt.text for task in built_in_tasks() for prompt in task.prompts]
    with httpx.Client(base_url=url, timeout=600) as client:
        while time.monotonic() < end:
            body: dict[str, Any] = {"max_tokens": rng.randint(1, 48), "seed": rng.randrange(1000)}
            body["temperature"] = rng.choice([0.0, 0.7, 1.0])
            body |= rng.choice(
                [{}, {}, {"n": 2}, {"logprobs": True, "top_logprobs": 3}, {"speculate": False}, {"return_rounds": True},
                 {"response_format": {"type": "json_object"}}, {"stop": ["\n"]}, {"tools": []}]
            )  # fmt: skip
            body["messages"] = [{"role": "user", "content": rng.choice(prompts)}]
            streams = rng.random() < 0.5
            with client.stream("POST", CHAT, json=body | {"stream": streams}) as response:
                most = 5 if rng.random() < 0.15 else None  # some users leave early
                list(islice(response.iter_lines(), most))
            seen[response.status_code] += 1


def resident_megabytes(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def say(what: str, seen: object, *right: object) -> None:
    good = seen in right
    if not good:
        wrong.append(what)
    print(f"{'ok   ' if good else 'WRONG'} {what}: {seen}" + ("" if good else f", not {right[0]}"), flush=True)


def status(client: httpx.Client, body: dict[str, Any]) -> int:
    return client.post(CHAT, json=body).status_code


if __name__ == "__main__":
    main()
