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
        if len(calls) == 10:  # two to warm up, then plain, Graft and plain in turn: Graft's third answer
            answer.choices[0].ids[-1] += 1
        return answer

    monkeypatch.setattr(Engine, "generate", once_wrong)
    result = graft_demo()
    assert result.status == 1
    assert result.out.count("✗") == 1
    assert "Not the same: question." in result.out
    assert "Every text was the same" not in result.out


def slowed(monkeypatch, seconds):
    """Makes every answer take these seconds, by the number of the call for a prompt: plain, Graft, plain again."""
    generate, calls = Engine.generate, []

    def timed(self, prompt, **options):
        answer = generate(self, prompt, **options)
        if len(calls) >= 2:  # two to warm up
            answer.stats.decode_seconds = seconds[(len(calls) - 2) % 3]
        calls.append(prompt)
        return answer

    monkeypatch.setattr(Engine, "generate", timed)


def words_of(result):
    return " ".join(result.out.split())


def test_demo_gives_no_verdict_when_plain_decoding_differs_before_and_after(graft_demo, monkeypatch):
    slowed(monkeypatch, [1.0, 1.0, 2.0])
    result = graft_demo()
    assert result.status == 0 and result.out.count("uncertain") == 4
    assert "No verdict on speed: plain decoding took 4.0 s before Graft and 8.0 s after it" in words_of(result)
    assert "times the speed of plain decoding" not in words_of(result)


def test_demo_gives_a_verdict_with_its_noise_and_accepted_tokens_first(graft_demo, monkeypatch):
    slowed(monkeypatch, [1.0, 1.0, 1.0])
    words = words_of(graft_demo())
    assert "1.00 times the speed of plain decoding, give or take 0.03." in words
    header = next(line for line in words.split("┃") if "accepted" in line)
    assert words.index(header) < words.index("ratio")
