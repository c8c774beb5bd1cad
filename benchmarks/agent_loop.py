"""What is speculation worth to an agent that calls tools?

    python benchmarks/agent_loop.py [--policies graft,off] [--steps 6] [--agents 2] [serve options ...]

An agent asks for the weather of one city after the other. Each step is a call that the grammar forces, and its result
goes back as a message, so every prompt holds all calls before it. Each policy has a server of its own, which has
learned nothing. Greedy texts must be the same under all, else the exit status is 1.
"""

from __future__ import annotations

import json
import sys
import time
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
    arguments, options = parser.parse_known_args()
    runs: dict[str, Run] = {}
    for policy in arguments.policies.split(","):
        with server(["--policy", policy, *options]) as (_, client):
            runs[policy] = agents(client, arguments.agents, arguments.steps)
    print(f"{arguments.agents} agents of {arguments.steps} calls: tokens a round, tokens a second")
    for policy, run in runs.items():
        print(f"  {policy:8} {run.accepted:5.2f} {run.num_tokens / max(run.seconds, 1e-9):8.1f}")
    texts = {tuple(run.calls) for run in runs.values()}
    print("the same calls" if len(texts) == 1 else "THE CALLS DIFFER")
    sys.exit(len(texts) != 1)


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


if __name__ == "__main__":
    main()
