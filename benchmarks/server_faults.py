"""Fault test of a real `graft serve` process: disconnects, floods, malformed requests, kills; and JSON schemas.

    python bench/server_faults.py [--json 100] [serve options ...]

Each line says what was done, what was seen and whether that is right; the exit status is how many are wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import httpx2 as httpx

CHAT = "/v1/chat/completions"
STORY = {"messages": [{"role": "user", "content": "Tell me a long story about the sea."}], "ignore_eos": True}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "green", "blue"]},
        "likes": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
        "married": {"type": "boolean"},
    },
    "required": ["name", "age", "colour", "likes", "married"],
    "additionalProperties": False,
}
wrong: list[str] = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=int, default=100, help="answers that must fit a schema")
    arguments, options = parser.parse_known_args()
    port = free_port()
    with server(port, options) as (process, client):
        malformed(client)
        gone_clients(client)
        json_answers(port, arguments.json)
        flood(client, 500)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with server(port, options) as (process, client):
        say("killed and started again on the same port", client.get("/health").status_code, 200)
        say("it answers", status(client, {**STORY, "max_tokens": 4}), 200)
        terminated(process, client)
    sys.exit(len(wrong))


@contextmanager
def server(port: int, options: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    command = [sys.executable, "-c", "from graft.cli import main; main()", "serve", "--port", str(port), *options]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
        try:
            while not is_up(client):
                if process.poll() is not None:
                    sys.exit(f"graft serve ended with {process.returncode}")
                time.sleep(0.5)
            yield process, client
        finally:
            process.kill()
            process.wait()


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
            for number, _ in enumerate(response.iter_lines()):
                if number > 4:
                    break
    with suppress(httpx.TimeoutException):
        client.post(CHAT, json={**STORY, "max_tokens": 2000}, timeout=2)
    deadline = time.monotonic() + 10
    while metric(client, "num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.2)
    say("after 5 clients went: running", metric(client, "num_requests_running"), 0)
    say("and cache in use", metric(client, "kv_cache_usage_perc"), 0)


def json_answers(port: int, count: int) -> None:
    from jsonschema import ValidationError, validate
    from openai import OpenAI

    openai = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600)
    name = openai.models.list().data[0].id
    seen: Counter[str] = Counter()
    texts = set()

    def ask(number: int) -> None:
        answer = openai.chat.completions.create(
            model=name,
            messages=[{"role": "user", "content": f"Describe person {number} as JSON."}],
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
            temperature=1.0,
            seed=number,
            max_tokens=200,
        )
        text = answer.choices[0].message.content or ""
        texts.add(text)
        try:
            validate(json.loads(text), SCHEMA)
            seen["valid"] += 1
        except (ValueError, ValidationError):
            seen[f"not valid: {text!r}"] += 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(count)))
    say(
        f"{count} answers at temperature 1 that must fit a schema ({len(texts)} different ones)",
        dict(seen),
        {"valid": count},
    )


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
    """A stream that is under way when the server is told to stop comes to its end."""
    lines: list[str] = []
    with client.stream("POST", CHAT, json={**STORY, "stream": True, "max_tokens": 100}) as response:
        for line in response.iter_lines():
            lines.append(line)
            if len(lines) == 5:
                os.kill(process.pid, signal.SIGTERM)
    say("SIGTERM while streaming: last line", [line for line in lines if line][-1], "data: [DONE]")
    say("and its exit status", process.wait(60), -signal.SIGTERM, 0)


def say(what: str, seen: object, *right: object) -> None:
    good = seen in right
    if not good:
        wrong.append(what)
    print(f"{'ok   ' if good else 'WRONG'} {what}: {seen}" + ("" if good else f", not {right[0]}"), flush=True)


def status(client: httpx.Client, body: dict[str, Any]) -> int:
    return client.post(CHAT, json=body).status_code


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"graft:{name}{{"))


def is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    main()
