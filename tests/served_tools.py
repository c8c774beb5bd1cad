"""Tools, chat templates that show them, and a small engine with such a template."""

import json

from graft import Engine
from tiny import BYTE_VOCAB, byte_tokenizer, tiny_model

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 6, "pattern": "^[a-z]*$"},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
        },
    },
}

CLOCK = {"type": "function", "function": {"name": "clock"}}

TOOLS = [WEATHER, CLOCK]

WITH_TOOLS = (
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}MARK{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)

SHORT = (
    "{# <tool_call> #}{% if tools %}T{{ tools | length }}{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}\n"
    "{% endfor %}[assistant]"
)


def engine_with(template=None):
    tokenizer = byte_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    model = tiny_model(vocab_size=BYTE_VOCAB, max_position_embeddings=4096, num_hidden_layers=1)
    return Engine(model, tokenizer, budget=12)


def fits(arguments):
    """Whether arguments of get_weather fit its schema."""
    given = json.loads(arguments)
    good = set(given) <= {"city", "unit", "days"} and {"city", "unit"} <= set(given)
    return good and given["unit"] in "CF" and len(given["city"]) <= 6 and 1 <= given.get("days", 1) <= 9


NAMED = {"type": "function", "function": {"name": "get_weather"}}
