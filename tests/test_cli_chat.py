"""`graft chat`: what it remembers, how an answer is stopped, and what ends the program."""

import shutil

import pytest

import graft as library
from conftest import Finished
from graft.request.detokenizer import TextStream


@pytest.fixture(scope="module")
def engine(model_folder):
    return library.load(model_folder)


def answers(engine, *turns, said=()):
    """What chat prints for these messages; `said` replaces the model's own first answers."""
    messages, printed = [], ""
    for index, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        text = said[index] if index < len(said) else engine.generate(messages, max_new_tokens=8).text
        messages.append({"role": "assistant", "content": text})
        printed += text + "\n"
    return printed


def test_piped_messages_are_answered_in_turn_with_what_was_said_before(graft_tiny, engine):
    result = graft_tiny("chat", stdin=b"hi\n\nand you?\n")
    assert result == Finished(0, answers(engine, "hi", "and you?"), "")


def test_system_message_comes_first(graft_tiny, engine):
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    expected = engine.generate(messages, max_new_tokens=8).text + "\n"
    assert graft_tiny("chat", "--system", "be kind", stdin=b"hi\n").out == expected
    assert graft_tiny("chat", "--system", "be kind", stdin=b"/clear\nhi\n").out == expected


def test_clear_forgets_and_exit_leaves(graft_tiny, engine):
    result = graft_tiny("chat", stdin=b"hi\n/clear\nhi\n/exit\nhi\n")
    assert result.out == 2 * answers(engine, "hi")


def test_unknown_command_is_not_sent_to_the_model(graft_tiny):
    result = graft_tiny("chat", stdin=b"/nonsense\n")
    assert result.out == ""
    assert "/clear" in result.err and "/exit" in result.err


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(graft_tiny, engine, monkeypatch):
    take, calls = TextStream.take, []

    def interrupted(self, final=False):
        calls.append(self)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return take(self, final)

    monkeypatch.setattr(TextStream, "take", interrupted)
    result = graft_tiny("chat", "--policy", "off", stdin=b"hi\nand you?\n")
    partial = calls[0].text
    assert 0 < len(partial) < len(engine.generate([{"role": "user", "content": "hi"}], max_new_tokens=8).text)
    assert result.status == 0
    assert result.out.endswith(answers(engine, "hi", "and you?", said=(partial,)).removeprefix(partial + "\n"))


def test_full_context_is_told_and_the_program_goes_on(graft_tiny, engine):
    result = graft_tiny("chat", stdin=b"hi\n" + b"x" * 1000 + b"\nand you?\n")
    assert result.status == 0
    assert result.out == answers(engine, "hi", "and you?")
    assert "context" in result.err and "/clear starts a new conversation" in result.err


def test_model_without_chat_template_is_refused(graft, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    result = graft("chat", "--model", str(folder))
    assert (result.status, result.err) == (2, "error: this model has no chat template; try graft generate --raw\n")
