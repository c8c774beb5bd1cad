"""The EAGLE-3 head computes the published layer, at once or in pieces, in chains or trees, and can learn."""

import math

import pytest
import torch

from graft.drafters.eagle3 import Eagle3Config, Eagle3Head, default_target_layers
from graft.errors import GraftError
from tiny import target_config

WIDTH = 6
TARGET = target_config(num_hidden_layers=8, max_position_embeddings=64)
NORMS = {
    "published": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True, "norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "head_norms": {"head_norms": True},
}


def make_head(**changes):
    torch.manual_seed(0)
    head = Eagle3Head(Eagle3Config.for_target(TARGET, **{"draft_vocab_size": 20, **changes}))
    for parameter in head.parameters():  # norms too, whose weights would all be one
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return head


def make_inputs(width=WIDTH):
    generator = torch.Generator().manual_seed(1)
    embeddings, hidden = torch.randn(2, 2, width, 32, generator=generator)
    return embeddings, hidden, torch.arange(width).expand(2, -1)


def reference(head, embeddings, hidden, positions):
    """The causal layer as the paper has it, one row, one query and one head at a time; [B, W, H]."""
    config, weights = head.config, dict(head.named_parameters())

    def norm(name, x):
        return x / (x.square().mean() + config.rms_norm_eps).sqrt() * weights[f"{name}.weight"]

    def rotate(x, position):
        half = len(x) // 2
        angles = position * 10000.0 ** (-torch.arange(half) / half)
        turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half), angles)
        return torch.cat([turned.real, turned.imag])

    outputs = []
    for row in range(len(hidden)):
        keys = []
        values = []
        for embedding, h, position in zip(embeddings[row], hidden[row], positions[row], strict=True):
            normed = norm("midlayer.hidden_norm", h)
            both = torch.cat([norm("midlayer.input_layernorm", embedding), normed])
            q, k, v = (
                (weights[f"midlayer.self_attn.{name}_proj.weight"] @ both).split(config.head_dim) for name in "qkv"
            )
            if config.head_norms:
                q, k = ([norm(f"midlayer.self_attn.{n}_norm", x) for x in each] for n, each in (("q", q), ("k", k)))
            keys.append([rotate(key, position) for key in k])
            values.append(list(v))
            attended = []
            for index, query in enumerate(q):
                shared = index * len(k) // len(q)
                scores = torch.stack([rotate(query, position) @ key[shared] for key in keys])
                share = (scores / math.sqrt(config.head_dim)).softmax(0)
                attended.append(share @ torch.stack([value[shared] for value in values]))
            residual = normed if config.norm_before_residual else h
            h = residual + weights["midlayer.self_attn.o_proj.weight"] @ torch.cat(attended)
            x = norm("midlayer.post_attention_layernorm", h)
            gate, up = (weights[f"midlayer.mlp.{name}_proj.weight"] @ x for name in ("gate", "up"))
            h = h + weights["midlayer.mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)
            outputs.append(norm("norm", h) if config.norm_output else h)
    return torch.stack(outputs).view_as(hidden)


@pytest.mark.parametrize("norms", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_forward_is_the_published_layer(norms, kv_heads):
    head, inputs = make_head(num_key_value_heads=kv_heads, **norms), make_inputs()
    output, (key, value) = head(*inputs)
    torch.testing.assert_close(output, reference(head, *inputs), rtol=1e-4, atol=1e-5)
    assert key.shape == value.shape == (2, kv_heads, WIDTH, 8)


@pytest.mark.parametrize("window", [None, 2])
def test_tokens_one_by_one_with_their_past_give_what_all_at_once_give(window):
    head, (embeddings, hidden, positions) = make_head(sliding_window=window), make_inputs()
    at_once, _ = head(embeddings, hidden, positions)
    past = None
    for step in range(WIDTH):
        now = slice(step, step + 1)
        output, new = head(embeddings[:, now], hidden[:, now], positions[:, now], past)
        past = new if past is None else tuple(torch.cat(pair, dim=2) for pair in zip(past, new, strict=True))
        torch.testing.assert_close(output, at_once[:, now], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norms", NORMS.values(), ids=NORMS)
def test_fuse_concatenates_and_norms_as_the_config_says(norms):
    head, features = make_head(**norms), torch.randn(2, WIDTH, 96)
    expected = features
    if head.config.norm_before_fc:
        expected = torch.nn.functional.rms_norm(expected, (96,), head.input_norm.weight, head.config.rms_norm_eps)
    if head.config.fc_norm:
        parts = [
            torch.nn.functional.rms_norm(part, (32,), norm.weight, head.config.rms_norm_eps)
            for part, norm in zip(expected.split(32, dim=-1), head.fc_norm, strict=True)
        ]
        expected = torch.cat(parts, dim=-1)
    torch.testing.assert_close(head.fuse(features), expected @ head.fc.weight.T)


@pytest.mark.parametrize("norms", NORMS.values(), ids=NORMS)
def test_logits_come_of_the_normed_output_once(norms):
    head, inputs = make_head(**norms), make_inputs()
    output, _ = head(*inputs)
    normed = output if head.config.norm_output else head.norm(output)
    torch.testing.assert_close(head.logits(output), normed @ head.lm_head.weight.T)


@pytest.mark.parametrize("norms", NORMS.values(), ids=NORMS)
def test_every_parameter_gets_a_gradient_through_two_steps(norms):
    head = make_head(own_embedding=True, **norms)
    tokens, positions = torch.randint(0, 61, (2, WIDTH)), torch.arange(WIDTH).expand(2, -1)
    hidden, past = head(head.embed(tokens), head.fuse(torch.randn(2, WIDTH, 96)), positions)
    hidden, _ = head(head.embed(tokens), hidden, positions + 1, past)
    head.logits(hidden).logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in head.parameters())


def test_the_targets_embedding_is_borrowed_not_owned():
    head, embedding = make_head(), torch.randn(61, 32, requires_grad=True)
    with pytest.raises(GraftError, match="borrow_embedding"):
        head.embed(torch.tensor([[3]]))
    head.borrow_embedding(embedding)
    assert torch.equal(head.embed(torch.tensor([[3]]))[0, 0], embedding[3])
    assert not head.embed(torch.tensor([[3]])).requires_grad
    assert not any("embed" in name for name in [*head.state_dict(), *dict(head.named_parameters())])
    with pytest.raises(GraftError, match=r"\[61, 16\], not \[61, 32\]"):
        head.borrow_embedding(torch.zeros(61, 16))


def test_rotary_frequencies_stay_exact_in_bf16():
    head = make_head()
    exact = head.rotary.inv_freq.clone()
    head.to(torch.bfloat16)
    assert head.fc.weight.dtype == torch.bfloat16
    assert torch.equal(head.rotary.inv_freq, exact)
    embeddings, hidden, positions = make_inputs()
    output, _ = head(embeddings.bfloat16(), hidden.bfloat16(), positions)
    torch.testing.assert_close(output.float(), make_head()(embeddings, hidden, positions)[0], rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("num_layers", "layers"), [(36, (2, 18, 33)), (30, (2, 15, 27)), (3, (0, 1, 2)), (1, (0, 0, 0))]
)
def test_default_layers_are_early_middle_and_late(num_layers, layers):
    assert default_target_layers(num_layers) == layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "4 attention heads do not share 3 key heads evenly"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"target_layers": ()}, "at least one layer"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps must be a positive number"),
        ({"sliding_window": 0}, "sliding_window must be a positive whole number"),
        (
            {"rope": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial rotary positions are not supported",
        ),
        ({"layers": (1, 2)}, "unknown setting 'layers'"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes, message):
    with pytest.raises(GraftError, match=message):
        Eagle3Config.for_target(TARGET, **changes)
