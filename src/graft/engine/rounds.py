"""Rounds: the round of speculative decoding, and the batches that it runs on.

A round: propose a tree (draft, prune, graft), verify it, accept a path, commit it, learn. Plain decoding is the same
round with a tree of one node. The loop around it (`decode_loop.py`) decides which requests are in a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from graft.drafters.drafter import Drafter, num_setups_of
from graft.engine.device_rounds import DeviceRounds
from graft.engine.device_rows import ChoiceRule, ReadChunk
from graft.model import Chunk, KVCache, TargetRunner, VerifyOutput
from graft.model.sampler import Chooser, Sampler, SamplingSettings
from graft.request.batch import Batch
from graft.request.sequence import Sequence as TokenSequence
from graft.request.stats import Clock
from graft.spec_decode.policies import Policy


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
        self.new_sampler = partial(_sampler_of, target, self.eos_token_ids)
        self._device_rounds: tuple[Policy, DeviceRounds] | None = None
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
        if self._is_prefilling:  # wait, or its time would count as this round's
            self.target.synchronize()
            self._is_prefilling = False
        read = self.device_rounds.run(batch, clock, [part.chunk for part in chunks], meanwhile)
        if read is not None:
            self._learn_prompts(chunks, read)
        elif chunks:
            self.prefill(chunks)

    @property
    def device_rounds(self) -> DeviceRounds:
        known = self._device_rounds
        if known is None or known[0] is not self.policy:
            made = DeviceRounds(self.target, self.policy, self.new_sampler)
            known = self._device_rounds = (self.policy, made)
        return known[1]

    def finish(self, sequence: TokenSequence) -> None:
        """Learn from a finished answer."""
        self.policy.num_texts += 1
        self.device_rounds.finish_text(sequence)

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
                if sequence.speculates:
                    salt = self.policy.salt_of(sequence)
                    chunk = ReadChunk(verified, preceding, following, salt, part.batch.draft, part.row)
                    together.append((sequence, chunk))
            except Exception as error:
                sequence.failure = error
        if not together:
            return
        try:
            self.device_rounds.learn_prompts([chunk for _, chunk in together])
        except Exception as error:
            for sequence, _ in together:
                sequence.failure = error

    # Batches and their pages

    def batch_of(self, sequences: list[TokenSequence], cache: KVCache, chooser: Chooser | None = None) -> Batch:
        """A batch of these sequences. Their rows may already hold the beginnings of their texts."""
        try:
            drafter = self.policy.drafter
            draft = drafter.open(cache, [sequence.ids for sequence in sequences]) if drafter is not None else None
            return Batch(list(sequences), cache, chooser, draft)
        except Exception:
            cache.release()
            raise

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
        self.device_rounds.warm_up(max_rows)

    def capture_rounds(self, max_rows: int, longest: int, settings: SamplingSettings) -> None:
        """Capture all graphs that device rounds may need, so that none is captured while rounds are timed.

        max_rows: rows decoded together. longest: tokens of the longest text. settings: of all rows.
        """
        # The host does not know yet what the round in flight adds.
        self.device_rounds.warm_up(max_rows, [ChoiceRule.of(settings)], longest + self.device_rounds.num_unknown)

    @property
    def num_setups(self) -> int:
        return num_setups_of(self.target, self.drafter)


def _sampler_of(target: TargetRunner, eos_token_ids: Sequence[int], sequences: Sequence[TokenSequence]) -> Sampler:
    """A sampler of these sequences as they are now."""
    return Sampler(
        [s.settings for s in sequences],
        [s.ids for s in sequences],
        eos_token_ids,
        target.vocab_size,
        target.device,
        [s.constraint for s in sequences],
        [s.num_prompt_tokens for s in sequences],
    )
