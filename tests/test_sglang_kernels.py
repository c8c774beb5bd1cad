"""The SGLang plugin's Triton kernels, on a GPU or in Triton's interpreter, against plain PyTorch."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")

import sglang_double
from graft.integrations.sglang import kernels, plugin
from graft.integrations.sglang.trees import verify_arrays
from graft.spec_decode.tree import TreeLinks
from test_kernels import DEVICE


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

    def arguments(self):
        """As SGLang's triton backend gives them."""
        tensors = (self.query, *self.new, self.out, *self.cache, self.token_starts, self.starts, self.slots, self.mask)
        moved = [each.to(DEVICE) for each in tensors]
        self.out = moved[3]
        return [*moved, True, self.mask_starts.to(DEVICE), self.num_places, 1.0, 1.0]

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
    monkeypatch.setattr(kernels, "_PROGRAMS", programs or kernels._PROGRAMS)
    verify = Verify(lengths, num_places, heads, kv_heads, head_dim, dtype)
    query, *arrays, _, _, mask, _, starts, places, _, _ = verify.arguments()
    (new_keys, new_values, out, keys, values), key_starts = arrays[:5], verify.starts.to(DEVICE)
    cached = (keys, values, key_starts, verify.slots.to(DEVICE))
    kernels.verify_attention(query, new_keys, new_values, out, *cached, mask, starts, places, head_dim**-0.5)
    assert torch.allclose(out.cpu().double(), verify.expected(), atol=1e-5 if dtype is torch.float32 else 4e-3)


@pytest.fixture
def attend(monkeypatch):
    """SGLang's function with the plugin's hook."""
    double = sglang_double.install(monkeypatch)
    monkeypatch.setenv("GRAFT_SGLANG", "1")
    plugin.register()
    double.HookRegistry.apply_hooks()
    return double.extend_attention_fwd


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_sglangs_verify_is_computed_by_our_kernel(attend, cap):
    verify = Verify([50, 131], 9, 4, 2, 32)
    more = {"sliding_window_size": -1, "sinks": None, "window_kv_offsets": None, "page_size": 1}
    assert attend(*verify.arguments(), verify.query.shape[2] ** -0.5, logit_cap=cap, **more) is None
    assert torch.allclose(verify.out.cpu().double(), verify.expected(cap), atol=1e-5)


OTHERS = {
    "a window": {"sliding_window_size": 64},
    "sinks": {"sinks": torch.zeros(4)},
    "pages": {"page_size": 16},
    "by name": {"sm_scale": 0.5, "skip_prefix": True},
}
CHANGED = ["a prompt", "other lengths", "scaled keys", "another dtype of keys", "long heads"]


@pytest.mark.parametrize("what", [*CHANGED, *OTHERS])
def test_what_our_kernel_does_not_know_is_left_to_sglang(attend, what):
    arguments = Verify([50, 131], 9, 4, 2, 128 if what == "long heads" else 32).arguments()
    if what == "a prompt":
        arguments[9] = None
    if what == "other lengths":
        arguments[12] = 10
    if what == "scaled keys":
        arguments[13] = 0.5
    if what == "another dtype of keys":
        arguments[4] = arguments[4].half()
    assert attend(*arguments, **OTHERS.get(what, {})) == "SGLang's own"


def test_trees_are_written_where_a_verify_reads_them():
    torch.manual_seed(2)
    num_rows, num_places, lengths = 3, 5, torch.tensor([4, 0, 70])
    links = TreeLinks.empty(num_rows, num_places)
    links.numbers.copy_(torch.randint(0, 5, links.numbers.shape))
    links.mask.copy_(torch.rand(links.mask.shape) < 0.5)
    expected = verify_arrays(links, lengths, int(lengths.sum()), None)
    size = num_rows * num_places
    tokens, positions = (torch.full((size + more,), -1, device=DEVICE) for more in (0, 4))
    mask = torch.ones(len(expected.custom_mask) + 11, dtype=torch.bool, device=DEVICE)
    numbers, seen = (part.to(DEVICE) for part in links)
    kernels.place_trees(numbers, seen, lengths.to(DEVICE), tokens, positions, mask)
    assert tokens.cpu().equal(expected.draft_token)
    assert positions[:size].cpu().equal(expected.positions) and (positions[size:] == -1).all()
    assert mask[: len(expected.custom_mask)].cpu().equal(expected.custom_mask)
    assert mask[len(expected.custom_mask) :].all()
