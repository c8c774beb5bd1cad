"""The kernels of a round in C, see `kernels`: ctypes calls of `tree/round.c` over the buffers' memory.

What each one does, and what its arguments are, is said in the Triton modules, whose functions they equal. Calls hold
the GIL, because they take only microseconds.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graft.tree.device.buffers import Beams, Draws, Others, Pool, PoolShape, Ranked, Tables, Texts, Trees
from graft.tree.native import HERE, load_library, plain


def _fields(**kinds: str) -> tuple[tuple[str, Any], ...]:
    """Fields of a structure: names of addresses and of numbers, in their order."""
    types = {"addresses": c_void_p, "numbers": c_int64}
    return tuple((name, types[kind]) for kind, names in kinds.items() for name in names.split())


class _PoolStruct(ctypes.Structure):
    _fields_ = _fields(
        addresses="tokens parents depths needs sources buckets agreement keys paths open before kept is_agreed spoke "
        "factors",
        numbers="num_factors num_rows capacity",
    )


class _ShapeStruct(ctypes.Structure):
    _fields_ = _fields(numbers="num_rows copy_nodes num_places first_level first_copy first_wave width num_waves beam")


class _TextsStruct(ctypes.Structure):
    _fields_ = _fields(addresses="own lengths past owners past_end", numbers="num_table_rows context ring")


class _DrawsStruct(ctypes.Structure):
    _fields_ = _fields(addresses="kinds seeds powers barred times is_keyed", numbers="num_barred num_depths")


class _OthersStruct(ctypes.Structure):
    _fields_ = _fields(addresses="owners groups num_prompt_tokens")


class _BeamsStruct(ctypes.Structure):
    _fields_ = _fields(
        addresses="tokens origins paths places entries depths cache_places num_passes",
        numbers="num_rows num_beams max_depth",
    )


class _ProbsStruct(ctypes.Structure):
    _fields_ = _fields(addresses="values", numbers="num_groups num_sources num_buckets")


class _TablesStruct(ctypes.Structure):
    _fields_ = _fields(
        addresses="entries tags starts row_bits factors", numbers="num_rows isolated first_learned end_learned"
    )


_POINTER, _NUMBER = (c_void_p,), (c_int64,)
_ARGUMENTS: dict[str, list[Any]] = {  # argument types by function; structures are passed as pointers
    "graft_begin": [*_POINTER * 4],
    "graft_choose_places": [*_POINTER * 5],
    "graft_add_copies": [*_POINTER * 6, *_NUMBER, *_POINTER * 3, *_NUMBER * 2],
    "graft_add_level": [*_POINTER, *_NUMBER * 5, *_POINTER * 9, *_NUMBER * 2],
    "graft_follow": [*_POINTER * 9, *_NUMBER],
    "graft_stop_rows": [*_POINTER, *_NUMBER * 7, *_POINTER * 5],
    "graft_attach": [*_POINTER * 4, *_NUMBER * 3, *_POINTER * 4, *_NUMBER],
    "graft_merge": [*_POINTER * 4, *_NUMBER],
    "graft_rank": [*_POINTER * 3, *_NUMBER, *_POINTER * 3],
    "graft_select": [*_NUMBER * 2, *_POINTER * 4],
    "graft_lay_out": [*_POINTER, *_NUMBER * 2, *_POINTER * 5, *_NUMBER, *_POINTER, *_NUMBER, *_POINTER, *_NUMBER * 3],
    "graft_walk": [*_NUMBER * 3, *_POINTER * 8],
    "graft_advance": [*_POINTER * 3, *_NUMBER * 3, *_POINTER * 9, *_NUMBER, *_POINTER],
    "graft_line_up": [*_NUMBER * 3, *_POINTER * 9],
    "graft_count": [*_POINTER * 4, *_NUMBER, *_POINTER, *_NUMBER * 3, *_POINTER * 2],
    "graft_learn": [*_POINTER, *_NUMBER * 2, *_POINTER * 5, *_NUMBER, *_POINTER * 3, *_NUMBER],
    "graft_spread": [*_NUMBER * 3, *_POINTER * 7],
    "graft_grow": [*_NUMBER * 3, *_POINTER * 3, *_NUMBER * 2, *_POINTER * 5],
    "graft_flatten_trees": [*_NUMBER * 2, *_POINTER * 3, *_NUMBER, *_POINTER * 5],
}


@cache
def _library() -> Any:
    return load_library(HERE, "_round", _ARGUMENTS)


def _at(column: Tensor, dtype: torch.dtype = torch.int32) -> int:
    """The address of a tensor's memory, which C reads as this dtype."""
    assert column.dtype is dtype and column.is_contiguous() and column.is_cpu
    return column.data_ptr()


def _held(make: Callable[[Any], ctypes.Structure]) -> Callable[[Any], Any]:
    """Make the structure of a shape, a tensor or an owner of tensors once: its memory never moves."""

    def struct_of(owner: Any) -> Any:
        held = vars(owner).get("_struct")
        if held is None:
            held = vars(owner)["_struct"] = ctypes.byref(make(owner))
        return held

    return struct_of


@_held
def _pool(pool: Pool) -> _PoolStruct:
    columns = (pool.tokens, pool.parents, pool.depths, pool.needs, pool.sources, pool.buckets, pool.agreement)
    scratch = (pool.before, pool.kept, pool.is_agreed, pool.spoke)
    return _PoolStruct(
        *map(_at, columns),
        _at(pool.keys, torch.int64),
        *(_at(part, torch.float32) for part in (pool.paths, pool.open)),
        *map(_at, scratch),
        _at(pool.factors, torch.int64),
        len(pool.factors),
        *pool.paths.shape,
    )


@_held
def _shape(shape: PoolShape) -> _ShapeStruct:
    places = (shape.first_level, shape.first_copy, shape.first_wave, shape.width)
    sizes = (shape.num_rows, shape.copy_nodes, shape.num_places, *places, shape.num_waves, shape.beam)
    return _ShapeStruct(*sizes)


@_held
def _texts(texts: Texts) -> _TextsStruct:
    of_ring = (_at(texts.owners, torch.int64), _at(texts.past_end, torch.int64))
    return _TextsStruct(*map(_at, (texts.own, texts.lengths, texts.past)), *of_ring, *texts.own.shape, len(texts.past))


@_held
def _tables(tables: Tables) -> _TablesStruct:
    long = torch.int64
    columns = (_at(tables.entries), _at(tables.tags, long), _at(tables.starts, long), _at(tables.row_bits))
    return _TablesStruct(*columns, _at(tables.factors, long), len(tables.entries), tables.isolated, *tables.learned)


def _draws(draws: Draws) -> Any:
    if not draws.times:
        return _keyed_draws(draws)
    struct, times = _new_draws(draws), draws.times
    struct.num_depths = most = max(len(own or ()) for own in times)
    addresses, is_keyed = array("q"), array("q", [own is None for own in times])
    for own in times:
        addresses.extend(_at(each, torch.float32) for each in own or ())
        addresses.extend([0] * (most - len(own or ())))
    struct.times, struct.is_keyed = addresses.buffer_info()[0], is_keyed.buffer_info()[0]
    struct.memory = (addresses, is_keyed)  # kept alive while C reads them
    return ctypes.byref(struct)


def _new_draws(draws: Draws) -> _DrawsStruct:
    barred = draws.barred
    columns = (_at(draws.kinds), _at(draws.seeds, torch.int64), _at(draws.powers, torch.float64))
    barred_numbers = (None, 0) if barred is None else (_at(barred), barred.shape[1])
    return _DrawsStruct(*columns, barred_numbers[0], None, None, barred_numbers[1], 0)


_keyed_draws = _held(_new_draws)
_NO_PROBS = ctypes.byref(_ProbsStruct())


def _probs(probs: Tensor | None) -> Any:
    return _NO_PROBS if probs is None else _given_probs(probs)


@_held
def _given_probs(probs: Tensor) -> _ProbsStruct:
    return _ProbsStruct(_at(probs, torch.float32), *probs.shape)


def begin(pool: Pool, shape: PoolShape, texts: Texts, table_rows: Tensor) -> None:
    _library().graft_begin(_pool(pool), _shape(shape), _texts(texts), _at(table_rows))


def choose_places(pool: Pool, shape: PoolShape, made: Tensor, places: Tensor, max_depths: Tensor) -> None:
    _library().graft_choose_places(_pool(pool), _shape(shape), _at(made), _at(places), _at(max_depths))


def add_copies(
    pool: Pool,
    shape: PoolShape,
    texts: Texts,
    table_rows: Tensor,
    others: Others,
    places: Tensor,
    acceptance_probs: Tensor,
    max_depths: Tensor,
    draws: Draws,
    source: int,
    first: int,
    max_context: int,
) -> None:
    besides = _OthersStruct(_at(others.owners, torch.int64), _at(others.groups), _at(others.num_prompt_tokens))
    of_rows = (_at(table_rows), ctypes.byref(besides), _at(places), places.shape[1])
    calibration = (_probs(acceptance_probs), _at(max_depths), _draws(draws))
    _library().graft_add_copies(_pool(pool), _shape(shape), _texts(texts), *of_rows, *calibration, source, first)


def lookup_bytes(num_rows: int, num_places: int, num_tokens: int) -> int:
    return 0


def add_level(
    pool: Pool,
    shape: PoolShape,
    number: int,
    tokens: Tensor,
    parents: Tensor,
    probabilities: Tensor,
    acceptance_probs: Tensor | None,
    draws: Draws,
    caps: Tensor,
    thresholds: Tensor,
    reaches: Tensor,
    made: Tensor,
    source: int,
    num_beams: int,
    num_depths: int,
) -> None:
    tokens, parents = tokens.int(), parents.int()
    _library().graft_add_level(
        _pool(pool),
        *(shape.num_rows, number, shape.levels[number], shape.first_level, shape.level_start(number)),
        *(_at(tokens), _at(parents), _at(probabilities, torch.float32), _probs(acceptance_probs), _draws(draws)),
        *(_at(caps), _at(thresholds, torch.float32), _at(reaches, torch.float32), _at(made)),
        *(source, num_beams),
    )


def stop_rows(
    pool: Pool,
    shape: PoolShape,
    number: int,
    first_gate: int,
    end_gate: int,
    gates: Tensor,
    thresholds: Tensor,
    stops: Tensor,
    confidences: Tensor,
    made: Tensor,
) -> None:
    floats = (_at(part, torch.float32) for part in (thresholds, confidences))
    _library().graft_stop_rows(
        *(_pool(pool), shape.num_rows, number, shape.levels[number], shape.level_start(number)),
        *(first_gate, end_gate, len(gates), _at(gates), next(floats), _at(stops), next(floats), _at(made)),
    )


def attach(
    pool: Pool,
    shape: PoolShape,
    stops: Tensor,
    splits: Tensor,
    at_leaf: bool,
    tables: Tables,
    salts: Tensor,
    max_depths: Tensor,
    draws: Draws,
    source: int,
) -> None:
    _library().graft_attach(
        *(_pool(pool), _shape(shape), _at(stops), _at(splits), *splits.shape, at_leaf),
        *(_tables(tables), _at(salts, torch.int64), _at(max_depths), _draws(draws), source),
    )


def follow(
    pool: Pool,
    shape: PoolShape,
    tables: Tables,
    salts: Tensor,
    acceptance_probs: Tensor,
    max_depths: Tensor,
    draws: Draws,
    texts: Texts,
    table_rows: Tensor,
    source: int,
) -> None:
    _library().graft_follow(
        *(_pool(pool), _shape(shape), _tables(tables), _at(salts, torch.int64), _probs(acceptance_probs)),
        *(_at(max_depths), _draws(draws), _texts(texts), _at(table_rows), source),
    )


def merge(pool: Pool, shape: PoolShape, acceptance_probs: Tensor, kinds: Tensor, drafted: int) -> None:
    _library().graft_merge(_pool(pool), _shape(shape), _probs(acceptance_probs), _at(kinds), drafted)


def rank(pool: Pool, shape: PoolShape, caps: Tensor, ranked: Ranked) -> None:
    columns = (_at(ranked.nodes), _at(ranked.paths, torch.float32), _at(ranked.needs))
    _library().graft_rank(_pool(pool), _shape(shape), _at(caps), ranked.nodes.shape[1], *columns)


def select(ranked: Ranked, caps: Tensor, total: Tensor) -> None:
    columns = (_at(ranked.paths, torch.float32), _at(caps), _at(total), _at(ranked.counts))
    _library().graft_select(*ranked.nodes.shape, *columns)


def lay_out(
    pool: Pool,
    shape: PoolShape,
    ranked: Ranked,
    texts: Texts,
    table_rows: Tensor,
    columns: Tensor,
    by_row: Tensor,
    origins: Tensor,
    size: int,
    stride: int = 0,
) -> None:
    _library().graft_lay_out(
        *(_pool(pool), *ranked.nodes.shape, _at(ranked.nodes), _at(ranked.counts), _texts(texts), _at(table_rows)),
        *(_at(columns), columns.shape[1], _at(by_row), by_row.shape[1], _at(origins), len(origins), size, stride),
    )


def walk(
    tokens: Tensor,
    parents: Tensor,
    chosen: Tensor,
    starts: Tensor,
    sizes: Tensor,
    counts: Tensor,
    following: Tensor,
    nodes: Tensor,
    most: int,
) -> None:
    chosen = chosen.long()
    step = (_at(tokens), _at(parents), _at(chosen, torch.int64), _at(starts), _at(sizes))
    _library().graft_walk(len(tokens), *following.shape, *step, _at(counts), _at(following), _at(nodes))


def advance(
    texts: Texts,
    table_rows: Tensor,
    starts: Tensor,
    counts: Tensor,
    tokens: Tensor,
    nodes: Tensor,
    places: Tensor,
    num_accepted: Tensor,
    lengths: Tensor,
    factors: Tensor,
    emitted: Tensor,
) -> None:
    columns = (table_rows, starts, counts, tokens, nodes, places, num_accepted, lengths)
    _library().graft_advance(
        *(_texts(texts), _at(texts.own), _at(texts.lengths), *tokens.shape, places.shape[1], *map(_at, columns)),
        *(_at(factors, torch.int64), len(factors), _at(emitted, torch.int64)),
    )


def line_up(
    counts: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    nodes: Tensor,
    begins: Tensor,
    entry_rows: Tensor,
    entry_places: Tensor,
    entry_tokens: Tensor,
    entry_nodes: Tensor,
) -> None:
    columns = (counts, lengths, tokens, nodes, begins, entry_rows, entry_places, entry_tokens, entry_nodes)
    _library().graft_line_up(len(counts) - 1, tokens.shape[1], len(entry_rows), *map(_at, columns))


def count(
    pool: Pool, shape: PoolShape, counts: Tensor, emitted: Tensor, kinds: Tensor, tried: Tensor, fitted: Tensor
) -> None:
    of_rows = (_at(counts), _at(emitted, torch.int64), emitted.shape[1], _at(kinds))
    _library().graft_count(_pool(pool), _shape(shape), *of_rows, *tried.shape, _at(tried), _at(fitted))


def learn(
    tables: Tables,
    step_tokens: Tensor,
    step_parents: Tensor,
    step_places: Tensor,
    step_rows: Tensor,
    starts: Tensor,
    before: Tensor,
    salts: Tensor,
    successors: Tensor,
    logits: Tensor,
    num_rows: int,
    is_text: bool,
) -> None:
    """A row's tokens stand together in the step, place by place, so the places need not be read."""
    successors = successors.int()
    _library().graft_learn(
        *(_tables(tables), len(step_tokens), num_rows, _at(step_tokens), _at(step_parents), _at(step_rows)),
        *(_at(starts), _at(before), before.shape[1], _at(salts, torch.int64)),
        *(_at(successors), _at(logits, torch.float32), is_text),
    )


def spread(ids: Tensor, q: Tensor, to_target: Tensor | None, beams: Beams, level: Tensor, keep: int) -> None:
    """The drafter's `spread` in `eagle3/kernels.py`, from probabilities. ids, q: [B * F, K], where F is 1 or K.

    level: [3, B * n] int32, written: tokens, parents and the bits of q. keep: its nodes n of a row.
    """
    (num_rows, topk), long = beams.tokens.shape, torch.int64
    num_parents = len(ids) // num_rows
    addresses = (_at(part) for part in level)
    _library().graft_spread(
        *(num_parents, min(keep, num_parents * topk), min(keep, topk * topk), _at(ids, long), _at(q, torch.float32)),
        *(None if to_target is None else _at(to_target, long), _beams(beams), *addresses),
    )


@_held
def _beams(beams: Beams) -> _BeamsStruct:
    columns = (_at(part, torch.float32 if part is beams.paths else torch.int32) for part in vars(beams).values())
    return _BeamsStruct(*columns, *beams.entries.shape)


def grow(tokens: Tensor, probabilities: Tensor, entries: Tensor, num_levels: int, trees: Trees) -> None:
    table = [part.contiguous() for part in (tokens, probabilities, entries)]
    addresses = (_at(table[0]), _at(table[1], torch.float32), _at(table[2]))
    columns = (_at(part) for part in trees.numbers)
    _library().graft_grow(*tokens.shape, *addresses, num_levels, trees.numbers.shape[2], *columns)


def flatten_trees(
    tokens: Tensor, parents: Tensor, sources: Tensor, columns: np.ndarray, by_row: np.ndarray, index: Tensor
) -> int:
    """Lay out trees [B, W] that the host has, without padding; Triton has no such kernel. Returns the step's tokens.

    columns [6, room], by_row [2 or more, B or more] and index [B, W], the step's token of each node, are written.
    """
    given = [plain(column) for column in (tokens, parents, sources)]
    total = c_int64()
    _library().graft_flatten_trees(
        *tokens.shape,
        *(column.data_ptr() for column in given),
        columns.shape[1],
        columns.ctypes.data,
        by_row[0].ctypes.data,
        by_row[1].ctypes.data,
        index.data_ptr(),
        ctypes.addressof(total),
    )
    return total.value
