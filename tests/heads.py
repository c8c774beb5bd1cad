"""EAGLE-3 heads with random weights, and what they draft when computed the plain way."""

import torch

from graft.drafters.drafter import TreeSettings
from graft.drafters.eagle3.head import Eagle3Config, Eagle3Head
from tiny import VOCAB

SMALL_TREE = TreeSettings(depth=3, topk=3, total_token=9)


def make_head(model, seed=0, draft_vocab_size=40, **changes):
    torch.manual_seed(seed)
    head = Eagle3Head(Eagle3Config.for_target(model.config, draft_vocab_size=draft_vocab_size, **changes))
    head.set_vocabulary(torch.randperm(max(VOCAB, draft_vocab_size))[:draft_vocab_size].sort().values)
    head.target_embedding = model.get_input_embeddings().weight.detach()
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
            elif changes:
                parameter.uniform_(0.5, 1.5)
    return head


def plain_draft(head, model, tokens, path):
    """q over the target's vocabulary after `tokens` and a drafted path, recomputed from nothing, entry by entry."""
    with torch.no_grad():
        states = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        hidden = head.fuse(torch.cat([states[layer] for layer in head.config.target_layers], dim=-1))
        entries = torch.tensor([tokens[1:]])
        for token in [*path, None]:
            positions = torch.arange(entries.shape[1])[None]
            output, _ = head(head.embed(entries), hidden, positions)
            if token is not None:
                entries = torch.cat([entries, torch.tensor([[token]])], dim=1)
                hidden = torch.cat([hidden, output[:, -1:]], dim=1)
        q = torch.zeros(VOCAB)
        q[head.to_target(torch.arange(40))] = head.logits(output[0, -1]).softmax(-1)
    return q
