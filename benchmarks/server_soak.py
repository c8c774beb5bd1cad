"""Does a running server leak memory under mixed load?

    graft serve --port 8000 & python benchmarks/server_soak.py --pid $! --minutes 20

Requests are streamed and whole, greedy and sampled, constrained, plain beside speculating, cancelled and invalid, a few
at a time. Resident memory is sampled every ten seconds. Freed memory is returned when the next request comes, so the
least of each minute counts, and after the load what is held after a few short requests. Then no request may run and no
page of the KV cache be in use; else the exit status is 1.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2 as httpx
from common import CHAT, command_line, metric

from graft.bench.tasks import built_in_tasks


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--pid", type=int, required=True, help="of the server")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--concurrency", type=int, default=6, help="users at once")
    parser.add_argument("--out", type=Path, help="a JSON file for the samples")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    seen: Counter[Any] = Counter()
    users = [
        threading.Thread(target=use, args=(arguments.url, number, end, seen)) for number in range(arguments.concurrency)
    ]
    for user in users:
        user.start()
    samples: list[tuple[float, float]] = []
    start = time.monotonic()
    while time.monotonic() < end:
        samples.append((time.monotonic() - start, resident_megabytes(arguments.pid)))
        if len(samples) % 6 == 1:
            print(f"{samples[-1][0]:6.0f} s {samples[-1][1]:8.1f} MB  {dict(seen)}", flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps({"seen": {str(k): v for k, v in seen.items()}, "samples": samples}))
        time.sleep(10)
    for user in users:
        user.join()
    for _ in range(3):
        httpx.post(f"{arguments.url}/v1/completions", json={"prompt": "hello", "max_tokens": 4}, timeout=600)
    least = [min(megabytes for _, megabytes in samples[start : start + 6]) for start in range(0, len(samples), 6)]
    print(f"MB by the minute: {', '.join(f'{megabytes:.0f}' for megabytes in least)}")
    print(f"after the load: {resident_megabytes(arguments.pid):.0f} MB; {dict(seen)}")
    with httpx.Client(base_url=arguments.url) as client:
        left = {name: metric(client, name) for name in ("num_requests_running", "kv_cache_usage_perc")}
    print(f"left: {left}")
    sys.exit(any(left.values()))


def use(url: str, number: int, end: float, seen: Counter[Any]) -> None:
    chance = random.Random(number)
    prompts = [prompt.text for task in built_in_tasks() for prompt in task.prompts]
    with httpx.Client(base_url=url, timeout=600) as client:
        while time.monotonic() < end:
            body: dict[str, Any] = {"max_tokens": chance.randint(1, 48), "seed": chance.randrange(1000)}
            body["temperature"] = chance.choice([0.0, 0.7, 1.0])
            body |= chance.choice(
                [{}, {}, {"n": 2}, {"logprobs": True, "top_logprobs": 3}, {"speculate": False}, {"return_rounds": True},
                 {"response_format": {"type": "json_object"}}, {"stop": ["\n"]}, {"tools": []}]
            )  # fmt: skip
            body["messages"] = [{"role": "user", "content": chance.choice(prompts)}]
            streams = chance.random() < 0.5
            with client.stream("POST", CHAT, json=body | {"stream": streams}) as response:
                leaves = chance.random() < 0.15
                for place, _ in enumerate(response.iter_lines()):
                    if leaves and place > 3:
                        break
            seen[response.status_code] += 1


def resident_megabytes(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


if __name__ == "__main__":
    main()
