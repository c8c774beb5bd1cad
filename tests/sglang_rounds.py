"""Whole rounds of the SGLang plugin over the stand-in, and the texts that they should give."""

from types import SimpleNamespace

import torch

import plain_kernels
import sglang_double
from graft.integrations.sglang import trees
from graft.model.sampler import Sampler, SamplingSettings

VOCAB = sglang_double.VOCAB
PROMPT = [3, 9, 4, 17, 22, 31, 8, 5]


def use_quick_parts(monkeypatch):
    """In Triton's interpreter the kernels over the vocabulary take seconds a round."""
    monkeypatch.setattr(trees.topk_kernels, "highest", plain_kernels.highest)
    monkeypatch.setattr(trees.draw_kernels, "draw", plain_kernels.draw)


def decode(
    double, requests, rounds_each_joins=2, mask_buffer=None, is_deterministic=False, is_overlapped=False, **flags
):
    """Decodes requests that join one after the other and leave when they have ended; how many rounds it took.

    mask_buffer: memory for masks, or "backend" for the attention backend's own. is_overlapped:
    the scheduler takes in a round's results while the next one runs.
    """
    usual = {"speculative_num_steps": 2, "speculative_num_draft_tokens": 6}
    worker = double.EAGLEWorkerV2(double.server_args(**usual | flags), double.target_worker())
    worker.init_cuda_graphs()
    if mask_buffer == "backend":
        mask_buffer = worker.target_worker.model_runner.attn_backend.mask
    waiting, running, inputs, slots = list(requests), [], [], list(range(1, sglang_double.NUM_SLOTS))
    while waiting or running:
        if waiting and len(inputs) % rounds_each_joins == 0:
            running.append(waiting.pop(0))
            running[-1].req_pool_idx = slots.pop(0)
            run(worker, double.batch_of(running[-1:], prefix_lens=[0]))
        before = [len(each.ids) for each in running]
        if not is_overlapped:
            for each in running:
                each.process(len(each.ids))
        inputs.append(copied(run(worker, double.batch_of(running, mask_buffer, is_deterministic)).verify_input))
        for each, num_before in zip(running, before, strict=True):
            each.process(num_before if is_overlapped else len(each.ids))
            if each.finished():
                slots.insert(0, each.req_pool_idx)
        running = [each for each in running if not each.finished()]
    return worker, inputs


def copied(verify_input):
    """The next round writes its trees to the same memory."""
    fields = vars(verify_input).items()
    return SimpleNamespace(**{name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in fields})


def run(worker, batch):
    result = worker.forward_batch_generation(batch)
    made = result.next_draft_input
    for each, *drafts in zip(batch.reqs, made.topk_p, made.topk_index, strict=True):
        each.drafts = drafts
    return result


def plain(request):
    """The text by our own sampler, token by token."""
    params = request.sampling_params
    seed = 0 if params.sampling_seed is None else params.sampling_seed
    chosen = SamplingSettings(
        temperature=0.0 if params.top_k == 1 else params.temperature,
        top_k=params.top_k if 1 < params.top_k < VOCAB else 0,
        top_p=params.top_p,
        seed=seed,
        logit_bias=params.logit_bias or {},
    )
    ids = [*request.origin_input_ids, request.origin_input_ids[0]]
    sampler = Sampler([chosen], [ids], [], VOCAB, torch.device("cpu"))
    while len(ids) < len(request.origin_input_ids) + params.length:
        ids.append(int(sampler.choose(sglang_double.target_logits(ids)[None], [True])))
    return ids[len(request.origin_input_ids) :]


def requests_of(double, length=20):
    sampled = {"top_k": 1 << 30, "temperature": 0.7, "length": length}
    return [
        double.Request("greedy", PROMPT, length=length),
        double.Request("sampled", PROMPT[::-1], **sampled, sampling_seed=5),
        double.Request("biased", [*PROMPT, 1], logit_bias={7: 3.0}, length=length),
        double.Request("nucleus", [*PROMPT, 2, 6], **sampled | {"top_p": 0.8, "top_k": 12}, sampling_seed=9),
    ]


def check_texts(requests):
    for each in requests:
        length = each.sampling_params.length
        assert each.output_ids[:length].tolist() == plain(each)[:length], each.rid
