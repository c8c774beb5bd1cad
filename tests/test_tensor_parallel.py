"""A model split over two processes: the same text, and the end of both if one fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import ranks
from conftest import Finished
from graft import Engine, GraftError, load
from graft.core.scheduler import Scheduler
from graft.loading import load_drafter
from graft.model.kv_cache import PAGE, Row
from graft.model.step import FlatStep
from graft.model.tensor_parallel import _Run, _Worker
from graft.spec_decode.proposers.eagle3 import Eagle3Config, Eagle3Head, save_head
from graft.spec_decode.tree import DraftTree
from ranks import BYTE_VOCAB, Ended, run_ranks, small_model_folder
from tiny import ARCHITECTURES, tiny_model

pytestmark = pytest.mark.skipif(
    not hasattr(DistributedConfig, "tp_plan"), reason="tensor parallelism needs transformers 5.17"
)
NUM_TOKENS = 14
SECONDS = 30  # until all have ended when one fails: a few, and the start of the processes on a busy machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_model_folder(tmp_path_factory.mktemp("model") / "whole")


def test_a_first_step_may_lie_anywhere_in_rank_0s_pages() -> None:
    worker, row = _Worker(tiny_model()), Row(line=1, pages=[100], length=0)
    step = FlatStep([row], DraftTree.roots(torch.tensor([5])))
    worker.do(_Run(1, 8192, [], step, 0))
    assert bool(worker._stores[1].keys[0].view(8192, -1)[100 * PAGE].any())


# The same text


@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("no draft", "draft model")),
        "EAGLE-3 head, tied embedding",
    ],
)
def test_text_is_that_of_transformers_on_the_same_ranks_and_of_one_process(tmp_path: Path, kind: str) -> None:
    folder = small_model_folder(tmp_path / "model", tie_word_embeddings="tied" in kind)
    draft = {"no draft": None, "draft model": folder}.get(kind, random_head(tmp_path / "head", folder))
    first, second = run_ranks(tmp_path / "ranks", ranks.compare, folder, NUM_TOKENS, draft)
    assert (first.status, second.status, second.result) == (0, 0, None), first.err + second.err
    found, expected = first.result, first.result["transformers"]
    alone = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sampled = ranks.sampled_of(Engine(alone, policy="off"), NUM_TOKENS)
    assert found["greedy"] == expected == ranks.expected_of(alone, NUM_TOKENS)
    assert found["oracle"] == expected[0]
    assert found["oracle_accepted"] > NUM_TOKENS / 2  # behind wrong siblings: keys and values were moved
    assert found["sampled"] == found["sampled_random"] == sampled
    assert sampled != [[ids, ids] for ids in expected]
    assert (found["drafts"] > 0) == (draft is not None)
    assert found["accepted"] > NUM_TOKENS or kind != "draft model"
    assert found["mode"] == "eager, tensor parallel over 2 processes"


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_trees_of_every_architecture_have_the_text_of_transformers(tmp_path: Path, name: str) -> None:
    folder = small_model_folder(tmp_path / "model", name)
    first, second = run_ranks(tmp_path / "ranks", ranks.compare_trees, folder, 8)
    assert (first.status, second.status) == (0, 0), first.err + second.err
    alone = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert first.result["plan"]
    assert first.result["trees"] == first.result["transformers"] == ranks.expected_of(alone, 8)


def random_head(folder: Path, model: str) -> str:
    torch.manual_seed(0)
    save_head(Eagle3Head(Eagle3Config.for_target(AutoConfig.from_pretrained(model))), folder)
    return str(folder)


def test_command_prints_the_answer_once(graft: Callable[..., Finished], tmp_path: Path) -> None:
    folder = small_model_folder(tmp_path / "model", tie_word_embeddings=True)
    words = ("generate", "hi", "--model", folder, "--max-new-tokens", "12", "--stats")
    expected = graft(*words)
    first, second = run_ranks(tmp_path / "ranks", ranks.command_line, *words, "--tensor-parallel")
    assert (first.status, second.status, second.out, second.err) == (0, 0, "", "")
    assert first.out == expected.out
    assert "eager, tensor parallel over 2 processes" in first.err


# One fails, all end


def assert_all_end_with(ended: list[Ended], *words: str) -> None:
    for rank, word in zip(ended, words, strict=True):
        assert rank.status != 0 and word in rank.err, rank
        assert rank.seconds < SECONDS


def test_a_rank_that_fails_in_a_step_ends_all_with_its_error(folder: str, tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, ranks.fail_in_a_step, folder, 1, 5)
    assert_all_end_with(ended, "RankError: rank 1 failed: MemoryError: no memory left here", "MemoryError")


def test_ranks_that_wait_for_rank_0_in_a_step_end_though_it_lives_on(folder: str, tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, ranks.fail_in_a_step, folder, 0, 5, True)
    assert first.result == "MemoryError, then rank 0 failed: MemoryError: no memory left here"
    assert_all_end_with([second], "error: rank 0 failed: MemoryError: no memory left here")
    assert second.seconds + 1 < first.seconds


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_ends_all(folder: str, tmp_path: Path, which: int) -> None:
    ended = run_ranks(tmp_path, ranks.vanish, folder, which)
    assert ended[which].status == -9
    assert_all_end_with([ended[1 - which]], "gone without a word")


def test_what_rank_0_fails_with_between_steps_ends_all(folder: str, tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, ranks.fail_between_steps, folder)
    assert_all_end_with(ended, "KeyError", 'RankError: rank 0 failed: KeyError: "of the user\'s own script"')


def test_a_rank_that_cannot_load_its_part_ends_all(folder: str, tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, ranks.one_cannot_load, folder, str(tmp_path / "nowhere"))
    assert_all_end_with(ended, "rank 1 failed: ModelError: unknown model", "unknown model")


# What is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 1}, "2 processes cannot share num_key_value_heads=1 evenly"),
        pytest.param(
            {"vocab_size": BYTE_VOCAB}, "must be divisible by the tensor parallel size (2)", marks=pytest.mark.slow
        ),
    ],
)
def test_models_that_cannot_be_split_are_refused_on_all_ranks(tmp_path: Path, changes: Any, words: str) -> None:
    folder = small_model_folder(tmp_path / "model", **changes)
    command = ("generate", "hi", "--model", folder, "--tensor-parallel")
    ended = run_ranks(tmp_path / "ranks", ranks.command_line, *command)
    for rank in ended:
        assert rank.status == 2 and words in rank.err and len(rank.err.splitlines()) == 1, rank.err


def test_an_engine_on_a_rank_other_than_0_is_refused_and_ends_all(folder: str, tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, ranks.engine_on_every_rank, folder)
    assert_all_end_with(ended, "call graft.load on every rank", "call graft.load on every rank")


def test_custom_generate_of_a_split_model_is_refused(folder: str, tmp_path: Path) -> None:
    ended = run_ranks(tmp_path, ranks.custom_generate, folder)
    assert_all_end_with(ended, *["graft.decode runs in one process"] * 2)


@pytest.mark.parametrize("draft", ["mtp", "early-exit", "early-exit:2"])
def test_drafters_out_of_the_targets_own_layers_are_refused(draft: str) -> None:
    with pytest.raises(GraftError, match=f"{draft} drafts with the target's own layers, which are split"):
        load_drafter(draft, as_if_split())


def test_requests_are_not_scheduled_for_a_split_model() -> None:
    engine = Engine(tiny_model(), policy="off")
    engine.target.model = as_if_split()
    with pytest.raises(GraftError, match="scheduled in one process"):
        Scheduler(engine)


def as_if_split() -> Any:
    model: Any = tiny_model()
    model._tp_size = 2
    return model


def test_a_single_process_is_told_to_start_more(folder: str, graft: Callable[..., Finished]) -> None:
    with pytest.raises(GraftError, match="torchrun --nproc-per-node 2"):
        load(folder, draft=None, profile=None, tensor_parallel=True)
    found = graft("generate", "-", "--tensor-parallel", stdin=b"hi")
    assert (found.status, found.out) == (2, "") and "give the prompt as an argument" in found.err
