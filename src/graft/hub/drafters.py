"""Drafters by the names that `--draft` takes.

A name is one of three things: a key of `NAMED`, for drafters made from the target itself; a packaged model or head; or
a folder, GGUF file or hub id, whose config.json says what it holds. Register a new drafter of the target's own parts
here, and its name in `draft_names`. A new kind of head file also needs `graft.drafters.head_kinds`, which recognises
it, and `graft.drafters.factory`, which runs it.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from graft.drafters import block, early_exit, mtp
from graft.drafters.block.drafter import BlockDrafter, BlockTreeSettings
from graft.drafters.checkpoints import said_of
from graft.drafters.drafter import TreeSettings
from graft.drafters.eagle3.checkpoint import load_head
from graft.drafters.eagle3.drafter import Eagle3Drafter
from graft.drafters.factory import drafter_for
from graft.drafters.head_kinds import kind_of
from graft.drafters.mtp.drafter import MtpDrafter
from graft.drafters.other_tokenizer import OtherTokenizerDrafter
from graft.drafters.small_model import SmallModelDrafter, shares_vocabulary
from graft.drafters.text_alignment import Vocabulary, VocabularyPair
from graft.folders import folder_of, read_config
from graft.home import is_gguf
from graft.hub.draft_names import EARLY_EXIT, MTP, name_of, named_layer, packaged_head
from graft.hub.registry import PACKAGED_MODELS
from graft.model import TargetRunner
from graft.model.cpu_linear import quick_linear, speed_up
from graft.model.support import usable_model
from graft.model.unusual_layers import output_weight
from graft.settings import require

AnyDrafter = Eagle3Drafter | BlockDrafter | MtpDrafter | SmallModelDrafter


@dataclass(frozen=True)
class NamedDrafter:
    """A drafter made from the target itself. It is called NAME, or NAME:VARIANT if there are several."""

    is_for: Callable[[PreTrainedModel], bool]
    load: Callable[[str, PreTrainedModel, TreeSettings | None, Any | None], AnyDrafter]  # the last is a tokenizer
    choose: Callable[[PreTrainedModel, Sequence[list[int]]], str] | None = None  # the best NAME:VARIANT for prompts


def _load_mtp(draft: str, model: PreTrainedModel, tree: TreeSettings | None, tokenizer: Any | None) -> AnyDrafter:
    head = mtp.load_head(model)
    speed_up(head)
    return MtpDrafter(head, tree)


def _load_exit(draft: str, model: PreTrainedModel, tree: TreeSettings | None, tokenizer: Any | None) -> AnyDrafter:
    layer = named_layer(draft)
    if layer is None:
        layer = early_exit.choose_exit_layer(model, early_exit.usual_prompts(model, tokenizer))
    return early_exit.EarlyExitDrafter(model, layer, tree)


NAMED = {
    MTP: NamedDrafter(mtp.has_head, _load_mtp),
    EARLY_EXIT: NamedDrafter(
        lambda model: True,
        _load_exit,
        lambda model, prompts: f"{EARLY_EXIT}:{early_exit.choose_exit_layer(model, prompts)}",
    ),
}


def check_kind(draft: str) -> None:
    """Raise a GraftError for a folder or hub id that holds no drafter, before any weights are read."""
    if name_of(draft) not in NAMED and draft not in PACKAGED_MODELS and not is_gguf(draft):
        kind_of(folder_of(draft, ("config.json",)))


def is_possible(draft: str, model: PreTrainedModel) -> bool:
    """Whether this target has the parts for a drafter made from it. True for drafters that are not made from it."""
    name = name_of(draft)
    return name not in NAMED or NAMED[name].is_for(model)


def load_drafter(
    draft: str | PreTrainedModel,
    model: PreTrainedModel,
    tree: TreeSettings | None = None,
    tokenizer: Any | None = None,
    draft_tokenizer: Any | None = None,
) -> AnyDrafter:
    """Load a drafter for this model. draft: a name, as the module's docstring lists them, or a small model in memory.

    tokenizer: the target's, which is compared with a small model's. draft_tokenizer: of a small model in memory.
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
        lm_head = output_weight(model)
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
    """The drafter of a small model: by token ids if both models share a vocabulary, else by text."""
    num_draft, num_target = draft.num_parameters(), target.num_parameters()
    if num_draft > num_target:
        counts = f"{num_draft:,} and {num_target:,}"
        warnings.warn(
            f"{name} has more parameters than the target ({counts}): drafting with it will hardly pay", stacklevel=2
        )
    runner = TargetRunner(target)
    drafter: SmallModelDrafter
    if by_ids := shares_vocabulary(name, draft, target, draft_tokenizer, tokenizer):
        with said_of(name):
            drafter = SmallModelDrafter(draft, runner.vocab_size, tree)
    else:
        pair = VocabularyPair(Vocabulary(draft_tokenizer, name), Vocabulary(tokenizer, "the target"))
        with said_of(name):
            drafter = OtherTokenizerDrafter(draft, pair, tree)
    context, most = TargetRunner(draft).max_positions, runner.max_positions
    if context is not None and context < (most or math.inf):
        longer = f"is {most:,}" if most is not None else "has no end"
        then = "its drafts are poor" if by_ids else "it does not draft"
        warnings.warn(
            f"the context of {name} is {context:,} tokens and the target's {longer}: beyond it, {then}", stacklevel=3
        )
    return drafter


def packaged_head_for(name: str, model: PreTrainedModel) -> Path | None:
    """The packaged head of this name, unless it is for a model of another width."""
    folder = packaged_head(name)
    if folder is None:
        return None
    config = read_config(folder)
    width = config.get("target_hidden_size") or config["hidden_size"]
    return folder if width == model.config.get_text_config().hidden_size else None
