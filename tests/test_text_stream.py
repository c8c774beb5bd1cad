"""`TextStream` by what users see of it: no half stop string, nothing past a stop, the text that the tokenizer gives."""

import time

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from graft.request.detokenizer import TextStream
from linear_time import check_linear
from tiny import byte_tokenizer


def pieces_of(stream, text):
    """What a client sees after each token of an answer, and whether the last one ended it."""
    pieces = []
    for token in byte_tokenizer().encode(text):
        is_stopped = stream.push(token)
        pieces.append(stream.take(final=is_stopped))
        if is_stopped:
            break
    return pieces, is_stopped


def test_a_stream_never_shows_the_beginning_of_a_stop_string():
    pieces, is_stopped = pieces_of(TextStream(byte_tokenizer(), [], ["END"]), "xEND and more")
    assert (pieces, is_stopped) == (["x", "", "", ""], True)


def test_a_held_back_beginning_is_shown_once_it_is_no_stop_string():
    stream = TextStream(byte_tokenizer(), [], ["Ex", "END"])
    assert pieces_of(stream, "aEENo!") == (["a", "", "E", "", "ENo", "!"], False)
    assert pieces_of(stream, "E") == ([""], False)
    assert stream.take(final=True) == "E", "an answer that ends there ends with it"


@pytest.mark.parametrize("stop", [["cd", "bcd"], ["bcd", "cd"]])
def test_the_earliest_of_two_stop_strings_ends_the_text(stop):
    stream = TextStream(byte_tokenizer(), [], stop)
    assert pieces_of(stream, "abcde")[1]
    assert stream.text == "a"


def word_tokenizer():
    """A token a word, with the space before it, as tokenizers of SentencePiece have it; and markers of a chat."""
    words = ["<s>", "</s>", "<user>", "<end>", "<assistant>", "▁good", "▁morning", "▁world", "!"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="!"))
    tokenizer.decoder = decoders.Metaspace()
    special = {"additional_special_tokens": words[2:5]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **special)


@pytest.mark.parametrize("markers", [[], [4], [3, 1, 0, 4]], ids=["words", "a marker", "markers of a turn"])
def test_an_answer_is_what_the_tokenizer_decodes_behind_the_prompt(markers):
    """A word keeps its space also where the prompt ends with tokens that have no text of their own."""
    tokenizer = word_tokenizer()
    prompt, answer = [0, 5, 6, *markers], [7, 6, 8]
    whole, before = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt + answer, prompt))
    assert (before, whole) == ("good morning", "good morning world morning!")
    stream, pieces = TextStream(tokenizer, prompt), []
    for token in answer:
        stream.push(token)
        pieces.append(stream.take())
    assert pieces == [" world", " morning", "!"]
    assert stream.text == whole[len(before) :]


def test_a_text_grows_in_linear_time():
    """To copy the text at each token would take quadratic time."""
    tokenizer = Tokenizer(models.WordLevel({"x" * 2000: 0}, unk_token="x" * 2000))
    tokenizer.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)

    def seconds(count):
        stream, start = TextStream(tokenizer, []), time.thread_time()
        for _ in range(count):
            stream.push(0)
        assert stream.text == "x" * 2000 * count
        return time.thread_time() - start

    seconds(10)
    check_linear(seconds, 500)
