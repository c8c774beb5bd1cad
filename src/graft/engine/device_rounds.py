"""Device rounds: draft, verify and accept on the target's device.

On a GPU they are CUDA graphs, and the host stays one round behind. `DeviceRounds.run` launches a round and then, while
the device works, takes the results of the previous one. So the host learns a row's tokens, its length and whether it
has ended one round late. It allocates pages by an upper bound, and throws away the surplus round of a row that has
ended. Where there are no graphs, `direct_rounds` runs the same rounds, and their results are taken at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from graft.engine import device_learning
from graft.engine.device_rows import ChoiceRule, ReadChunk
from graft.engine.direct_rounds import DirectRounds
from graft.engine.flight import Flight
from graft.engine.marks import seconds_between
from graft.engine.round_memory import MAX_ROWS, RoundMemory
from graft.engine.staging import Staging
from graft.model import Chunk, Row, TargetRunner, VerifyOutput
from graft.model.grammar import advance
from graft.model.sampler import Sampler, is_adjusted
from graft.request.batch import Batch
from graft.request.sequence import Sequence as TokenSequence
from graft.request.sequence import TreeRow
from graft.request.stats import Clock
from graft.spec_decode.planner import Outcome, Plan
from graft.spec_decode.policies import Policy
from graft.tree.device.buffers import Ranked
from graft.tree.device.round import MAX_TOKENS, MAX_TREE_TOKENS, DeviceRound, RoundShape

if TYPE_CHECKING:
    from graft.engine.captured_rounds import CapturedRounds

_log = logging.getLogger(__name__)

_LEAST_TREE = 8  # tokens of the smallest step with a tree


class DeviceRounds:
    """The rounds of one engine."""

    max_rows = MAX_ROWS  # decoded together

    def __init__(
        self,
        target: TargetRunner,
        policy: Policy,
        new_sampler: Callable[[Sequence[TokenSequence]], Sampler],
    ) -> None:
        self.target: Any = target
        self.policy = policy
        self.drafter: Any = policy.drafter
        self.planner = planner = policy.planner
        if planner is not None:
            planner.padded = target.size_for
        self._calibration = planner.calibration if planner is not None else None
        self.staging = Staging(target.device)
        adjustments: Any = None
        if target.is_captured:
            from graft.engine.adjustments import Adjustments  # needs Triton

            adjustments = Adjustments(target.device, target.vocab_size, self.staging)
        self.memory = RoundMemory(target, policy, self.staging, adjustments)
        self._direct = DirectRounds(self, new_sampler)
        self.captured: CapturedRounds | None = None
        if target.is_captured:
            from graft.engine.captured_rounds import CapturedRounds

            self.captured = CapturedRounds(self, adjustments)
        self._flight: Flight | None = None
        self._ended: Any = None  # the mark at the end of the previous round

    @property
    def learns_successors(self) -> bool:
        """Whether acceptance probabilities or tables are learned."""
        return self._calibration is not None or self.policy.memory is not None

    @property
    def num_unknown(self) -> int:
        """The most tokens of a row that the host may not know of."""
        return MAX_TOKENS if self.target.is_captured else 0

    @property
    def is_in_flight(self) -> bool:
        """Whether a launched round's results have not been taken yet."""
        return self._flight is not None

    def warm_up(self, max_rows: int, choices: Iterable[ChoiceRule] = ChoiceRule, longest: int = 0) -> None:
        """Do one-time work for up to `max_rows` rows. choices, longest: see `CapturedRounds.warm_up`."""
        if self.captured is not None and self.target.is_captured:
            self.captured.warm_up(max_rows, choices, longest)

    # A round

    def run(
        self, batch: Batch, clock: Clock, chunks: Sequence[Chunk], meanwhile: Callable[[], None]
    ) -> list[VerifyOutput] | None:
        """Launch a round, and take the results of the previous one. Returns the output of the prompt chunks.

        Returns None if all answers have ended, so that nothing was launched.
        """
        captured = self.captured if self.captured is not None and self.captured.can_run(batch) else None
        if self._flight is not None and (captured is None or self._is_last(batch) or self.memory.must_move):
            self.flush(clock)
        flight: Flight | None = None
        read: list[VerifyOutput] | None = None
        if any(sequence.finish_reason is None for sequence in batch.sequences):
            if captured is not None:
                flight, read = captured.launch(batch, chunks, clock)
            if flight is None:  # not captured, or that has just failed
                self.flush(clock)
                captured = None
                flight, read = self._run_direct(batch, chunks)
        batch.settle()
        meanwhile()
        self.flush(clock)
        self._flight = flight
        if captured is None:
            self.flush(clock)
        return read

    def _run_direct(self, batch: Batch, chunks: Sequence[Chunk]) -> tuple[Flight, list[VerifyOutput]]:
        rows = batch.cache.rows
        try:
            done = self._direct.run(batch, chunks)
        except BaseException:
            self.memory.forget(rows)  # their texts there may be ahead of the host's
            raise
        if self.captured is not None:  # its adjustments have not counted the new tokens
            pairs = zip(batch.sequences, rows, strict=True)
            self.memory.forget(row for sequence, row in pairs if is_adjusted(sequence.settings))
        return done

    def flush(self, clock: Clock) -> None:
        """Take the results of the round in flight, if there is one, and learn from them."""
        self.take(clock)()

    def take(self, clock: Clock) -> Callable[[], None]:
        """Take the results of the round in flight, if there is one. Returns what learns from them, and may wait."""
        flight, self._flight = self._flight, None
        if flight is None:
            return lambda: None
        try:
            return self._take(flight, clock)
        except BaseException:
            # The device's texts may be ahead of the host's now, so they are sent again before their next round.
            self.memory.forget(flight.rows)
            raise

    def _is_last(self, batch: Batch) -> bool:
        """Whether the round in flight probably ends all answers, so that another one would be thrown away."""
        flight = self._flight
        assert flight is not None
        own = {id(sequence) for sequence in flight.sequences}
        return all(
            id(sequence) in own and sequence.num_remaining <= 1.5 * sequence.stats.mean_accepted
            for sequence in batch.sequences
        )

    # Parts of a round that captured and direct ones share

    def plan(self, batch: Batch, kinds: Sequence[int], padded_rows: int, num_prefill: int) -> Plan:
        if self.planner is None or not self.learns(batch.sequences):
            return Plan(padded_rows, 0, ())
        self.planner.sees_candidates = not self.target.is_captured
        return self.planner.plan(kinds, padded_rows, self._sizes(len(kinds), padded_rows, num_prefill), num_prefill)

    @staticmethod
    def learns(sequences: Sequence[TokenSequence]) -> bool:
        """Whether something is learned from rounds of these sequences."""
        return any(sequence.speculates for sequence in sequences)

    def choose_total(self, round: DeviceRound, kinds: Sequence[int], num_prefill: int, ranked: Ranked) -> None:
        """Choose how many nodes of all rows together are verified, now that the round's candidates are known."""
        if self.planner is not None:
            total = self.planner.choose(ranked.paths[: len(kinds)].cpu().numpy(), kinds, num_prefill)
            round.inputs["total"].clamp_(max=total)

    def make_room(self, batch: Batch, chunks: Sequence[Chunk], shape: RoundShape) -> int:
        """Give rows and prompts pages for the round. Returns the longest text of a decoded row, in tokens."""
        longest, pool = 0, self.target.pool
        in_flight = set(map(id, self._flight.rows)) if self._flight is not None else set()
        for row in batch.cache.rows:
            known = row.length + (MAX_TOKENS if id(row) in in_flight else 0)
            longest = max(longest, known)
            self._ensure(row, known + self._slots_ahead(shape))
        for chunk in chunks:
            pool.ensure(chunk.row, chunk.row.length + len(chunk.tokens))
        return longest

    def _sizes(self, num_rows: int, padded_rows: int, num_prefill: int) -> list[int]:
        """Sizes of steps with trees, prompt tokens not counted; if steps are not padded, only the most tokens."""
        if self.planner is None:
            return []
        most = num_rows * (1 + RoundShape(padded_rows, 0).cap)
        if not self.target.is_captured:
            most = min(most, MAX_TREE_TOKENS - num_prefill)
            return [most] if most > num_rows else []
        # Trees may enlarge a step up to MAX_TREE_TOKENS. If prompts fill more than that, trees only use its padding.
        room = max(self.target.size_for(padded_rows + num_prefill), MAX_TREE_TOKENS) - num_prefill
        most = min(room, most)
        return [size for size in self.target.step_sizes if max(2 * padded_rows, _LEAST_TREE) <= size <= most]

    def planned_sizes(self, padded_rows: int) -> list[int]:
        """Sizes of steps with trees that may be planned for `padded_rows` rows, which include padding."""
        sizes = self._sizes(padded_rows, padded_rows, 0)
        if self.planner is None or self.planner.fixed is None or not sizes:
            return sizes
        # With fewer rows or beside a prompt, rounds are smaller.
        return [size for size in sizes if size <= self.planner.fixed_size(padded_rows, sizes)]

    def _slots_ahead(self, shape: RoundShape) -> int:
        drafted = self.drafter.num_slots if self.drafter is not None else 0
        return max(shape.cap + 1, drafted, MAX_TOKENS)

    def _ensure(self, row: Row, num_slots: int) -> None:
        pool = self.target.pool
        most = pool.max_slots
        pool.ensure(row, num_slots if most is None else min(num_slots, most))

    # Prompt chunks in the same step

    def learn_prompts(self, chunks: Sequence[ReadChunk]) -> None:
        """Let the drafter and the tables learn from the prompt chunks of the last step."""
        if self.drafter is not None:
            self.drafter.read([(each.draft, each.row, each.verified, each.following) for each in chunks])
        with self.target.launching(1):
            # While a round is in flight and the pool grows, tables skip this chunk.
            if self.policy.memory is not None and not (self.is_in_flight and self.memory.must_move):
                device_learning.learn_prompts(self.memory.round(), chunks, self.staging)

    def finish_text(self, sequence: TokenSequence) -> None:
        """Learn from a finished answer."""
        self.memory.finish_text(sequence)

    # Taking results

    def _take(self, flight: Flight, clock: Clock) -> Callable[[], None]:
        """Extend the sequences that have not ended by a round's tokens. Returns what learns from the round."""
        flight.done.wait()
        found, shape, num_rows = flight.results, flight.shape, len(flight.rows)
        counts = found["counts"][:num_rows].tolist()
        tokens = [own[:count] for own, count in zip(found["tokens"][:num_rows].tolist(), counts, strict=True)]
        nodes = [
            own[: max(count - 1, 0)] for own, count in zip(found["places"][:num_rows].tolist(), counts, strict=True)
        ]
        num_passes = int(found["made"].sum()) if not shape.is_plain else 0
        tree = flight.tree()
        considered, logprobs = flight.considered(tree), flight.logprobs()
        names, common = self.policy.sources, self.policy.common_sources
        by_row = [*zip(flight.sequences, flight.rows, flight.draft_rows, tokens, nodes, strict=True)]
        is_over = [not row.is_open or sequence.finish_reason is not None for sequence, row, *_ in by_row]
        for (_, row, draft_row, new, _), is_row_over in zip(by_row, is_over, strict=True):
            if not is_row_over:
                row.length += len(new)
                if draft_row is not None:
                    draft_row.length += len(new)
        if flight.draft is not None and flight.verified is not None and self.learns(flight.sequences):
            self.drafter.learn(flight.draft, flight.verified, nodes, tokens)
        for number, (sequence, _, _, new, accepted) in enumerate(by_row):
            if is_over[number]:
                continue
            sequence.stats.draft_passes += num_passes if sequence.speculates else 0
            knew_noise = flight.kinds[number] > 0
            try:
                if sequence.constraint is not None and flight.adjusted is not None:
                    advance(sequence.constraint, new, [0, *accepted], flight.adjusted.failures.get(number, {}))
                seen = TreeRow(tree, flight.verified, number, names, considered, common, knew_noise, logprobs)
                sequence.extend(new, accepted, seen)
            except Exception as error:  # ends only that sequence
                sequence.failure = error

        def learn() -> None:
            try:
                self._count(flight, clock, nodes, num_passes)
            except Exception:  # learning affects only speed, so no answer may fail
                _log.exception("learning from a round failed")

        return learn

    def _count(self, flight: Flight, clock: Clock, nodes: list[list[int]], num_passes: int) -> None:
        """Learn from a round's times and outcome."""
        before, proposed, verified, finished = flight.marks
        ended, self._ended = self._ended, finished
        seconds = [seconds_between(*pair) for pair in ((before, proposed), (proposed, verified), (verified, finished))]
        for phase, own in zip(("propose", "verify", "accept"), seconds, strict=True):
            clock.seconds[phase] += own
        if self.planner is None:
            return
        pause = seconds_between(ended, before) if ended is not None else 0.0
        is_usual = flight.is_usual and 0 <= pause < seconds[1]
        found, num_rows, shape = flight.results, len(flight.rows), flight.shape
        size = shape.rows * shape.cap
        paths, needs = (found[name][:size].reshape(shape.rows, -1)[:num_rows].copy() for name in ("paths", "needs"))
        first = num_rows if flight.reach is None else flight.reach
        self.planner.learn(
            Outcome(
                num_rows=num_rows,
                is_plain=shape.is_plain,
                tokens=flight.num_tokens,
                num_prefill_tokens=flight.num_prefill_tokens,
                paths=paths,
                needs=needs,
                num_nodes=found["num_nodes"][:num_rows].copy(),
                nodes=nodes,
                reaches=[first, *found["reaches"][1 : num_passes + 1].tolist()],
                max_passes=flight.max_passes,
                num_passes=num_passes,
                kinds=flight.kinds,
                tried=found["tried"],
                fitted=found["fitted"],
                step_seconds=seconds[1] if is_usual else 0.0,
                work_seconds=seconds[0] + seconds[2] + pause if is_usual else 0.0,
                confidences=found["confidences"][:num_rows].copy(),
            )
        )
