"""A stand-in for the parts of SGLang 0.5.15 that the plugin touches, on a CPU, over a made-up target and head.

One module plays all of SGLang's (`install`). Its workers take the same course as SGLang's and call the same functions
by the same names; what the plugin must replace fails here. The target reads each place's context out of the verify's
own arrays (tokens, positions, mask), so that a wrong one of them gives another text.
"""

import importlib.util
import os
import sys
from array import array
from collections import namedtuple
from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar

import torch

__version__ = "0.5.15"
VOCAB = 40
SKIP = "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"
NAMES = (
    "sglang",
    "sglang.srt",
    "sglang.srt.plugins",
    "sglang.srt.plugins.hook_registry",
    "sglang.srt.server_args",
    "sglang.srt.distributed",
    "sglang.srt.layers",
    "sglang.srt.layers.attention.triton_backend",
    "sglang.srt.layers.dp_attention",
    "sglang.srt.layers.sampler",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.speculative",
    "sglang.srt.speculative.eagle_utils",
    "sglang.srt.speculative.eagle_worker_v2",
)


def install(monkeypatch):
    """A fresh stand-in under SGLang's names."""
    spec = importlib.util.spec_from_file_location("sglang_double_now", __file__)
    double = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(double)
    double.__path__ = []  # a package
    double.eagle_worker_v2 = double.sampler = double
    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, double)
    for name in ("hooks", "worker"):
        monkeypatch.delitem(sys.modules, f"graft.integrations.sglang.{name}", raising=False)
    return double


# Plugins


class HookType:
    AFTER, AROUND, REPLACE = range(3)


class HookRegistry:
    hooks: ClassVar = []

    @classmethod
    def register(cls, target, hook, hook_type):
        cls.hooks.append((target, hook, hook_type))

    @classmethod
    def apply_hooks(cls):
        for target, hook, kind in cls.hooks:
            module, _, rest = target.rpartition(".")
            parent, _, name = module.rpartition(".")
            where = sys.modules[module] if module in sys.modules else getattr(sys.modules[parent], name)
            setattr(where, rest, hook if kind == HookType.REPLACE else wrapped(getattr(where, rest), hook, kind))


def wrapped(original, hook, kind):
    def after(*args):
        result = original(*args)
        modified = hook(result, *args)
        return modified if modified is not None else result

    return after if kind == HookType.AFTER else lambda *args, **kwargs: hook(original, *args, **kwargs)


class ServerArgs(SimpleNamespace):
    def check_server_args(self):
        pass


def server_args(**changes):
    usual = dict(
        speculative_algorithm="EAGLE3",
        speculative_eagle_topk=3,
        speculative_num_steps=3,
        speculative_num_draft_tokens=12,
        speculative_draft_model_path="nobody/head",
        max_running_requests=None,
        cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(bs=[1, 2, 4, 8])),
        speculative_adaptive=False,
        speculative_use_rejection_sampling=False,
        disable_radix_cache=False,
    )
    return ServerArgs(**usual | changes)


# Ranks


class Group:
    """The ranks of a target: this process alone, or those of torch.distributed."""

    rank_in_group, world_size = 0, 1

    def broadcast_object(self, obj, src=0):
        return obj

    def broadcast(self, tensor, src=0):
        raise AssertionError("there is nobody else")


class Processes(Group):
    def __init__(self):
        self.rank_in_group, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def broadcast_object(self, obj, src=0):
        sent = [obj]
        torch.distributed.broadcast_object_list(sent, src=src)
        return sent[0]

    def broadcast(self, tensor, src=0):
        torch.distributed.broadcast(tensor, src=src)
        return tensor


group = Group()


def get_tp_group():
    return group


get_attention_tp_group = get_tp_group


def is_dp_attention_enabled():
    return False


# The models


def target_logits(context):
    """Mostly what followed 7 tokens ago, else pseudo-random by the last two tokens."""
    generator = torch.Generator().manual_seed(context[-1] * 1009 + context[-2])
    logits = torch.randn(VOCAB, generator=generator)
    logits[context[-7] if len(context) % 5 else (context[-1] * 3 + 1) % VOCAB] += 4.0
    return logits


def head_probabilities(context):
    generator = torch.Generator().manual_seed(len(context))
    return (target_logits(context) + 0.7 * torch.randn(VOCAB, generator=generator)).softmax(0)


def fast_topk(values, topk, dim):
    return values.topk(topk, dim=dim)


# EAGLE workers


class EagleDraftWorker:
    def __init__(self, server_args, target_worker):
        self.topk, self.speculative_num_steps = server_args.speculative_eagle_topk, server_args.speculative_num_steps
        self.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens
        self.target_worker = target_worker
        config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[target_worker.head_name]))
        self.draft_runner = SimpleNamespace(model_config=config, tp_group=None, attn_backend="first extend")
        self.draft_tp_context = lambda group: nullcontext()
        self.draft_attn_backend = self.draft_runner.draft_attn_backend = "first draft"
        self.draft_extend_attn_backend = "first extend"
        self.cuda_graph_runner = self.cuda_graph_runner_for_draft_extend = "first graph"

    def draft(self, batch):
        parents, best, tokens, _ = self.draft_forward(batch)
        roots = batch.roots
        names = ("custom_mask", "positions", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
        mask_buffer = batch.mask_buffer
        lengths_sum = 0 if mask_buffer is not None else int(batch.seq_lens.sum())
        sizes = (self.topk, self.speculative_num_steps, self.speculative_num_draft_tokens)
        lengths = (batch.seq_lens, lengths_sum)
        arrays = build_tree_kernel_efficient(roots, parents, best, tokens, *lengths, *sizes, 0, mask_buffer, None)
        return SimpleNamespace(
            **dict(zip((*names, "draft_token"), arrays, strict=True)),
            spec_steps=self.speculative_num_steps,
            draft_token_num=self.speculative_num_draft_tokens,
        )

    def _draft_extend_for_prefill(self, batch, hidden_states, next_token_ids, mm_input_embeds=None):
        for request, num_before in zip(batch.reqs, batch.prefix_lens or (), strict=True):
            request.is_read_by_head = num_before == 0 or request.is_read_by_head
        return EagleDraftInput(next_token_ids, 1, 1, topk_p=torch.ones(len(batch.reqs), self.topk))

    def _draft_extend_for_decode(self, batch, batch_result):
        pass

    def draft_forward(self, batch):
        """Level by level: every pass expands the K best nodes of the last level, each into K."""
        topk, by_step = self.topk, []
        contexts = [[*request.origin_input_ids, *request.ids] for request in batch.reqs]
        first = [head_probabilities(context).topk(topk) for context in contexts]
        beams = [[(float(p), [int(t)]) for p, t in zip(*each, strict=True)] for each in first]
        scores, tokens = torch.stack([each.values for each in first]), torch.stack([each.indices for each in first])
        by_step.append((scores[:, None], tokens, torch.arange(-1, topk).expand(len(contexts), -1)))
        for step in range(1, self.speculative_num_steps):
            rows = []
            for row, context in enumerate(contexts):
                found = [head_probabilities(context + path).topk(topk) for _, path in beams[row]]
                scores = torch.stack([p * each.values for (p, _), each in zip(beams[row], found, strict=True)])
                tokens = torch.stack([each.indices for each in found]).flatten()
                best, chosen = scores.flatten().topk(topk)
                beams[row] = [
                    (float(p), beams[row][int(place) // topk][1] + [int(tokens[place])])
                    for p, place in zip(best, chosen, strict=True)
                ]
                rows.append((scores, tokens, chosen + topk * topk * (step - 1) + topk))
            by_step.append(tuple(torch.stack(column) for column in zip(*rows, strict=True)))
        lists = [list(column) for column in zip(*by_step, strict=True)]
        return (*organize_draft_results(*lists, self.speculative_num_draft_tokens), None)


class SpecRuntimeState(SimpleNamespace):
    pass


class EagleDraftInput(SimpleNamespace):
    def __init__(self, bonus_tokens, num_tokens_per_req, num_tokens_for_logprob_per_req, topk_p=None):
        super().__init__(bonus_tokens=bonus_tokens, topk_p=topk_p)


class _Switch:
    def get(self):
        return os.environ.get(SKIP) == "1"


envs = SimpleNamespace(**{SKIP: _Switch()})


speculative_moe_backend_context = speculative_moe_a2a_backend_context = nullcontext


class Backend(str):
    """An attention backend, by its name, that has a mask for verifies without trees."""

    def __new__(cls, name):
        made = super().__new__(cls, name)
        made.mask = torch.ones(2000, dtype=torch.bool)
        return made

    def get_verify_buffers_to_fill_after_draft(self):
        return self.mask, None


class Cache:
    """The KV cache and its own allocator; a tensor that has one number for each slot."""

    def get_kvcache(self):
        return self

    def move_kv_cache(self, tgt_loc, src_loc):
        self.cache[tgt_loc] = self.cache[src_loc]


class EAGLEWorkerV2:
    def __init__(self, server_args, target_worker):
        self.server_args, self.target_worker = server_args, target_worker
        self.speculative_num_steps = server_args.speculative_num_steps
        self.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens
        self.draft_worker = EagleDraftWorker(server_args, target_worker)
        self.token_to_kv_pool_allocator = Cache()

    def clear_cache_pool(self):
        pass

    def init_cuda_graphs(self):
        self.built = []

    def build_adaptive_runtime_state(self, speculative_num_steps, speculative_num_draft_tokens, cuda_graph_bs=None):
        captured = self.server_args.cuda_graph_config.decode.bs
        self.built.append((speculative_num_draft_tokens, speculative_num_steps, captured))
        name = f"{speculative_num_draft_tokens}"
        return SpecRuntimeState(
            speculative_num_steps=speculative_num_steps,
            speculative_num_draft_tokens=speculative_num_draft_tokens,
            draft_attn_backend=name,
            cuda_graph_runner=name,
            target_attn_backend=Backend(name),
            target_graph_runner=name,
            draft_extend_attn_backend=name,
            cuda_graph_runner_for_draft_extend=name,
        )

    def activate_step_by_batch(self, batch_size):
        pass

    def forward_batch_generation(self, batch, on_publish=None):
        if batch.forward_mode.is_extend():
            tokens = torch.tensor([request.ids[-1] for request in batch.reqs])
            for request, num_before in zip(batch.reqs, batch.prefix_lens or (), strict=True):
                request.is_read_by_head = request.is_read_by_head and num_before > 0
            found = self.draft_worker._draft_extend_for_prefill(batch, None, tokens, None)
            return SimpleNamespace(next_draft_input=found)
        self.activate_step_by_batch(len(batch.reqs))
        if self.speculative_num_steps == 0:
            verify_input = self._build_trivial_verify_input(batch)
        else:
            verify_input = self.draft_worker.draft(batch)
        prepared, _ = eagle_prepare_for_verify(verify_input, None, batch, self.target_worker)
        logits = read_trees(verify_input, batch, *prepared)
        output = SimpleNamespace(next_token_logits=logits)
        predict, lengths, accepted = eagle_sample(verify_input, batch, output, None)
        assert accepted.shape == (len(batch.reqs), self.speculative_num_steps + 1)
        size = (len(batch.reqs), self.speculative_num_draft_tokens)
        batch.out_cache_loc = torch.randperm(size[0] * size[1])
        cache = self.token_to_kv_pool_allocator.cache = batch.out_cache_loc.argsort()  # every slot holds its place
        output.hidden_states = torch.arange(size[0] * size[1])[:, None].float()
        predict = self._finalize_accept_tree_path(batch, accepted, lengths, predict, output, size[0])
        kept, features = cache[batch.out_cache_loc].view(size), output.hidden_states.view(size)
        for row, (request, length, path) in enumerate(
            zip(batch.reqs, lengths.tolist(), accepted.tolist(), strict=True)
        ):
            request.ids.extend(predict.view(size)[row, :length].tolist())
            assert kept[row, :length].tolist() == features[row, :length].tolist() == path[:length]
        output.next_draft_input = EagleDraftInput(None, 1, 1)
        if self.speculative_num_steps == 0 and envs.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND.get():
            for request in batch.reqs:
                request.is_read_by_head = False
            self._stub_skipped_draft_extend(batch, output)
        else:
            self.draft_worker._draft_extend_for_decode(batch, output)
        return verify_input

    def _stub_skipped_draft_extend(self, batch, batch_output):
        for name in ("topk_p", "topk_index", "hidden_states"):
            setattr(batch_output.next_draft_input, name, torch.zeros(len(batch.reqs), 1))

    def _build_trivial_verify_input(self, batch):
        num_rows, nothing = len(batch.reqs), torch.full((len(batch.reqs), 1), -1)
        return SimpleNamespace(
            draft_token=batch.spec_info.bonus_tokens,
            custom_mask=self.target_worker.model_runner.attn_backend.mask,
            positions=batch.seq_lens.clone(),
            retrieve_index=torch.arange(num_rows)[:, None],
            retrieve_next_token=nothing,
            retrieve_next_sibling=nothing.clone(),
            spec_steps=0,
            draft_token_num=1,
        )


def eagle_prepare_for_verify(verify_input, req_to_token_pool, batch, target_worker):
    """What the forward pass reads, later; and whether it is captured."""
    return (verify_input.draft_token, verify_input.positions), target_worker.is_captured


def read_trees(verify_input, batch, tokens, positions):
    """The target's logits after every place, which sees what the mask shows it at the positions given."""
    width, start, logits = verify_input.draft_token_num, 0, []
    tokens, positions = tokens.view(-1, width), positions.view(-1, width)
    for row, request in enumerate(batch.reqs):
        cached = [*request.origin_input_ids, *request.ids[:-1]]
        length = len(cached)
        mask = verify_input.custom_mask[start : start + width * (length + width)].view(width, length + width).bool()
        start += width * (length + width)
        assert mask[:, :length].all()
        for place in range(width):
            seen = mask[place, length:].nonzero().flatten().tolist()
            path = {int(positions[row, node]): int(tokens[row, node]) for node in seen}
            assert len(path) == len(seen) and max(path) == positions[row, place]
            if sorted(path) == list(range(length, length + len(path))):
                logits.append(target_logits(cached + [path[position] for position in sorted(path)]))
            else:
                logits.append(torch.zeros(VOCAB))  # padding
    return torch.stack(logits)


def organize_draft_results(score_list, token_list, parents_list, num_draft_token):
    raise AssertionError("the tree is SGLang's own")


def build_tree_kernel_efficient(*args):
    raise AssertionError("the tree is SGLang's own")


def eagle_sample(verify_input, batch, logits_output, vocab_mask=None):
    logits, num_rows, width = logits_output.next_token_logits, len(batch.reqs), verify_input.draft_token_num
    if batch.sampling_info.logit_bias is not None:
        logits.add_(batch.sampling_info.logit_bias.repeat_interleave(width, dim=0))
    assert batch.sampling_info.is_all_greedy, "drawn by SGLang's own rule"
    predict = torch.zeros(num_rows * width, dtype=torch.int32)
    accept_index = torch.full((num_rows, verify_input.spec_steps + 1), -1, dtype=torch.int32)
    counts = torch.empty(num_rows, dtype=torch.int32)
    verify_tree_greedy_func(
        predicts=predict,
        accept_index=accept_index,
        accept_token_num=counts,
        candidates=verify_input.draft_token.view(num_rows, width),
        retrieve_index=verify_input.retrieve_index,
        retrieve_next_token=verify_input.retrieve_next_token,
        retrieve_next_sibling=verify_input.retrieve_next_sibling,
        target_predict=logits.argmax(-1).view(num_rows, width),
    )
    return predict, counts + 1, accept_index


def verify_tree_greedy_func(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    target_predict,
):
    """The walk of SGLang's kernel, one row after the other."""
    for row, (index, children, siblings) in enumerate(
        zip(retrieve_index.tolist(), retrieve_next_token.tolist(), retrieve_next_sibling.tolist(), strict=True)
    ):
        node, count = 0, 0
        accept_index[row, 0] = index[0]
        for _ in range(1, accept_index.shape[1]):
            child = children[node]
            while child != -1 and candidates[row, child] != target_predict[row, node]:
                child = siblings[child]
            if child == -1:
                break
            predicts[index[node]] = target_predict[row, node]
            count, node = count + 1, child
            accept_index[row, count] = index[child]
        predicts[index[node]] = target_predict[row, node]
        accept_token_num[row] = count


# SGLang's own draws in deterministic mode, by noise of seed and position


def sampling_from_probs_torch(probs, sampling_seed=None, positions=None):
    return torch.tensor(
        [
            int((row.log() + own_noise(int(seed), int(position))).argmax())
            for row, seed, position in zip(probs, sampling_seed, positions, strict=True)
        ],
        dtype=torch.int32,
    )


def own_noise(seed, position):
    uniform = torch.rand(VOCAB, generator=torch.Generator().manual_seed(seed * 4099 + position))
    return -(-uniform.log()).log()


def top_k_top_p_min_p_sampling_from_probs_torch(probs, top_ks, top_ps, min_ps, need_min_p, seeds, positions):
    assert not need_min_p
    ordered, tokens = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered[(torch.arange(VOCAB) >= top_ks[:, None]) | (before > top_ps[:, None])] = 0.0
    places = sampling_from_probs_torch(ordered, seeds, positions).long()
    return tokens.gather(1, places[:, None]).flatten().int()


# Attention of several tokens of a request


KVWriteLoc = namedtuple("KVWriteLoc", "loc swa_loc full_loc")


class TritonAttnBackend:
    max_context_len = 100
    use_mla, enable_deterministic, dcp_size, page_size = False, False, 1, 1

    def __init__(self, has_mask=True):
        self._has_mask = has_mask

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        return "SGLang's own"

    def init_cuda_graph_state(self, max_bs, max_num_tokens, kv_indices_buf=None):
        if self._has_mask:
            self.cuda_graph_custom_mask = torch.zeros(max_num_tokens * self.max_context_len, dtype=torch.uint8)


# Requests


class Request:
    def __init__(self, rid, prompt, **params):
        usual = dict(temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, sampling_seed=None, logit_bias=None, length=60)
        self.rid, self.origin_input_ids = rid, array("q", prompt)
        self.sampling_params = SimpleNamespace(**usual | params)
        self.ids = [prompt[0]]  # all that the model has given; the first token is the prefill's
        self.output_ids = array("q")  # what the scheduler knows of it
        self.is_read_by_head = True

    def process(self, num_known):
        """The scheduler takes in results until it knows so many tokens."""
        self.output_ids.extend(self.ids[len(self.output_ids) : num_known])

    def finished(self):
        return len(self.output_ids) >= self.sampling_params.length


def batch_of(requests, mask_buffer=None, is_deterministic=False, is_overlapped=False, prefix_lens=None):
    """prefix_lens: of a batch of prompts, how much of each was read before."""
    params = [request.sampling_params for request in requests]
    columns = {name: torch.tensor([getattr(p, name) for p in params]) for name in ("top_k", "top_p", "min_p")}
    bias = torch.zeros(len(params), VOCAB)
    for row, each in enumerate(params):
        for token, value in (each.logit_bias or {}).items():
            bias[row, token] = value
    info = SimpleNamespace(
        temperatures=torch.tensor([[p.temperature] for p in params]),
        **{name + "s": column for name, column in columns.items()},
        is_all_greedy=all(p.top_k <= 1 for p in params),
        need_top_k_sampling=any(p.top_k < VOCAB for p in params),
        need_top_p_sampling=any(p.top_p < 1 for p in params),
        need_min_p_sampling=any(p.min_p > 0 for p in params),
        sampling_seed=torch.tensor([p.sampling_seed or 42 for p in params]) if is_deterministic else None,
        logit_bias=bias if any(p.logit_bias for p in params) else None,
    )
    lengths = [len(request.origin_input_ids) + len(request.ids) - 1 for request in requests]
    return SimpleNamespace(
        reqs=requests,
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu=None if is_overlapped else torch.tensor(lengths),
        roots=torch.tensor([request.ids[-1] for request in requests], dtype=torch.int32),
        sampling_info=info,
        spec_info=SimpleNamespace(bonus_tokens=torch.tensor([request.ids[-1] for request in requests])),
        mask_buffer=mask_buffer,
        forward_mode=SimpleNamespace(is_idle=lambda: False, is_extend=lambda: prefix_lens is not None),
        is_extend_in_batch=False,
        prefix_lens=prefix_lens,
    )


def target_worker(head_name="LlamaForCausalLMEagle3"):
    runner = SimpleNamespace(attn_backend=Backend("first"), decode_cuda_graph_runner="first")
    config = SimpleNamespace(vocab_size=VOCAB)
    return SimpleNamespace(model_config=config, head_name=head_name, model_runner=runner, is_captured=False)
