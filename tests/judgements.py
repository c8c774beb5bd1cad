"""What a target says of n-grams, made by hand."""

import torch

from graft.model import VerifyOutput
from graft.spec_decode.proposers import TargetTopK
from tiny import VOCAB


def verified(tokens, logits):
    """What the target says after tokens [B, W], by logits [B, W, vocabulary]."""
    rows, width = tokens.shape
    flat = logits.flatten(0, 1)
    return VerifyOutput(tokens, torch.arange(rows * width).view(rows, width), [width] * rows, flat, flat)


def judged(ngrams, following, salt=0):
    """A judgement in which `following[i]` is by far the likeliest after the n-gram (earlier, before, token)."""
    earlier, before, tokens = zip(*ngrams, strict=True)
    logits = torch.zeros(len(ngrams), 1, VOCAB)
    for i, token in enumerate(following):
        logits[i, 0, token] = 8.0
        logits[i, 0, (token + 1) % VOCAB] = 4.0
    return judged_alone(tokens, before, earlier, logits, salt)


def judged_alone(tokens, before, earlier, logits, salt=0):
    """A judgement of one token a text. logits: [texts, 1, vocabulary]"""
    tokens = torch.tensor(tokens)[:, None]
    zeros = torch.zeros_like(tokens)
    said = verified(tokens, logits).likeliest()
    return TargetTopK(tokens, zeros, zeros, *said, before, earlier, [salt] * len(tokens))
