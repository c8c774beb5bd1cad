"""Kernels behind a gate, on a GPU or in Triton's interpreter: shut, they write nothing; open, they change no bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed, and without it there are no kernels")


from captured_parts import DEVICE, PROMPT, SmallDrafter, Text
from graft.drafters import head_drafter
from graft.drafters.drafter import Passes, TreeSettings
from graft.drafters.eagle3 import kernels as eagle3_kernels
from graft.drafters.head_drafter import HeadDrafter
from graft.model.captures import Captures
from graft.model.kernels import attention as attention_kernels
from graft.model.kernels import gate, overlap
from graft.model.kernels import layer as layer_kernels
from graft.model.kernels import rotary as rotary_kernels
from graft.model.kernels import topk as topk_kernels
from graft.model.kernels.eight_bits import EIGHT_BITS, in_eight_bits
from graft.model.kernels.matmul import EightBits, Products
from graft.model.layout import Layout
from graft.tree.device.buffers import Beams
from tiny import tiny_model

UNWRITTEN = 10**6  # what new memory holds: no index of anything


def flag(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int32, device=DEVICE)


def ints(*numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(math.prod(shape))).to(DEVICE)


def unwritten(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, torch.finfo(EIGHT_BITS).max if tensor.dtype is EIGHT_BITS else UNWRITTEN)


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [part.cpu().contiguous().view(torch.uint8).numpy().tobytes() for part in tensors]


@pytest.fixture
def made(monkeypatch) -> Iterator[list[Tensor]]:
    """The tensors that the kernels' callers make for their outputs, in order. They are filled with `UNWRITTEN`."""
    tensors: list[Tensor] = []

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make_filled(*args: Any, **options: Any) -> Tensor:
            tensor = make(*args, **options)
            tensor.copy_(unwritten(tensor))
            if tensor.numel():  # Triton's interpreter makes empty ones
                tensors.append(tensor)
            return tensor

        return make_filled

    monkeypatch.setattr(Tensor, "new_empty", filled(Tensor.new_empty))
    monkeypatch.setattr(torch, "empty_like", filled(torch.empty_like))
    yield tensors


# Single kernels. Each function returns the tensors that a launch writes besides new ones, and the launch.

Case = tuple[list[Tensor], Callable[[], Any]]


def product() -> Case:
    x, weight, bias = numbers(3, 64), numbers(128, 64), numbers(128)
    return [], lambda: Products(torch.device(DEVICE)).multiply(x, weight, bias)


def activated_product() -> Case:
    x, weight = numbers(3, 64), numbers(128, 64)
    return [], lambda: Products(torch.device(DEVICE)).multiply(x, weight, is_gated=True)


def product_in_8_bits() -> Case:
    x, weight = numbers(3, 64).to(EIGHT_BITS), EightBits.of(numbers(128, 64).bfloat16())
    return [], lambda: Products(torch.device(DEVICE)).multiply(x, weight)


def in_8_bits() -> Case:
    return [], lambda: in_eight_bits(numbers(3, 40))


def activate() -> Case:
    return [], lambda: layer_kernels.activate(numbers(3, 40))


def add_norm() -> Case:
    return [], lambda: layer_kernels.add_norm(numbers(3, 40), numbers(2, 3, 40)[0], numbers(40), 1e-5)


def norm() -> Case:
    return [], lambda: layer_kernels.add_norm(numbers(3, 40), None, numbers(40), 1e-5)


def add_norm_in_place() -> Case:
    total, normed = numbers(2, 3, 40)
    return [total, normed], lambda: layer_kernels.add_norm(total, normed, numbers(40), 1e-5, total, normed)


def tree() -> Layout:
    """A root and its two children after 40 tokens, and a chain of two tokens after 33."""
    return Layout(
        rows=ints(0, 0, 0, 1, 1),
        places=ints(0, 1, 2, 0, 1),
        depths=ints(0, 1, 1, 0, 1),
        paths=ints([0, 0], [0, 1], [0, 2], [0, 0], [0, 0]),
        starts=ints(0, 3),
        counts=ints(3, 2),
        lengths=ints(40, 33),
        table_rows=ints(1, 0),
        tables=ints([1, 1], [2, 2]),
        max_context=40,
    )


def lay_out() -> Case:
    layout = tree()
    parents, places = ints(0, 0, 0, 0, 0), (layout.places, layout.depths, layout.starts, layout.rows)
    return [], lambda: layer_kernels.lay_out(parents, *places, 2)


def rotate_and_store() -> Case:
    qkv, keys, values = numbers(5, 6 * 16), *numbers(2, 192, 1, 16)
    tables = numbers(50, 8), numbers(8, 50).T.contiguous()
    return [qkv, keys, values], lambda: rotary_kernels.rotate_and_store(qkv, keys, values, tree(), *tables)


TILES = attention_kernels.Tiles(
    rows=16, keys=16, short_split=32, border=64, long_split=48, combined=64, prefix_stages=2
)


def plan() -> Case:
    return [], lambda: attention_kernels.plan(tree(), 2, TILES)


def attention() -> Case:
    layout, query, (keys, values) = tree(), numbers(5, 4, 16), numbers(2, 192, 2, 16)
    planned = attention_kernels.plan(layout, 2, TILES)
    launch = attention_kernels.tree_attention
    return [], lambda: launch(query, keys, values, layout, planned, tiles=TILES)


def highest() -> Case:
    return [], lambda: topk_kernels.highest(numbers(2, 1030), 3)


def enter() -> Case:
    inputs = (ints(1, 8, 0), numbers(9, 12), numbers(6, 12), ints(2, 0, 4), (numbers(12), numbers(12)))
    return [], lambda: eagle3_kernels.enter(*inputs, 1e-5, False, torch.float32)


def keep_last() -> Case:
    root = numbers(4, 12)
    return [root], lambda: eagle3_kernels.keep_last(numbers(5, 12), ints(0, 2), ints(2, 3), ints(3, 1), root)


def take_roots() -> Case:
    hidden = numbers(6, 12)
    return [hidden], lambda: eagle3_kernels.take_roots(numbers(4, 12), ints(3, 1), hidden, 3)


def spread() -> Case:
    beams = Beams.make(1, 2, 3, torch.device(DEVICE))
    levels = torch.zeros(2, 3, 4, dtype=torch.int32, device=DEVICE)

    def launch() -> None:
        to_target = torch.arange(9, device=DEVICE)
        for is_first, ids in ((True, ints([4, 2])), (False, ints([4, 2], [1, 7]))):
            logits, totals = numbers(*ids.shape), numbers(len(ids))
            eagle3_kernels.spread(ids, logits, totals, to_target, beams, levels[int(is_first)], 3, is_first)

    return [levels, *vars(beams).values()], launch


KERNELS = [product, activated_product, activate, add_norm, norm, add_norm_in_place, lay_out, rotate_and_store]
KERNELS += [plan, attention, highest, enter, keep_last, take_roots, spread, product_in_8_bits, in_8_bits]


@pytest.mark.parametrize("case", KERNELS, ids=lambda case: case.__name__)
def test_a_kernel_behind_a_gate_writes_nothing_or_the_same_bits(case, made):
    results = []
    for gates in (nullcontext(), gate.under(flag(1)), gate.under(flag(0))):
        written, launch = case()
        before = bits(written)
        made.clear()
        with gates:
            launch()
        results.append(bits([*written, *made]))
    assert results[0][: len(before)] != before or not before, "without a gate the kernel writes"
    assert results[1] == results[0]
    assert results[2][: len(before)] == before
    assert all(bits([part]) == bits([unwritten(part)]) for part in made)
    assert made or before


def test_the_flag_is_read_when_a_kernel_runs_and_the_inner_gate_counts():
    own, source, weight = flag(0), numbers(2, 8), numbers(8)
    target, normed = torch.zeros_like(source), torch.zeros_like(source)

    def copy(stream: Tensor) -> None:
        layer_kernels.add_norm(stream, torch.zeros_like(stream), weight, 1e-5, target, normed)

    with gate.under(own):
        copy(source)
        assert not target.any()
        own.fill_(1)
        copy(source)
        assert torch.equal(target, source)
        with gate.under(flag(0)):
            copy(-source)
        assert torch.equal(target, source)
        own.zero_()
        copy(-source)
    assert torch.equal(target, source) and not gate.is_set() and gate.options() == {}


@pytest.mark.parametrize(
    "wrong", [torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)]
)
def test_a_flag_is_one_int32(wrong):
    with pytest.raises(ValueError, match="one int32"), gate.under(wrong):
        pass
    assert not gate.is_set()


def test_the_first_launches_behind_a_gate_do_not_overlap(few_programs, made, monkeypatch):
    """They would start before the flag and the plan are written."""
    model = tiny_model(hidden_size=64, intermediate_size=64, head_dim=16, num_hidden_layers=1).to(DEVICE)
    text = Text(model, SmallDrafter, TreeSettings(depth=2, topk=8))
    drafter: Any = text.drafter
    _, state = text.open(PROMPT[:3])
    text.levels(state, 1, keep=8)
    buffers, asked = drafter._buffers[state.pool], asked_of(state, 8)
    launched = []
    monkeypatch.setattr(overlap, "options", lambda device: launched.append(overlap._is_worth_it.get()) or overlap.USUAL)
    for module, name in ((eagle3_kernels, "enter"), (attention_kernels, "plan"), (topk_kernels, "highest")):
        function = getattr(module, name)

        def noted(*given, name=name, function=function, **more):
            launched.append(name if not overlap._is_worth_it.get() else f"{name} overlaps")
            return function(*given, **more)

        monkeypatch.setattr(module, name, noted)
    with gate.under(flag(1)):
        for number in range(2):
            drafter.fast.run_pass(buffers, asked, asked.lengths, None, number)
    names = [each for each in launched if isinstance(each, str)]
    assert names == ["highest", "plan", "enter", "highest"]
    inside = launched[launched.index("enter") + 1 : len(launched) - launched[::-1].index("highest") - 1]
    *inside, is_overlapping = inside  # the product of the output head comes after the layer
    assert len(inside) > 7 and all(inside), "8 beams are worth it, and our products take part"
    assert not is_overlapping
    assert not any(each is True for each in launched[: launched.index("enter")])


# Whole passes


@pytest.fixture
def few_programs(monkeypatch):
    """Real kernels, with little padding and without trial runs: every program takes its time in the interpreter."""
    monkeypatch.setattr(Captures, "capture", lambda captures, run: run)
    monkeypatch.setattr(HeadDrafter, "_try", lambda drafter, state: None)
    monkeypatch.setattr(head_drafter, "ENTRIES", (4,))


def asked_of(state: Any, keep: int) -> Passes:
    """The passes of its row."""
    asked = Passes.scratch(state.pool, None, [row.row for row in state.rows], 2)
    return replace(asked, text_lengths=asked.text_lengths + 1 + state.lengths[0], context=16, keep=keep)


def check_pass(run: Callable[[], None], written: list[Tensor], products: Products) -> None:
    """Behind a shut gate a pass leaves everything as it was; behind an open one it writes the bits of our kernels."""
    before, results = [part.clone() for part in written], []
    products._always = True
    for gates in (nullcontext(), gate.under(flag(1)), gate.under(flag(0))):
        for part, old in zip(written, before, strict=True):
            part.copy_(old)
        with gates:
            run()
        products._always = False
        results.append(bits(written))
    assert results[0] != bits(before)
    assert results[1] == results[0]
    assert results[2] == bits(before)


@pytest.mark.parametrize("norm_output", [True, False])
def test_a_pass_of_an_eagle3_head_behind_a_gate(norm_output, few_programs, made):
    """Its output product, with 40 outputs, is PyTorch's, and the others are ours."""
    model = tiny_model(hidden_size=64, intermediate_size=64, head_dim=16, num_hidden_layers=1).to(DEVICE)
    text = Text(model, SmallDrafter, TreeSettings(depth=2, topk=2))
    drafter: Any = text.drafter
    _, state = text.open(PROMPT[:3])
    text.levels(state, 1, keep=3)
    drafter.fast.config = replace(drafter.fast.config, norm_output=norm_output)
    buffers, asked = drafter._buffers[state.pool], asked_of(state, 3)
    written = [buffers.root, buffers.hidden, *vars(buffers.beams).values(), buffers.levels]
    written += [buffers.keys, buffers.values]
    buffers.levels.zero_()
    for number in range(2):
        run = partial(drafter.fast.run_pass, buffers, asked, asked.lengths, None, number)
        check_pass(run, written, drafter.fast._multiply)
        run()
