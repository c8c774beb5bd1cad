"""`graft demo`: transformers, plain decoding and Graft side by side, and no claim that was not measured."""

import gc
import sys
from dataclasses import replace

import pytest

import graft.loading
from graft import Engine
from graft.bench.peers import Peer
from graft.cli import demo

MODULE = sys.modules[demo.__module__]


@pytest.fixture
def graft_demo(graft, model_folder, monkeypatch):
    monkeypatch.setattr(MODULE, "MAX_NEW_TOKENS", 4)
    monkeypatch.setattr(MODULE, "are_cores_shared", lambda: False)
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *words: graft("demo", "--model", model_folder, *words)


def test_demo_shows_every_prompt_and_says_that_texts_were_the_same(graft_demo):
    result = graft_demo()
    assert result.status == 0
    assert result.out.count("✓") == 4
    assert "Every text was the same" in result.out
    assert "Why is the sky blue?" in result.out
    assert "story: hard to guess" in result.out
    assert "To end in time" not in result.out and "Other programs" not in result.out
    table = [line for line in result.out.splitlines() if "✓" in line]
    assert all(len(line) <= 80 for line in table) and len(table) == len(MODULE.PROMPTS), "a line for each prompt"


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
    assert "Not the same: question, Graft and plain decoding." in result.out
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


@pytest.fixture
def other_transformers(monkeypatch):
    """transformers chooses another last token."""
    answer = Peer.answer

    def other(self, prompts, settings):
        right = answer(self, prompts, settings)[0]
        return [replace(right, ids=[*right.ids[:-1], right.ids[-1] + 1])]

    monkeypatch.setattr(Peer, "answer", other)


def test_demo_exits_1_when_transformers_text_is_another_one_in_fp32(graft_demo, other_transformers):
    result = graft_demo()
    assert result.status == 1 and result.out.count("✗") == 4
    assert "Not the same: copying, Graft and transformers." in result.out
    assert "In fp32 that is a bug in Graft" in result.out


def test_demo_says_that_rounding_is_the_reason_when_transformers_text_is_another_one_in_bf16(
    graft_demo, other_transformers
):
    result = graft_demo("--dtype", "bf16")
    assert result.status == 0 and result.out.count("✗") == 4
    assert "steps of different width round differently" in words_of(result)
    assert "Graft's texts were those of plain decoding" in words_of(result)
    assert "Every text was the same" not in words_of(result)


def test_demo_decodes_with_the_profile_that_generate_uses_and_with_nothing_that_was_learned(
    graft_demo, monkeypatch, tmp_path
):
    equip, generate = graft.loading.equip, Engine.generate
    equipped, used = [], []

    def watched_equip(engine, profile, keep):
        equipped.append((engine, profile))
        equip(engine, profile, keep)

    def watched_generate(self, prompt, **options):
        used.append(self)
        return generate(self, prompt, **options)

    monkeypatch.setattr(graft.loading, "equip", watched_equip)
    monkeypatch.setattr(Engine, "generate", watched_generate)
    monkeypatch.setenv("GRAFT_KEEP_LEARNED", "1")
    monkeypatch.setenv("GRAFT_HOME", str(tmp_path))
    assert graft_demo().status == 0
    [(engine, profile)] = equipped
    assert profile == "auto" and sum(one is engine for one in used) == 1 + len(MODULE.PROMPTS)
    del engine
    equipped.clear()
    used.clear()
    gc.collect()
    assert not list(tmp_path.glob("learned-*"))


def test_demo_on_a_slow_machine_cuts_answers_and_says_so(graft_demo, monkeypatch):
    monkeypatch.setattr(MODULE, "MAX_NEW_TOKENS", 40)
    slowed(monkeypatch, [12.0, 12.0, 12.0])  # for the 16 tokens that it then asks for
    result = graft_demo()
    assert result.status == 0
    assert "To end in time, answers have as few as 16 of 40 tokens" in words_of(result)
    assert "because decoding is slow here" in words_of(result)


def test_demo_without_time_answers_one_prompt_and_says_what_it_left_out_and_why(graft_demo, monkeypatch):
    monkeypatch.setattr(MODULE, "TIME_LIMIT", 0.0)
    monkeypatch.setattr(MODULE, "are_cores_shared", lambda: True)
    result = graft_demo()
    assert result.status == 0 and result.out.count("✓") == 1
    assert "Other programs use the cores of this machine" in words_of(result)
    assert "code, question, story are left out, because" in words_of(result)
    assert "because other programs use the cores" in words_of(result)


def words_of(result):
    return " ".join(result.out.split())


def test_demo_gives_no_verdict_when_plain_decoding_differs_before_and_after(graft_demo, monkeypatch):
    slowed(monkeypatch, [1.0, 1.0, 2.0])
    result = graft_demo()
    assert result.status == 0 and result.out.count("uncertain") == 4
    assert "No verdict on speed: plain decoding took 4.0 s before Graft and 8.0 s after it" in words_of(result)
    assert "times the speed of plain decoding" not in words_of(result)
    assert "times as long as Graft; on so busy a machine that is a rough figure." in words_of(result)


def test_demo_gives_a_verdict_with_its_noise_and_says_how_slow_transformers_is(graft_demo, monkeypatch):
    slowed(monkeypatch, [1.0, 1.0, 1.0])
    words = words_of(graft_demo())
    assert "1.00 times the speed of plain decoding, give or take 0.03." in words
    assert "times as long as Graft." in words and "tokens a round (plain decoding has 1)" in words
