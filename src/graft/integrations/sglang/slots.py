"""What the rounds of a server know of its requests, on the device, by SGLang's slots: texts and sampling settings.

A request that joins gets its slot written, and the text of one that has ended is kept behind those of earlier ones. All
that a batch changes is one copy to the device and one launch: the device waits while requests join.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from graft.engine.staging import Staging
from graft.integrations.sglang import kernels
from graft.model.noise import RowDraws, share_powers
from graft.tree.device.buffers import MAX_MATCH, NO_TOKEN, NUM_BUCKETS, Texts
from graft.tree.device.round import packed

_MOST_OF_A_TEXT = 1 << 15  # tokens of one finished text that are kept
_COMPARED_PROMPTS, _COMPARED_TOKENS = 16, 4096  # compared with a new prompt, so that a shared beginning is kept once


class Request(Protocol):
    """The part of SGLang's `Req` that is used here."""

    req_pool_idx: int
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    sampling_params: Any

    def finished(self) -> bool: ...


class _Held(NamedTuple):
    """The request in a slot."""

    request: Request
    first: int  # the tokens before this index are in an earlier text too


class _Kept(NamedTuple):
    """The part of a finished text that is kept."""

    slot: int
    first: int
    num_tokens: int


class Slots:
    """The requests of a server. `settings` are theirs, by slot."""

    def __init__(self, texts: Texts, vocab_size: int, random_seed: int, knows_noise: bool, is_isolated: bool) -> None:
        """texts: the memory that is written. See `trees.Server` for the rest."""
        self._texts, self._vocab_size, self._random_seed = texts, vocab_size, random_seed
        self._knows_noise, self._is_isolated = knows_noise, is_isolated
        size, views = packed(_settings_layout(len(texts.own)))
        self.settings = views(torch.zeros(size, dtype=torch.int32, device=texts.own.device))
        self._staging = Staging(texts.own.device)
        self._joined = itertools.count(1)
        self.reset()

    def reset(self) -> None:
        """Forget all texts."""
        self._held: dict[int, _Held] = {}  # by slot
        self._prompts: deque[np.ndarray] = deque(maxlen=_COMPARED_PROMPTS)
        self._num_past = 0  # tokens of finished texts ever written
        self._texts.past_end.zero_()
        self._texts.lengths.zero_()

    def see(self, requests: Sequence[Request]) -> None:
        """Send the requests of a batch that are new, and keep the texts of those that have ended."""
        now = {request.req_pool_idx: request for request in requests}
        new = {}
        for slot, request in now.items():
            held = self._held.get(slot)
            if held is None or held.request is not request:
                new[slot] = request
        gone = [
            slot for slot, held in self._held.items() if slot in new or (slot not in now and held.request.finished())
        ]
        ended = [] if self._is_isolated else [slot for slot in gone if self._held[slot].request.finished()]
        kept = [part for part in map(self._kept, ended) if part.num_tokens]
        while sum(part.num_tokens + 1 for part in kept) > len(self._texts.past):
            del kept[0]  # little of it would be left
        if new or kept:
            self._write(new, kept)
        for slot in gone:  # only now, since a failed call is made again
            del self._held[slot]
        self._held |= {slot: self._hold(request) for slot, request in new.items()}

    def warm_up(self) -> None:
        """Compile what writes requests. `reset` is to follow."""
        self._write({}, [_Kept(0, 0, 0)])

    def seed_of(self, request: Any) -> int:
        """A request's own seed, or one of its number among all requests, which is the same on all ranks."""
        if request.sampling_params.sampling_seed is not None:
            return int(request.sampling_params.sampling_seed)
        key = f"{self._random_seed} {self._number_of(request)}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())

    def _number_of(self, request: Any) -> int:
        if not hasattr(request, "graft_number"):
            request.graft_number = next(self._joined)
        return int(request.graft_number)

    def _kept(self, slot: int) -> _Kept:
        held, most = self._held[slot], min(_MOST_OF_A_TEXT, len(self._texts.past) - 1)
        request = held.request
        end = min(len(request.origin_input_ids) + len(request.output_ids), self._texts.own.shape[1])
        first = max(held.first, end - most)
        return _Kept(slot, first, max(end - first, 0))

    def _write(self, new: dict[int, Request], kept: Sequence[_Kept]) -> None:
        """Keep texts, and then write the slots of new requests."""
        texts = {slot: self._text_of(request) for slot, request in new.items()}
        slots = list(dict.fromkeys([*(each.slot for each in kept), *new]))
        size, views = packed(_message_layout(len(slots), sum(map(len, texts.values()))))
        here = torch.zeros(size, dtype=torch.int32)
        columns = {name: part.numpy() for name, part in views(here).items()}
        columns["slots"][:] = slots
        columns["starts"].fill(-1)
        rows = {slot: row for row, slot in enumerate(slots)}
        end = self._num_past
        for slot, first, count in kept:
            row = rows[slot]
            columns["kept_firsts"][row], columns["kept_counts"][row], columns["kept_places"][row] = first, count, end
            end += count + 1  # with the token that ends it
        columns["past_end"][:] = end, max(end - len(self._texts.past), 0)
        start = 0
        for slot, request in new.items():
            row, given, tokens = rows[slot], request.sampling_params, texts[slot]
            temperature = 0.0 if given.top_k <= 1 else float(given.temperature)  # SGLang writes greedy as top-k 1
            draws = RowDraws(0, 0, temperature if self._knows_noise else 0.0)
            columns["starts"][row], columns["lengths"][row] = start, len(tokens)
            columns["tokens"][start : start + len(tokens)] = tokens
            columns["seeds"][row] = self.seed_of(request)
            columns["salts"][row] = self._number_of(request) if self._is_isolated else 0
            columns["kinds"][row] = draws.kind
            columns["powers"][row] = share_powers(draws.temperature, NUM_BUCKETS)
            columns["temperatures"][row] = temperature
            columns["top_k"][row], columns["top_p"][row], columns["min_p"][row] = given.top_k, given.top_p, given.min_p
            start += len(tokens)
        message = views(self._staging.send(here.numpy()))
        kernels.write_requests(message, self.settings, self._texts)
        self._num_past = end

    def _text_of(self, request: Request) -> np.ndarray:
        known = (np.asarray(part, dtype=np.int64) for part in (request.origin_input_ids, request.output_ids))
        ids = np.concatenate(list(known))[: self._texts.own.shape[1]]
        # Placeholders of images are not tokens, and must never be proposed.
        return np.where((ids >= 0) & (ids < self._vocab_size), ids, NO_TOKEN).astype(np.int32)

    def _hold(self, request: Request) -> _Held:
        """Note a request, and how many of its first tokens an earlier prompt has too."""
        begin = np.asarray(request.origin_input_ids[:_COMPARED_TOKENS])
        common = max((_common_prefix(begin, other) for other in self._prompts), default=0)
        self._prompts.append(begin)
        return _Held(request, max(common - MAX_MATCH, 0))  # less what a match may need


def _settings_layout(num_requests: int) -> dict[str, Any]:
    """The sampling settings of requests, for `packed`."""
    i64, f32, each = torch.int64, torch.float32, (num_requests,)
    return {
        "seeds": (i64, each),
        "salts": (i64, each),
        "kinds": (torch.int32, each),
        "temperatures": (f32, each),
        "powers": (torch.float64, (num_requests, NUM_BUCKETS)),
        "top_k": (i64, each),
        "top_p": (f32, each),
        "min_p": (f32, each),
    }


def _message_layout(num_slots: int, num_tokens: int) -> dict[str, Any]:
    """What `kernels.write_requests` reads."""
    i32, i64, each = torch.int32, torch.int64, (num_slots,)
    return _settings_layout(num_slots) | {
        "slots": (i64, each),
        "kept_firsts": (i32, each),  # the part of the slot's finished text that is kept
        "kept_counts": (i32, each),
        "kept_places": (i64, each),  # where it begins among all finished texts
        "past_end": (i64, (2,)),
        "starts": (i32, each),  # of the new request's text among `tokens`; -1: none
        "lengths": (i32, each),
        "tokens": (i32, (num_tokens,)),
    }


def _common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length
