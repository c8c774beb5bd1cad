"""The trees of a server's rounds: made, verified and learned from on the device. Needs Triton, but not SGLang.

SGLang gives every running request a slot in its tables. Texts and sampling settings lie on the device in the same
slots, written when a request joins. A round then needs nothing from the host, and the host needs nothing from a round.

What runs outside of SGLang's graphs is captured in graphs of our own (`warm_up`), because launching its kernels one by
one takes longer than they run. A graph has fixed addresses: small inputs are copied into memory of ours, and logits are
read where SGLang's own graphs leave them. Without a graph (or a GPU) the same functions run directly.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graft.integrations.sglang import kernels
from graft.integrations.sglang.fallback import Attempt
from graft.integrations.sglang.kernels import Drafted, Rows
from graft.integrations.sglang.settings import SGLangSettings
from graft.integrations.sglang.slots import Request, Slots
from graft.model.captures import Captures, Run, pinned_zeros
from graft.model.kernels import draw as draw_kernels
from graft.model.kernels import topk as topk_kernels
from graft.model.noise import NUM_KINDS, gumbel_noise
from graft.model.sampler import truncated
from graft.model.verified import NUM_SUCCESSORS
from graft.spec_decode.memory import FACTORS, ISOLATED_ROWS
from graft.spec_decode.sources import calibrated
from graft.tree.device.buffers import DraftDraws, Tables
from graft.tree.device.round import MAX_TOKENS, MAX_TREE_TOKENS, DeviceRound, RoundShape, Sources

_log = logging.getLogger("graft.sglang")

_PAST_TOKENS = 1 << 18  # tokens of finished texts that are searched
_TABLE_ROWS = 1 << 18
_DRAWN_AT_ONCE = 1 << 22  # random numbers that `draw_in_torch` makes at once
_SHARPNESS = 1.2  # factor of an EAGLE-3 head's logits when it guesses draws; as in `Eagle3Drafter`
_UNREAD_SHARE = 8  # the head drafts for a text if it has left out at most an eighth of it


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


class Trees:
    """Proposes trees for the rows of a batch, and learns from the verified ones."""

    def __init__(
        self, server: Server, settings: SGLangSettings, to_target: Tensor | None, device: torch.device
    ) -> None:
        """to_target: [draft vocabulary] the target's id of each draft id; None: they are the same."""
        self._server, self._settings, self._device = server, settings, device
        sources, calibration = calibrated(has_drafter=True)
        numbers = {name: number for number, name in enumerate(sources)}
        self._calibration = calibration.to(device)
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
        texts, isolated = self.round.texts, settings.isolated
        self._slots = Slots(texts, server.vocab_size, server.random_seed, server.knows_noise, isolated)
        self._ones = torch.ones(server.num_slots, dtype=torch.int64, device=device)
        self._has_head = torch.ones(server.num_slots, dtype=torch.int32, device=device)
        self._unread: Tensor | None = None  # [KV slots] whether the head has left the token out
        # The target's id minus the draft id, by draft id.
        self._to_target = torch.zeros(server.vocab_size, dtype=torch.int64, device=device)
        if to_target is not None:
            self._to_target = to_target.to(device).long() - torch.arange(len(to_target), device=device)
        self._captures = Captures(device)
        self._graph_rows: dict[int, list[int]] = {}  # by places, the batch sizes with graphs; 0: of the head's ranking
        # What graphs read and write. SGLang's verify reads the numbers and the chosen tokens before the next round.
        most, rows, long = MAX_TREE_TOKENS, server.most_rows, torch.int64
        num_successors = min(NUM_SUCCESSORS, server.vocab_size)
        self._numbers = torch.zeros(5 * most, dtype=long, device=device)
        self._successors = torch.zeros(most, num_successors, dtype=torch.int32, device=device)
        self._successor_logits = torch.zeros(most, num_successors, device=device)
        self._chosen, self._positions = torch.zeros(2, most, dtype=long, device=device)
        self._rows, self._ends = torch.zeros(2, rows, dtype=long, device=device)
        self._head_logits = torch.zeros(rows, len(self._to_target), device=device)
        self._head_probs = torch.zeros(rows, server.topk, device=device)
        self._head_tokens = torch.zeros(rows, server.topk, dtype=long, device=device)
        self._log = RoundLog(settings.log, device)
        self.reset()

    def reset(self) -> None:
        """Forget all texts and everything learned from them."""
        self._slots.reset()
        self._log.restart()
        assert self.round.tables is not None
        self.round.tables.entries.fill_(-1)
        self._calibration.restore({})
        self.round.inputs["acceptance_probs"].copy_(self._calibration.acceptance_probs)

    def see(self, requests: Sequence[Request]) -> None:
        """Send the requests of a batch that are new, and keep the texts of those that have ended."""
        self._slots.see(requests)

    def seed_of(self, request: Any) -> int:
        """A request's seed, which is the same on all ranks."""
        return self._slots.seed_of(request)

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
        if self._unread is None:
            return
        self._has_head.index_fill_(0, rows.long(), 1)
        self._unread.index_fill_(0, kv_slots.long(), 0)
        for row, length in enumerate(prefix_lens):
            if length:
                prefix = tables.index_select(0, rows[row : row + 1].long())[0, :length].long()
                num_unread = self._unread.index_select(0, prefix).sum()
                has_read = (_UNREAD_SHARE * num_unread <= length).int()
                self._has_head.index_copy_(0, rows[row : row + 1].long(), has_read[None])

    # A round

    def fits(self, num_rows: int, num_places: int) -> bool:
        """Whether so many rows can have such trees; of one place: whether their draws can be captured."""
        return num_rows <= self._server.most_rows and num_rows * num_places <= MAX_TREE_TOKENS

    def load(self, rows: Rows, num_places: int) -> None:
        """Prepare a round of these rows. Their requests have been seen."""
        budget, settings = num_places - 1, self._settings
        num_nodes = min(settings.budget or budget, budget)
        max_depth = min(settings.max_depth or num_nodes, num_nodes, MAX_TOKENS - 1)
        kernels.load_rows(rows, self._slots.settings, self.round.inputs, self.round.texts, num_nodes, max_depth)

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

    def leave_roots(self, roots: Tensor, lengths: Tensor, num_places: int) -> None:
        """Make the trees of a round roots alone. lengths: [B] tokens in the KV cache."""
        num_rows = len(roots)
        rows = torch.arange(num_rows, device=roots.device)
        own = self._columns[:, : num_rows * num_places].view(6, num_rows, num_places)
        own.zero_()
        own[4].fill_(num_rows)
        own[0, :, 0].copy_(roots)
        own[4, :, 0].copy_(rows)
        self._by_row.zero_()
        starts, sizes, committed, _ = self._by_row[:, :num_rows]
        starts.copy_(rows * num_places)
        sizes.fill_(1)
        committed.copy_(lengths)

    def warm_up(self, num_rows: int, num_places: int, logits: Tensor | None, mask: Tensor | None) -> None:
        """Compile and capture all that is outside of SGLang's graphs. What that teaches is to be forgotten.

        logits: [B * D, V] where SGLang's graphs leave them. mask: its memory for the masks of such verifies. Without
        them, what needs them is compiled alone.
        """
        size, shape = num_rows * num_places, (num_rows, num_places)
        moving = {"place": mask is None, "successors": logits is None, "draw": logits is None}
        mask = torch.ones(size * num_places, dtype=torch.bool, device=self._device) if mask is None else mask
        logits = torch.zeros(size, self._server.vocab_size, device=self._device) if logits is None else logits
        rows = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
        self._slots.warm_up()
        for roots in (rows, rows.int()):  # a prefill and a verify give different types
            self.load(Rows(rows, rows, roots), num_places)
        self.leave_roots(rows, rows, num_places)
        work: dict[tuple[Any, ...], Run] = {}
        if num_places > 1:  # rounds without trees need draws alone
            work = {
                ("rank", num_rows): partial(self._rank_first_level, num_rows),
                ("finish", *shape): partial(self._finish, *shape),
                ("place", *shape, mask.data_ptr()): partial(self._place, *shape, mask, True),
                ("successors", *shape, logits.data_ptr()): partial(self._rank_successors, logits),
            }
        static = (self._rows[:num_rows], self._positions[:size], self._chosen[:size])
        for truncates in (False, True):
            key = ("draw", *shape, logits.data_ptr(), truncates)
            work[key] = partial(self._draw, logits, *static, truncates)
        for key, run in work.items():
            with Attempt("capture its kernels in CUDA graphs, and launches them one by one"):
                if moving.get(key[0]):
                    run()
                else:
                    self._captures.steps[key] = self._captures.capture(run)
        for places in (num_places, 0) if num_places > 1 else (1,):
            self._graph_rows.setdefault(places, []).append(num_rows)

    def _padded(self, num_rows: int, num_places: int) -> int:
        """The rows of the graphs that a batch can run in; without graphs, its own."""
        return min((rows for rows in self._graph_rows.get(num_places, ()) if rows >= num_rows), default=num_rows)

    def arrays(
        self, num_rows: int, num_places: int, mask: Tensor | None, most_tokens: int, has_texts: bool, fills: bool
    ) -> VerifyArrays:
        """The proposed trees as the inputs of a verify, valid until the next round's.

        mask: SGLang's memory for it, if there is any. most_tokens: at least the tokens of all texts together.
        has_texts: the mask covers the texts too. fills: the part over the texts is read.
        """
        size = num_places * (most_tokens * has_texts + num_rows * num_places)
        if mask is None or len(mask) < size:  # too small for a batch larger than all captured ones
            mask = torch.ones(size, dtype=torch.bool, device=self._device)
        elif fills:
            mask.fill_(True)  # all of it: a padded batch reads beyond our rows
        rows = self._padded(num_rows, num_places)
        graph = self._captures.steps.get(("place", rows, num_places, mask.data_ptr())) if has_texts else None
        if graph is None:
            rows = num_rows
            self._place(rows, num_places, mask, has_texts)
        else:
            graph()
        numbers = self._numbers[: 5 * rows * num_places].view(5, rows, num_places)[:, :num_rows]
        tokens, positions, index, children, siblings = numbers
        return VerifyArrays(mask, positions.flatten(), index, children, siblings, tokens.flatten())

    def _place(self, num_rows: int, num_places: int, mask: Tensor, has_texts: bool) -> None:
        numbers = self._numbers[: 5 * num_rows * num_places].view(5, num_rows, num_places)
        kernels.place_trees(self._columns, self._by_row[2], numbers, mask, has_texts)

    def likeliest(self, logits: Tensor, topk: int, ends: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """The head's probabilities [R, K] and tokens [R, K], int64. In sampled rows they are those of being drawn.

        logits: [B * n, V] of the loaded rows. ends: [B] tokens of the texts, with their roots. depth: 1 is the next
        token.
        """
        num_rows = len(ends)
        graph = self._captures.steps.get(("rank", self._padded(num_rows, 0)))
        fits = logits.shape == (num_rows, self._head_logits.shape[1]) and topk == self._server.topk
        if graph is None or not fits or depth != 1:  # deeper levels are ranked inside of SGLang's graphs
            return self._rank(logits, topk, ends, depth)
        self._head_logits[:num_rows].copy_(logits)
        self._ends[:num_rows].copy_(ends)
        graph()
        # SGLang keeps them while the head reads other prompts.
        return self._head_probs[:num_rows].clone(), self._head_tokens[:num_rows].clone()

    def _rank_first_level(self, num_rows: int) -> None:
        logits, ends = self._head_logits[:num_rows], self._ends[:num_rows]
        probabilities, tokens = self._rank(logits, self._server.topk, ends, depth=1)
        self._head_probs[:num_rows].copy_(probabilities)
        self._head_tokens[:num_rows].copy_(tokens)

    def _rank(self, logits: Tensor, topk: int, ends: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        draws, num_rows, inputs = None, len(ends), self.round.inputs
        if self._server.knows_noise and num_rows <= self._server.most_rows:
            seeds, temperatures = (inputs[name][:num_rows] for name in ("seeds", "temperatures"))
            draws = DraftDraws(seeds, temperatures / _SHARPNESS, ends + depth - 2, self._to_target)
        tokens, best, total = topk_kernels.highest(logits, topk, draws)
        return (best - total[:, None]).exp(), tokens.long()

    def rank_successors(self, logits: Tensor, num_places: int) -> None:
        """Note the target's likeliest tokens after every place, from which `finish` learns. logits: [B * D, V]."""
        rows = self._padded(len(logits) // num_places, num_places)
        graph = self._captures.steps.get(("successors", rows, num_places, logits.data_ptr()))
        (graph or partial(self._rank_successors, logits))()

    def _rank_successors(self, logits: Tensor) -> None:
        tokens, values, _ = topk_kernels.highest(logits, self._successors.shape[1])
        self._successors[: len(logits)].copy_(tokens)
        self._successor_logits[: len(logits)].copy_(values)

    def draw(self, logits: Tensor, best: Tensor, positions: Tensor, rows: Tensor, truncates: bool) -> Tensor:
        """The target's token [B * D] after every place, by noise of the request's seed and the position alone.

        It is valid until the next round's. best: [B * D] the likeliest, which greedy rows choose. positions: [B * D] of
        the places. rows: [B] slots. truncates: whether a row has a top-k, top-p or min-p.
        """
        num_rows, size = len(rows), len(best)
        num_places = size // num_rows
        padded = self._padded(num_rows, num_places)
        graph = self._captures.steps.get(("draw", padded, num_places, logits.data_ptr(), truncates))
        if graph is None:
            chosen = best.clone()
            self._draw(logits, rows, positions, chosen, truncates)
            return chosen
        static = [self._rows[:num_rows], self._positions[:size], self._chosen[:size]]
        torch._foreach_copy_(static, [rows, positions, best])
        graph()
        return self._chosen[:size]

    def _draw(self, logits: Tensor, rows: Tensor, positions: Tensor, chosen: Tensor, truncates: bool) -> None:
        """Draw the tokens of sampled rows. chosen: [B * D] the likeliest tokens, overwritten in these rows."""
        slots = self._slots.settings
        of_places = rows.repeat_interleave(len(logits) // len(rows))
        drawn = torch.empty_like(chosen)
        draw_kernels.draw(
            *(logits, of_places, positions, slots["seeds"], self._ones, slots["temperatures"]),
            *(slots["top_k"], slots["top_p"], slots["min_p"], drawn),
            truncates=truncates,
        )
        is_sampled = slots["temperatures"].index_select(0, of_places) > 0
        chosen.copy_(torch.where(is_sampled, drawn, chosen))

    def finish(self, num_rows: int, num_places: int, chosen: Tensor) -> None:
        """Walk down the verified trees, and let texts, tables and calibration learn. chosen: [B * D].

        `rank_successors` has been called for this round.
        """
        own = self._chosen[: len(chosen)]
        if own.data_ptr() != chosen.data_ptr():
            own.copy_(chosen)
        rows = self._padded(num_rows, num_places)
        graph = self._captures.steps.get(("finish", rows, num_places))
        (graph or partial(self._finish, num_rows, num_places))()
        self._log.add(num_rows)

    def _finish(self, num_rows: int, num_places: int) -> None:
        shape, found = RoundShape(num_rows, num_rows * num_places), self.round.found
        learned = (part[: shape.tokens] for part in (self._chosen, self._successors, self._successor_logits))
        self.round.finish(shape, self._columns, self._by_row, *learned)
        self._calibration.add(found["tried"], found["fitted"])
        self.round.inputs["acceptance_probs"].copy_(self._calibration.acceptance_probs)
        if self._settings.log is not None:
            self._log.tokens += found["counts"][:num_rows].sum()


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
    """Logs accepted tokens in one line after every `every` rounds, when their number has arrived from the device."""

    def __init__(self, every: int | None, device: torch.device) -> None:
        self._every = every
        self.tokens = torch.zeros(1, dtype=torch.int64, device=device)  # rounds add to it
        self._here = pinned_zeros((1,), torch.int64, device)
        self._arrived = torch.cuda.Event() if device.type == "cuda" else None
        self.restart()

    def restart(self) -> None:
        self.tokens.zero_()
        self._coming: tuple[int, int] | None = None  # rounds and rows whose tokens are on their way
        self._rounds = self._rows = self._tokens = 0

    def add(self, num_rows: int) -> None:
        if self._every is None:
            return
        if self._coming is not None and (self._arrived is None or self._arrived.query()):
            (rounds, rows), tokens = self._coming, int(self._here)
            each = (rounds, rows / rounds, (tokens - self._tokens) / rows)
            _log.info("Graft: %d rounds with trees of %.1f requests, %.2f tokens of each", *each)
            self._tokens, self._coming = tokens, None
        self._rounds, self._rows = self._rounds + 1, self._rows + num_rows
        if self._rounds >= self._every and self._coming is None:
            self._here.copy_(self.tokens, non_blocking=True)
            if self._arrived is not None:
                self._arrived.record()
            self._coming, self._rounds, self._rows = (self._rounds, self._rows), 0, 0
