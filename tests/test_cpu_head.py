"""EAGLE-3 heads in fused layers on a CPU: what the head's own modules compute, and never with what has changed."""

import copy
from dataclasses import replace

import pytest
import torch

from graft.drafters.drafter import Passes, TreeSettings
from graft.drafters.eagle3.cpu_head import why_not
from graft.drafters.eagle3.drafter import Eagle3Drafter
from graft.model import TargetRunner, cpu_layers, cpu_linear
from graft.model.kv_cache import PAGE
from heads import make_head
from test_cpu_layers import cpu_sped, in_place, moved, run_as_on, unseen
from test_cpu_linear import CAPABILITIES, needs_kernel
from tiny import VOCAB, tiny_model

pytestmark = needs_kernel
TREE = TreeSettings(depth=4, topk=3, total_token=9)
PASSES = 4
PLAIN = {"norm_output": False}
VARIANTS = [
    PLAIN,
    *({name: True} for name in ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output", "head_norms")),
]


def fused_and_plain(head):
    """A drafter whose head cannot run by its own modules, and one whose head cannot run otherwise."""

    def refuse(*args):
        raise AssertionError("the head's modules ran it")

    ours = cpu_sped(copy.deepcopy(head))
    ours.qkv = refuse
    return Eagle3Drafter(ours, TREE), Eagle3Drafter(head, TREE)


class Texts:
    """Rows of random features and tokens that a drafter reads, and its drafts for them."""

    def __init__(self, drafter, num_rows=1):
        self.drafter, self.random = drafter, torch.Generator().manual_seed(3)
        self.pool = TargetRunner(tiny_model()).pool
        cache = TargetRunner(tiny_model(), pool=self.pool).open(num_rows, 1)
        self.state = drafter.open(cache)

    def extend(self, counts):
        for row, count in zip(self.state.rows, counts, strict=True):
            width = self.drafter.head.fc.in_features
            row.pending.append(torch.randn(count, width, generator=self.random))
            row.following += torch.randint(VOCAB, (count,), generator=self.random).tolist()

    @torch.no_grad()
    def read(self, counts):
        self.extend(counts)
        self.drafter.refresh(self.pool, self.state.rows)

    def draft(self, keep=24, before_pass=lambda number: None):
        """All levels; each row's hidden state; keys and values of the texts and of the drafts."""
        levels, num_rows = [], len(self.state.rows)
        asked = Passes.scratch(self.pool, self.state, [row.row for row in self.state.rows], PASSES)

        def add_level(number, *level):
            levels.append([part.clone() for part in level])
            before_pass(number + 1)

        before_pass(0)
        self.drafter.run_passes(replace(asked, keep=keep), add_level)
        ends = [row.length + (PASSES - 1) * min(TREE.topk, keep) for row in self.state.rows]
        cache = self.drafter.cache_writing_at(self.pool, [])
        places = zip(self.state.rows, ends, strict=True)
        slots = cache.slots_of([(row.row, place) for row, end in places for place in range(end)])
        stored = [each[:, slots].clone() for each in cache.store.stored]
        assert len(levels) == PASSES and len(levels[0][0]) == num_rows * min(TREE.topk, keep)
        return [*levels, *(row.hidden for row in self.state.rows), *stored]


def drafts(drafter, lengths, pending=None, keep=24):
    """Drafts after texts of these lengths, read in chunks in turn, and further entries that no pass has run yet."""
    texts = Texts(drafter, len(lengths))
    chunk = cpu_linear.MAX_TOKENS // len(lengths)
    for start in range(0, max(lengths), chunk):
        texts.read([min(max(length - start, 0), chunk) for length in lengths])
    if pending is not None:
        texts.extend(pending)
    return texts.draft(keep)


def assert_alike(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize(
    "lengths, pending", [((9,), (1,)), ((PAGE + 3, 2, 2 * PAGE - 4), (3, 5, 1)), ((12, 7), (4, 0))]
)
def test_a_fused_head_drafts_what_its_modules_draft(changes, lengths, pending):
    ours, theirs = fused_and_plain(make_head(tiny_model(), **changes))
    assert_alike(drafts(ours, lengths, pending), drafts(theirs, lengths, pending))


@pytest.mark.parametrize("keep", [1, 24])
def test_beams_of_kept_nodes(keep):
    ours, theirs = fused_and_plain(make_head(tiny_model(), fc_norm=True, norm_output=True))
    assert_alike(drafts(ours, (11, 4), (2, 3), keep), drafts(theirs, (11, 4), (2, 3), keep))


@pytest.mark.parametrize("head_dim", [6, 40, 64])
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("has_threads", [True, False])
def test_odd_sizes_on_every_processor_with_and_without_threads(head_dim, capability, has_threads, monkeypatch):
    run_as_on(capability, monkeypatch, has_threads)
    sizes = {"head_dim": head_dim, "intermediate_size": 37, "hidden_size": 28, "own_embedding": True}
    head = make_head(tiny_model(), **sizes, norm_before_residual=True, fc_norm=True, target_layers=(0, 1))
    ours, theirs = fused_and_plain(head)
    assert_alike(drafts(ours, (11, 4), (5, 2)), drafts(theirs, (11, 4), (5, 2)))


def test_long_chunks_are_left_to_the_modules():
    head = make_head(tiny_model(), fc_norm=True)
    ours, theirs = Texts(Eagle3Drafter(cpu_sped(copy.deepcopy(head)), TREE)), Texts(Eagle3Drafter(head, TREE))
    for texts in (ours, theirs):
        texts.read([cpu_linear.MAX_TOKENS + 1])
    assert ours.drafter._fused.layers is not None
    assert_alike(ours.draft(), theirs.draft())


@pytest.mark.parametrize("change", [in_place, unseen, moved])
@pytest.mark.parametrize("part", ["fc", "fc_norm.1", "norm", "midlayer.mlp.up_proj", "midlayer.hidden_norm"])
def test_weights_that_change_between_passes_are_used_at_once(change, part):
    head = make_head(tiny_model(), fc_norm=True, norm_output=True)
    results = []
    for each in (cpu_sped(copy.deepcopy(head)), head):
        texts = Texts(Eagle3Drafter(each, TREE))
        texts.read([9])
        assert (texts.drafter._fused.layers is not None) == (each is not head)

        def before(number, each=each):
            if number == 2:
                change(each.get_submodule(part).weight)

        results.append([texts.draft(before_pass=before)])
        texts.extend([3])
        results[-1].append(texts.draft())
    assert_alike(*results)


@pytest.mark.parametrize("context", [torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_autocast_and_gradients_are_left_to_the_modules(context):
    ours, _ = fused_and_plain(make_head(tiny_model(), **PLAIN))
    texts = Texts(ours)
    texts.read([3])
    inputs = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, 64)
    with torch.no_grad(), context(), pytest.raises(AssertionError, match="the head's modules ran it"):
        ours._outputs(ours.cache_writing_at(texts.pool, [(texts.state.rows[0], 3)]), None, *inputs)


def window(head):
    return make_head(tiny_model(), sliding_window=4)


def hook(head):
    head.midlayer.mlp.register_forward_hook(lambda module, inputs, output: output * 2)


def replace_activation(head):
    head.midlayer.mlp.act_fn = torch.nn.GELU()


def replace_norm(head):
    head.norm = torch.nn.RMSNorm(head.config.hidden_size, eps=0.1)


def replace_product(head):
    head.midlayer.self_attn.o_proj = torch.nn.Linear(64, 64, bias=False)


def add_bias(head):
    head.fc.bias = torch.nn.Parameter(torch.ones(head.fc.out_features))


def shorten(head):
    head.double()


@pytest.mark.parametrize("change", [window, hook, replace_activation, replace_norm, replace_product, add_bias, shorten])
def test_heads_that_are_not_as_usual_are_left_to_their_modules(change):
    head = cpu_sped(make_head(tiny_model(), fc_norm=True))
    drafter = Eagle3Drafter(head, TREE)
    Texts(drafter)
    assert drafter._fused.layers is not None
    other = change(head)
    if other is not None:
        assert why_not(cpu_sped(other)) is not None
        return
    drafter._fused.refresh()
    assert drafter._fused.layers is None


def test_heads_whose_products_are_torchs_and_a_library_that_was_not_built(monkeypatch):
    head = make_head(tiny_model(), fc_norm=True)
    assert why_not(head) is not None
    ours, theirs = Eagle3Drafter(cpu_sped(copy.deepcopy(head)), TREE), Eagle3Drafter(head, TREE)
    for module in (cpu_layers, cpu_linear):
        monkeypatch.setattr(module, "library", lambda: None)
    found = drafts(ours, (9,), (2,))
    assert ours._fused.layers is None
    assert_alike(found, drafts(theirs, (9,), (2,)))
