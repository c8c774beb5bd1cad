"""What is speculation worth to an agent that calls tools, and are forced calls always valid?

    python benchmarks/agent_loop.py [--policies graft,off] [--steps 6] [--agents 2] [--calls 200] [serve options ...]

An agent asks for the weather of one city after the other. Each step is a call that the grammar forces, and its result
goes back as a message, so every prompt holds all calls before it. Each policy has a server of its own, which has
learned nothing; greedy texts must be the same under all. `--calls` asks the first policy's server for so many calls at
temperature 1, each of which must be valid JSON of the function's schema.
The exit status is 1 if a text differs or a call is invalid.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx
from common import CHAT, command_line, server

CITIES = ("Rome", "Oslo", "Lima", "Cairo", "Delhi", "Tokyo", "Quito", "Paris", "Accra", "Hanoi")
NAME = "get_weather_forecast"
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "name of the city", "maxLength": 24},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "include_humidity": {"type": "boolean"},
    },
    "required": ["city", "unit", "days", "include_humidity"],
    "additionalProperties": False,
}
DESCRIPTION = "The weather forecast of a city for some days."
TOOL = {"type": "function", "function": {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}}


@dataclass
class Run:
    """What an agent's steps took under one policy, all agents together."""

    calls: list[str] = field(default_factory=list)
    num_tokens: int = 0
    num_rounds: int = 0
    seconds: float = 0.0

    @property
    def accepted(self) -> float:
        return self.num_tokens / max(self.num_rounds, 1)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--policies", default="graft,off", help="a comma between them")
    parser.add_argument("--steps", type=int, default=6, help="calls of an agent")
    parser.add_argument("--agents", type=int, default=2, help="one after the other")
    parser.add_argument("--calls", type=int, default=0, help="forced calls at temperature 1")
    arguments, options = parser.parse_known_args()
    runs: dict[str, Run] = {}
    num_invalid = 0
    for number, policy in enumerate(arguments.policies.split(",")):
        with server(["--policy", policy, *options]) as (_, client):
            runs[policy] = agents(client, arguments.agents, arguments.steps)
            if number == 0 and arguments.calls:
                num_invalid = forced_calls(client, arguments.calls)
    print(f"{arguments.agents} agents of {arguments.steps} calls: tokens a round, tokens a second")
    for policy, run in runs.items():
        print(f"  {policy:8} {run.accepted:5.2f} {run.num_tokens / max(run.seconds, 1e-9):8.1f}")
    texts = {tuple(run.calls) for run in runs.values()}
    print("the same calls" if len(texts) == 1 else "THE CALLS DIFFER")
    sys.exit(len(texts) != 1 or num_invalid > 0)


def agents(client: httpx.Client, num_agents: int, num_steps: int) -> Run:
    run = Run()
    for agent in range(num_agents):
        cities = [CITIES[(agent + step) % len(CITIES)] for step in range(num_steps)]
        messages: list[Any] = [{"role": "system", "content": "You are an assistant who looks things up."}]
        for city in cities:
            ask = f"What will the weather be in {city} in the next 3 days, in celsius, with humidity?"
            messages.append({"role": "user", "content": ask})
            start = time.perf_counter()
            choice = call(client, messages, temperature=0)
            run.seconds += time.perf_counter() - start
            numbers = choice["speculation"]
            run.num_rounds += numbers["num_rounds"]
            run.num_tokens += numbers["num_rounds"] + numbers["num_accepted_tokens"]
            (made,) = choice["message"]["tool_calls"]
            run.calls.append(made["function"]["arguments"])
            result = json.dumps({"city": city, "forecast": ["sunny", "cloudy", "rain"], "humidity": 0.6})
            messages += [choice["message"], {"role": "tool", "tool_call_id": made["id"], "content": result}]
    return run


def call(client: httpx.Client, messages: list[Any], **options: Any) -> Any:
    choice = {"type": "function", "function": {"name": NAME}}
    body = {"messages": messages, "tools": [TOOL], "tool_choice": choice, "max_tokens": 160, **options}
    answer = client.post(CHAT, json=body)
    if answer.status_code != 200:
        sys.exit(f"the server answered {answer.status_code}: {answer.text}")
    return answer.json()["choices"][0]


def forced_calls(client: httpx.Client, count: int) -> int:
    """Calls at temperature 1, sixteen at a time. Returns how many are not valid."""

    def one(number: int) -> str | None:
        city = CITIES[number % len(CITIES)]
        messages = [{"role": "user", "content": f"The weather in {city}, please."}]
        return fault_of(call(client, messages, temperature=1.0, seed=number))

    with ThreadPoolExecutor(16) as pool:
        faults = [fault for fault in pool.map(one, range(count)) if fault is not None]
    print(f"{count - len(faults)} of {count} forced calls at temperature 1 are valid")
    for fault in faults[:5]:
        print(f"  {fault}")
    return len(faults)


def fault_of(choice: Any) -> str | None:
    """What is wrong with an answer that must be one call of the function, if anything is."""
    try:
        (made,) = choice["message"]["tool_calls"]
        if made["function"]["name"] != NAME or choice["finish_reason"] != "tool_calls":
            return str(choice)
        given = json.loads(made["function"]["arguments"])
        is_valid = (
            set(given) == set(PARAMETERS["required"])
            and isinstance(given["city"], str)
            and len(given["city"]) <= 24
            and given["unit"] in ("celsius", "fahrenheit")
            and given["days"] in range(1, 8)
            and isinstance(given["include_humidity"], bool)
        )
    except (KeyError, TypeError, ValueError) as error:
        return f"{error}: {choice}"
    return None if is_valid else str(choice)


if __name__ == "__main__":
    main()
