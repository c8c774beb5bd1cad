"""Block heads with random weights, and what they draft when computed the plain way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graft import Engine
from graft.drafters.block import BlockConfig, BlockHead
from graft.model import target_for
from graft.spec_decode.policies import make_policy

PROMPT = [3, 17, 42, 9, 9, 30, 5, 21]

LONG = (PROMPT * 9)[:67]  # more than a page

MARGINAL: dict[str, Any] = {"shifted": False}

HEADS: dict[str, dict[str, Any]] = {
    "marginal": MARGINAL,
    "causal": {"shifted": True, "causal": (True, False), "windows": (6, 3)},
    "conditional": {"shifted": True, "conditional": True},
    "markov": {"shifted": False, "markov": "gated", "markov_rank": 5, "causal": (True, True)},
}


def make_head(model, seed=0, size=5, **changes) -> BlockHead:
    torch.manual_seed(seed)
    head = BlockHead(BlockConfig.for_target(model.config, 2, block_size=size, mask_token_id=4, **changes))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    head.borrow_embedding(model.get_input_embeddings().weight)
    head.borrow_lm_head(model.get_output_embeddings().weight)
    return head.eval()


@torch.no_grad()
def hidden_without_cache(head: BlockHead, model, text: list[int]) -> Tensor:
    """Hidden states [1, K, H] of the block behind the text's last token, from the whole text."""
    known = torch.zeros(1, 0, head.fc.in_features)
    if len(text) > 1:
        states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        known = torch.cat([states[layer] for layer in head.config.target_layers], dim=-1)
    past = head.context(known, torch.arange(known.shape[1])[None])
    return head.block(torch.tensor(text[-1:]), torch.tensor([len(text) - 1]), past)


def make_engine(model, policy, drafter):
    """Draft passes cost nothing there: how fast this machine drafts does not matter."""
    target = target_for(model, drafter.hidden_layers)
    return Engine(model, policy=make_policy(policy, target, drafter, budget=20, pass_cost=0.0), drafter=drafter)
