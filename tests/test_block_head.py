"""The block head against the published networks, computed slot by slot; its draft cache; what a slot may see."""

import pytest
import torch

from block_oracle import Network
from graft.drafters.block import BlockConfig, BlockHead, default_target_layers
from graft.errors import GraftError
from tiny import target_config

VOCAB, HIDDEN, LAYERS, BLOCK, MASK = 37, 16, 2, 4, 5
TARGET = target_config(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=24,
    num_hidden_layers=9,
    head_dim=6,
    max_position_embeddings=64,
)
LENGTHS = (7, 3)  # tokens before each root
ROOTS = (11, 30)


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


EMBEDDING, LM_HEAD = random(VOCAB, HIDDEN, seed=1), random(VOCAB, HIDDEN, seed=2)


def make_head(**changes):
    usual = {"block_size": BLOCK, "mask_token_id": MASK, "shifted": False, "rms_norm_eps": 1e-5}
    head = BlockHead(BlockConfig.for_target(TARGET, LAYERS, **(usual | changes)))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    if not head.config.own_embedding:
        head.borrow_embedding(EMBEDDING)
    if not head.config.own_lm_head:
        head.borrow_lm_head(LM_HEAD)
    return head.eval()


def oracle(head):
    config, state = head.config, {name: tensor.detach() for name, tensor in head.state_dict().items()}
    embedding = state.get("embed_tokens.weight", EMBEDDING)
    return Network(
        state=state,
        embedding=embedding,
        lm_head=state.get("lm_head.weight", LM_HEAD),
        num_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        block_size=config.block_size,
        mask=state.get("mask_embedding", embedding[config.mask_token_id]),
        causal=config.causal,
        windows=config.windows,
        eps=config.rms_norm_eps,
        theta=config.rope["rope_theta"],
    )


def features(head):
    return random(len(LENGTHS), max(LENGTHS), head.fc.in_features, seed=4)


@torch.no_grad()
def hidden_of(head, known=None):
    known = features(head) if known is None else known
    past = head.context(known, torch.arange(known.shape[1]).expand(len(known), -1))
    return head.block(torch.tensor(ROOTS), torch.tensor(LENGTHS), past)


def expected_hidden(head):
    """By row, of the slots that predict."""
    rows = zip(ROOTS, LENGTHS, features(head), strict=True)
    slots = [oracle(head).hidden(root, known[:length]) for root, length, known in rows]
    return slots if head.config.shifted else [row[1:] for row in slots]


def close(own, expected):
    torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)


NETWORKS = {
    "in place": {},
    "shifted": {"shifted": True},
    "causal": {"causal": (True, True)},
    "windows": {"causal": (True, False), "windows": (3, 2), "shifted": True},
    "one layer with a window": {"causal": (True, False), "windows": (2, None)},
    "no norms of queries and keys": {"head_norms": False},
    "a vector for masked slots": {"own_mask": True},
    "its own weights": {"own_embedding": True, "own_lm_head": True},
    "narrower than the target": {"hidden_size": 12, "own_embedding": True, "own_lm_head": True},
    "a draft vocabulary": {"own_lm_head": True, "draft_vocab_size": 10},
    "other layers": {"target_layers": (0, 4, 8), "rope": {"rope_type": "default", "rope_theta": 500.0}},
}


@pytest.mark.parametrize("changes", NETWORKS.values(), ids=NETWORKS)
def test_a_block_is_what_the_published_network_computes_slot_by_slot(changes):
    head = make_head(**changes)
    hidden, expected = hidden_of(head), expected_hidden(head)
    assert hidden.shape[1] == head.config.num_drafts == len(expected[0])
    logits = head.marginals(hidden)
    for row, slots in enumerate(expected):
        close(hidden[row], torch.stack(slots))
        close(logits[row], torch.stack([oracle(head).logits(slot) for slot in slots]))


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_markov_head_gives_logits_after_each_candidate(kind):
    head = make_head(markov=kind, markov_rank=3, shifted=True)
    hidden, expected = hidden_of(head), expected_hidden(head)
    parents = torch.tensor([[[11, 11], [3, 8], [9, 1], [2, 36]], [[30, 30], [0, 4], [35, 7], [7, 5]]])
    logits = head.conditionals(hidden, parents)
    for row, slots in enumerate(expected):
        chain = parents[row, :, 0].tolist()
        close(logits[row, :, 0], torch.stack(oracle(head).markov(kind, slots, chain)))
        for slot in range(BLOCK):  # the other candidate of a slot, after the first of those before it
            path = [*chain[:slot], int(parents[row, slot, 1])]
            close(logits[row, slot, 1], oracle(head).markov(kind, slots[: slot + 1], path)[-1])


def test_a_conditional_head_gives_logits_after_each_candidate():
    head = make_head(conditional=True)
    hidden, expected = hidden_of(head), expected_hidden(head)
    parents = torch.tensor([[[11, 11, 11], [3, 8, 9], [9, 1, 0]], [[30, 30, 30], [0, 4, 6], [35, 7, 8]]])
    logits = head.conditionals(hidden, parents)
    for row, slots in enumerate(expected):
        for slot, state in enumerate(slots):
            for place, parent in enumerate(parents[row, slot].tolist()):
                close(logits[row, slot, place], oracle(head).treeflash(state, parent))
    close(head.conditionals(hidden[:, 1:2], parents[:, 1:2]), logits[:, 1:2])  # a few slots at a time


def test_the_usual_layers_are_evenly_spread():
    """Outputs of 1, 9, 17, 25, 33 of 36 and 1, 8, 14, 20, 27 of 30 are the inputs of the next."""
    assert default_target_layers(36, 5) == (2, 10, 18, 26, 34)
    assert default_target_layers(30, 5) == (2, 9, 15, 21, 28)
    assert default_target_layers(30, 1) == (16,)
    with pytest.raises(GraftError, match="a target of 3 layers has no default layers to read: name them"):
        default_target_layers(3, 2)


def test_an_error_names_what_a_head_lacks():
    head = make_head()
    hidden = hidden_of(head)
    with pytest.raises(GraftError, match="has marginals only"):
        head.conditionals(hidden, torch.zeros(2, 3, 1, dtype=torch.int64))
    with pytest.raises(GraftError, match=r"the target's lm_head is \[36, 16\], not \[37, 16\]"):
        head.borrow_lm_head(LM_HEAD[1:])
    bare = BlockHead(head.config)
    with pytest.raises(GraftError, match="no embedding of its own"):
        bare.slots(torch.tensor(ROOTS))
    with pytest.raises(GraftError, match="no lm_head of its own"):
        bare.marginals(hidden)


BAD_CONFIGS = [  # that no file can hold: those of files are in test_block_checkpoint.py
    ({"causal": ()}, "a head has at least one layer"),
    ({"windows": (3,)}, "1 windows for 2 layers: there must be one for each"),
    ({"windows": (3, 0)}, "sliding_window must be a positive whole number, not 0"),
    ({"markov": "rnn", "markov_rank": 2, "conditional": True}, "a head is Markov or conditional, not both"),
    ({"num_target_layers": 0}, "num_target_layers must be a positive whole number, not 0"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS, ids=[message for _, message in BAD_CONFIGS])
def test_a_config_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(GraftError, match=message):
        make_head(**changes)


@pytest.mark.parametrize("changes", [{"conditional": True}, {"markov": "vanilla", "markov_rank": 3}])
def test_a_shortlists_logits_are_those_of_its_tokens_however_few_are_gathered_at_once(changes, monkeypatch):
    head, generator = make_head(**changes), torch.Generator().manual_seed(5)
    hidden = hidden_of(head)
    parents, shortlist = (torch.randint(VOCAB, (*hidden.shape[:2], count), generator=generator) for count in (4, 6))
    everything = head.conditionals(hidden, parents)  # [B, K, 4, vocab]
    expected = everything.gather(-1, shortlist[:, :, None].expand(-1, -1, 4, -1))
    for most in (2**27, 1):
        monkeypatch.setattr("graft.drafters.block.head._GATHERED", most)
        torch.testing.assert_close(head.conditionals(hidden, parents, shortlist), expected)
