"""Parsers of answers take time in proportion to the text, whatever a model writes and however it is cut into pieces."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest

import graft.server
from graft.server.chat import without_tools
from graft.server.tool_formats import FORMATS, Function
from graft.server.tool_parsers import Thinking
from linear_time import check_linear

FUNCTIONS = [Function("f", {"type": "object", "properties": {"a": {"type": "string"}}})]
CALL = '<tool_call>{"name": "f", "arguments": {}}'
XML = "<tool_call><function=f><parameter=a>"
# A format, what a text begins with, what comes again and again, and its end.
CASES = {
    "pythonic, a list of spaces": ("pythonic", "[", " ", "!"),
    "pythonic, one long word": ("pythonic", "", "f", "!"),
    "hermes, braces behind a call": ("hermes", CALL, "}", ""),
    "hermes, a call that never closes": ("hermes", "<tool_call>", "x</tool_call", ""),
    "qwen, spaces in a call": ("qwen", "<tool_call>", " ", "<function="),
    "qwen, spaces behind a value": ("qwen", XML + "x</parameter>", " ", ""),
    "qwen, words in a value": ("qwen", XML, "word ", ""),
    "qwen, beginnings of values": ("qwen", "<tool_call><function=f>", "<parameter=a>", ""),
    "llama3, line breaks": ("llama3", "", "\n", ""),
    "mistral, brackets": ("mistral", "", "[", ""),
    "mistral, words behind the marker": ("mistral", "[TOOL_CALLS]", "word", ""),
    "hermes, one long name": ("hermes", '<tool_call>{"name": "', "abcd", ""),
}


def seconds(form, text, size, thinks):
    """CPU time of a parser that is fed a text in pieces."""
    parser = FORMATS[form].parser(FUNCTIONS)
    parser = Thinking(False, parser) if thinks else parser
    start = time.thread_time()
    for place in range(0, len(text), size):
        parser.feed(text[place : place + size])
    parser.finish()
    return time.thread_time() - start


def check(case, length, size, thinks=False):
    form, before, again, after = case
    check_linear(lambda number: seconds(form, before + again * (number // len(again)) + after, size, thinks), length)


@pytest.mark.parametrize("case", CASES)
def test_a_text_in_small_pieces_is_read_in_linear_time(case):
    check(CASES[case], 8_000, 2)


def test_spaces_before_an_answer_that_may_begin_with_reasoning_are_read_in_linear_time():
    check(("hermes", "", " ", "x"), 25_000, 2, thinks=True)


def test_results_of_tools_are_joined_in_linear_time():
    def measured(count):
        messages = [{"role": "tool", "content": "x" * 20} for _ in range(count)]
        start = time.thread_time()
        (said,) = without_tools(messages, [])
        assert said["content"].count("x" * 20) == count
        return time.thread_time() - start

    check_linear(measured, 10_000)


# The page's Markdown, with elements that hold nothing. Tells the CPU time of a text.
SHOW = """
class Box {
  constructor() { this.children = []; this.dataset = {}; }
  append(...nodes) { this.children.push(...nodes); }
}
globalThis.document = { createElement: () => new Box() };
const { showMarkdown } = await import(process.argv[1]);
const [before, again, after, length] = JSON.parse(process.argv[2]);
const seconds = (count) => {
  const start = process.cpuUsage();
  showMarkdown(new Box(), before + again.repeat(count) + after, (text) => [text]);
  const { user, system } = process.cpuUsage(start);
  return (user + system) / 1e6;
};
seconds(10); // once, so that all is compiled
console.log(seconds(length));
"""
MARKDOWN = {
    "a fence with a word and a backtick": ("~~~", "a", "`", 10_000),
    "a long fence and a backtick": ("", "~", "`", 1_000),
    "backticks": ("x", "`", "", 10_000),
    "blank lines in a list": ("- a", "\n", "- b", 10_000),
    "spaces behind a rule": ("---", " ", "x", 10_000),
    "marks without an end": ("", "**a ", "", 2_000),
}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
@pytest.mark.parametrize("case", MARKDOWN)
def test_markdown_is_shown_in_linear_time(case, tmp_path):
    shutil.copytree(Path(graft.server.__file__).parent / "static", tmp_path, dirs_exist_ok=True)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    command = ["node", "--input-type=module", "--eval", SHOW, str(tmp_path / "markdown.js")]
    *text, length = MARKDOWN[case]

    def measured(count):
        told = subprocess.run([*command, json.dumps([*text, count])], capture_output=True, text=True, check=True)
        return json.loads(told.stdout)

    check_linear(measured, length)
