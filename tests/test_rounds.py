"""Round traces of an answer, and how a terminal shows them."""

import re

import numpy as np
import pytest
import torch
from rich.console import Console

from graft import Engine, SamplingSettings
from graft.cli.rounds import Rounds, drawn, likeliest
from graft.engine.round_reports import Report
from graft.request.round_trace import MODEL, RoundRecord
from graft.request.sequence import TreeRow
from graft.tree.tree import ROOT, DraftTree
from proposers import Oracle, RandomTrees
from tiny import BYTE_VOCAB, byte_tokenizer, tiny_model

PROMPT = "grafting"
COLOURED = Console(force_terminal=True, color_system="standard", no_color=False)
COLOURS = {"drafted": "green", "suffix": "cyan"}
RECORD = RoundRecord(
    tokens=[9, 1, 2, 3, 4],
    parents=[0, 0, 1, 0, 3],
    probabilities=[1.0, 0.5, 0.9, 0.2, 0.1],
    sources=["root", "drafted", "suffix", "drafted", "drafted"],
    accepted=[3],
    new_tokens=[3, 7],
)


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=BYTE_VOCAB)


@pytest.fixture(scope="module")
def free(model):
    return Engine(model, byte_tokenizer(), policy="off").generate(PROMPT, max_new_tokens=24)


def oracle(model, free):
    return Engine(model, byte_tokenizer(), policy=Oracle(free.ids, len(free.prompt_ids)))


def watched(engine, **options):
    records = []
    stream = engine.stream(PROMPT, watch=records.append, **options)
    text = "".join(stream)
    return records, text, stream.result


@pytest.mark.parametrize("limit", [24, 10, 7])
def test_the_records_of_an_answer_add_up_to_it(model, free, limit):
    records, _, result = watched(oracle(model, free), max_new_tokens=limit)
    assert [token for record in records for token in record.new_tokens] == result.ids == free.ids[:limit]
    assert len(records) == result.stats.rounds
    assert sum(len(record.tokens) - 1 for record in records) == result.stats.nodes
    assert sum(len(record.accepted) for record in records) == result.stats.accepted
    origins = [origin for record in records for origin in record.origins]
    assert origins.count("drafted") == result.stats.accepted_by_source["drafted"] > 0
    assert origins.count(MODEL) == limit - result.stats.accepted


def test_a_record_is_the_verified_tree_without_padding():
    engine = Engine(tiny_model(), policy=RandomTrees(40))
    (sequence,) = engine.new_sequences([3, 17, 42], SamplingSettings(max_new_tokens=100))
    sequence.is_recorded = True
    root, num_nodes, num_accepted = 42, 0, 0
    for _ in engine.rounds([sequence]):
        [record] = sequence.take_records()
        assert record.tokens[0] == root, "the root is the last token before the round"
        assert record.sources == ["root", *["drafted"] * (len(record.tokens) - 1)]
        assert all(parent < node for node, parent in enumerate(record.parents) if node)
        for parent, node, token in zip([0, *record.accepted], record.accepted, record.new_tokens, strict=False):
            assert (record.parents[node], record.tokens[node]) == (parent, token)
        root = record.new_tokens[-1]
        num_nodes += len(record.tokens) - 1
        num_accepted += len(record.accepted)
    assert num_accepted == sequence.stats.accepted > 0
    assert num_nodes == sequence.stats.nodes < 40 * sequence.stats.rounds, "some places held no node"


def test_a_round_shows_of_other_prompts_texts_what_was_accepted_and_no_more(model):
    """Unless all is asked for, as by who owns them all."""
    tokenizer, said = byte_tokenizer(), {}
    for show_all in (False, True):
        engine = Engine(model, tokenizer, policy="graft", budget=12)
        engine.generate("my card number is 4929-1234-8765", max_new_tokens=4)
        records = []
        stream = engine.stream("is my card number is ", watch=records.append, show_all=show_all, max_new_tokens=30)
        list(stream)
        for record in records:
            proposed = [node for node in range(1, len(record.tokens)) if record.sources[node] != "suffix"]
            assert show_all or set(proposed) <= set(record.accepted)
        assert sum(record.num_hidden for record in records) > 0 or show_all
        assert [token for record in records for token in record.new_tokens] == stream.result.ids
        said[show_all] = "".join(tokenizer.decode([t]) for record in records for t in record.tokens)
    assert "4929" in said[True] and "4929" not in said[False]


def test_nothing_is_recorded_unless_somebody_watches(model, monkeypatch):
    monkeypatch.delattr(TreeRow, "record")
    engine = Engine(model, byte_tokenizer(), policy=RandomTrees(10, BYTE_VOCAB))
    assert "".join(engine.stream(PROMPT, max_new_tokens=5)) == engine.generate(PROMPT, max_new_tokens=5).text
    with pytest.raises(AttributeError):
        watched(engine, max_new_tokens=5)


def lines(tree):
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(tree)
    return capture.get().splitlines()


def test_a_drawn_tree_shows_who_proposed_what_and_what_was_accepted():
    assert [line.rstrip() for line in lines(drawn(RECORD, "round 2", COLOURS, str))] == [
        "round 2 after 9: 1 of 4 accepted",
        "├── 1  0.50 drafted",
        "│   └── 2  0.90 suffix",
        "└── 3 ✓  0.20 drafted",
        "    ├── 4  0.10 drafted",
        "    └── 7  the model's own",
    ]


def test_a_drawn_tree_is_cut_to_its_likeliest_nodes_and_the_accepted(monkeypatch):
    monkeypatch.setattr("graft.cli.rounds.MAX_NODES", 2)
    assert likeliest(RECORD, 2) == {1, 2}, "by the whole path, so no node without its parent"
    text = "\n".join(lines(drawn(RECORD, "round 2", COLOURS, str)))
    assert "3 ✓" in text and "4  0.10" not in text and "and 1 less likely" in text


def test_text_is_coloured_by_who_proposed_each_token(model, free):
    engine = oracle(model, free)
    rounds = Rounds(byte_tokenizer(), free.prompt_ids, ("root", "other", "drafted"))
    stream = engine.stream(PROMPT, watch=rounds.watch, max_new_tokens=12)
    painted = "".join(rounds.paint(piece, COLOURED) for piece in stream)
    assert re.sub(r"\x1b\[[\d;]*m", "", painted) == stream.result.text
    assert "\x1b[36m" in painted and "\x1b[32m" not in painted, "the second proposer's colour alone"
    assert rounds.legend().plain == "other 0, drafted 10, the model's own 2"


@pytest.mark.parametrize("stop", [(), ("s",), ("\ufffd\ufffd",)])
def test_colouring_never_changes_the_text(model, stop):
    for seed in range(4):
        engine = Engine(model, byte_tokenizer(), policy=RandomTrees(60, BYTE_VOCAB, seed=seed))
        rounds = Rounds(byte_tokenizer(), engine.encode(PROMPT), engine.policy.sources)
        options = {"max_new_tokens": 40, "temperature": 1.5, "seed": seed, "stop": stop}
        stream = engine.stream(PROMPT, watch=rounds.watch, **options)
        painted = "".join(rounds.paint(piece, COLOURED) for piece in stream)
        assert re.sub(r"\x1b\[[\d;]*m", "", painted) == stream.result.text


def test_a_round_of_graft_remembers_what_it_pruned():
    engine = Engine(tiny_model(), policy="graft", budget=4)
    sequence = engine.new_sequences([1, 2, 3, 1, 2, 3, 1, 2], SamplingSettings(max_new_tokens=24, ignore_eos=True))[0]
    sequence.is_recorded = True
    records = [record for _ in engine.rounds([sequence]) for record in sequence.take_records()]
    assert any(record.num_pruned for record in records)
    for record in records:
        assert record.num_verified <= 5 and all(node < record.num_verified for node in record.accepted)
        assert all(parent < node for node, parent in enumerate(record.parents) if node)


def test_a_pruned_candidate_is_as_likely_as_its_path_given_its_parent():
    paths = np.array([0.5, 0.25, 0.125], np.float32)  # nodes 4 and 9 of the pool below the root, 7 below 4
    columns = [[4, 7, 9], [11, 12, 13], [0, 4, 0], [1, 2, 1], paths.view(np.int32)]
    tree = DraftTree.roots(torch.tensor([5]))
    considered = Report(candidates=np.array(columns, np.int32)[:, None]).considered(tree)
    assert considered.tokens.tolist() == [[5, 11, 12, 13]] and considered.parents.tolist() == [[0, 0, 1, 0]]
    assert considered.sources.tolist() == [[ROOT, 1, 2, 1]]
    assert considered.probabilities.tolist() == [[1, 0.5, 0.5, 0.125]]
