"""A stand-in for the parts of SGLang 0.5.15 that the plugin touches, on a CPU, over a made-up target and head.

One module plays all of SGLang's (`install`). Its workers take the same course as SGLang's and call the same functions
by the same names. The target reads each place's context out of the verify's own arrays (tokens, positions, mask), so
that a wrong one of them gives another text.
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
from transformers import LlamaConfig

import graft.integrations.sglang
from graft.integrations.sglang import fallback, release

__version__ = "0.5.15"
VOCAB = 40
CONTEXT = 160
NUM_SLOTS = 9  # of requests; 0 is padding
SKIP = "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"
NAMES = """sglang sglang.srt sglang.srt.plugins sglang.srt.plugins.hook_registry sglang.srt.server_args sglang.srt.utils
sglang.srt.utils.common sglang.srt.distributed sglang.srt.layers sglang.srt.layers.attention
sglang.srt.layers.attention.triton_backend sglang.srt.layers.dp_attention sglang.srt.layers.sampler sglang.srt.mem_cache
sglang.srt.mem_cache.memory_pool sglang.srt.speculative sglang.srt.speculative.eagle_utils
sglang.srt.speculative.eagle_worker_v2 sglang.srt.speculative.spec_utils"""


def install(monkeypatch):
    """A fresh stand-in under SGLang's names."""
    spec = importlib.util.spec_from_file_location("sglang_double_now", __file__)
    double = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(double)
    double.__path__ = []  # a package
    double.eagle_worker_v2 = double.sampler = double
    for name in NAMES.split():
        monkeypatch.setitem(sys.modules, name, double)
    for name in ("hooks", "worker"):
        monkeypatch.delitem(sys.modules, f"graft.integrations.sglang.{name}", raising=False)
        monkeypatch.delattr(graft.integrations.sglang, name, raising=False)
    release.current.cache_clear()
    fallback._told.clear()
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
        random_seed=7,
    )
    return ServerArgs(**usual | changes)


# Ranks


class Group:
    """The ranks of a target: this process alone."""

    world_size = 1

    def broadcast(self, tensor, src=0):
        raise AssertionError("there is nobody else")


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


def head_logits(context, is_read=True):
    """Those of the target with some noise; of nothing, if the head has not read the context."""
    generator = torch.Generator().manual_seed(len(context))
    noise = torch.randn(VOCAB, generator=generator)
    return target_logits(context) + 0.7 * noise if is_read else 5 * noise


def renorm_draft_probs(next_token_logits, sampling_info, use_rejection_sampling):
    return next_token_logits.softmax(dim=-1)


def fast_topk(values, topk, dim):
    return values.topk(topk, dim=dim)


# EAGLE workers

captured_batch = None  # what is drafted for when graphs are captured


class EagleDraftWorker:
    def __init__(self, server_args, target_worker):
        self.server_args, self.target_worker = server_args, target_worker
        self.topk, self.speculative_num_steps = server_args.speculative_eagle_topk, server_args.speculative_num_steps
        self.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens
        config = SimpleNamespace(hf_config=LlamaConfig(architectures=[target_worker.head_name]))
        self.draft_runner = SimpleNamespace(model_config=config, tp_group=None, attn_backend="first extend")
        self.draft_tp_context = lambda group: nullcontext()
        self.draft_attn_backend = self.draft_runner.draft_attn_backend = "first draft"
        self.draft_extend_attn_backend = "first extend"
        self.cuda_graph_runner = self.cuda_graph_runner_for_draft_extend = "first graph"

    def alloc_memory_pool(self, memory_pool_config=None, req_to_token_pool=None, token_to_kv_pool_allocator=None):
        self.req_to_token_pool, self.token_to_kv_pool_allocator = req_to_token_pool, token_to_kv_pool_allocator
        self.hot_token_id = None

    def _capture_cuda_graphs(self):
        self.captured = self.server_args.cuda_graph_config.decode.bs
        if captured_batch is not None:
            self.draft_forward(captured_batch)

    def draft(self, batch):
        parents, best, tokens, _ = self.draft_forward(batch)
        names = ("custom_mask", "positions", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
        mask_buffer = batch.mask_buffer
        lengths_sum = 0 if mask_buffer is not None else int(batch.seq_lens.sum())
        sizes = (self.topk, self.speculative_num_steps, self.speculative_num_draft_tokens)
        roots = batch.spec_info.bonus_tokens
        lengths = (batch.seq_lens, lengths_sum)
        arrays = build_tree_kernel_efficient(roots, parents, best, tokens, *lengths, *sizes, 0, mask_buffer, None)
        return SimpleNamespace(
            **dict(zip((*names, "draft_token"), arrays, strict=True)),
            spec_steps=self.speculative_num_steps,
            draft_token_num=self.speculative_num_draft_tokens,
        )

    def draft_forward(self, forward_batch):
        """Level by level: every pass expands the K best nodes of the last level, each into K."""
        topk, requests, spec = self.topk, forward_batch.reqs, forward_batch.spec_info
        num_rows = len(requests)
        topk_p, topk_index = spec.topk_p, spec.topk_index
        contexts = [
            [[*each.origin_input_ids, *each.ids, int(token)] for token in tokens]
            for each, tokens in zip(requests, topk_index, strict=True)
        ]
        scores, by_step = topk_p, [(topk_p[:, None], topk_index, torch.arange(-1, topk).expand(num_rows, -1))]
        for step in range(1, self.speculative_num_steps):
            logits = [
                head_logits(context, each.is_read_by_head)
                for each, own in zip(requests, contexts, strict=True)
                for context in own
            ]
            probs = renorm_draft_probs(torch.stack(logits), forward_batch.sampling_info, False)
            topk_p, topk_index = fast_topk(probs, topk, dim=-1)
            expanded = scores[:, :, None] * topk_p.view(num_rows, topk, topk)
            tokens = topk_index.view(num_rows, topk * topk)
            scores, chosen = expanded.flatten(1).topk(topk, dim=-1)
            by_step.append((expanded, tokens, chosen + topk * topk * (step - 1) + topk))
            contexts = [
                [[*own[int(place) // topk], int(new[place])] for place in places]
                for own, new, places in zip(contexts, tokens, chosen, strict=True)
            ]
        lists = [list(column) for column in zip(*by_step, strict=True)]
        return (*organize_draft_results(*lists, self.speculative_num_draft_tokens), None)

    def _draft_extend_for_prefill(self, batch, target_hidden_states, next_token_ids, mm_input_embeds=None):
        if not batch.reqs:
            return EagleDraftInput(next_token_ids, 1, 1)
        for request, num_before in zip(batch.reqs, batch.prefix_lens or (), strict=True):
            request.is_read_by_head = num_before == 0 or request.is_read_by_head
        return EagleDraftInput(next_token_ids, 1, 1, *self._first_level(batch))

    def _draft_extend_for_decode(self, batch, batch_result):
        made = batch_result.next_draft_input
        for request, was_read in zip(batch.reqs, batch.read_before, strict=True):
            request.is_read_by_head = was_read
        made.topk_p, made.topk_index = self._first_level(batch)

    def _first_level(self, batch):
        logits = [head_logits([*each.origin_input_ids, *each.ids], each.is_read_by_head) for each in batch.reqs]
        probs = renorm_draft_probs(torch.stack(logits), batch.sampling_info, False)
        return fast_topk(probs, self.topk, dim=-1)


class SpecRuntimeState(SimpleNamespace):
    pass


class EagleDraftInput(SimpleNamespace):
    def __init__(self, bonus_tokens, num_tokens_per_req, num_tokens_for_logprob_per_req, topk_p=None, topk_index=None):
        super().__init__(bonus_tokens=bonus_tokens, topk_p=topk_p, topk_index=topk_index)


class _Switch:
    def get(self):
        return os.environ.get(SKIP) == "1"


envs = SimpleNamespace(**{SKIP: _Switch()})


speculative_moe_backend_context = speculative_moe_a2a_backend_context = nullcontext


class Backend(str):
    """An attention backend, by its name, that has a mask for verifies without trees."""

    max_context_len = CONTEXT

    def __new__(cls, name):
        made = super().__new__(cls, name)
        made.mask = torch.ones(4000, dtype=torch.bool)
        return made

    def get_verify_buffers_to_fill_after_draft(self):
        return self.mask, None


class EAGLEWorkerV2:
    def __init__(self, server_args, target_worker):
        self.server_args, self.target_worker, self.topk = server_args, target_worker, server_args.speculative_eagle_topk
        self.speculative_num_steps = server_args.speculative_num_steps
        self.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens
        self.draft_worker = EagleDraftWorker(server_args, target_worker)
        tables = torch.arange(NUM_SLOTS * CONTEXT, dtype=torch.int32).view(NUM_SLOTS, CONTEXT)  # a KV slot each
        copies = {"bytes_per_tile": 128, "byte_tiles": 16, "num_warps": 4, "num_locs_upper": 256}
        pool = SimpleNamespace(_kv_copy_config=copies)
        allocator = SimpleNamespace(size=NUM_SLOTS * CONTEXT, page_size=1, get_kvcache=lambda: pool)
        self.draft_worker.alloc_memory_pool(None, SimpleNamespace(req_to_token=tables), allocator)

    def clear_cache_pool(self):
        pass

    def init_cuda_graphs(self):
        self.built = []
        self.draft_worker._capture_cuda_graphs()

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
            for request, num_before in zip(batch.reqs, batch.prefix_lens or (), strict=True):
                request.is_read_by_head = request.is_read_by_head and num_before > 0
            tokens = torch.tensor([request.ids[-1] for request in batch.reqs])
            found = self.draft_worker._draft_extend_for_prefill(batch, None, tokens, None)
            return SimpleNamespace(next_draft_input=found)
        self.activate_step_by_batch(len(batch.reqs))
        if self.speculative_num_steps == 0:
            verify_input = self._build_trivial_verify_input(batch)
        else:
            verify_input = self.draft_worker.draft(batch)
        num_rows, num_places = len(batch.reqs), self.speculative_num_draft_tokens
        batch.out_cache_loc = _kv_slots(batch.req_pool_indices, batch.seq_lens, num_places)
        logits = read_trees(verify_input, batch)
        shared = self.target_worker.model_runner.graph_shared_output
        if len(logits) <= shared.max_rows:  # captured graphs leave all logits in the same memory
            logits = shared.get_logits_buffer(VOCAB, rows=len(logits)).copy_(logits)
        output = SimpleNamespace(next_token_logits=logits)
        predict, lengths, accepted = eagle_sample(verify_input, batch, output, None)
        assert accepted.shape == (num_rows, self.speculative_num_steps + 1)
        predict = self._finalize_accept_tree_path(batch, accepted, lengths, predict, output, num_rows)
        for row, (request, length) in enumerate(zip(batch.reqs, lengths.tolist(), strict=True)):
            request.ids.extend(predict.view(num_rows, num_places)[row, :length].tolist())
        output.new_seq_lens, output.next_draft_input = batch.seq_lens + lengths, EagleDraftInput(None, 1, 1)
        batch.read_before = [request.is_read_by_head for request in batch.reqs]
        for request in batch.reqs:
            request.is_read_by_head = False  # until the head has read this round's tokens
        if self.speculative_num_steps == 0 and envs.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND.get():
            self._stub_skipped_draft_extend(batch, output)
        else:
            self.draft_worker._draft_extend_for_decode(batch, output)
        output.verify_input = verify_input
        return output

    def _finalize_accept_tree_path(self, batch, accept_index, accept_lens, predict, logits_output, bs):
        assert len(predict) > bs, "one place of each request is not moved"
        out = predict.clone().view(bs, -1)
        for row, (path, length) in enumerate(zip(accept_index.tolist(), accept_lens.tolist(), strict=True)):
            out[row, :length] = predict[path[:length]]
        return out.flatten()

    def _stub_skipped_draft_extend(self, batch, batch_output):
        made, size = batch_output.next_draft_input, (len(batch.reqs), self.topk)
        made.topk_p, made.topk_index = torch.zeros(size), torch.zeros(size, dtype=torch.int64)
        made.hidden_states = torch.zeros(size)

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


def read_trees(verify_input, batch):
    """The target's logits after every place, which sees what the mask shows it at the positions given."""
    width, start, logits = verify_input.draft_token_num, 0, []
    tokens, positions = verify_input.draft_token.view(-1, width), verify_input.positions.view(-1, width)
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
    scores, tokens = torch.cat([level.flatten(1) for level in score_list], dim=1), torch.cat(token_list, dim=1)
    chosen = scores.topk(num_draft_token - 1, dim=-1).indices.sort().values
    return torch.cat(parents_list[:-1], dim=1), chosen, tokens.gather(1, chosen)


def build_tree_kernel_efficient(
    bonus_tokens,
    parent_list,
    top_scores_index,
    draft_tokens,
    seq_lens,
    seq_lens_sum,
    topk,
    spec_steps,
    num_verify_tokens,
    tree_mask_mode=0,
    tree_mask_buf=None,
    position_buf=None,
):
    """SGLang's own tree, one row after the other."""
    global num_own_trees
    num_own_trees += 1
    num_rows, masks, positions = len(seq_lens), [], []
    index = torch.arange(num_rows * num_verify_tokens).view(num_rows, -1)
    links = torch.full((2, num_rows, num_verify_tokens), -1)
    for row, length in enumerate(seq_lens.tolist()):
        flat, above = top_scores_index[row].tolist(), [-1]
        for number in flat:
            above.append(0 if number < topk else 1 + flat.index(int(parent_list[row, number // topk])))
        for place in range(num_verify_tokens - 1, 0, -1):
            links[1, row, place], links[0, row, above[place]] = links[0, row, above[place]].clone(), place
        seen = torch.eye(num_verify_tokens, dtype=torch.bool)
        for place in range(1, num_verify_tokens):
            seen[place] |= seen[above[place]]
        masks.append(torch.cat([torch.ones(num_verify_tokens, length, dtype=torch.bool), seen], dim=1).flatten())
        positions.append(length + seen.sum(dim=1) - 1)
    tokens = torch.cat([bonus_tokens[:, None].long(), draft_tokens], dim=1).flatten()
    return torch.cat(masks), torch.cat(positions), index, *links, tokens


num_own_trees = 0


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
    topk=-1,
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


def top_k_top_p_min_p_sampling_from_probs_torch(
    probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions
):
    assert not need_min_p_sampling
    ordered, tokens = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered[(torch.arange(VOCAB) >= top_ks[:, None]) | (before > top_ps[:, None])] = 0.0
    places = sampling_from_probs_torch(ordered, sampling_seed, positions).long()
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

    def init_cuda_graph_state(self, max_bs, max_num_tokens, kv_indices_buf=None, cuda_graph_num_kv_splits_buf=None):
        if self._has_mask:
            self.cuda_graph_custom_mask = torch.zeros(max_num_tokens * self.max_context_len, dtype=torch.uint8)


# Requests


class Request:
    def __init__(self, rid, prompt, **params):
        usual = dict(temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, sampling_seed=None, logit_bias=None, length=40)
        self.rid, self.origin_input_ids, self.req_pool_idx = rid, array("q", prompt), None
        self.sampling_params = SimpleNamespace(**usual | params)
        self.ids = [prompt[0]]  # all that the model has given; the first token is the prefill's
        self.output_ids = array("q")  # what the scheduler knows of it
        self.is_read_by_head = True
        self.drafts = (torch.zeros(3), torch.zeros(3, dtype=torch.int64))  # the first level of the next tree

    def process(self, num_known):
        """The scheduler takes in results until it knows so many tokens."""
        self.output_ids.extend(self.ids[len(self.output_ids) : num_known])

    def finished(self):
        return len(self.output_ids) >= self.sampling_params.length


def _kv_slots(rows, lengths, count):
    return (CONTEXT * rows[:, None] + lengths[:, None] + torch.arange(count)).flatten()


def batch_of(requests, mask_buffer=None, is_deterministic=False, prefix_lens=None):
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
    lengths = torch.tensor([len(each.origin_input_ids) + len(each.ids) - 1 for each in requests], dtype=torch.int64)
    rows = torch.tensor([each.req_pool_idx or 0 for each in requests], dtype=torch.int64)
    drafts = [torch.stack(column) for column in zip(*(each.drafts for each in requests), strict=True)]
    read = [
        range(CONTEXT * int(row) + first, CONTEXT * int(row) + int(end))
        for row, first, end in zip(rows, prefix_lens or [], lengths, strict=False)
    ]
    return SimpleNamespace(
        reqs=requests,
        seq_lens=lengths,
        req_pool_indices=rows,
        out_cache_loc=torch.tensor([slot for part in read for slot in part], dtype=torch.int64),
        sampling_info=info,
        spec_info=EagleDraftInput(torch.tensor([request.ids[-1] for request in requests]), 1, 1, *drafts),
        mask_buffer=mask_buffer,
        forward_mode=SimpleNamespace(is_idle=lambda: not requests, is_extend=lambda: prefix_lens is not None),
        is_extend_in_batch=False,
        prefix_lens=prefix_lens,
    )


class GraphSharedOutput:
    """The logits of all graphs."""

    max_rows = 24

    def __init__(self):
        self._buffer = torch.full((self.max_rows, VOCAB), torch.nan)

    def get_logits_buffer(self, vocab_size, *, rows):
        assert vocab_size == VOCAB and rows <= self.max_rows
        return self._buffer[:rows]


def target_worker(head_name="LlamaForCausalLMEagle3"):
    runner = SimpleNamespace(attn_backend=Backend("first"), decode_cuda_graph_runner="first")
    runner.graph_shared_output = GraphSharedOutput()
    config = SimpleNamespace(vocab_size=VOCAB)
    return SimpleNamespace(model_config=config, head_name=head_name, model_runner=runner)
