"""A model split over two processes: the same text, and the end of both if one fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import graft
import ranks
from graft import GraftError
from ranks import run_ranks, small_model_folder
from tiny import byte_tokenizer, tiny_model

NUM_TOKENS = 32
SECONDS = 30  # within which all have ended when one fails: a few, and the start of processes on a busy machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_model_folder(tmp_path_factory.mktemp("model") / "whole", max_position_embeddings=512)


def in_one_process(folder: str) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = ranks.expected_of(model, NUM_TOKENS)
    return {"transformers": expected, **ranks.texts_of(model, expected, NUM_TOKENS, None)}


@pytest.mark.parametrize("draft", [None, "itself"])
@pytest.mark.parametrize("tied", [False, True])
def test_text_is_that_of_transformers_on_the_same_ranks_and_of_one_process(
    tmp_path: Path, tied: bool, draft: str | None
) -> None:
    folder = small_model_folder(tmp_path / "model", tie_word_embeddings=tied, max_position_embeddings=512)
    first, second = run_ranks(tmp_path / "ranks", ranks.compare, folder, NUM_TOKENS, folder if draft else None)
    assert (first.status, second.status, second.result) == (0, 0, None), first.err + second.err
    found, alone = first.result, in_one_process(folder)
    expected = found["transformers"]
    assert found["greedy"] == expected == alone["transformers"]
    assert found["oracle"] == expected[0]
    assert found["plain"] == found["random"] == [[ids] for ids in expected]
    for name in ("sampled", "sampled_random", "sampled_plain"):
        assert found[name] == alone["sampled_plain"], name
    assert found["sampled_plain"] != [[ids, ids] for ids in expected]
    assert found["oracle_accepted"] > NUM_TOKENS / 2
    assert found["accepted"] > NUM_TOKENS if draft else found["drafts"] == 0
    assert found["mode"] == "eager, tensor parallel over 2 processes"
