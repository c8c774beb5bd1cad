"""What is speculation worth to an agent that calls tools?

    python benchmarks/agent_loop.py [--policies graft,off] [--steps 6] [--agents 2] [serve options ...]

An agent asks for the weather of one city after the other. Each step is a tool call that the grammar forces. Its result
goes back as a message, so every prompt holds all earlier calls. Each policy has its own server, which has learned
nothing. Greedy texts must be the same under all policies, else the exit status is 1.
"""

import json
import sys
import time
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


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--policies", default="graft,off", help="separated by commas")
    parser.add_argument("--steps", type=int, default=6, help="calls of an agent")
    parser.add_argument("--agents", type=int, default=2, help="one after the other")
    arguments, options = parser.parse_known_args()
    print(f"{arguments.agents} agents of {arguments.steps} calls: tokens a round, tokens a second")
    texts = set()
    for policy in arguments.policies.split(","):
        with server(["--policy", policy, *options]) as (_, client):
            texts.add(run_agents(policy, client, arguments.agents, arguments.steps))
    print("the same calls" if len(texts) == 1 else "THE CALLS DIFFER")
    sys.exit(len(texts) != 1)


def run_agents(policy: str, client: httpx.Client, num_agents: int, num_steps: int) -> tuple[str, ...]:
    """Prints the rates of one policy, and returns all calls that its agents made."""
    calls: list[str] = []
    seconds, num_rounds, num_tokens = 0.0, 0, 0
    for agent in range(num_agents):
        messages: list[Any] = [{"role": "system", "content": "You are an assistant who looks things up."}]
        for step in range(num_steps):
            city = CITIES[(agent + step) % len(CITIES)]
            question = f"What will the weather be in {city} in the next 3 days, in celsius, with humidity?"
            messages.append({"role": "user", "content": question})
            start = time.perf_counter()
            choice = ask(client, messages)
            seconds += time.perf_counter() - start
            speculation = choice["speculation"]
            num_rounds += speculation["num_rounds"]
            num_tokens += speculation["num_rounds"] + speculation["num_accepted_tokens"]
            (call,) = choice["message"]["tool_calls"]
            calls.append(call["function"]["arguments"])
            result = json.dumps({"city": city, "forecast": ["sunny", "cloudy", "rain"], "humidity": 0.6})
            messages += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": result}]
    print(f"  {policy:8} {num_tokens / max(num_rounds, 1):5.2f} {num_tokens / max(seconds, 1e-9):8.1f}", flush=True)
    return tuple(calls)


def ask(client: httpx.Client, messages: list[Any]) -> Any:
    forced = {"type": "function", "function": {"name": NAME}}
    body = {"messages": messages, "tools": [TOOL], "tool_choice": forced, "max_tokens": 160, "temperature": 0}
    answer = client.post(CHAT, json=body)
    if answer.status_code != 200:
        sys.exit(f"the server answered {answer.status_code}: {answer.text}")
    return answer.json()["choices"][0]


if __name__ == "__main__":
    main()
