"""`load`: an engine from a model's name, with its drafter and profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from graft.device_info import pick_device
from graft.drafters.drafter import TreeSettings
from graft.engine import Engine
from graft.hub.draft_names import NONE, packaged_head_of
from graft.hub.drafters import NAMED, check_kind, is_possible, load_drafter
from graft.hub.registry import DEFAULT_MODEL
from graft.load_options import AUTO, check_load_options, dtype_name
from graft.model.support import check_supported, usable_model
from graft.settings import require
from graft.spec_decode.policies import DEFAULT_POLICY, POLICIES
from graft.tuning.drafters import best_draft, best_variant
from graft.tuning.learned import equip, is_kept
from graft.tuning.profile import About


def load(
    model: str | Path | PreTrainedModel = DEFAULT_MODEL,
    *,
    tokenizer: Any | None = None,
    draft: str | Path | PreTrainedModel | None = "auto",
    draft_tokenizer: Any | None = None,
    policy: str = DEFAULT_POLICY,
    budget: int | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    chunk_size: int = 256,
    profile: str | Path | None = "auto",
    isolated: bool = False,
    exact: bool = False,
    prefix_cache: bool | None = None,
    keep_learned: bool | None = None,
) -> Engine:
    """An engine for a packaged model, a local folder or GGUF file, a hub id, or a transformers model already in memory.

    device: auto (a GPU if there is one), cpu, cuda, cuda:1 ...; dtype: auto (fp32 on a CPU, bf16 on a GPU),
    fp32, bf16, fp16, or as torch spells them. A model in memory keeps its own.
    draft: an EAGLE-3 or block head, by folder or hub id, or a packaged head's name; a small model, by name, as a GGUF
    file or in memory; mtp, the multi-token-prediction head in the model's own checkpoint; or early-exit:LAYER, the
    model's own first layers (early-exit alone chooses how many). auto: the fastest one that `graft tune` measured for
    this model on this machine, which may be none; without measurements, the packaged head of a packaged model, loaded
    by its name or by its folder. None: no drafter.
    draft_tokenizer: of a small model in memory; without one, its vocabulary must be the target's.
    policy: see `graft.spec_decode.policies`.
    budget: nodes that a round verifies; None: the policy decides, and graft takes as many as pay on this machine.
    profile: a file that `graft tune` saved; auto: the one of this model, head and machine, or the packaged head's;
    None: start with nothing learned.
    isolated: a text learns only from itself and from texts with the same `Sequence.owner`, which a server sets. It does
    not learn from other texts or from a profile's texts.
    exact: on a GPU, a token has the same bits in any batch; a GraftError says why if that is impossible. Large batches
    are slower. See docs/exactness.md.
    prefix_cache: a prompt that begins like an earlier text of this engine is prefilled only from where it differs.
    None: only for models loaded here by name, because the weights of a model in memory may change.
    keep_learned: start from what earlier use taught policy graft, and store what this engine learns, in a file of this
    user's own in GRAFT_HOME; only with profile auto, and not with isolated texts. None: yes, unless
    GRAFT_KEEP_LEARNED=0.
    """
    model = str(model) if isinstance(model, Path) else model
    draft = str(draft) if isinstance(draft, Path) else draft
    _check_names(model, draft, policy, budget, profile, device, dtype)
    require(not (keep_learned and isolated), "what isolated texts teach cannot be kept: drop keep_learned")
    name = None
    if isinstance(model, str):
        from graft.hub.load import load_model

        chosen, name = pick_device(device), model
        model, own_tokenizer = load_model(name, device=str(chosen), dtype=pick_dtype(dtype, chosen))
        tokenizer = tokenizer or own_tokenizer
    model = usable_model(model)
    check_supported(model)
    if draft == "auto":
        usual = packaged_head_of(name) if name is not None else None
        draft = _best_or(usual, model) if policy == DEFAULT_POLICY or POLICIES[policy].drafts else None
    if isinstance(draft, str) and draft in NAMED:
        draft = best_variant(About.of_model(model), draft) or draft
    tree = tree_settings(policy, model.device)
    drafter = load_drafter(draft, model, tree, tokenizer, draft_tokenizer) if draft is not None else None
    engine = Engine(
        model,
        tokenizer,
        policy=policy,
        drafter=drafter,
        budget=budget,
        chunk_size=chunk_size,
        isolated=isolated,
        exact=exact,
        prefix_cache=prefix_cache if prefix_cache is not None else name is not None,
    )
    keeps = policy == DEFAULT_POLICY and profile == "auto" and not isolated and is_kept(keep_learned)
    equip(engine, profile if policy != "off" else None, keeps)
    return engine


def _check_names(model: Any, draft: Any, policy: Any, budget: Any, profile: Any, device: Any, dtype: Any) -> None:
    """Check all names before the model is loaded, so that an error comes at once."""
    where = "a packaged name, a folder or a hub id"
    for what, given in (("model", model), ("draft", draft)):
        good = isinstance(given, str | nn.Module) or (what == "draft" and given is None)
        require(good, f"{what} must be {where}, or a transformers model, not {given!r}")
    require(profile is None or isinstance(profile, str | Path), f"profile must be a path, not {profile!r}")
    check_load_options(model, policy, budget, draft, profile, device, dtype, policies=POLICIES)
    if isinstance(draft, str) and draft != AUTO:
        check_kind(draft)


def _best_or(usual: str | None, model: PreTrainedModel) -> str | None:
    """The fastest drafter that `graft tune` measured for this model here; the usual one without measurements."""
    best = best_draft(About.of_model(model))
    if best is None or not is_possible(best, model):  # a model in memory may have no files
        return usual
    return None if best == NONE else best


def tree_settings(policy: str, device: torch.device) -> TreeSettings:
    """The size of the draft tree for a policy on that device."""
    # A CPU verifies few nodes, so narrow and shallow drafts miss little and cost a third.
    narrow = policy == DEFAULT_POLICY and device.type == "cpu"
    return TreeSettings(depth=5, topk=4) if narrow else TreeSettings()


def pick_dtype(name: str | torch.dtype, device: torch.device) -> torch.dtype:
    """A dtype by our name or torch's."""
    found = dtype_name(str(name))
    if found == AUTO:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    chosen: torch.dtype = getattr(torch, found)
    return chosen
