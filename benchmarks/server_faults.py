"""Does a real `graft serve` process survive disconnects, floods, malformed requests and being killed, and leak nothing?

    python benchmarks/server_faults.py [--soak 20] [--mixed 1000] [serve options ...]

Each line says what was done, what happened, and whether that is right. The exit status is the number of wrong lines.

`--mixed` instead sends requests of all kinds to all three endpoints, eight at a time. Some clients leave early, some
requests are invalid, and the server's optional work fails now and then. In the middle the server is told to stop and is
started again; from then on whole rounds fail, too. Every finished answer must be that of plain decoding, asked alone.

`--soak` adds minutes of mixed load: requests that are streamed or whole, greedy or sampled, constrained, plain,
cancelled or invalid. It prints the server's resident memory every minute, to find leaks. After the load no request may
be running and no page of the KV cache may be in use.
"""

import itertools
import json
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
    parser.add_argument("--mixed", type=int, default=0, metavar="REQUESTS", help="compare so many answers instead")
    arguments, options = parser.parse_known_args()
    port = free_port()
    if arguments.mixed:
        mixed(arguments.mixed, options, port)
        sys.exit(len(wrong))
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


# Requests of all kinds, compared with plain decoding


def mixed(count: int, options: list[str], port: int) -> None:
    """Two servers with faults get half of the requests each. A third one then answers every body alone."""
    options = ["--dtype", "fp32", "--max-cache-tokens", "4096", *options]
    load = Load(f"http://127.0.0.1:{port}", count)
    users = [threading.Thread(target=load.work, args=(number,), daemon=True) for number in range(8)]
    with server(options, port, [__file__, "serve-with-faults", "0"]) as (process, _):
        for user in users:
            user.start()
        load.watch(count // 2, process)
        process.send_signal(signal.SIGTERM)
        say("told to stop under load: exit status", process.wait(90), -signal.SIGTERM, 0)
        say("5xx but 503 and 504", [s for s in load.seen if s >= 500 and s not in (503, 504)], [])
    with server(options, port, [__file__, "serve-with-faults", "200"]) as (process, client):
        load.watch(count, process)
        for user in users:
            user.join()
        while metric(client, "num_requests_running"):
            time.sleep(0.2)
        for name in ("num_requests_waiting", "kv_cache_usage_perc"):
            say(f"after the load: {name}", metric(client, name), 0)
    with server(options, port) as (_, client):
        num_different = 0
        for number, texts in sorted(load.texts.items()):
            path, body = load.bodies[number]
            _, alone = ask(client, path, body | {"speculate": False}, stream=False)
            different = [text for text in texts if text != alone]
            num_different += len(different)
            if different:
                print(path, body, f"{different[0]} is not {alone}", sep="\n  ", flush=True)
    say(f"answers that differ, of {sum(map(len, load.texts.values()))}", num_different, 0)


def serve_with_faults(rounds: int) -> None:
    """`graft serve` whose learning and prefix cache fail at every seventh call, and so do rounds at every so many."""
    from graft.cli import main as graft
    from graft.engine.rounds import Rounds

    def plant(owner: type, name: str, every: int) -> None:
        original, calls = getattr(owner, name), itertools.count(1)

        def fails_sometimes(*args: Any, **options: Any) -> Any:
            if next(calls) % every == 0:
                raise RuntimeError(f"a planted fault in {name}")
            return original(*args, **options)

        setattr(owner, name, fails_sometimes)

    plant(Rounds, "finish", 7)
    plant(Rounds, "keep_pages", 7)
    if rounds:
        plant(Rounds, "run_round", rounds)
    graft()


class Load:
    """Requests that users take one after the other, and the texts of those that were finished, by body."""

    def __init__(self, url: str, count: int) -> None:
        rng = random.Random(0)
        self.url, self.count, self.seen, self.num_done = url, count, Counter[int](), 0
        self.bodies = [make_body(number, rng) for number in range(max(count // 4, 1))]
        self.texts: dict[int, list[Any]] = {}
        self._numbers, self._lock = itertools.count(), threading.Lock()

    def work(self, user: int) -> None:
        rng = random.Random(user)
        while (number := next(self._numbers)) < self.count:
            path, body = self.bodies[number % len(self.bodies)]
            leaves_after = rng.choice([0.05, 0.4, 1.0]) if rng.random() < 0.15 else None
            if is_invalid := rng.random() < 0.03:
                body = body | {"temperature": -1}
            status, text = self._send(path, body, rng.random() < 0.5, leaves_after)
            with self._lock:
                self.num_done += 1
                if status == 200:
                    self.texts.setdefault(number % len(self.bodies), []).append(text)
            if is_invalid and status not in (400, 499):
                wrong.append(f"an invalid request has status {status}")

    def _send(self, path: str, body: dict[str, Any], stream: bool, leaves_after: float | None) -> tuple[int, Any]:
        """Ask until there is an answer, as clients do while a server is restarted."""
        while True:
            with httpx.Client(base_url=self.url, timeout=300) as client:
                try:
                    status, text = ask(client, path, body, stream, leaves_after)
                except httpx.TransportError:
                    status, text = 503, None  # nobody listens
                else:
                    self.seen[status] += 1
            if status not in (429, 503):
                return status, text
            time.sleep(2)

    def watch(self, until: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until so many requests are done. In the second half, the server may not have 5 % more memory."""
        begin, sizes = self.num_done, list[float]()
        while self.num_done < until:
            time.sleep(1)
            if self.num_done - begin >= (len(sizes) + 1) * (until - begin) / 8:
                sizes.append(resident_megabytes(process.pid))
                print(f"{self.num_done:5} requests {sizes[-1]:8.1f} MB  {dict(self.seen)}", flush=True)
        half = len(sizes) // 2
        grown = sum(sizes[half:]) / (len(sizes) - half) / (sum(sizes[:half]) / half) - 1
        say("memory grew by less than 5 %", grown < 0.05, True)


CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather of a city.", "parameters": CITY}
VARIANTS: list[dict[str, Any]] = [
    {}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "n": 2}, {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.2, "temperature": 0.6}, {"stop": ["."]}, {"logit_bias": {"260": -100}},
    {"guided_choice": ["the north", "the south", "nowhere"]}, {"guided_regex": "[a-z]{3,9} [0-9]{2}"},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": CITY}}}, {"tools": []}, {"tools": []},
]  # fmt: skip


def make_body(number: int, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body; all of them can be answered."""
    prompts = [prompt.text for task in built_in_tasks() for prompt in task.prompts]
    prompt = rng.choice(sorted(prompts, key=len)[: len(prompts) // 2])  # the shorter ones, for machines without a GPU
    body = {"temperature": 0.0, "seed": rng.randrange(2**40)} | VARIANTS[number % len(VARIANTS)]
    longest, kind = rng.randint(8, 24), rng.choice(["chat", "chat", "text", "response"])
    choice = rng.choice(["required", "auto"])
    if kind == "text":
        body.pop("tools", None)
        return "/v1/completions", body | {"prompt": rng.choice([prompt, [prompt, "Once"]]), "max_tokens": longest}
    if kind == "chat":
        if "tools" in body:
            body |= {"tools": [{"type": "function", "function": WEATHER}], "tool_choice": choice}
        return CHAT, body | {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": longest}
    kept = {name: body[name] for name in ("temperature", "seed", "top_p") if name in body}
    if "tools" in body:
        kept |= {"tools": [{"type": "function", **WEATHER}], "tool_choice": choice}
    elif "response_format" in body:
        kept["text"] = {"format": {"type": "json_schema", "name": "city", "schema": CITY}}
    return "/v1/responses", kept | {"input": prompt, "max_output_tokens": longest}


def ask(
    client: httpx.Client, path: str, body: dict[str, Any], stream: bool, leaves_after: float | None = None
) -> tuple[int, Any]:
    """The status, and what was answered: 499 if the client left, after so many seconds or as many events."""
    if not stream:
        try:
            response = client.post(path, json=body, timeout=leaves_after or 300)
        except httpx.TimeoutException:
            return 499, None
        return response.status_code, answered(path, response.json()) if response.status_code == 200 else None
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        if response.status_code != 200:
            return response.status_code, None
        most = int(leaves_after * 10) if leaves_after is not None else None
        lines = [line for line in islice(response.iter_lines(), most) if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
    failed = [error for event in events if (error := event.get("error") or event.get("response", {}).get("error"))]
    if failed:  # after the first event an error has no status
        return {"timeout": 504, "unavailable": 503}.get(failed[0]["code"], 500), None
    if path == "/v1/responses":
        if not events or "response.completed" != events[-1]["type"] != "response.incomplete":
            return 499, None
        return 200, answered(path, events[-1]["response"])
    if leaves_after is not None and not (lines and lines[-1] == "data: [DONE]"):
        return 499, None
    return 200, joined(path, [choice for event in events for choice in event["choices"]])


def answered(path: str, content: dict[str, Any]) -> list[Any]:
    """Texts, calls and ends of an answer."""
    if path == "/v1/responses":
        items = content["output"]
        text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
        calls = [[item["name"], item["arguments"]] for item in items if item["type"] == "function_call"]
        return [text, calls, content["status"]]
    if path != CHAT:
        return [[choice["text"], [], choice["finish_reason"]] for choice in content["choices"]]
    return [
        [choice["message"]["content"] or "", [[*call["function"].values()] for call in calls], choice["finish_reason"]]
        for choice in content["choices"]
        for calls in [choice["message"].get("tool_calls", [])]
    ]


def joined(path: str, deltas: list[dict[str, Any]]) -> list[Any]:
    """The same, of the choices in a stream's chunks."""
    answers: dict[int, list[Any]] = {}
    for choice in deltas:
        answer = answers.setdefault(choice["index"], ["", [], None])
        delta = choice.get("delta", {})
        answer[0] += choice["text"] if path != CHAT else delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                answer[1].append([call["function"]["name"], ""])
            answer[1][call["index"]][1] += call["function"]["arguments"]
        answer[2] = choice["finish_reason"] or answer[2]
    return [answer for _, answer in sorted(answers.items())]


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
    if sys.argv[1:2] == ["serve-with-faults"]:
        every, sys.argv[1:] = int(sys.argv[2]), sys.argv[3:]
        serve_with_faults(every)
    else:
        main()
