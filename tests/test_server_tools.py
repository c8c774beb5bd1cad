"""Tool calls: formats and their parsers, forced calls, streams, and the official client's round trip."""

import asyncio
import json
import random

import numpy as np
import openai
import pytest

from graft import GraftError
from graft.server.chat import ChatTemplate
from graft.server.grammar import Grammars, GrammarSpec
from graft.server.refusals import RefusedError
from graft.server.schema import ChatRequest, FunctionTool, Tool
from graft.server.tool_formats import FORMATS, Function, call_grammar, format_of
from graft.server.tool_parsers import Arguments, CallStart, Content, PlainText, Reasoning, Thinking
from served import CHAT, post, running
from served_tools import CLOCK, NAMED, SHORT, TOOLS, WEATHER, WITH_TOOLS, engine_with, fits
from tiny import BYTE_VOCAB, byte_tokenizer


@pytest.fixture(scope="module")
def url():
    with running(engine_with(SHORT)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


# Parsers


def read(parser, text, size):
    """Content, reasoning and calls that a parser finds in a text that comes in pieces of a size."""
    pieces = [piece for start in range(0, len(text), size) for piece in parser.feed(text[start : start + size])]
    pieces += parser.finish()
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    calls = [[piece.name, ""] for piece in pieces if isinstance(piece, CallStart)]
    for piece in pieces:
        if isinstance(piece, Arguments):
            calls[piece.index][1] += piece.text
    return content, thought, [(name, json.loads(arguments)) for name, arguments in calls]


ROME = ("get_weather", {"city": 'Ro}"m{e', "unit": "C"})
ROME_JSON = json.dumps(ROME[1])
ONE = f'{{"name": "get_weather", "arguments": {ROME_JSON}}}'
FUNCTIONS = [Function("get_weather", WEATHER["function"]["parameters"]), Function("clock", None)]
CITY = "<tool_call>\n<function=get_weather>\n<parameter=city>\n{}\n</parameter>\n"
CASES = [
    ("hermes", f"<tool_call>\n{ONE}\n</tool_call>", "", [ROME]),
    ("hermes", f"Let me see.\n<tool_call>{ONE}</tool_call>\n<tool_call>{ONE}</tool_call>", "Let me see.", [ROME, ROME]),
    ("hermes", f'<tool_call>{{"arguments": {ROME_JSON}, "name": "get_weather"}}</tool_call>', "", [ROME]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "]}</tool_call>}"}}</tool_call> <tool_call>' + ONE
     + "</tool_call>", "", [("f", {"x": "]}</tool_call>}"}), ROME]),  # a marker in a string is none
    ("hermes", '<tool_call>{"no": "call"} </tool_call> more', '<tool_call>{"no": "call"} </tool_call> more', []),
    ("hermes", "1 < 2 <tool", "1 < 2 <tool", []),
    ("hermes", "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
    ("hermes", '<tool_call>{"name": "clock"}</tool_call>', "", [("clock", {})]),
    ("hermes", f"<tool_call>\n{ONE}", "", [ROME]),
    ("hermes", '<tool_call>{"name": "\\q", "arguments": {}}</tool_call> x',
     '<tool_call>{"name": "\\q", "arguments": {}}</tool_call> x', []),  # no JSON: such an escape is none
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}\n</tool_call>\n<tool_call>' + ONE
     + "</tool_call> bye", " bye", [("f", {"x": 1}), ROME]),  # a brace is missing
    ("hermes", f"<tool_call>{ONE}}}\n</tool_call><tool_call>{ONE}</tool_call>", "", [ROME, ROME]),  # one too many
    ("qwen", f"<tool_call>\n{ONE}\n</tool_call>", "", [ROME]),
    ("qwen", "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n"
     "</parameter>\n</function>\n</tool_call>", "", [("get_weather", {"city": "Rome", "days": 3})]),
    ("qwen", CITY.format("12345") + "</function>\n</tool_call>", "", [("get_weather", {"city": "12345"})]),
    ("qwen", CITY.format("a</tool_call>b") + "</function>\n</tool_call>x", "x",
     [("get_weather", {"city": "a</tool_call>b"})]),
    ("qwen", CITY.format("Rome") + "<parameter=da", CITY.format("Rome") + "<parameter=da", []),  # cut
    ("qwen", CITY.format("Rome").replace("city", "days").replace("Rome", "NaN") + "</function>\n</tool_call>", "",
     [("get_weather", {"days": "NaN"})]),
    ("hermes", '<tool_call>{"arguments": {"x": NaN}, "name": "f"}</tool_call>',
     '<tool_call>{"arguments": {"x": NaN}, "name": "f"}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),  # it takes none
    ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
     '<tool_call>{"name": "f", "arguments": 3}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}\n<tool_call>' + ONE + "</tool_call>bye", "bye",
     [("f", {"x": 1}), ROME]),  # a brace and a marker are missing
    ("qwen", CITY.format("Rome") + "</function>\n" + CITY.format("Oslo") + "</function>\n</tool_call>", "",
     [("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Oslo"})]),  # no marker between them
    ("qwen", CITY.format("Rome") + "</function>\n" + CITY.format("Oslo").removeprefix("<tool_call>\n")
     + "</function>\n</tool_call>", "", [("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Oslo"})]),
    ("qwen", CITY.format("Rome") + "</tool_call> text " + CITY.format("Oslo") + "</function></tool_call>", " text",
     [("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Oslo"})]),
    ("qwen", CITY.format("Rome") + "</function>\nbye", "bye", [("get_weather", {"city": "Rome"})]),
    ("qwen", CITY.format("Rome").removesuffix("</parameter>\n") + "</function></tool_call>", "",
     [("get_weather", {"city": "Rome"})]),
    ("qwen", CITY.format("Rome").removesuffix("</parameter>\n") + "</function>" + 60 * " " + "</tool_call>then", "then",
     [("get_weather", {"city": "Rome"})]),
    ("qwen", CITY.format("Rome").removesuffix("</parameter>\n") + "</function>" + 60 * " " + "</tool_cal", CITY.format(
     "Rome").removesuffix("</parameter>\n") + "</function>" + 60 * " " + "</tool_cal", []),  # cut
    ("qwen", CITY.format("a </tool_call>\n<tool_call> b") + "</function>\n</tool_call>", "",
     [("get_weather", {"city": "a </tool_call>\n<tool_call> b"})]),
    ("qwen", "<tool_call><function=clock>\n</function></tool_call><function=x>", "<function=x>", [("clock", {})]),
    ("qwen", "<tool_call><function=clock>now</tool_call>", "<tool_call><function=clock>now</tool_call>", []),
    ("llama3", '{"name": "Ann", "parameters": {"age": 3}}', '{"name": "Ann", "parameters": {"age": 3}}', []),
    ("llama3", '{"name": "clock", "parameters": {"x": 1}\nIt is late.', "It is late.", [("clock", {"x": 1})]),
    ("llama3", '{"name": "clock", "parameters": {"x": 1}; ' + ONE, "", [("clock", {"x": 1}), ROME]),
    ("llama3", '{"name": "clock", "parameters": {}} (done)', "(done)", [("clock", {})]),
    ("llama3", '{"name": "clock", "parameters": {}}\n[1] is it', "[1] is it", [("clock", {})]),
    ("mistral", '[TOOL_CALLS][{"arguments": {}, "name": "f"}, {"arguments": {}, "name": "g"}]', "",
     [("f", {}), ("g", {})]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}g[ARGS]{"y": 2}', "", [("f", {"x": 1}), ("g", {"y": 2})]),
    ("pythonic", "[f(x=1e999)]", "[f(x=1e999)]", []),
    ("llama3", '[{"a": 1}, {"b": 2}]', '[{"a": 1}, {"b": 2}]', []),
    ("llama3", '{"a": 1} and more', '{"a": 1} and more', []),
    ("llama3", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ("llama3", "(1) one; [2] two", "(1) one; [2] two", []),
    ("mistral", 'a [TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{"y": 2}', "a", [("f", {"x": 1}), ("g", {"y": 2})]),
    ("mistral", "clock {x} is a set", "clock {x} is a set", []),
    ("mistral", 'f {"x": 1} is an object', 'f {"x": 1} is an object', []),
    ("mistral", "[TOOL_CALLS] is a marker", "[TOOL_CALLS] is a marker", []),
    ("llama3", f'{{"name": "get_weather", "parameters": {ROME_JSON}}}', "", [ROME]),
    ("llama3", f'<|python_tag|>{{"name": "get_weather", "parameters": {ROME_JSON}}}; {ONE}', "", [ROME, ROME]),
    ("llama3", "Just text { with braces }", "Just text { with braces }", []),
    ("llama3", '{"some": "JSON"}', '{"some": "JSON"}', []),
    ("mistral", f"[TOOL_CALLS][{ONE}, {ONE}]", "", [ROME, ROME]),
    ("mistral", f"[{ONE}]", "", [ROME]),  # its marker may be a token without text
    ("mistral", f"I look.[TOOL_CALLS]get_weather[ARGS]{ROME_JSON}", "I look.", [ROME]),
    ("mistral", f"get_weather{ROME_JSON}", "", [ROME]),
    ("mistral", "get_weather is a function", "get_weather is a function", []),
    ("pythonic", '[get_weather(city="Rome", days=3, on=true), clock()]', "",
     [("get_weather", {"city": "Rome", "days": 3, "on": True}), ("clock", {})]),
    ("pythonic", "[1, 2] is a list", "[1, 2] is a list", []),
    ("pythonic", '[f(**{"a": 1})]', '[f(**{"a": 1})]', []),
    ("pythonic", "[f(__import__('os').system('true'))]", "[f(__import__('os').system('true'))]", []),
    ("pythonic", "[f(x=open('f'))]", "[f(x=open('f'))]", []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_read_however_the_text_is_cut(name, text, content, calls):
    for size in (1, 3, 7, 1000):
        parser = FORMATS[name].parser(FUNCTIONS)
        assert read(parser, text, size) == (content, "", calls), size


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"enum": ["1", "2"]}, "1"),
        ({"const": 1}, 1),
        ({"$ref": "#/$defs/word"}, "1"),
        ({"allOf": [{"type": "string"}]}, "1"),
        ({"type": "integer"}, 1),
        ({"$ref": "#/$defs/loop"}, 1),
    ],
)
def test_a_value_without_quotes_has_the_type_that_its_schema_names(schema, expected):
    shared = {"word": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}
    function = Function("f", {"properties": {"x": schema}, "$defs": shared})
    text = "<tool_call><function=f><parameter=x>1</parameter></function></tool_call>"
    assert read(FORMATS["qwen"].parser([function]), text, 9) == ("", "", [("f", {"x": expected})])


def test_arguments_come_before_the_call_has_ended():
    parser = FORMATS["hermes"].parser([])
    pieces = parser.feed('<tool_call>\n{"name": "f", "arguments": {"text": "a long st')
    assert isinstance(pieces[0], CallStart) and pieces[1] == Arguments(0, '{"text": "a long st')


@pytest.mark.parametrize(
    ("has_begun", "text", "expected"),
    [
        (False, "<think>hm\n</think>\n\nyes", ("yes", "hm\n", [])),
        (True, "hm</think>yes", ("yes", "hm", [])),
        (False, "no <think> here", ("no <think> here", "", [])),
        (True, "never ends </thi", ("", "never ends </thi", [])),
        (False, f"<think>a</think>\n<tool_call>{ONE}</tool_call>", ("", "a", [ROME])),
    ],
)
def test_reasoning_is_told_apart(has_begun, text, expected):
    for size in (1, 4, 1000):
        assert read(Thinking(has_begun, FORMATS["hermes"].parser([])), text, size) == expected
    assert read(PlainText(), text, 3)[0] == text


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... <tool_call> ...", "hermes"),
        ("<tool_call><function=", "qwen"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3"),
        ("write [func_name1(params_name1=params_value1)]", "pythonic"),
    ],
)
def test_the_format_is_told_by_the_template(template, name):
    assert format_of(template).name == name
    assert format_of("{{ messages }}") is None


# Templates


def rendered(engine, messages, tools=TOOLS):
    return ChatTemplate(engine).render(ChatRequest(messages=messages, tools=tools)).text


CONVERSATION = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "x"}'}}]},
    {"role": "tool", "tool_call_id": "a", "content": "sunny"},
]  # fmt: skip


def test_tools_go_through_the_models_own_template():
    text = rendered(engine_with(WITH_TOOLS), CONVERSATION)
    assert text.startswith('TOOLS [{"type": "function", "function": {"name": "get_weather"')
    assert 'MARKget_weather {"city": "x"}' in text and "[tool]sunny" in text


def test_a_template_that_knows_no_tools_is_told_of_them_in_words():
    text = rendered(engine_with(), CONVERSATION)
    assert text.startswith("[system]You can call functions") and '{"name": "clock"' in text
    assert '[assistant]<tool_call>\n{"name": "get_weather", "arguments": {"city": "x"}}\n</tool_call>' in text
    assert "[user]<tool_response>\nsunny\n</tool_response>" in text
    with_system = rendered(engine_with(), [{"role": "system", "content": "Be brief."}, *CONVERSATION])
    assert with_system.startswith("[system]Be brief.\n\nYou can call functions")
    with pytest.raises(GraftError, match="no tools"):
        ChatTemplate(engine_with(), "mistral")


def test_a_name_goes_to_the_template():
    named = engine_with("{% for m in messages %}{{ m.name }}: {{ m.content }}\n{% endfor %}")
    assert rendered(named, [{"role": "user", "content": "x", "name": "Ann"}], []) == "Ann: x\n"


@pytest.mark.parametrize("arguments", ['{"city": "Ro', "[1]", "null"])
def test_a_call_that_went_wrong_may_come_back_in_the_history(arguments):
    call = {"id": "a", "type": "function", "function": {"name": "odd name", "arguments": arguments}}
    text = rendered(engine_with(WITH_TOOLS), [CONVERSATION[0], {"role": "assistant", "tool_calls": [call]}])
    assert f"MARKodd name {json.dumps(arguments)}" in text


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


DEFS = {f"d{i}": {"type": "string", "pattern": "x" * 40} for i in range(100)}
BAD_SCHEMAS = [
    ({"properties": {f"a{i}": {"type": "integer"} for i in range(4000)}}, "JSON schemas have"),
    ({"$defs": DEFS, "properties": {f"a{i}": {"$ref": "#/$defs/d1"} for i in range(500)}}, "more than the 65536"),
    ({"properties": {"a": {}}, "required": 5}, "required must be a list of names"),
    ({"properties": {"a": {}}, "required": [{}]}, "required must be a list of names"),
    ({"properties": ["a"]}, "properties must be an object"),
    (nested(3000), "nested too deeply"),
]


@pytest.mark.parametrize(("schema", "words"), BAD_SCHEMAS)
def test_a_schema_that_makes_no_grammar_is_refused_before_it_is_written(schema, words):
    functions = [Function("f", schema)]
    with pytest.raises(GraftError, match=words):
        call_grammar(
            FORMATS["pythonic"], functions, is_forced=True, max_calls=1, thinks=None, answer=None, marker_ids={}
        )


def test_definitions_are_written_only_where_they_are_referred_to():
    properties = {f"a{i}": {"type": "integer"} for i in range(100)} | {"b": {"$ref": "#/$defs/d1"}}
    functions = [Function("f", {"$defs": DEFS, "properties": properties})]
    text = call_grammar(
        FORMATS["pythonic"], functions, is_forced=True, max_calls=1, thinks=None, answer=None, marker_ids={}
    )
    assert text.count('"$defs"') == 1


def test_a_bad_schema_is_the_requests_fault():
    with running(engine_with(WITH_TOOLS), tool_parser="pythonic") as url:
        for schema in ({"properties": ["a"]}, BAD_SCHEMAS[0][0], nested(150)):
            tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
            answer = post(url, "/v1/chat/completions", **CHAT, tools=[tool], tool_choice="required")
            assert answer.status_code == 400, answer.text


def test_tools_nested_too_deeply_are_refused():
    for template in (WITH_TOOLS, None):
        tool = Tool.model_construct(
            type="function", function=FunctionTool.model_construct(name="f", description="", parameters=nested(3000))
        )
        chat = ChatRequest(**CHAT).model_copy(update={"tools": [tool]})
        with pytest.raises(RefusedError):
            ChatTemplate(engine_with(template)).render(chat)


def test_a_stream_that_fails_says_so(monkeypatch):
    def fail(self, text):
        if text:
            self.count = getattr(self, "count", 0) + 1
        if getattr(self, "count", 0) > 2:
            raise ZeroDivisionError
        return [Content(text)] if text else []

    monkeypatch.setattr(PlainText, "feed", fail)
    with running(engine_with()) as url:
        answer = post(url, "/v1/chat/completions", **{**CHAT, "stream": True, "max_tokens": 40, "ignore_eos": True})
    last = answer.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error", answer.text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice requires tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "not among the tools"),
        ({"tools": [WEATHER, WEATHER]}, "two tools have the same name"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": "no name"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string", "minLength": 2,
            "maxLength": 1}}}], "tool_choice": "required"}, "Unsatisfiable"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": CONVERSATION[1]["tool_calls"]}]}, "assistant"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template is not supported"),
        ({"functions": [{"name": "f"}]}, "functions: only [] is supported here"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(url, body, words):
    answer = post(url, "/v1/chat/completions", **{**CHAT, **body})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


# Calls


@pytest.mark.parametrize("name", list(FORMATS))
def test_whatever_a_forced_grammar_allows_is_read_as_calls_that_fit(name):
    functions = [Function("get_weather", WEATHER["function"]["parameters"]), Function("clock", {})]
    text = call_grammar(FORMATS[name], functions, is_forced=True, max_calls=3, thinks=None, answer=None, marker_ids={})
    tokenizer = byte_tokenizer()
    grammar = asyncio.run(Grammars(tokenizer, BYTE_VOCAB, [2]).compile(GrammarSpec("grammar", text)))
    dice, numbers = random.Random(0), set()
    for _ in range(10):
        matcher, ids = grammar.deep_copy(), []
        while not matcher.is_stopped():
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            ids.append(dice.choice(np.flatnonzero(bits[:BYTE_VOCAB]).tolist()))
            matcher.consume_token(ids[-1])
        answer = tokenizer.decode(ids, skip_special_tokens=True)
        content, _, calls = read(FORMATS[name].parser(FUNCTIONS), answer, 5)
        assert content == "" and 1 <= len(calls) <= 3, answer
        for function, arguments in calls:
            assert fits(json.dumps(arguments)) if function == "get_weather" else arguments == {}
        numbers.add(len(calls))
    assert len(numbers) > 1


def test_the_official_clients_round_trip(client):
    messages = [{"role": "user", "content": "weather in rome?"}]
    options = {"model": "tiny", "tools": TOOLS, "tool_choice": NAMED, "seed": 3}
    message = client.chat.completions.create(messages=messages, **options).choices[0].message
    (call,) = message.tool_calls
    assert fits(call.function.arguments)
    chunks = list(client.chat.completions.create(messages=messages, stream=True, **options))
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
    assert deltas[0].id and deltas[0].function.name == "get_weather" and {delta.index for delta in deltas} == {0}
    assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
    assert len(deltas) > 3, "it comes bit by bit"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=5, temperature=0)
    again = client.chat.completions.create(
        model="tiny", messages=messages, tools=TOOLS, tool_choice="none", max_tokens=5, temperature=0
    )
    assert answer.choices[0].message.content and answer.usage.prompt_tokens > again.usage.prompt_tokens


@pytest.mark.parametrize("name", list(FORMATS))
def test_where_no_call_is_forced_a_strict_function_is_called_by_its_schema(name):
    form, tokenizer = FORMATS[name], byte_tokenizer()
    functions = [Function("get_weather", WEATHER["function"]["parameters"]), Function("clock", None)]
    text = call_grammar(form, functions, is_forced=False, max_calls=1, thinks="may", answer=None, marker_ids={})
    grammars = Grammars(tokenizer, BYTE_VOCAB, [2])
    matcher = asyncio.run(grammars.compile(GrammarSpec("grammar", text)))

    def is_whole(answer):
        state, ids = matcher.deep_copy(), tokenizer.encode(answer)
        return state.validate_tokens(ids) == len(ids) and state.consume_tokens(ids) and state.is_accepting()

    def written(arguments):
        given = json.loads(arguments)
        if name == "pythonic":
            return "[get_weather({})]".format(", ".join(f"{k}={json.dumps(v)}" for k, v in given.items()))
        key = "parameters" if name == "llama3" else "arguments"
        call = json.dumps({"name": "get_weather", key: given})
        return {"llama3": call, "mistral": f"[TOOL_CALLS][{call}]"}.get(name, f"<tool_call>\n{call}\n</tool_call>")

    good, bad = '{"city": "rome", "unit": "C"}', '{"city": "rome", "unit": "K"}'
    assert is_whole(written(good)) and not is_whole(written(bad))
    assert is_whole("") and is_whole("Just text.\nAnd more.") and is_whole("<think>hm</think>\nyes")
    assert is_whole(f"<think>hm</think>\n{written(good)}") and not is_whole(f"<think>hm</think>\n{written(bad)}")
    assert not is_whole(written(good) + written(good)), "one at most"


def forced(url, **body):
    """Finish reason, content and calls of a forced answer, which must be the same whether it is streamed or not."""
    body = {**CHAT, "tool_choice": "required", "temperature": 0, **body}
    whole = post(url, "/v1/chat/completions", **body).json()["choices"][0]
    made = whole["message"].get("tool_calls", ())
    calls = [tuple(call["function"].values()) for call in made]
    assert len({call["id"] for call in made}) == len(made)
    lines = post(url, "/v1/chat/completions", stream=True, **body).text.splitlines()
    choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    streamed = [["", ""] for _ in calls]
    for parts in (choice["delta"].get("tool_calls", ()) for choice in choices):
        assert len({part["index"] for part in parts}) == len(parts), "a chunk has one entry for each call"
    for part in (part for choice in choices for part in choice["delta"].get("tool_calls", ())):
        for place, key in enumerate(("name", "arguments")):
            streamed[part["index"]][place] += part["function"].get(key, "")
    assert content == (whole["message"]["content"] or "") and [tuple(call) for call in streamed] == calls
    assert choices[-1]["finish_reason"] == whole["finish_reason"]
    return whole["finish_reason"], content, calls


def test_a_forced_answer_ends_with_its_call(url):
    # The bias makes a second call much more likely than an end.
    body = {"tools": [CLOCK], "logit_bias": {"2": -50}, "max_tokens": 200}
    assert forced(url, **body) == ("tool_calls", "", [("clock", "{}")])
    _, content, calls = forced(url, parallel_tool_calls=True, **body)
    assert content == "" and len(calls) > 1, "several come only if they are asked for"


@pytest.mark.parametrize("length", [1, 11, 12, 30, 50, 55, 60, 75])
def test_a_forced_answer_that_is_cut_has_no_markup_in_its_text(url, length):
    """The lengths are those of a call, one token a letter: in the marker, the name, the arguments, the second call."""
    body = {"tools": [CLOCK], "logit_bias": {"2": -50}, "parallel_tool_calls": True}
    reason, content, calls = forced(url, max_tokens=length, **body)
    assert reason == "length" and content == "" and all(name == "clock" for name, _ in calls)


def test_a_forced_call_wins_over_a_response_format(url):
    never = {"type": "json_schema", "json_schema": {"schema": {"type": "string", "minLength": 5, "maxLength": 2}}}
    for form in ({"type": "json_object"}, never):
        assert forced(url, tools=[CLOCK], response_format=form) == ("tool_calls", "", [("clock", "{}")])


@pytest.mark.parametrize(("length", "expected"), [(-1, "tool_calls"), (0, "tool_calls"), (-15, "length")])
def test_a_forced_call_without_the_end_of_its_markup_is_whole(url, length, expected):
    whole = len('<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>')
    reason, content, calls = forced(url, tools=[CLOCK], max_tokens=whole + length)
    assert (reason, content) == (expected, "")
    assert calls == [("clock", "{}" if expected == "tool_calls" else "{")]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_called(url, mode):
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "clock"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    body = ChatRequest(**CHAT, tools=TOOLS, tool_choice=choice)
    assert body.offered == body.tools and [tool.function.name for tool in body.callable] == ["clock"]
    assert body.must_call == (mode == "required") and body.constrains_calls
    allowed["tools"].append({"type": "function", "function": {"name": "x"}})
    answer = post(url, "/v1/chat/completions", **CHAT, tools=TOOLS, tool_choice=choice)
    assert answer.status_code == 400 and "'x', which is not among the tools" in answer.text
    allowed["tools"].pop()
    if mode == "required":
        reason, content, calls = forced(url, tools=TOOLS, tool_choice=choice)
        assert (reason, content, [name for name, _ in calls]) == ("tool_calls", "", ["clock"])


def test_reasoning_comes_apart_in_streams_and_answers():
    template = WITH_TOOLS + "<think>"
    with running(engine_with(template)) as url:
        body = {**CHAT, "max_tokens": 8, "temperature": 0}
        message = post(url, "/v1/chat/completions", **body).json()["choices"][0]["message"]
        assert message["reasoning_content"] and message["content"] == ""
        back = [*CHAT["messages"], message, *CHAT["messages"]]
        assert post(url, "/v1/chat/completions", messages=back, max_tokens=1).status_code == 200
    chat = ChatRequest(**CHAT)
    assert ChatTemplate(engine_with(template), reasoning_parser="none").render(chat).thinks is None
    assert ChatTemplate(engine_with(template)).render(chat).thinks == "does"
    assert ChatTemplate(engine_with(WITH_TOOLS), reasoning_parser="think").render(chat).thinks == "may"
