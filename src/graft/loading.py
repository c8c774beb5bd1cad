"""`load`: makes an engine from a model's name, with its drafter, profile and datastore."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from graft.datastore.format import read_header
from graft.datastore.lookup import Datastore
from graft.drafters import NONE, best_draft, best_exit
from graft.engine import Engine
from graft.errors import GraftError
from graft.hub.home import is_gguf
from graft.hub.registry import DEFAULT_MODEL, PACKAGED_MODELS
from graft.model import TargetRunner
from graft.model.cpu_linear import quick_linear, speed_up
from graft.model.ranks import rank_group
from graft.model.support import is_tensor_parallel, usable_model
from graft.model.tensor_parallel import embedding_of, lm_head_of, work
from graft.settings import require, require_known
from graft.spec_decode import learned
from graft.spec_decode.exit_layer import choose_exit_layer, is_early_exit, named_layer, usual_prompts
from graft.spec_decode.policies import DEFAULT_POLICY, POLICIES, PolicySettings
from graft.spec_decode.profile import About, Profile, equip
from graft.spec_decode.proposers import block, mtp
from graft.spec_decode.proposers.block.drafter import BlockDrafter, BlockTreeSettings
from graft.spec_decode.proposers.checkpoints import folder_of, read_config, said_of
from graft.spec_decode.proposers.drafter import TreeSettings
from graft.spec_decode.proposers.eagle3.checkpoint import load_head
from graft.spec_decode.proposers.eagle3.drafter import Eagle3Drafter
from graft.spec_decode.proposers.early_exit import EarlyExitDrafter
from graft.spec_decode.proposers.factory import drafter_for
from graft.spec_decode.proposers.head_kinds import kind_of
from graft.spec_decode.proposers.mtp.drafter import MtpDrafter
from graft.spec_decode.proposers.other_tokenizer import OtherTokenizerDrafter
from graft.spec_decode.proposers.small_model import SmallModelDrafter, shares_vocabulary
from graft.spec_decode.proposers.text_alignment import Vocabulary, VocabularyPair

AnyDrafter = Eagle3Drafter | BlockDrafter | MtpDrafter | SmallModelDrafter
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
    datastore: str | Path | None = None,
    isolated: bool = False,
    exact: bool = False,
    tensor_parallel: bool = False,
    prefix_cache: bool | None = None,
    keep_learned: bool | None = None,
) -> Engine:
    """An engine for a packaged model, a local folder or GGUF file, a hub id, or a transformers model already in memory.

    device: auto (a GPU if there is one), cpu, cuda, cuda:1 ...; dtype: auto (fp32 on a CPU, bf16 on a GPU),
    fp32, bf16, fp16, or as torch spells them. A model in memory keeps its own.
    draft: an EAGLE-3 or block head's folder or hub id, or a packaged head's name; or a small model, by name, as a GGUF
    file or in memory; or mtp, the multi-token-prediction head in the model's own checkpoint; or early-exit:LAYER, the
    model's own first layers, of which early-exit chooses how many. auto takes the one that `graft tune` measured as the
    fastest for this model on this machine, or none; if it was never asked, the packaged head of a packaged model. None
    drafts with nothing.
    draft_tokenizer: of a small model in memory; without one its vocabulary has to be the target's.
    policy: see `graft.spec_decode.policies`.
    budget: nodes a round verifies; None leaves it to the policy, which for graft is what pays on this machine.
    profile: what `graft tune` saved: a file; auto takes the one of this model, head and machine, or the packaged
    head's; None starts with nothing learned.
    datastore: an index made by `graft index build`, to retrieve from as well; policy graft only.
    isolated: texts do not learn from each other, nor from a profile's texts; only from themselves, and from texts of
    the same `Sequence.owner`, where a server names one.
    exact: on a GPU, the same bits for a token in any batch, or a GraftError that says why not; large batches are
    slower. See docs/exactness.md.
    tensor_parallel: splits the model over the processes that `torchrun` has started; a model in memory may be split
    already. Rank 0 has the engine; on every other rank this call works for it, and ends the process
    (SystemExit) when rank 0 has ended. Steps are transformers' own layers: docs/architecture.md.
    prefix_cache: a prompt that begins like an earlier text of this engine is read from where it differs. None: where
    the model is loaded here, by its name; the weights of one in memory may change, and what was read with them.
    keep_learned: what policy graft learns is kept in GRAFT_HOME for later processes, in a file of this user's
    own; not with another profile than auto, nor where texts are isolated. None: unless GRAFT_KEEP_LEARNED=0.
    """
    model = str(model) if isinstance(model, Path) else model
    draft = str(draft) if isinstance(draft, Path) else draft
    _check_names(model, draft, policy, datastore, profile)
    PolicySettings(budget)  # which checks it
    require(
        not (keep_learned and isolated), "isolated texts leave nothing that later ones may learn: drop keep_learned"
    )
    name = None
    if isinstance(model, str):
        from graft.hub.load import load_model

        chosen, name = pick_device(device), model
        if tensor_parallel:
            model, own_tokenizer = _load_part(name, chosen, pick_dtype(dtype, chosen))
        else:
            model, own_tokenizer = load_model(name, device=str(chosen), dtype=pick_dtype(dtype, chosen))
        tokenizer = tokenizer or own_tokenizer
    model = usable_model(model)
    split = is_tensor_parallel(model)
    require(split or not tensor_parallel, "the model in memory is whole: load it with a tensor-parallel plan")
    if split:
        if not rank_group().leads:
            work(model)
            raise SystemExit(0)
        rank_group().meet()
    if draft == "auto":
        usual = name if name is not None and packaged_head(name) is not None else None
        draft = _best_or(usual, model) if policy == DEFAULT_POLICY or POLICIES[policy].drafts else None
    tree = tree_settings(policy, model.device)
    drafter = load_drafter(draft, model, tree, tokenizer, draft_tokenizer) if draft is not None else None
    engine = Engine(
        model,
        tokenizer,
        policy=policy,
        drafter=drafter,
        budget=budget,
        chunk_size=chunk_size,
        datastore=Datastore(datastore, tokenizer) if datastore is not None else None,
        isolated=isolated,
        exact=exact,
        prefix_cache=prefix_cache if prefix_cache is not None else name is not None,
    )
    equip(engine, profile if policy != "off" else None)
    if policy == DEFAULT_POLICY and profile == "auto" and not isolated and learned.is_wanted(keep_learned):
        learned.keep_learned(engine)
    return engine


def _check_names(model: Any, draft: Any, policy: Any, datastore: Any, profile: Any) -> None:
    """What is wrong with a name is said before anybody waits for the model."""
    where = "a packaged name, a folder or a hub id"
    for what, given in (("model", model), ("draft", draft)):
        good = isinstance(given, str | nn.Module) or (what == "draft" and given is None)
        require(good, f"{what} must be {where}, or a transformers model, not {given!r}")
    require_known("policy", policy, POLICIES)
    for what, given in (("datastore", datastore), ("profile", profile)):
        require(given is None or isinstance(given, str | Path), f"{what} must be a path, not {given!r}")
    require(datastore is None or policy == DEFAULT_POLICY, f"policy {policy!r} retrieves from no datastore: drop it")
    if datastore is not None:
        read_header(Path(datastore))
    if profile not in (None, "auto") and policy != "off":
        Profile.read(Path(profile).expanduser())
    if isinstance(draft, str) and draft not in (*PACKAGED_MODELS, "auto", mtp.MTP):
        if is_early_exit(draft):
            named_layer(draft)
        elif draft.endswith(".gguf"):
            require(is_gguf(draft), f"no drafter at {draft}: there is no such file")
        else:
            read_config(folder_of(draft, ("config.json",)))


def _load_part(name: str, device: torch.device, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """This rank's part of a model, and its tokenizer."""
    from graft.hub.load import load_model

    usual = "cuda" if torch.cuda.is_available() else "cpu"
    good = device.type == usual and device.index is None
    require(good, f"each rank of a tensor-parallel model has a {usual} device of its own: drop device={device}")
    group = rank_group()
    with group.together():
        loaded = load_model(name, device=str(device), dtype=dtype, num_ranks=group.size)
    if device.type == "cuda":
        warnings.warn(
            "a tensor-parallel model runs in transformers' own layers: CUDA graphs and fused layers are for one GPU",
            stacklevel=3,
        )
    return loaded


def _best_or(usual: str | None, model: PreTrainedModel) -> str | None:
    """The drafter that `graft tune` found to be the fastest for this model here; the usual one if it was not asked."""
    best = best_draft(About.of_model(model))
    if best is None or (best == mtp.MTP and not mtp.has_head(model)):  # a model in memory may be without its files
        return usual
    return None if best == NONE else best


def tree_settings(policy: str, device: torch.device) -> TreeSettings:
    """The size of the draft tree for a policy on that device."""
    # A CPU verifies few nodes: narrow, shallow drafts miss little there and cost a third.
    narrow = policy == DEFAULT_POLICY and device.type == "cpu"
    return TreeSettings(depth=5, topk=4) if narrow else TreeSettings()


def load_drafter(
    draft: str | PreTrainedModel,
    model: PreTrainedModel,
    tree: TreeSettings | None = None,
    tokenizer: Any | None = None,
    draft_tokenizer: Any | None = None,
) -> AnyDrafter:
    """A drafter for this model from a head's folder, hub id or packaged name; from a small model, likewise; by the name
    mtp, from the model's own checkpoint; or from the model's own first layers.

    tokenizer: the target's, with which a small model's is compared. draft_tokenizer: of a small model in memory.
    """
    if not isinstance(draft, str):
        where = f"the draft model is on {draft.device} and the target on {model.device}: move it there"
        require(draft.device == model.device, where)
        return _small_model_drafter("the draft model", usable_model(draft), draft_tokenizer, model, tokenizer, tree)
    own_layers = draft == mtp.MTP or is_early_exit(draft)
    require(
        not (own_layers and is_tensor_parallel(model)),
        f"{draft} drafts with the target's own layers, which are split over processes: choose another drafter",
    )
    if draft == mtp.MTP:
        mtp_head = mtp.load_head(model)
        speed_up(mtp_head)
        return MtpDrafter(mtp_head, tree)
    if is_early_exit(draft):
        return EarlyExitDrafter(model, _exit_layer(draft, model, tokenizer), tree)
    source: str | Path = packaged_head_for(draft, model) or draft
    is_whole_model = source == draft and (draft in PACKAGED_MODELS or is_gguf(draft))
    kind = "model" if is_whole_model else kind_of(folder_of(source, ("config.json",)))
    if kind == "model":
        return _load_small_model(draft, model, tree, tokenizer)
    folder = folder_of(source)
    embedding = embedding_of(model)
    if kind == "block":
        lm_head = lm_head_of(model)
        block_head = block.load_head(folder, model.config, model.dtype, model.device, embedding, lm_head)
        if speed_up(block_head):
            block_head.product = quick_linear
        settings = BlockTreeSettings.like(tree) if tree is not None else None
        return drafter_for(block_head, settings)
    head = load_head(folder, model.config, model.dtype, model.device, embedding)
    speed_up(head)
    return drafter_for(head, tree)


def _exit_layer(draft: str, model: PreTrainedModel, tokenizer: Any | None) -> int:
    """The layer that is named; else the best that `graft tune` measured here; else one chosen on a few answers."""
    layer = named_layer(draft)
    if layer is None:
        layer = named_layer(best_exit(About.of_model(model)) or draft)
    return layer if layer is not None else choose_exit_layer(model, usual_prompts(model, tokenizer))


def _load_small_model(
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
    folder = Path(__file__).parent / "heads" / name
    return folder if name in PACKAGED_MODELS and folder.is_dir() else None


def pick_device(name: str | torch.device) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise GraftError(f"device {str(name)!r} is not usable here: {str(error).splitlines()[0]}") from error
    return device


def pick_dtype(name: str | torch.dtype, device: torch.device) -> torch.dtype:
    """By our name or torch's; or as it is."""
    if isinstance(name, str) and name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    spelt = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES.values()} | _DTYPES
    chosen = spelt.get(str(name).removeprefix("torch."))
    if chosen is None:
        raise GraftError(f"unknown dtype {str(name)!r}: known are auto, {', '.join(_DTYPES)}")
    return chosen
