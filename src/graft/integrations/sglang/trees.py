"""The trees of a server's rounds: made, verified and learned from on the device. Needs Triton, but not SGLang.

SGLang gives every running request a slot in its tables. Texts and sampling settings lie on the device in the same
slots, written when a request joins. A round then needs nothing from the host. Its results for the host (how well each
source's scores fit) arrive a round or two later, and nothing waits for them.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from graft.engine.staging import Staging
from graft.integrations.sglang import kernels
from graft.integrations.sglang.kernels import Drafted, Rows
from graft.integrations.sglang.settings import SGLangSettings
from graft.model.captures import pinned_zeros
from graft.model.kernels import draw as draw_kernels
from graft.model.kernels import topk as topk_kernels
from graft.model.noise import NUM_KINDS, RowDraws, gumbel_noise
from graft.model.sampler import truncated
from graft.model.verified import NUM_SUCCESSORS
from graft.spec_decode.cost_model import StepCost
from graft.spec_decode.grafter import Grafter
from graft.spec_decode.policy_settings import PolicySettings
from graft.spec_decode.proposers.successor_table import FACTORS, ISOLATED_ROWS
from graft.tree.device.copies import MAX_MATCH
from graft.tree.device.noise import DraftDraws
from graft.tree.device.pool import NO_TOKEN, NUM_BUCKETS
from graft.tree.device.round import MAX_TOKENS, MAX_TREE_TOKENS, DeviceRound, RoundShape, Sources, packed
from graft.tree.device.tables import Tables

_log = logging.getLogger("graft.sglang")

_PAST_TOKENS = 1 << 18  # tokens of finished texts that are searched
_MOST_OF_A_TEXT = 1 << 15  # tokens of one finished text that are kept
_TABLE_ROWS = 1 << 18
_COMPARED_PROMPTS, _COMPARED_TOKENS = 16, 4096  # compared with a new prompt, so that a shared beginning is kept once
_SENT_AT_ONCE = 1 << 16
_RING = 4  # rounds whose results may be on their way to the host
_DRAWN_AT_ONCE = 1 << 22  # random numbers that `draw_in_torch` makes at once
_SHARPNESS = 1.2  # factor of an EAGLE-3 head's logits when it guesses draws; as in `Eagle3Drafter`
_UNREAD_SHARE = 8  # the head drafts for a text if it has left out at most an eighth of it


class Request(Protocol):
    """The part of SGLang's `Req` that is used here."""

    req_pool_idx: int
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    sampling_params: Any

    def finished(self) -> bool: ...


@dataclass(frozen=True)
class Server:
    """What is known of a server when its memory has been made."""

    num_slots: int  # slots of requests, with slot 0, which is padding
    context: int  # tokens of the longest text
    num_kv_slots: int  # slots of the KV cache
    vocab_size: int
    topk: int  # branches of the head's drafts
    num_steps: int  # the most levels that the head drafts
    most_rows: int  # most rows of a round with trees
    random_seed: int
    knows_noise: bool  # whether Graft's own noise draws tokens; not in SGLang's deterministic mode


class VerifyArrays(NamedTuple):
    """The fields of SGLang's `EagleVerifyInput` for B trees of D places, with its names and in its order."""

    custom_mask: Tensor  # flat: D x (text + D) for each row, whether the place sees it; or D x D
    positions: Tensor  # [B * D]
    retrieve_index: Tensor  # [B, D] the index of each place among all
    retrieve_next_token: Tensor  # [B, D] first child in the row, -1 if none
    retrieve_next_sibling: Tensor  # [B, D]
    draft_token: Tensor  # [B * D]


class _Held(NamedTuple):
    """The request in a slot."""

    request: Request
    first: int  # the tokens before this index are in an earlier text too


class Trees:
    """Proposes trees for the rows of a batch, and learns from the verified ones."""

    def __init__(
        self, server: Server, settings: SGLangSettings, to_target: Tensor | None, device: torch.device
    ) -> None:
        """to_target: [draft vocabulary] the target's id of each draft id; None: they are the same."""
        self._server, self._settings, self._device = server, settings, device
        # Only for the names, numbers and priors of the sources.
        policy = PolicySettings(budget=1, pass_cost=0.0, isolated=settings.isolated)
        grafter = Grafter(server.vocab_size, server.num_steps, policy, StepCost())
        self._calibration, numbers = grafter.calibration, {name: n for n, name in enumerate(grafter.sources)}
        num_buckets = self._calibration.acceptance_probs.shape[2]
        used = (numbers["drafted"], numbers["suffix"], numbers["trigram"])
        levels = (server.topk, *[server.topk**2] * (server.num_steps - 1))
        hashed = ISOLATED_ROWS if settings.isolated else _TABLE_ROWS
        sizes = (hashed, hashed, hashed if settings.isolated else server.vocab_size)
        self.round = DeviceRound(
            max_rows=server.most_rows,
            num_table_rows=server.num_slots,
            context=server.context,
            past_tokens=_PAST_TOKENS,
            levels=lambda rows: levels,
            num_beams=lambda rows: server.topk,
            num_passes=server.num_steps,
            depths_of_pass=1,
            sources=Sources(len(numbers), num_buckets, NUM_KINDS, *used),
            known=Tables.make(sizes, (True, True, settings.isolated), FACTORS, settings.isolated, device),
            device=device,
        )
        self.round.inputs["thresholds"].fill_(-1.0)  # SGLang makes all draft passes in any case
        self.round.inputs["drafts"].fill_(1)
        self.round.inputs["total"].fill_(MAX_TREE_TOKENS)
        self.round.inputs["caps"].fill_(-1)
        self._level_sizes = levels
        num_drafted = server.most_rows * sum(levels)
        numbers_of = torch.zeros(2, num_drafted, dtype=torch.int32, device=device)
        self._levels = (*numbers_of, torch.zeros(num_drafted, device=device))
        # One buffer for the whole step, so that ranks exchange it at once.
        self.step = torch.zeros(6 * MAX_TREE_TOKENS + 4 * (server.most_rows + 1), dtype=torch.int32, device=device)
        columns, by_row = self.step.split([6 * MAX_TREE_TOKENS, 4 * (server.most_rows + 1)])
        self._columns, self._by_row = columns.view(6, -1), by_row.view(4, -1)
        size, in_slots = packed(_settings_layout(server.num_slots))
        self._slots = in_slots(torch.zeros(size, dtype=torch.int32, device=device))
        self._ones = torch.ones(server.num_slots, dtype=torch.int64, device=device)
        self._has_head = torch.ones(server.num_slots, dtype=torch.int32, device=device)
        self._unread: Tensor | None = None  # [KV slots] whether the head has left the token out
        # The target's id minus the draft id, by draft id.
        self._to_target = torch.zeros(server.vocab_size, dtype=torch.int64, device=device)
        if to_target is not None:
            self._to_target = to_target.to(device).long() - torch.arange(len(to_target), device=device)
        self._staging = Staging(device)
        self._joined = itertools.count(1)
        self._free = [
            (pinned_zeros((self.round.num_results,), torch.int32, device), _new_event(device)) for _ in range(_RING)
        ]
        self._coming: deque[tuple[Tensor, Any, int]] = deque()  # results on their way, and their numbers of rows
        self.reset()

    def reset(self) -> None:
        """Forget all texts and everything learned from them."""
        self._held: dict[int, _Held] = {}  # by slot
        self._prompts: deque[np.ndarray] = deque(maxlen=_COMPARED_PROMPTS)
        self._num_past = 0  # tokens of finished texts ever written
        self._log = RoundLog(self._settings.log)
        self._drop_results()
        self.round.texts.past_end.zero_()
        self.round.texts.lengths.zero_()
        assert self.round.tables is not None
        self.round.tables.entries.fill_(-1)
        self._calibration.restore({})
        self._send_probabilities()

    # Requests

    def see(self, requests: Sequence[Request]) -> None:
        """Send the requests of a batch that are new, and keep the texts of those that have ended."""
        now = {request.req_pool_idx: request for request in requests}
        new = {}
        for slot, request in now.items():
            held = self._held.get(slot)
            if held is None or held.request is not request:
                new[slot] = request
        for slot, held in list(self._held.items()):
            if slot in new or (slot not in now and held.request.finished()):
                del self._held[slot]
                if held.request.finished() and not self._settings.isolated:
                    self._keep(slot, held)
        if new:
            self._join(new)

    def _join(self, new: Mapping[int, Request]) -> None:
        size, views = packed(_settings_layout(len(new)) | {"slots": (torch.int64, (len(new),))})
        here = torch.zeros(size, dtype=torch.int32)
        columns = {name: part.numpy() for name, part in views(here).items()}
        held = {}
        for row, (slot, request) in enumerate(new.items()):
            given, number = request.sampling_params, self._number_of(request)
            temperature = 0.0 if given.top_k <= 1 else float(given.temperature)  # SGLang writes greedy as top-k 1
            draws = RowDraws(0, 0, temperature if self._server.knows_noise else 0.0)
            columns["slots"][row] = slot
            columns["seeds"][row] = self.seed_of(request)
            columns["salts"][row] = number if self._settings.isolated else 0
            columns["kinds"][row] = draws.kind
            columns["powers"][row] = [draws.share_power(bucket / 2) for bucket in range(NUM_BUCKETS)]
            columns["temperatures"][row] = temperature
            columns["top_k"][row], columns["top_p"][row], columns["min_p"][row] = given.top_k, given.top_p, given.min_p
            held[slot] = _Held(request, self._send_text(slot, request))
        there = views(self._staging.send(here.numpy()))
        for name, part in self._slots.items():
            part.index_copy_(0, there["slots"], there[name])
        self._held |= held

    def seed_of(self, request: Any) -> int:
        """A request's own seed, or one of its number among all requests, which is the same on all ranks."""
        if request.sampling_params.sampling_seed is not None:
            return int(request.sampling_params.sampling_seed)
        key = f"{self._server.random_seed} {self._number_of(request)}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())

    def _number_of(self, request: Any) -> int:
        if not hasattr(request, "graft_number"):
            request.graft_number = next(self._joined)
        return int(request.graft_number)

    def _send_text(self, slot: int, request: Request) -> int:
        """Send what is known of a text. Returns how many of its first tokens an earlier prompt has too."""
        known = (np.asarray(part, dtype=np.int64) for part in (request.origin_input_ids, request.output_ids))
        ids = np.concatenate(list(known))[: self._server.context]
        # Placeholders of images are not tokens, and must never be proposed.
        tokens = np.where((ids >= 0) & (ids < self._server.vocab_size), ids, NO_TOKEN).astype(np.int32)
        own = self.round.texts.own[slot]
        for first in range(0, len(tokens), _SENT_AT_ONCE):
            part = tokens[first : first + _SENT_AT_ONCE]
            own[first : first + len(part)].copy_(self._staging.send(part))
        own[len(tokens) :].fill_(NO_TOKEN)
        begin = tokens[: min(len(request.origin_input_ids), _COMPARED_TOKENS)]
        common = max((_common_prefix(begin, other) for other in self._prompts), default=0)
        self._prompts.append(begin)
        return max(common - MAX_MATCH, 0)

    def _keep(self, slot: int, held: _Held) -> None:
        """Copy a finished text behind the others, over the oldest ones."""
        texts, request = self.round.texts, held.request
        end = min(len(request.origin_input_ids) + len(request.output_ids), self._server.context)
        first, size = max(held.first, end - _MOST_OF_A_TEXT), len(texts.past)
        while first < end:
            at = self._num_past % size
            count = min(end - first, size - at)
            texts.past[at : at + count].copy_(texts.own[slot, first : first + count])
            first, self._num_past = first + count, self._num_past + count
        at = self._num_past % size
        texts.past[at : at + 1].fill_(NO_TOKEN)
        self._num_past += 1
        ends = self._staging.send([self._num_past, max(self._num_past - size, 0)], torch.int64)
        texts.past_end.copy_(ends)

    # What the head has read

    def lose_head(self, rows: Tensor, kv_slots: Tensor) -> None:
        """Note that the head has left these tokens out, and drafts for these requests no more. rows: their slots."""
        if self._unread is None:
            self._unread = torch.zeros(self._server.num_kv_slots, dtype=torch.int32, device=self._device)
        self._unread.index_fill_(0, kv_slots.long(), 1)
        self._has_head.index_fill_(0, rows.long(), 0)

    def find_head(self, rows: Tensor, kv_slots: Tensor, prefix_lens: Sequence[int], tables: Tensor) -> None:
        """Note that the head reads these tokens behind prefixes, which it may have left out in earlier requests.

        tables: [slots, context] the KV slots of each text.
        """
        self._has_head.index_fill_(0, rows.long(), 1)
        if self._unread is None:
            return
        self._unread.index_fill_(0, kv_slots.long(), 0)
        for row, length in enumerate(prefix_lens):
            if length:
                prefix = tables.index_select(0, rows[row : row + 1].long())[0, :length].long()
                num_unread = self._unread.index_select(0, prefix).sum()
                has_read = (_UNREAD_SHARE * num_unread <= length).int()
                self._has_head.index_copy_(0, rows[row : row + 1].long(), has_read[None])

    # A round

    def fits(self, num_rows: int, num_places: int) -> bool:
        return num_rows <= self._server.most_rows and num_places > 1 and num_rows * num_places <= MAX_TREE_TOKENS

    def load(self, rows: Rows, num_places: int) -> None:
        """Prepare a round of these rows. Their requests have been seen."""
        self._take_results()
        budget, settings = num_places - 1, self._settings
        num_nodes = min(settings.budget or budget, budget)
        max_depth = min(settings.max_depth or num_nodes, num_nodes, MAX_TOKENS - 1)
        kernels.load_rows(rows, self._slots, self.round.inputs, self.round.texts, num_nodes, max_depth)

    def propose(self, drafted: Drafted, num_places: int) -> None:
        """Build the trees of the loaded rows, with padding, from the head's drafts. It may run inside a CUDA graph."""
        num_rows, num_nodes = drafted.tokens.shape
        table_rows = self.round.inputs["table_rows"]
        kernels.split_levels(drafted, self._server.topk, self._has_head, table_rows, self._levels)

        def draft(add_level: Any) -> None:
            first = 0
            for number, size in enumerate(self._level_sizes):
                if num_rows * num_nodes > first:  # batches of many rows have fewer levels
                    add_level(number, *(part[first : first + num_rows * size] for part in self._levels))
                first += num_rows * size

        shape = RoundShape(num_rows, num_rows * num_places)
        self.round.propose(shape, self._columns, self._by_row, self._server.context, draft, stride=num_places)

    def leave_roots(self, roots: Tensor, num_places: int) -> None:
        """Make the trees of a round roots alone."""
        num_rows = len(roots)
        own = self._columns[:, : num_rows * num_places].view(6, num_rows, num_places)
        own.zero_()
        own[4].fill_(num_rows)
        own[0, :, 0].copy_(roots)
        own[4, :, 0].copy_(torch.arange(num_rows, device=roots.device))
        self._by_row[1, :num_rows].fill_(1)

    def warm_up(self, num_rows: int, num_places: int) -> None:
        """Run all that is outside of SGLang's graphs on padding. What that teaches is to be forgotten."""
        rows, places = (
            torch.zeros(n, dtype=torch.int64, device=self._device) for n in (num_rows, num_rows * num_places)
        )
        logits = torch.zeros(len(places), self._server.vocab_size, device=self._device)
        for roots in (rows, rows.int()):  # a prefill and a verify give different types
            self.load(Rows(rows, rows, roots), num_places)
        self.leave_roots(rows, num_places)
        self.arrays(rows, num_places, None, 0, True, True)
        for truncates in (False, True):
            self.draw(logits, places, places, rows, truncates)
        self.finish(num_rows, num_places, places, *likeliest_successors(logits))
        self._drop_results()

    def arrays(
        self, lengths: Tensor, num_places: int, mask: Tensor | None, most_tokens: int, has_texts: bool, fills: bool
    ) -> VerifyArrays:
        """The proposed trees as the inputs of a verify.

        lengths: [B] tokens in the KV cache. mask: SGLang's memory for it, if there is any. most_tokens: at least the
        sum of the lengths. has_texts: the mask covers the texts too. fills: the part over the texts is read.
        """
        num_rows = len(lengths)
        size = num_places * (most_tokens * has_texts + num_rows * num_places)
        if mask is None or len(mask) < size:  # too small for a batch larger than all captured ones
            mask = torch.ones(size, dtype=torch.bool, device=lengths.device)
        elif fills:
            mask.fill_(True)  # all of it: a padded batch reads beyond our rows
        numbers = torch.empty(5, num_rows, num_places, dtype=torch.int64, device=lengths.device)
        kernels.place_trees(self._columns, lengths, numbers, mask, has_texts)
        tokens, positions, index, children, siblings = numbers
        return VerifyArrays(mask, positions.flatten(), index, children, siblings, tokens.flatten())

    def likeliest(self, logits: Tensor, topk: int, ends: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """The head's probabilities [R, K] and tokens [R, K], int64. In sampled rows they are those of being drawn.

        logits: [B * n, V] of the loaded rows. ends: [B] tokens of the texts, with their roots. depth: 1 is the next
        token.
        """
        draws, num_rows, inputs = None, len(ends), self.round.inputs
        if self._server.knows_noise and num_rows <= self._server.most_rows:
            seeds, temperatures = (inputs[name][:num_rows] for name in ("seeds", "temperatures"))
            draws = DraftDraws(seeds, temperatures / _SHARPNESS, ends + depth - 2, self._to_target)
        tokens, best, total = topk_kernels.highest(logits, topk, draws)
        return (best - total[:, None]).exp(), tokens.long()

    def draw(self, logits: Tensor, best: Tensor, positions: Tensor, rows: Tensor, truncates: bool) -> Tensor:
        """The target's token [B * D] after every place, by noise of the request's seed and the position alone.

        best: [B * D] the likeliest, which greedy rows choose. positions: [B * D] of the places. rows: [B] slots.
        truncates: whether a row has a top-k, top-p or min-p.
        """
        slots = self._slots
        of_places = rows.repeat_interleave(len(logits) // len(rows))
        drawn = torch.empty_like(best)
        draw_kernels.draw(
            *(logits, of_places, positions, slots["seeds"], self._ones, slots["temperatures"]),
            *(slots["top_k"], slots["top_p"], slots["min_p"], drawn),
            truncates=truncates,
        )
        return torch.where(slots["temperatures"].index_select(0, of_places) > 0, drawn, best)

    def finish(self, num_rows: int, num_places: int, chosen: Tensor, successors: Tensor, logits: Tensor) -> None:
        """Walk down the verified trees, and let texts, tables and counts learn. chosen: [B * D].

        successors, logits: [B * D, k] the target's likeliest tokens after every place.
        """
        shape = RoundShape(num_rows, num_rows * num_places)
        self.round.finish(shape, self._columns, self._by_row, chosen, successors, logits)
        if self._free:  # else the host is far behind, and these counts are lost
            here, arrived = self._free.pop()
            here.copy_(self.round.results, non_blocking=True)
            if arrived is not None:
                arrived.record()
            self._coming.append((here, arrived, num_rows))

    def _drop_results(self) -> None:
        while self._coming:
            self._free.append(self._coming.pop()[:2])

    def _take_results(self) -> None:
        """Learn from the results that have arrived."""
        has_learned = False
        while self._coming and (self._coming[0][1] is None or self._coming[0][1].query()):
            here, arrived, num_rows = self._coming.popleft()
            found = self.round.results_in(here)
            self._calibration.add(found["tried"].numpy(), found["fitted"].numpy())
            self._log.add(num_rows, int(found["counts"].numpy()[:num_rows].sum()))
            self._free.append((here, arrived))
            has_learned = True
        if has_learned:
            self._send_probabilities()

    def _send_probabilities(self) -> None:
        probabilities = self._calibration.acceptance_probs
        there = self._staging.send(probabilities.numpy().ravel(), torch.float32)
        self.round.inputs["acceptance_probs"].copy_(there.view(probabilities.shape))


def likeliest_successors(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The target's top-k tokens [B * D, k] int32 after every node, best first, and their logits in float32."""
    tokens, values, _ = topk_kernels.highest(logits, min(NUM_SUCCESSORS, logits.shape[1]))
    return tokens, values


def draw_in_torch(
    logits: Tensor, best: Tensor, positions: Tensor, seeds: Sequence[int], limits: Sequence[Tensor]
) -> Tensor:
    """What `Trees.draw` gives, slowly: where its kernels fail. limits: [B] temperature, top-k, top-p and min-p."""
    num_places = len(logits) // len(seeds)
    columns = (torch.tensor(seeds, device=logits.device), *limits)
    by_place = [column.repeat_interleave(num_places) for column in columns]
    drawn, at_once = torch.empty_like(best), max(_DRAWN_AT_ONCE // logits.shape[1], 1)
    for first in range(0, len(logits), at_once):
        part = slice(first, first + at_once)
        seed, temperature, *cut = (column[part] for column in by_place)
        scores = truncated(logits[part].float() / temperature[:, None], *cut)
        drawn[part] = (scores + gumbel_noise(seed, positions[part] + 1, logits.shape[1])).argmax(dim=1)
    return torch.where(by_place[2] <= 1, best, drawn)


class RoundLog:
    """Logs accepted tokens in one line after every `every` rounds."""

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._rounds = self._rows = self._tokens = 0

    def add(self, num_rows: int, num_tokens: int) -> None:
        self._rounds, self._rows, self._tokens = self._rounds + 1, self._rows + num_rows, self._tokens + num_tokens
        if self._every is not None and self._rounds >= self._every:
            each = (self._rounds, self._rows / self._rounds, self._tokens / self._rows)
            _log.info("Graft: %d rounds with trees of %.1f requests, %.2f tokens of each", *each)
            self._rounds = self._rows = self._tokens = 0


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


def _common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def _new_event(device: torch.device) -> Any:
    return torch.cuda.Event() if device.type == "cuda" else None
