"""Rounds: the round of speculative decoding, and the batches that it runs on.

A round: propose a tree (draft, prune, graft), verify it, accept a path, commit it, learn. Plain decoding is the same
round with a tree of one node. The loop around it (`decode_loop.py`) decides which requests are in a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from graft.engine.device_rows import Choice, ReadChunk
from graft.engine.marks import new_mark, seconds_between
from graft.model import Chunk, KVCache, TargetRunner, VerifyOutput
from graft.model.captures import on_device
from graft.model.grammar import pruned
from graft.model.sampler import Chooser, Sampler, SamplingSettings
from graft.request.batch import Batch
from graft.request.sequence import Sequence as TokenSequence
from graft.request.sequence import TreeRow
from graft.request.stats import Clock
from graft.spec_decode.acceptance import Accepted, walk
from graft.spec_decode.policies import Policy
from graft.spec_decode.policies.base import DraftResult
from graft.spec_decode.policies.graft import Graft
from graft.spec_decode.proposers.drafter import Drafter, num_setups_of
from graft.tree.tree import DraftTree

if TYPE_CHECKING:
    from graft.engine.device_rounds import DeviceRounds

BY_ITSELF = ("cuda",)  # device types that can run device rounds


class PrefillChunk(NamedTuple):
    """The next tokens of a prompt to prefill, and the row that they belong to."""

    batch: Batch
    row: int
    chunk: Chunk


class Rounds:
    """Runs rounds, and steps that only prefill, with one target model and one policy."""

    def __init__(
        self, target: TargetRunner, policy: Policy, drafter: Drafter | None, eos_token_ids: Sequence[int]
    ) -> None:
        self.target, self.policy, self.drafter = target, policy, drafter
        self.eos_token_ids = list(eos_token_ids)
        self._device_rounds: tuple[Policy, DeviceRounds | None] | None = None
        self._is_prefilling = False  # whether the device may still be busy with a step that only prefills

    @torch.no_grad()
    def run_round(
        self,
        batch: Batch,
        clock: Clock,
        chunks: Sequence[PrefillChunk] = (),
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """The round: propose a tree for every row, verify all trees in one step, and extend each sequence.

        chunks: prompt chunks of other batches, prefilled in the same step.
        meanwhile: called while the device works; the sequences' texts are then those of the previous round.
        """
        batch.begin_round(sum(len(part.chunk.tokens) for part in chunks))
        if batch.is_on_device:
            self._run_on_device(batch, clock, chunks, meanwhile)
            return
        if self._is_prefilling:  # wait, or its time would count as this round's
            self.target.synchronize()
            self._is_prefilling = False
        speculates = any(sequence.speculates for sequence in batch.sequences)
        if speculates:
            draft_result = self.policy.grow(batch, batch.roots(), clock)
        else:
            draft_result = DraftResult.without_drafts(DraftTree.roots(batch.roots()))
        tree = self._allowed_tree(batch, draft_result.tree)
        begin, end = (new_mark(self.target.device) for _ in range(2))
        with clock("verify"):
            with on_device(self.target.device):
                begin.record()
                verified, read = self.target.step(batch.cache, tree, [part.chunk for part in chunks])
                end.record()
            assert verified is not None
            batch.settle()
            meanwhile()
            self.target.synchronize()  # wait here, so that the time counts as the verify's and not as the walk's
        with clock("accept"):
            assert batch.chooser is not None
            accepted = walk(tree, verified, batch.chooser)
            self.target.commit(batch.cache, accepted.nodes)
        with clock("learn"):
            if speculates:
                seconds = seconds_between(begin, end) if self._is_alone else 0.0
                self.policy.learn(batch, tree, verified, accepted, seconds)
            self._learn_prompts(chunks, read)
        self._extend(batch, tree, verified, accepted, draft_result)

    @property
    def _is_alone(self) -> bool:
        """Whether no device round is in flight, beside which a host round would take longer."""
        return self.device_rounds is None or not self.device_rounds.is_in_flight

    def _run_on_device(
        self, batch: Batch, clock: Clock, chunks: Sequence[PrefillChunk], meanwhile: Callable[[], None]
    ) -> None:
        """Launch a device round, and take the results of the previous one."""
        assert self.device_rounds is not None
        try:
            read = self.device_rounds.run(batch, clock, [part.chunk for part in chunks], meanwhile)
        except RuntimeError:
            if self.device_rounds.failure is None:
                raise
            # Device rounds cannot be captured: the host takes over, with new samplers for the texts so far.
            self.device_rounds.flush(clock)
            self.take_over(batch)
            self.run_round(batch, clock, chunks, meanwhile)
            return
        if read is not None:
            self._learn_prompts(chunks, read)
        elif chunks:
            self.prefill(chunks)

    @property
    def device_rounds(self) -> DeviceRounds | None:
        """The device rounds; None if they are not possible here."""
        if self._device_rounds is None or self._device_rounds[0] is not self.policy:
            rounds = None
            if self.target.device.type in BY_ITSELF:
                from graft.engine.device_rounds import DeviceRounds  # needs Triton

                rounds = DeviceRounds.of(self.target, self.policy, self.drafter)
            if isinstance(self.policy, Graft):
                self.policy.on_device = rounds
            self._device_rounds = (self.policy, rounds)
        return self._device_rounds[1]

    def finish(self, batch: Batch, sequence: TokenSequence) -> None:
        """Learn from a finished answer."""
        if batch.is_on_device and self.device_rounds is not None:
            self.policy.num_texts += 1
            self.device_rounds.finish_text(sequence)
        else:
            self.policy.finish(sequence)

    def _allowed_tree(self, batch: Batch, tree: DraftTree) -> DraftTree:
        """The tree without nodes that grammars forbid, and no larger than fits a step."""
        sequences = batch.sequences
        tree = pruned(
            tree, [sequence.constraint for sequence in sequences], [sequence.speculates for sequence in sequences]
        )
        most = self.target.max_tokens
        if most is None:
            return tree
        # A fixed budget for many rows may ask for more than fits.
        return tree.first(max((most - batch.num_prefill_tokens) // len(sequences), 1))

    def _extend(
        self, batch: Batch, tree: DraftTree, verified: VerifyOutput, accepted: Accepted, draft_result: DraftResult
    ) -> None:
        """Append each row's accepted tokens to its sequence, if it goes on. A failure ends only that sequence."""
        sources, common = self.policy.sources, self.policy.common_sources
        outcome = zip(batch.sequences, accepted.tokens, accepted.nodes, draft_result.passes, strict=True)
        for row, (sequence, tokens, nodes, passes) in enumerate(outcome):
            if sequence.finish_reason is not None:  # in the last device round, before the host took over
                continue
            try:
                is_whole = sequence.speculates and sequence.constraint is None
                considered = draft_result.considered if is_whole else None
                knew_noise = draft_result.draws is not None and draft_result.draws.kinds[row] > 0
                seen = TreeRow(tree, verified, row, sources, considered, common, knew_noise)
                sequence.stats.draft_passes += passes
                sequence.extend(tokens, nodes, seen)
            except Exception as error:
                sequence.failure = error

    @torch.no_grad()
    def prefill(self, chunks: Sequence[PrefillChunk], waits: bool = True) -> None:
        """Run a step of only prompt chunks. waits: until the device has finished."""
        _, read = self.target.step(None, None, [part.chunk for part in chunks])
        self._learn_prompts(chunks, read)
        self._is_prefilling = not waits
        if waits:
            self.target.synchronize()

    def _learn_prompts(self, chunks: Sequence[PrefillChunk], read: Sequence[VerifyOutput]) -> None:
        """Learn from prefilled chunks. A failure ends only its sequence, or all those of one device batch."""
        together: list[tuple[TokenSequence, ReadChunk]] = []
        for part, verified in zip(chunks, read, strict=True):
            sequence, end = part.batch.sequences[part.row], part.chunk.row.length
            start = end - len(part.chunk.tokens)
            preceding, following = sequence.ids[max(start - 2, 0) : start], sequence.ids[start + 1 : end + 1]
            try:
                sequence.read_prompt(start, verified)
                if sequence.speculates and part.batch.is_on_device:
                    salt = self.policy.salt_of(sequence)
                    chunk = ReadChunk(verified, preceding, following, salt, part.batch.draft, part.row)
                    together.append((sequence, chunk))
                elif sequence.speculates:
                    self.policy.read(part.batch, part.row, verified, following)
            except Exception as error:
                sequence.failure = error
        if not together:
            return
        assert self.device_rounds is not None
        try:
            self.device_rounds.learn_prompts([chunk for _, chunk in together])
        except Exception as error:
            for sequence, _ in together:
                sequence.failure = error

    # Batches and their pages

    def batch_of(self, sequences: list[TokenSequence], cache: KVCache, chooser: Chooser | None = None) -> Batch:
        """A batch of these sequences. Their rows may already hold the beginnings of their texts."""
        try:
            draft = self.policy.open(cache, [sequence.ids for sequence in sequences])
            rounds = self.device_rounds if chooser is None else None
            is_on_device = rounds is not None and rounds.can_run(sequences, draft)
            if chooser is None and not is_on_device:
                chooser = self._sampler(sequences)
            return Batch(list(sequences), cache, chooser, draft, is_on_device)
        except Exception:
            cache.release()
            raise

    def take_over(self, batch: Batch) -> None:
        """Leave a batch's rounds to the host."""
        if batch.is_on_device:
            batch.is_on_device, batch.chooser = False, self._sampler(batch.sequences)

    def _sampler(self, batch: list[TokenSequence]) -> Sampler:
        return Sampler(
            [s.settings for s in batch],
            [s.ids for s in batch],
            self.eos_token_ids,
            self.target.vocab_size,
            self.target.device,
            [s.constraint for s in batch],
            [s.num_prompt_tokens for s in batch],
        )

    def page_salt(self, sequence: TokenSequence, salt: str = "") -> str:
        """The salt of a text's page hashes in the prefix cache. salt: common to the requests that may share pages."""
        # Texts that do not speculate have a salt of their own, because their pages lack the drafter's entries. A prompt
        # whose log-probabilities are wanted must be prefilled from its beginning, so it shares with no other.
        own = f"{sequence.number}/" if sequence.num_prompt_logprobs is not None else ""
        return f"{own}{sequence.speculates and self.drafter is not None}/{salt}"

    def keep_pages(self, batch: Batch, row: int, salt: str = "") -> None:
        """Put a row's pages into the prefix cache."""
        sequence = batch.sequences[row]
        if sequence.num_prompt_logprobs is not None:
            return  # no other text has its salt
        num_entries = batch.draft.lengths[row] if batch.draft is not None and sequence.speculates else None
        batch.cache.pool.keep_prefix(batch.cache.rows[row], sequence.ids, self.page_salt(sequence, salt), num_entries)

    # Set-up

    def warm_up(self, max_tokens: int, max_rows: int) -> None:
        """Do one-time work now, so that the first requests need not wait for it. `target.progress` reports progress.

        max_tokens: of the largest step. max_rows: of the largest batch.
        """
        self.target.warm_up(max_tokens)
        if self.drafter is not None:
            self.drafter.warm_up(self.target, max_rows)
        self.policy.prepare()
        self.policy.measure()
        if self.device_rounds is not None:
            self.device_rounds.warm_up(max_rows)

    def capture_rounds(self, max_rows: int, longest: int, settings: SamplingSettings) -> None:
        """Capture all graphs that device rounds may need, so that none is captured while rounds are timed.

        max_rows: rows decoded together. longest: tokens of the longest text. settings: of all rows.
        """
        if self.device_rounds is not None:
            # The host does not know yet what the round in flight adds.
            longest += self.device_rounds.max_new_tokens
            self.device_rounds.warm_up(max_rows, [Choice.of(settings)], longest)

    @property
    def num_setups(self) -> int:
        return num_setups_of(self.target, self.drafter)
