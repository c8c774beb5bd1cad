"""GraftEagleProposer: vLLM's EAGLE proposer, whose chains are drafted as far as that pays, and retrieved from there on.

vLLM's own code runs the head. It asks `_greedy_sample` for the token of each pass, where the head's logits are seen,
and where drafting can be ended. Nothing else of vLLM is changed: what it verifies, and how it accepts, is its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.spec_decode.eagle import EagleProposer

from graft.integrations.vllm.chains import ChainRound, Chains
from graft.integrations.vllm.cpu_sampling import guard
from graft.integrations.vllm.plugin import check_config
from graft.integrations.vllm.settings import ChainSettings
from graft.integrations.vllm.texts import Texts
from graft.spec_decode.grafter import Text

logger = init_logger(f"vllm.{__name__}")  # vLLM's handlers serve its own names


class _EnoughDrafted(Exception):
    """Leaves vLLM's loop of draft passes."""


@dataclass
class _Drafting:
    """The round under way, and which rows of vLLM's batch are in it."""

    chains: ChainRound | None  # None: no row can have a draft, and only the pass that is always made is made
    rows: list[int]


class GraftEagleProposer(EagleProposer):
    """vLLM's EAGLE proposer with Graft's chains."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        check_config(vllm_config)
        settings = ChainSettings.from_environment(os.environ)
        super().__init__(vllm_config, device, runner)
        if device.type == "cpu":
            guard()
        # Drafts that are grafted have no distribution of the head: vLLM takes them as certain, which stays exact.
        self._enable_probabilistic_draft_probs = False
        length = vllm_config.speculative_config.num_speculative_tokens
        self._chains = Chains(vllm_config.model_config.get_vocab_size(), length, settings, has_drafter=True)
        self._texts = Texts(self._chains.grafter.finish)
        self._sampled: list[list[int]] = []  # by row: the last step's tokens, none while a prompt is read
        self._rows: dict[int, Text] = {}  # by row: the texts of those that have got tokens
        self._drafting: _Drafting | None = None
        logger.info("Graft: chains of %d tokens, at most %d draft passes", length, self._chains.num_passes)

    # Both are called right before `propose`, with the last step's tokens and vLLM's texts.

    def prepare_next_token_ids_padded(
        self, sampled_token_ids: Tensor, requests: Any, gpu_input_batch: Any, discard_request_mask: Tensor
    ) -> Any:
        found = super().prepare_next_token_ids_padded(
            sampled_token_ids, requests, gpu_input_batch, discard_request_mask
        )
        discarded = discard_request_mask[: len(sampled_token_ids)].tolist()
        self._sampled = [
            [] if is_discarded else [token for token in row if token >= 0]
            for row, is_discarded in zip(sampled_token_ids.tolist(), discarded, strict=True)
        ]
        self._grow_texts(requests, gpu_input_batch, are_known=False)
        return found

    def prepare_next_token_ids_cpu(
        self, sampled_token_ids: list[list[int]], requests: Any, gpu_input_batch: Any, num_scheduled_tokens: Any
    ) -> Any:
        self._sampled = sampled_token_ids
        self._grow_texts(requests, gpu_input_batch, are_known=True)
        return super().prepare_next_token_ids_cpu(sampled_token_ids, requests, gpu_input_batch, num_scheduled_tokens)

    def _grow_texts(self, requests: Any, batch: Any, are_known: bool) -> None:
        """Takes in the last step's tokens. are_known: whether vLLM's texts have them already."""
        self._texts.keep(requests)
        self._rows = {}
        for row, new in enumerate(self._sampled):
            if new:
                known, count = batch.token_ids_cpu[row], int(batch.num_tokens_no_spec[row])
                self._rows[row] = self._texts.grown(batch.req_ids[row], known, count, [] if are_known else new)

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        """A chain for every row, as lists. vLLM 0.32 says how long it may be, by a keyword that 0.20 does not have."""
        length: int = kwargs.get("num_speculative_tokens", self._chains.length)
        if length < 1:
            self._chains.skip()
            return super().propose(*args, **kwargs)
        texts = self._rows
        limits: dict[int, int] = {
            row: min(length, self.max_model_len - len(text.ids) - 1) for row, text in texts.items()
        }
        rows = [row for row in texts if limits[row] > 0]
        chains = self._chains.begin([texts[row] for row in rows], [limits[row] for row in rows]) if rows else None
        self._drafting = _Drafting(chains, rows)
        try:
            super().propose(*args, **kwargs)
        except _EnoughDrafted:
            pass
        finally:
            self._drafting = None
        proposed: list[list[int]] = [[] for _ in self._sampled]
        if chains is not None:
            for row, chain in zip(rows, self._chains.end(chains), strict=True):
                # In a captured step all rows have one length; what fills them up is verified, too, and mostly rejected.
                filling = [chain[-1] if chain else texts[row].ids[-1]] * (limits[row] - len(chain))
                proposed[row] = chain + filling if self._pads else chain
        every = self._chains.settings.log
        if every and chains is not None and self._chains.counts.steps % every == 0:
            logger.info("Graft: %s", self._chains.counts)
        return proposed

    def _greedy_sample(self, hidden_states: Tensor) -> Tensor:
        if self._drafting is None:
            return super()._greedy_sample(hidden_states)
        if self._drafting.chains is None:
            raise _EnoughDrafted
        logits = self.model.compute_logits(hidden_states).float()
        top, tokens = logits.max(dim=-1)
        probabilities = (top - logits.logsumexp(dim=-1)).exp()
        seen = torch.stack((tokens.double(), probabilities.double())).tolist()  # one wait for the device
        rows = self._drafting.rows
        drafted, chances = [int(seen[0][row]) for row in rows], [seen[1][row] for row in rows]
        if not self._chains.drafted(self._drafting.chains, drafted, chances):
            raise _EnoughDrafted
        return tokens

    @property
    def _pads(self) -> bool:
        if self._chains.settings.pad is not None:
            return self._chains.settings.pad
        return self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
