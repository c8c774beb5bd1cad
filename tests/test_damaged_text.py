"""Streams of text that is no UTF-8, or not yet: what comes out, and how much is decoded for it."""

import random

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from graft.request.detokenizer import TextStream

WORDS = ["a", "漢", "é", "😀", "👩‍💻", "👨‍👩‍👧", "🇩🇪", "�", "한국", "ß\n"]
INVALID = [b"\xff", b"\x80", b"\xe6", b"\xe6\xbc", b"\xf0\x9f", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf5"]


def byte_level():
    """A token for each byte, and tokens that end or begin in the middle of a character."""
    letters = dict(zip(sorted(range(256), key=_byte_order), sorted(ByteLevel.alphabet()), strict=True))
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += [
        "漢".encode(),
        "😀".encode()[:2],
        "😀".encode()[2:],
        b"\xa2\xe6\xbc",
        b"\x80\xf0\x9f\x98",
        b" a",
        "�".encode(),
    ]
    vocab = {"<s>": 0, "</s>": 1} | {
        "".join(letters[byte] for byte in piece): 2 + place for place, piece in enumerate(pieces)
    }
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def _byte_order(byte):
    """GPT-2's alphabet: bytes that can be printed stand for themselves, the others for letters from 256 on."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return byte if byte in printed else 256 + [b for b in range(256) if b not in printed].index(byte)


def byte_fallback():
    """As Llama 2's: words with a mark for the space before them, and bytes for what no word holds."""
    words = ["▁a", "b", "▁", "漢", "�", "▁�"]
    vocab = {"<s>": 0, "</s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    vocab |= {word: 258 + place for place, word in enumerate(words)}
    tokenizer = Tokenizer(BPE(vocab, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


MAKERS = {"byte-level": byte_level, "byte fallback": byte_fallback}


@pytest.fixture(scope="module", params=list(MAKERS))
def tokenizer(request):
    return MAKERS[request.param]()


class Counting:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.num_decoded = 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    __hash__ = None  # nothing of it is remembered: all is counted

    def decode(self, ids, **options):
        self.num_decoded += len(ids)
        return self._tokenizer.decode(ids, **options)


def bytes_ids(content):
    return [2 + byte for byte in content]


def streamed(tokenizer, ids, prompt=()):
    """All pieces of a stream, one after the other."""
    stream, pieces = TextStream(tokenizer, list(prompt)), []
    for token in ids:
        stream.push(token)
        pieces.append(stream.take())
    stream.finish()
    pieces.append(stream.take(final=True))
    assert "".join(pieces) == stream.text
    return stream.text


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def simply_streamed(tokenizer, ids):
    """The rule itself: whenever the text of what is held ends with a whole character, it comes out."""
    text, start, out = "", 0, 0
    for end in range(1, len(ids) + 1):
        new = decoded(tokenizer, ids[start:end])
        if end == len(ids) or not new.endswith("�"):
            text += new[len(decoded(tokenizer, ids[start:out])) :]
            start, out = out, end
    return text


def random_ids(tokenizer, rng, damage):
    """Characters byte by byte, among them any tokens, and invalid bytes in runs short and long."""
    ids = []
    for _ in range(rng.randint(1, 12)):
        if rng.random() < damage:
            ids += bytes_ids(rng.choice(INVALID)) * rng.choice([1, 2, 30])
        elif rng.random() < 0.3:
            ids += rng.choices(range(2, len(tokenizer)), k=3)
        else:
            ids += bytes_ids(rng.choice(WORDS).encode()) * rng.choice([1, 1, 8])
    return ids


def test_whole_characters_come_out_as_the_tokenizer_decodes_them(tokenizer):
    rng = random.Random(0)
    for _ in range(60):
        ids = bytes_ids("".join(rng.choices(WORDS, k=rng.randint(1, 30))).encode())
        assert streamed(tokenizer, ids) == decoded(tokenizer, ids)


def test_damaged_text_comes_out_whenever_it_ends_with_a_whole_character(tokenizer):
    rng = random.Random(2)
    for _ in range(60):
        ids = random_ids(tokenizer, rng, damage=0.5)
        assert streamed(tokenizer, ids) == simply_streamed(tokenizer, ids)


def test_text_behind_damage_comes_out_with_its_token(tokenizer):
    word = tokenizer.convert_tokens_to_ids("b")
    for damage in (bytes_ids(b"\xff" * 500), bytes_ids("�".encode() * 100), bytes_ids(b"\xff" + "漢".encode() * 99)):
        stream = TextStream(tokenizer, [], stop=["b"])
        assert not any(stream.push(token) for token in damage)
        assert stream.push(word), "a stop string is found as soon as it is there"
        assert stream.text == decoded(tokenizer, damage)


@pytest.mark.parametrize(
    "damage",
    {
        "lone bytes": b"\xff" * 2048,
        "beginnings": b"\xe6" * 2048,
        "continuations": b"\x80" * 2048,
        "replacement characters": "�".encode() * 683,
        "characters behind an invalid byte": b"\xff" + "漢".encode() * 683,
        "characters far behind an invalid byte": "�".encode() * 10 + b"\xff" + "漢".encode() * 683,
        "letters behind an invalid byte": b"\xff" + b"a" * 2048,
    }.items(),
    ids=lambda item: item[0],
)
def test_damaged_text_is_decoded_in_linear_time(tokenizer, damage):
    counting = Counting(tokenizer)
    ids = bytes_ids(damage[1])
    streamed(counting, ids)
    assert counting.num_decoded < 100 * len(ids)


def test_a_space_behind_a_token_that_leaves_no_text_stays(tokenizer):
    word = tokenizer.convert_tokens_to_ids("▁a" if "▁a" in tokenizer.get_vocab() else "Ġa")
    for silent in (1, len(tokenizer) + 5):  # </s>, and an id that a model has and its tokenizer has not
        ids = [word, silent, word]
        assert streamed(tokenizer, ids) == decoded(tokenizer, ids)
    halves = bytes_ids("漢".encode())
    ids = [halves[0], *[1] * 40, *halves[1:]]
    assert streamed(tokenizer, ids) == "漢"


def test_a_prompt_cut_within_a_character_damages_no_text(tokenizer):
    face = bytes_ids("😀".encode())
    for prompt in ("😀😀😀", "漢漢漢漢", "é漢😀", "🇩🇪漢é"):
        assert streamed(tokenizer, face, bytes_ids(prompt.encode())) == "😀"
