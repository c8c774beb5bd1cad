"""KL divergence from the target: the loss of heads that predict over the whole vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graft.train.trainer import compiled


def divergence(logits: Tensor, wanted: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """KL(wanted || own) [n, K] of logits [n, K, vocab], and the labels' log-probabilities, without gradient."""
    values, label_log_probs = _Divergence.apply(logits, wanted, labels)
    return values, label_log_probs


class _Divergence(torch.autograd.Function):
    """Computes the gradient, own minus wanted, in forward, so that only one tensor of vocabulary size is kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        # Compiled, it takes a few kernels instead of a dozen passes over tensors of vocabulary size.
        run = compiled(_divergence_and_gradient) if logits.is_cuda else _divergence_and_gradient
        divergence, gradient, label_log_probs = run(logits, wanted, labels)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(label_log_probs)
        return divergence, label_log_probs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0][..., None].to(gradient.dtype), None, None


def _divergence_and_gradient(logits: Tensor, wanted: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    own, target = logits.float().log_softmax(dim=-1), wanted.float().log_softmax(dim=-1)
    shares = target.exp()
    divergence = (shares * (target - own)).sum(dim=-1)
    return divergence, (own.exp() - shares).to(logits.dtype), own.gather(-1, labels[..., None]).squeeze(-1)
