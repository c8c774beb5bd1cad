"""The SGLang plugin's Triton kernels, on a GPU or in Triton's interpreter, against plain PyTorch."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")

import sglang_double
from graft.integrations.sglang import kernels, plugin

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Verify:
    """The arguments of SGLang's attention for trees of D places: texts of these lengths in slots of any order."""

    def __init__(self, lengths, num_places, heads, kv_heads, head_dim, dtype=torch.float32):
        torch.manual_seed(1)
        num_tokens, num_slots = len(lengths) * num_places, sum(lengths) + 9
        self.lengths, self.num_places = lengths, num_places
        self.query = torch.randn(num_tokens, heads, head_dim).to(dtype)
        self.new = torch.randn(2, num_tokens, kv_heads, head_dim).to(dtype)
        self.cache = torch.randn(2, num_slots, kv_heads, head_dim).to(dtype)
        self.starts = torch.tensor([0, *lengths]).cumsum(0).int()
        self.slots = torch.randperm(num_slots)[: sum(lengths)]
        self.cache[:, [slot for slot in range(num_slots) if slot not in set(self.slots.tolist())]] = torch.nan
        trees = torch.rand(len(lengths), num_places, num_places).lt(0.4).tril() | torch.eye(num_places).bool()
        ones = [torch.ones(num_places, length, dtype=torch.bool) for length in lengths]
        self.seen = [torch.cat(pair, dim=1) for pair in zip(ones, trees, strict=True)]
        self.mask = torch.cat([each.flatten() for each in self.seen]).to(torch.uint8)
        self.mask_starts = torch.tensor([0, *map(torch.numel, self.seen)]).cumsum(0)
        self.token_starts = torch.arange(0, num_tokens + 1, num_places)
        self.out = torch.full_like(self.query, torch.nan)

    def on_device(self):
        """The arguments of our kernel, but for the scale."""
        tensors = (self.query, *self.new, self.out, *self.cache, self.starts, self.slots, self.mask, self.mask_starts)
        moved = [each.to(DEVICE) for each in tensors]
        self.out = moved[3]
        return (*moved, self.num_places)

    def call(self, double, **layer):
        """What SGLang's triton backend is asked for, and the backend: keys and values are views of one product."""
        query, new_keys, new_values, _, keys, values, starts, slots, mask, mask_starts, num_places = self.on_device()
        heads, kv_heads, head_dim = query.shape[1], *keys.shape[1:]
        joined = torch.cat([query, new_keys, new_values], dim=1).flatten(1)
        sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        query, new_keys, new_values = joined.split(sizes, dim=1)
        backend = double.TritonAttnBackend()
        backend.forward_metadata = SimpleNamespace(
            max_extend_len=num_places,
            kv_indptr=torch.cat([starts, starts[:1]]),  # a buffer that is longer
            kv_indices=slots,
            qo_indptr=self.token_starts.to(DEVICE),
            custom_mask=mask,
            mask_indptr=mask_starts,
            swa_out_cache_loc=None,
            out_cache_loc_full_physical=None,
        )
        backend.token_to_kv_pool = Pool(keys, values)
        usual = dict(sliding_window_size=-1, is_cross_attention=False, attn_type=SimpleNamespace(value="decoder"))
        usual |= dict(k_scale=None, k_scale_float=None, v_scale=None, v_scale_float=None)
        usual |= dict(xai_temperature_len=-1, logit_cap=0.0, logit_capping_method="tanh")
        usual |= dict(tp_q_head_num=heads, qk_head_dim=head_dim, v_head_dim=head_dim, scaling=head_dim**-0.5)
        attention = SimpleNamespace(**usual | layer, layer_id=3)
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_target_verify=lambda: True), out_cache_loc=torch.arange(len(query))
        )
        shape = (-1, kv_heads, head_dim)
        return backend, [query, new_keys.view(shape), new_values.view(shape), attention, batch]

    def expected(self, cap=0.0):
        """By a plain softmax, row by row."""
        found, group, size = [], self.query.shape[1] // self.new.shape[2], self.num_places
        for row, seen in enumerate(self.seen):
            own = slice(row * size, (row + 1) * size)
            text = self.slots[self.starts[row] : self.starts[row + 1]]
            key, value = (
                torch.cat([old[text], new[own]]).repeat_interleave(group, dim=1).double()
                for old, new in zip(self.cache, self.new, strict=True)
            )
            scores = torch.einsum("dhe,khe->hdk", self.query[own].double(), key) * self.query.shape[2] ** -0.5
            scores = cap * torch.tanh(scores / cap) if cap else scores
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            found.append(torch.einsum("hdk,khe->dhe", weights, value))
        return torch.cat(found)


HALF = torch.float16


@pytest.mark.parametrize(
    ("lengths", "num_places", "heads", "kv_heads", "head_dim", "dtype", "programs"),
    [
        ([300], 48, 8, 2, 64, torch.float32, None),  # many splits, several tiles
        ([0, 130, 700], 5, 6, 3, 32, torch.float32, None),  # other lengths than whole splits, and no text at all
        ([17, 900], 1, 4, 1, 48, HALF, None),  # no trees; head sizes that are no powers of two
        ([20, 129], 70, 2, 2, 16, torch.float32, None),  # trees of more than a block
        ([7, 300], 2, 8, 8, 32, torch.float32, 1),  # one split
        ([40, 3], 6, 14, 2, 24, HALF, None),  # groups of seven query heads
    ],
)
def test_places_attend_to_the_text_and_to_what_their_mask_shows(
    lengths, num_places, heads, kv_heads, head_dim, dtype, programs, monkeypatch
):
    monkeypatch.setattr(kernels, "PROGRAMS", programs or kernels.PROGRAMS)
    verify = Verify(lengths, num_places, heads, kv_heads, head_dim, dtype)
    kernels.verify_attention(*verify.on_device(), head_dim**-0.5)
    out = verify.out
    assert torch.allclose(out.cpu().double(), verify.expected(), atol=1e-5 if dtype is torch.float32 else 4e-3)


class Pool:
    """SGLang's KV cache."""

    def __init__(self, keys, values):
        self._keys, self._values = keys, values
        self.stored = []

    def get_key_buffer(self, layer_id):
        assert layer_id == 3
        return self._keys

    def get_value_buffer(self, layer_id):
        return self._values

    def set_kv_buffer(self, layer, where, keys, values):
        self.stored.append((where.loc, keys, values))


@pytest.fixture
def double(monkeypatch):
    """The stand-in for SGLang with the plugin's hooks."""
    made = sglang_double.install(monkeypatch)
    monkeypatch.setenv("GRAFT_SGLANG", "1")
    plugin.register()
    made.HookRegistry.apply_hooks()
    return made


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_sglangs_verify_is_computed_by_our_kernel(double, cap):
    verify = Verify([50, 131], 9, 4, 2, 32)
    backend, arguments = verify.call(double, logit_cap=cap, k_scale=torch.ones(1), k_scale_float=1.0)
    out = backend.forward_extend(*arguments)
    assert torch.allclose(out.view(verify.out.shape).cpu().double(), verify.expected(cap), atol=1e-5)
    ((where, keys, values),) = backend.token_to_kv_pool.stored
    assert where is arguments[4].out_cache_loc and keys is arguments[1] and values is arguments[2]
    backend.forward_extend(*arguments, save_kv_cache=False)
    assert len(backend.token_to_kv_pool.stored) == 1, "a kernel before it has stored them"


OTHERS = {
    "a window": {"sliding_window_size": 64},
    "scaled keys": {"k_scale": torch.ones(1), "k_scale_float": 0.5},
    "another cap": {"logit_capping_method": "clip"},
    "other text": {"is_cross_attention": True},
    "values of another size": {"v_head_dim": 16},
}
CHANGED = ["a prompt", "no mask", "other lengths", "another dtype of keys", "long heads", "sinks", "pages", "exact"]


@pytest.mark.parametrize("what", [*CHANGED, *OTHERS])
def test_what_our_kernel_does_not_know_is_left_to_sglang(double, what):
    verify = Verify([50, 131], 9, 4, 2, 128 if what == "long heads" else 32)
    backend, arguments = verify.call(double, **OTHERS.get(what, {}))
    more, known = {}, backend.forward_metadata
    if what == "a prompt":
        arguments[4].forward_mode.is_target_verify = lambda: False
    if what == "no mask":
        known.custom_mask = None
    if what == "other lengths":
        known.max_extend_len = 10
    if what == "another dtype of keys":
        backend.token_to_kv_pool._keys = backend.token_to_kv_pool._keys.half()
    if what == "sinks":
        more = {"sinks": torch.zeros(4)}
    if what == "pages":
        backend.page_size = 16
    if what == "exact":
        backend.enable_deterministic = True
    assert backend.forward_extend(*arguments, **more) == "SGLang's own"
    assert not backend.token_to_kv_pool.stored


# Rows, drafts and trees


def drafted_by(topk, num_steps, num_rows, seed):
    """Drafts of SGLang's loop in its flat ids; by row also the nodes by path: {path: q}."""
    rng = torch.Generator().manual_seed(seed)
    tokens, scores, beams, nodes = [], [], [], []
    for _ in range(num_rows):
        q, new = torch.rand(topk, generator=rng).tolist(), torch.randperm(1000, generator=rng)[:topk].tolist()
        own_tokens, own_scores, own_beams = list(new), list(q), [-1, *range(topk)]
        known = {(token,): own for token, own in zip(new, q, strict=True)}
        frontier = [(own, (token,)) for token, own in zip(new, q, strict=True)]
        for _ in range(1, num_steps):
            first, level = len(own_tokens), []
            for score, path in frontier:
                q, new = torch.rand(topk, generator=rng).tolist(), torch.randperm(1000, generator=rng)[:topk].tolist()
                own_tokens += new
                own_scores += [score * own for own in q]
                known |= {(*path, token): own for token, own in zip(new, q, strict=True)}
                level += [(score * own, (*path, token)) for token, own in zip(new, q, strict=True)]
            order = sorted(range(len(level)), key=lambda place: -level[place][0])[:topk]
            own_beams += [first + place for place in order]
            frontier = [level[place] for place in order]
        for column, own in zip((tokens, scores, beams, nodes), (own_tokens, own_scores, own_beams, known), strict=True):
            column.append(own)
    return kernels.Drafted(*(torch.tensor(part, device=DEVICE) for part in (tokens, scores, beams))), nodes


@pytest.mark.parametrize(("topk", "num_steps"), [(2, 3), (3, 2), (5, 1)])
def test_levels_have_the_nodes_of_sglangs_loop_with_their_own_parents(topk, num_steps):
    drafted, nodes = drafted_by(topk, num_steps, 3, seed=topk)
    num_rows, num_nodes = drafted.tokens.shape
    has_head, slots = torch.tensor([0, 0, 1, 1, 0, 1]), torch.tensor([2, 4, 3])  # the second row has no head
    levels = [torch.full((num_rows * num_nodes,), -1, device=DEVICE).to(kind) for kind in (torch.int, torch.int)]
    levels.append(torch.full((num_rows * num_nodes,), -1.0, device=DEVICE))
    kernels.split_levels(drafted, topk, has_head.int().to(DEVICE), slots.int().to(DEVICE), tuple(levels))
    first, paths = 0, [[()] for _ in range(num_rows)]  # by number in the drafted tree
    for size in [topk, *[topk * topk] * (num_steps - 1)]:
        parts = [part[first : first + num_rows * size].view(num_rows, size).tolist() for part in levels]
        first += num_rows * size
        for row, (tokens, parents, q) in enumerate(zip(*parts, strict=True)):
            paths[row] += [(*paths[row][parent], token) for token, parent in zip(tokens, parents, strict=True)]
            expected = [0.0 if row == 1 else nodes[row][path] for path in paths[row][-size:]]
            assert q == pytest.approx(expected, rel=1e-5)
    assert first == num_rows * num_nodes and [set(own[1:]) for own in paths] == [set(own) for own in nodes]


@pytest.mark.parametrize("has_texts", [True, False])
def test_trees_are_written_where_a_verify_reads_them(has_texts):
    """Each place sees its path, and the links lead SGLang's walk down it."""
    parents = [[-1, 0, 0, 1, 3, 2, 1], [-1, 0, 1, 2], [-1], [], []]
    num_rows, num_places, lengths = 5, 7, [4, 0, 70, -1, -1]  # the last two are padding
    columns = torch.zeros(6, 40, dtype=torch.int32)
    columns[4] = num_rows
    depths = []
    for row, own in enumerate(parents):
        deep = [0]
        for parent in own[1:]:
            deep.append(deep[parent] + 1)
        depths.append(deep)
        at = slice(row * num_places, row * num_places + len(own))
        columns[0, at] = torch.arange(len(own), dtype=torch.int32) + 10 * row
        columns[1, at] = torch.tensor(own).clamp(min=0).int()
        columns[3, at], columns[4, at] = torch.tensor(deep).int(), row
    numbers = torch.full((5, num_rows, num_places), -9, dtype=torch.int64, device=DEVICE)
    size = num_places * (74 * has_texts + num_rows * num_places)
    mask = torch.ones(size + 5, dtype=torch.bool, device=DEVICE)
    kernels.place_trees(columns.to(DEVICE), torch.tensor(lengths, device=DEVICE), numbers, mask, has_texts)
    tokens, positions, index, children, siblings = numbers.cpu().tolist()
    start = 0
    for row, (own, length) in enumerate(zip(parents, [4, 0, 70, 0, 0], strict=True)):
        assert index[row] == list(range(row * num_places, (row + 1) * num_places))
        for place in range(num_places):
            path, is_node = [place], place < len(own)
            while is_node and own[path[-1]] >= 0:
                path.append(own[path[-1]])
            before = length if has_texts else 0
            seen = mask[start : start + before + num_places].nonzero().flatten().tolist()
            assert seen == [*range(before), *(before + node for node in sorted(path))]
            assert positions[row][place] == length + len(path) - 1
            assert tokens[row][place] == (10 * row + place if is_node else 0)
            below = [node for node in range(1, len(own)) if own[node] == place]
            beside = [node for node in range(place + 1, len(own)) if is_node and place and own[node] == own[place]]
            assert children[row][place] == min(below, default=-1) and siblings[row][place] == min(beside, default=-1)
            start += before + num_places
    assert mask[start:].all()


# A round whose launches only compile: what it leaves in memory is zeros.
COMPILED = """
from functools import partial
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

TYPES = {torch.int32: "i32", torch.int64: "i64", torch.float32: "fp32", torch.float64: "fp64", torch.uint8: "u8"}
compiled = set()

def type_of(value, annotation=""):
    if isinstance(value, tuple):
        return value._make(map(type_of, value))
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i64" if "int64" in annotation else "i32"

def run(kernel, *given, grid, warmup, **named):
    values = {each.name: each.default for each in kernel.params} | dict(zip(kernel.arg_names, given)) | named
    sizes = {each.name: values[each.name] for each in kernel.params if each.is_constexpr or values[each.name] is None}
    others = (each for each in kernel.params if each.name not in sizes)
    kinds = {each.name: type_of(values[each.name], str(each.annotation)) for each in others}
    source = ASTSource(fn=kernel, signature=kinds | dict.fromkeys(sizes, "constexpr"), constexprs=sizes)
    options = {name: value for name, value in named.items() if name not in kernel.arg_names}
    assert compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
    compiled.add(kernel.fn.__name__)

JITFunction.run = run
from test_sglang import DeviceRound, Drafted, Rows, made, request, torch, trees, triton_kernels

trees.DeviceRound = partial(DeviceRound, kernels=triton_kernels)
now, rows = made(), torch.tensor([2, 3])
now.see([request(2, range(8)), request(3, range(8), top_k=9)])
now.load(Rows(rows, rows, rows), 4)
now.propose(Drafted(torch.zeros(2, 12).long(), torch.zeros(2, 12), torch.zeros(2, 7).long()), 4)
now.arrays(2, 4, None, 16, True, True)
now.rank_successors(torch.zeros(8, 40), 4)
now.draw(torch.zeros(8, 40), torch.zeros(8).long(), torch.zeros(8).long(), rows, True)
now.finish(2, 4, torch.zeros(8).long())
print(len(compiled))
"""


@pytest.mark.slow
def test_kernels_compile_for_a_gpu():
    """Triton's interpreter takes what its compiler refuses: a name that has two types, for instance."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parent, capture_output=True, text=True)
    if "ptxas" in done.stderr or "libtriton" in done.stderr:
        pytest.skip("this Triton cannot compile for NVIDIA GPUs")
    assert done.returncode == 0 and int(done.stdout) > 15, done.stderr
