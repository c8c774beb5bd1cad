"""Prompts from files: what a row may be, and the error of each bad one."""

import pytest

from graft.errors import GraftError
from graft.prompt_files import PromptRow, read_prompts, user_message
from tiny import byte_tokenizer


def written(folder, content):
    path = folder / "rows.jsonl"
    path.write_bytes(content)
    return path


def test_a_row_is_a_prompt_or_the_first_of_its_turns(tmp_path):
    path = written(tmp_path, b'{"prompt": "one"}\n\n{"id": 7, "turns": ["two", "later"], "prompt": null}\n')
    assert read_prompts(path) == [PromptRow("1", "one"), PromptRow("7", "two")]


def test_lines_after_the_limit_are_not_read(tmp_path):
    path = written(tmp_path, b'{"prompt": "one"}\n{"prompt": "two"}\nnot JSON\n')
    assert [prompt.text for prompt in read_prompts(path, limit=2)] == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "one"}\n{"prompt"\n', r"rows\.jsonl:2 is not valid JSON \(.* at column 10\)"),
        (b'{"prompt": "one"}\n{"prompt": "\xff"}\n', r"rows\.jsonl:2 is not UTF-8 text"),
        (b'{"prompt": "one"}\n\n{"question": "two"}\n', r'rows\.jsonl:3 needs "prompt"'),
        (b'["one"]\n', r"rows\.jsonl:1 is not a JSON object"),
        (b'{"turns": []}\n', r"rows\.jsonl:1 needs"),
        (b'{"turns": "one"}\n', r"rows\.jsonl:1 needs"),
        (b'{"turns": [1]}\n', r"rows\.jsonl:1 needs"),
        (b'{"prompt": " "}\n', r"rows\.jsonl:1 needs"),
        (b"\n\n", r"rows\.jsonl holds no prompts"),
    ],
)
def test_bad_data_is_one_line_that_names_the_place(tmp_path, content, message):
    with pytest.raises(GraftError, match=message) as caught:
        read_prompts(written(tmp_path, content))
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder_are_named(tmp_path):
    with pytest.raises(GraftError, match=r"cannot read .*nowhere\.jsonl: No such file"):
        read_prompts(tmp_path / "nowhere.jsonl")
    with pytest.raises(GraftError, match=r"cannot read .*: Is a directory"):
        read_prompts(tmp_path)


def test_text_is_put_as_a_message_only_where_there_is_a_chat_template():
    tokenizer = byte_tokenizer()
    user = {"role": "user", "content": "hi"}
    assert user_message("hi", tokenizer) == [user]
    assert user_message("hi", tokenizer, "be kind") == [{"role": "system", "content": "be kind"}, user]
    tokenizer.chat_template = None
    assert user_message("hi", tokenizer) == "hi"
    with pytest.raises(GraftError, match="no chat template"):
        user_message("hi", tokenizer, "be kind")
