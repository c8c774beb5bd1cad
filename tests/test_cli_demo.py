"""`graft demo`: plain decoding and Graft side by side, and no claim that was not measured."""

import sys

import pytest

from graft import Engine
from graft.cli import demo


@pytest.fixture
def graft_demo(graft, model_folder, monkeypatch):
    monkeypatch.setattr(sys.modules[demo.__module__], "MAX_NEW_TOKENS", 4)
    monkeypatch.setenv("COLUMNS", "120")
    return lambda: graft("demo", "--model", model_folder)


def test_demo_shows_every_prompt_and_says_that_texts_were_the_same(graft_demo):
    result = graft_demo()
    assert result.status == 0
    assert result.out.count("✓") == 4
    assert "Every text was the same" in result.out
    assert "Why is the sky blue?" in result.out


def test_demo_exits_1_when_a_text_differs(graft_demo, monkeypatch):
    generate, calls = Engine.generate, []

    def once_wrong(self, prompt, **options):
        calls.append(prompt)
        answer = generate(self, prompt, **options)
        if len(calls) == 8:  # two to warm up, then plain and Graft in turn: Graft's third answer
            answer.choices[0].ids[-1] += 1
        return answer

    monkeypatch.setattr(Engine, "generate", once_wrong)
    result = graft_demo()
    assert result.status == 1
    assert result.out.count("✗") == 1
    assert "Not the same: question." in result.out
    assert "Every text was the same" not in result.out
