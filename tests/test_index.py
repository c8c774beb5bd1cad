"""The datastore: what is built is found again, exactly; what is damaged, foreign or half-made is refused."""

import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.datastore.build import build_index
from graft.datastore.corpus import Corpus
from graft.datastore.format import HEADER, PARTS, part_path
from graft.datastore.lookup import MAX_MATCH, NO_MATCH, Continuation, Datastore
from graft.errors import GraftError
from graft.spec_decode.proposers import DatastoreLookup
from graft.tree.candidates import Candidates
from tiny import byte_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class LetterTokenizer:
    """A token a letter: a is 0. `spread` sets the ids apart, so that a large vocabulary is used."""

    chat_template = None

    def __init__(self, spread=1):
        self._ids = {letter: i * spread for i, letter in enumerate(LETTERS)}

    def get_vocab(self):
        return self._ids

    def __call__(self, texts, **options):
        return {"input_ids": [self.encode(text) for text in texts]}

    def encode(self, text):
        return [self._ids[letter] for letter in text if letter in self._ids]


def build(folder, documents, tokenizer=None, **options):
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    tokenizer = tokenizer or LetterTokenizer()
    build_index(Corpus.under([rows]), tokenizer, folder / "index", force=True, **options)
    return Datastore(folder / "index", tokenizer)


def ids(text, tokenizer=None):
    return (tokenizer or LetterTokenizer()).encode(text)


def followers(documents, context, length):
    """By search of the whole text: the longest match that something follows, and all that follows it."""
    for match in range(min(len(context), MAX_MATCH), 1, -1):
        end = context[-match:]
        ends = [(doc, i) for doc in documents for i in range(match, len(doc)) if doc[i - match : i] == end]
        if ends:
            return match, [tuple(doc[i : i + length]) for doc, i in ends]
    return 0, []


# What is found


def test_the_longest_match_is_continued_by_what_is_commonest(tmp_path):
    store = build(tmp_path, ["abcde", "xabcdf", "yabcde", "bcz"])
    match = store.continuations(ids("qabc"), count=3, length=2)
    assert (match.length, match.num_occurrences, match.num_read) == (3, 3, 3)
    assert match.continuations == [Continuation(ids("de"), [3, 2]), Continuation(ids("df"), [3, 1])]


def test_ids_outside_the_vocabulary_match_nothing(tmp_path):
    store = build(tmp_path, ["abcd"])
    assert store.continuations([*ids("ab"), 26], 3, 4) == NO_MATCH
    assert store.continuations([2**40, *ids("ab")], 3, 4).length == 2


def test_many_occurrences_are_sampled(tmp_path):
    # What stands before an occurrence decides its place, so it varies here independently of what follows.
    documents = [f"{LETTERS[i % 15]}{LETTERS[i // 15 % 15]}xy{'p' if i % 4 else 'q'}" for i in range(4000)]
    match = build(tmp_path, documents).continuations(ids("xy"), 2, 4)
    assert match.num_occurrences == 4000
    assert match.num_read < 100
    first, second = match.continuations
    assert (first.tokens, second.tokens) == (ids("p"), ids("q"))
    assert abs(first.counts[0] / match.num_read - 0.75) < 0.15


@given(
    documents=st.lists(st.text("abc", max_size=60), min_size=1, max_size=6).filter(lambda d: max(map(len, d)) > 1),
    contexts=st.lists(st.text("abcd", max_size=40), min_size=1, max_size=10),
    shard_tokens=st.integers(1, 200),
    spread=st.sampled_from([1, 300, 5000]),
    length=st.integers(1, 5),
)
@settings(deadline=None, max_examples=150)
def test_lookups_find_what_a_search_of_the_text_finds(documents, contexts, shard_tokens, spread, length):
    tokenizer = LetterTokenizer(spread)
    encoded = [ids(text, tokenizer) for text in documents]
    # A document longer than a shard is cut, which the search must do as well.
    cut = [doc[i : i + shard_tokens] for doc in encoded for i in range(0, len(doc), shard_tokens)]
    if max(map(len, cut)) < 2:
        return
    with tempfile.TemporaryDirectory() as folder:
        store = build(Path(folder), documents, tokenizer, shard_tokens=shard_tokens)
        for context in [*contexts, *documents]:
            query = ids(context, tokenizer)
            match = store.continuations(query, count=1000, length=length)
            expected_length, rows = followers(cut, query, length)
            assert (match.length, match.num_occurrences) == (expected_length, len(rows))
            if match.num_read < len(rows):
                continue
            # Every path is there, with the number of occurrences that begin so.
            begun = Counter(row[: i + 1] for row in rows for i in range(len(row)))
            found = {
                tuple(chain.tokens[: i + 1]): count
                for chain in match.continuations
                for i, count in enumerate(chain.counts)
            }
            assert found == begun
            weights = [chain.counts[0] for chain in match.continuations]
            assert not weights or weights[0] == max(weights)


# What is read


def test_folders_are_walked_and_what_is_no_text_is_skipped_and_counted(tmp_path):
    (tmp_path / "sub" / ".git").mkdir(parents=True)
    (tmp_path / "sub" / ".git" / "config").write_text("secret")
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / "a.py").write_text("import os\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "sub" / "b.md").write_text("\ufeffgrüße", encoding="utf-8")
    (tmp_path / "sub" / "log.jsonl").write_text('{"loss": 1}\n\n{"text": "kept"}\n{"text": " "}\nnot json\n')
    corpus = Corpus.under([tmp_path, tmp_path / "a.py"])
    assert [document for document, _ in corpus.documents()] == ["import os\n", "grüße", "kept"]
    assert {reason: skipped.count for reason, skipped in corpus.skipped.items()} == {
        "hidden or generated folders": 1,
        "hidden files": 1,
        "empty files": 1,
        "binary files": 1,
        "files that are not UTF-8": 1,
        "rows of another shape": 2,
        "rows without text": 1,
        "files given twice": 1,
    }


def test_rows_of_every_shape_are_documents(tmp_path):
    rows = [{"text": "t"}, {"prompt": "p"}, {"turns": ["one", "two"]}, {"prompt": "ask", "answer": "say"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    conversation = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "say"}]
    assert [document for document, _ in Corpus.under([path]).documents()] == ["t", "p", "one", "two", conversation]


def test_answers_are_indexed_as_the_chat_template_writes_them(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "ask", "answer": "say"}))
    tokenizer = byte_tokenizer()
    build_index(Corpus.under([path]), tokenizer, tmp_path / "index")
    match = Datastore(tmp_path / "index", tokenizer).continuations(tokenizer.encode("why\n[assistant]"), 1, 16)
    assert tokenizer.decode(match.continuations[0].tokens) == "say\n"


def test_a_long_file_is_read_in_pieces_that_end_with_a_line(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("".join(f"line {i}\n" for i in range(200_000)))
    pieces = [document for document, _ in Corpus.under([path]).documents()]
    assert len(pieces) > 1
    assert all(isinstance(piece, str) and piece.endswith("\n") for piece in pieces)
    assert "".join(map(str, pieces)) == path.read_text()


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("x.bin", b"a\0b", "binary"),
        ("x.txt", b"caf\xe9 au lait", "not UTF-8"),
        ("x.jsonl", b'{"text": "fine"}\n{"loss": 1}\n', "line 2"),
    ],
)
def test_a_named_file_that_is_no_text_is_an_error(tmp_path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(GraftError, match=problem):
        list(Corpus.under([tmp_path / name]).documents())


@pytest.mark.parametrize("content", ["", "\n \n", "a"])
def test_too_little_text_is_an_error_and_leaves_no_index(tmp_path, content):
    path = tmp_path / "x.txt"
    path.write_text(content)
    with pytest.raises(GraftError, match="nothing to index"):
        build_index(Corpus.under([path]), LetterTokenizer(), tmp_path / "index")
    assert visible(tmp_path) == ["x.txt"]


# What is refused


def test_an_index_of_another_tokenizer_is_refused(tmp_path):
    build(tmp_path, ["abcd"])
    with pytest.raises(GraftError, match="another tokenizer"):
        Datastore(tmp_path / "index", LetterTokenizer(spread=2))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("damage", ["missing", "cut off", "changed"])
def test_a_damaged_array_is_refused_by_name(tmp_path, part, damage):
    build(tmp_path, ["abcd" * 100])
    path = part_path(tmp_path / "index", 0, part)
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "cut off" else content[:9] + b"\x7f" + content[10:])
    with pytest.raises(GraftError, match=rf"{path.name} .*build the index again"):
        Datastore(tmp_path / "index")


def test_every_changed_byte_of_the_header_is_noticed(tmp_path):
    build(tmp_path, ["abcd"])
    path = tmp_path / "index" / HEADER
    content = path.read_bytes()
    for place in range(len(content)):
        changed = bytes([content[place] ^ 1])
        if content[place : place + 1].isspace() or changed.isspace():
            continue  # may be the same JSON
        path.write_bytes(content[:place] + changed + content[place + 1 :])
        with pytest.raises(GraftError, match=HEADER):
            Datastore(tmp_path / "index")


@pytest.mark.parametrize("part", PARTS)
def test_damage_that_opening_does_not_see_stops_no_lookup_and_gives_no_foreign_ids(tmp_path, part):
    draw = random.Random(0)
    store = build(tmp_path, ["".join(draw.choices("abcd", k=5000))])
    path = part_path(tmp_path / "index", 0, part)
    for _ in range(20):
        with path.open("r+b") as file:  # what is mapped changes with the file
            file.write(draw.randbytes(path.stat().st_size))
        for _ in range(50):
            match = store.continuations(draw.choices(range(26), k=4), 3, 8)
            assert all(0 <= token < 26 for chain in match.continuations for token in chain.tokens)


# How it is written


def visible(folder):
    """What is there, but for the lock that keeps two builds apart."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_build_leaves_nothing_and_the_old_index_as_it_was(tmp_path, error):
    def interrupt(report):
        if report.stage == "sorting" and report.done == 1:  # a shard is written, and no header
            raise error

    with pytest.raises(error):
        build(tmp_path, ["abcd"], report=interrupt)
    assert visible(tmp_path) == ["rows.jsonl"]
    build(tmp_path, ["abcd"])
    with pytest.raises(error):
        build(tmp_path, ["wxyz"], report=interrupt)
    assert visible(tmp_path) == ["index", "rows.jsonl"]
    assert Datastore(tmp_path / "index").continuations(ids("ab"), 1, 1).length == 2


def test_an_index_is_replaced_only_by_force_and_other_folders_never(tmp_path):
    build(tmp_path, ["abcd"])
    corpus = Corpus.under([tmp_path / "rows.jsonl"])
    with pytest.raises(GraftError, match="--force"):
        build_index(corpus, LetterTokenizer(), tmp_path / "index")
    with pytest.raises(GraftError, match="not an index"):
        build_index(corpus, LetterTokenizer(), tmp_path, force=True)
    assert build(tmp_path, ["wxyz"]).continuations(ids("wx"), 1, 1).length == 2


def test_what_a_killed_build_left_goes_with_the_next(tmp_path):
    (tmp_path / ".index.scratch-killed").mkdir()
    build(tmp_path, ["abcd"])
    assert visible(tmp_path) == ["index", "rows.jsonl"]


def test_a_second_build_of_the_same_index_is_refused_while_one_runs(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("abcd")

    def report(stage):
        with pytest.raises(GraftError, match="another process"):
            build_index(Corpus.under([path]), LetterTokenizer(), tmp_path / "index")
        reports.append(stage)

    reports = []
    build_index(Corpus.under([path]), LetterTokenizer(), tmp_path / "index", report=report)
    assert reports


def test_two_processes_look_up_the_same_index_without_torch(tmp_path):
    build(tmp_path, ["abcdefgh"])
    code = (
        "import sys; sys.modules.update(torch=None, transformers=None, pydivsufsort=None)\n"
        "from graft.datastore.lookup import Datastore\n"
        f"store = Datastore({str(tmp_path / 'index')!r})\n"
        "print('open', flush=True); sys.stdin.readline()\n"
        "print(store.continuations([0, 1, 2], 1, 3).continuations[0].tokens)"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
    assert [process.communicate("\n")[0] for process in both] == ["[3, 4, 5]\n"] * 2


# As a retriever


def test_proposals_are_one_small_tree_with_evidence_by_match_and_share(tmp_path):
    lookup = DatastoreLookup(build(tmp_path, ["abcde", "xabcdf", "yabcde"]))
    candidates = pool_for("qabc", "zz")
    propose(lookup, candidates, "qabc", "zz", max_depth=8, first=3)
    nodes = candidates.nodes
    assert nodes.tokens[0].tolist() == ids("cdef")
    assert nodes.parents.tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]
    assert nodes.sources[0].tolist() == [0, 3, 3, 3]
    assert (nodes.paths[0] > 0).all() and nodes.paths[1].tolist() == [1, 0, 0, 0], "nothing is known after zz"
    d, e, f = (float(lookup.prior[0, bucket]) for bucket in nodes.score_bucket[0, 1:])
    assert d > e > f
    assert nodes.paths[0].tolist() == pytest.approx([1, d, d * e, d * f])


@pytest.mark.parametrize("max_depth", [1, 2, 9])
def test_drafted_nodes_are_looked_up_as_if_they_had_come(tmp_path, max_depth):
    candidates = pool_for("xyab", "xyz")
    drafted = torch.tensor([ids("c")] * 2)
    ones = torch.ones_like(drafted)
    candidates.add(drafted, 0 * ones, torch.tensor([[0.9], [0.0]]), ones, 0 * ones, needs=1)
    propose(DatastoreLookup(build(tmp_path, ["abcdefgh"])), candidates, "xyab", "xyz", max_depth=max_depth, first=2)
    nodes = candidates.nodes
    new = [(int(nodes.parents[0, n]), LETTERS[int(nodes.tokens[0, n])]) for n in range(2, candidates.width)]
    assert (0, "c") not in new, "what follows the text was looked up before"
    assert ((1, "d") in new) == (max_depth > 1), "below the drafted node, if that may have children"
    assert int(nodes.depths[0].max()) == min(max_depth, len("cdefgh"))
    assert (nodes.paths[1, 1:] == 0).all(), "a row that drafted nothing has no such node"


def history(text):
    return SimpleNamespace(ids=ids(text) or [1000])  # an id that the index cannot hold, where there is no letter


def pool_for(*texts):
    histories = [history(text).ids for text in texts]
    return Candidates(torch.tensor([each[-1] for each in histories]), histories)


def propose(lookup, candidates, *texts, max_depth, first=1):
    chances = torch.nn.functional.pad(lookup.prior, (0, 0, first, 0))[None]  # by agreement, source and score bucket
    lookup.propose(candidates, [history(text) for text in texts], first, chances, max_depth)


# As a command


def test_build_and_info(tmp_path, model_folder, graft):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("hello world")
    (tmp_path / "text" / "b.bin").write_bytes(b"\0\1")
    out = str(tmp_path / "index")
    built = graft("index", "build", "--model", model_folder, str(tmp_path / "text"), "--out", out)
    assert (built.status, built.out) == (0, out + "\n")
    assert "skipped 1 binary files" in built.err
    assert "11 tokens of 1 documents" in built.err

    facts = json.loads(graft("index", "info", out, "--json").out)
    assert (facts["tokens"], facts["documents"], facts["model"]) == (11, 1, model_folder)
    assert facts["bytes"] == sum(path.stat().st_size for path in Path(out).iterdir() if path.name != HEADER)
    assert facts["tokenizer"] in graft("index", "info", out, "--verify").out
    Datastore(out, byte_tokenizer())


def test_info_reads_all_only_when_asked(tmp_path, graft):
    build(tmp_path, ["abcd" * 20_000])
    path = part_path(tmp_path / "index", 0, "suffixes")
    with path.open("r+b") as file:
        file.seek(5000)  # between the first two blocks that opening looks at
        file.write(b"\xff")
    assert graft("index", "info", str(tmp_path / "index")).status == 0
    checked = graft("index", "info", "--verify", str(tmp_path / "index"))
    assert checked.status == 2
    assert path.name in checked.err
