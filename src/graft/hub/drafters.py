"""Drafters by the names that `--draft` takes.

A name is one of `NAMED`, whose drafters are made from the target itself; a packaged model or head; or a folder, a GGUF
file or a hub id, whose config.json says what it holds. A new drafter of the target's own parts is registered here. A
new kind of head file also needs `proposers.head_kinds`, which recognises it, and `proposers.factory`, which runs it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from graft.home import is_gguf
from graft.hub.registry import PACKAGED_MODELS
from graft.model import TargetRunner
from graft.model.cpu_linear import quick_linear, speed_up
from graft.model.support import usable_model
from graft.settings import require
from graft.spec_decode.proposers import block, early_exit, mtp
from graft.spec_decode.proposers.block.drafter import BlockDrafter, BlockTreeSettings
from graft.spec_decode.proposers.checkpoints import folder_of, read_config, said_of
from graft.spec_decode.proposers.drafter import TreeSettings
from graft.spec_decode.proposers.eagle3.checkpoint import load_head
from graft.spec_decode.proposers.eagle3.drafter import Eagle3Drafter
from graft.spec_decode.proposers.factory import drafter_for
from graft.spec_decode.proposers.head_kinds import kind_of
from graft.spec_decode.proposers.mtp.drafter import MtpDrafter
from graft.spec_decode.proposers.other_tokenizer import OtherTokenizerDrafter
from graft.spec_decode.proposers.small_model import SmallModelDrafter, shares_vocabulary
from graft.spec_decode.proposers.text_alignment import Vocabulary, VocabularyPair

AnyDrafter = Eagle3Drafter | BlockDrafter | MtpDrafter | SmallModelDrafter
_HEADS = Path(__file__).parents[1] / "heads"


@dataclass(frozen=True)
class NamedDrafter:
    """A drafter that comes from the target itself. It is called NAME, or NAME:VARIANT where there are several."""

    what: str  # it is, in a few words
    is_for: Callable[[PreTrainedModel], bool]
    load: Callable[[str, PreTrainedModel, TreeSettings | None, Any | None], AnyDrafter]  # with the target's tokenizer
    check: Callable[[str], object] = lambda draft: None  # a GraftError if VARIANT is no such thing
    choose: Callable[[PreTrainedModel, Sequence[list[int]]], str] | None = None  # NAME:VARIANT, by answers to prompts


def _load_mtp(draft: str, model: PreTrainedModel, tree: TreeSettings | None, tokenizer: Any | None) -> AnyDrafter:
    head = mtp.load_head(model)
    speed_up(head)
    return MtpDrafter(head, tree)


def _load_exit(draft: str, model: PreTrainedModel, tree: TreeSettings | None, tokenizer: Any | None) -> AnyDrafter:
    layer = early_exit.named_layer(draft)
    if layer is None:
        layer = early_exit.choose_exit_layer(model, early_exit.usual_prompts(model, tokenizer))
    return early_exit.EarlyExitDrafter(model, layer, tree)


NAMED = {
    mtp.MTP: NamedDrafter("the MTP head in its checkpoint", mtp.has_head, _load_mtp),
    early_exit.EARLY_EXIT: NamedDrafter(
        "its first layers",
        lambda model: True,
        _load_exit,
        early_exit.named_layer,
        lambda model, prompts: f"{early_exit.EARLY_EXIT}:{early_exit.choose_exit_layer(model, prompts)}",
    ),
}


def name_of(draft: str) -> str:
    """NAME of NAME:VARIANT; of any other drafter what stands before a colon, which is in no `NAMED`."""
    return draft.partition(":")[0]


def check_draft(draft: str) -> None:
    """A GraftError if there is no such drafter, without loading it."""
    if draft in (*PACKAGED_MODELS, *NAMED):
        return
    if name_of(draft) in NAMED:
        NAMED[name_of(draft)].check(draft)
    elif draft.endswith(".gguf"):
        require(is_gguf(draft), f"no drafter at {draft}: there is no such file")
    else:
        read_config(folder_of(draft, ("config.json",)))


def is_possible(draft: str, model: PreTrainedModel) -> bool:
    """Whether the model itself has what the drafter comes from, if it comes from the model."""
    name = name_of(draft)
    return name not in NAMED or NAMED[name].is_for(model)


def load_drafter(
    draft: str | PreTrainedModel,
    model: PreTrainedModel,
    tree: TreeSettings | None = None,
    tokenizer: Any | None = None,
    draft_tokenizer: Any | None = None,
) -> AnyDrafter:
    """A drafter for this model: one of `NAMED`; a head, by its folder, hub id or packaged name; or a small model,
    likewise or in memory.

    tokenizer: the target's, with which a small model's is compared. draft_tokenizer: of a small model in memory.
    """
    if not isinstance(draft, str):
        where = f"the draft model is on {draft.device} and the target on {model.device}: move it there"
        require(draft.device == model.device, where)
        return _small_model_drafter("the draft model", usable_model(draft), draft_tokenizer, model, tokenizer, tree)
    if name_of(draft) in NAMED:
        return NAMED[name_of(draft)].load(draft, model, tree, tokenizer)
    source: str | Path = packaged_head_for(draft, model) or draft
    is_whole_model = source == draft and (draft in PACKAGED_MODELS or is_gguf(draft))
    kind = "model" if is_whole_model else kind_of(folder_of(source, ("config.json",)))
    if kind == "model":
        return load_small_model(draft, model, tree, tokenizer)
    folder = folder_of(source)
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    if kind == "block":
        lm_head = model.get_output_embeddings().weight
        block_head = block.load_head(folder, model.config, model.dtype, model.device, embedding, lm_head)
        if speed_up(block_head):
            block_head.product = quick_linear
        settings = BlockTreeSettings.like(tree) if tree is not None else None
        return drafter_for(block_head, settings)
    head = load_head(folder, model.config, model.dtype, model.device, embedding)
    speed_up(head)
    return drafter_for(head, tree)


def load_small_model(
    name: str, target: PreTrainedModel, tree: TreeSettings | None, tokenizer: Any | None
) -> SmallModelDrafter:
    from graft.hub.load import load_model

    model, own_tokenizer = load_model(name, device=str(target.device), dtype=target.dtype)
    return _small_model_drafter(name, model, own_tokenizer, target, tokenizer, tree)


def _small_model_drafter(
    name: str,
    draft: PreTrainedModel,
    draft_tokenizer: Any | None,
    target: PreTrainedModel,
    tokenizer: Any | None,
    tree: TreeSettings | None,
) -> SmallModelDrafter:
    """The drafter of a small model: by token ids if they mean the same to both models, else by text."""
    own, its = draft.num_parameters(), target.num_parameters()
    if own > its:
        warnings.warn(
            f"{name} has more parameters than the target ({own:,} and {its:,}): drafting with it will hardly pay",
            stacklevel=2,
        )
    by_ids = shares_vocabulary(name, draft, target, draft_tokenizer, tokenizer)
    its_runner = TargetRunner(target)
    drafter: SmallModelDrafter
    if by_ids:
        with said_of(name):
            drafter = SmallModelDrafter(draft, its_runner.vocab_size, tree)
    else:
        pair = VocabularyPair(Vocabulary(draft_tokenizer, name), Vocabulary(tokenizer, "the target"))
        with said_of(name):
            drafter = OtherTokenizerDrafter(draft, pair, tree)
    _warn_of_a_short_context(name, TargetRunner(draft).max_positions, its_runner.max_positions, by_ids)
    return drafter


def _warn_of_a_short_context(name: str, context: int | None, its_context: int | None, by_ids: bool) -> None:
    if context is None or context >= (its_context or math.inf):
        return
    longer = f"is {its_context:,}" if its_context is not None else "has no end"
    then = "its drafts are poor" if by_ids else "it does not draft"
    warnings.warn(
        f"the context of {name} is {context:,} tokens and the target's {longer}: behind that {then}", stacklevel=4
    )


def packaged_head_for(name: str, model: PreTrainedModel) -> Path | None:
    """The packaged head of that name, if it is for models of this one's width: the name is also a packaged model's."""
    folder = packaged_head(name)
    if folder is None:
        return None
    config = read_config(folder)
    width = config.get("target_hidden_size") or config["hidden_size"]
    return folder if width == model.config.get_text_config().hidden_size else None


def packaged_head(name: str) -> Path | None:
    """The folder of the head that comes with the package for the packaged model of that name."""
    folder = _HEADS / name
    return folder if name in PACKAGED_MODELS and folder.is_dir() else None
