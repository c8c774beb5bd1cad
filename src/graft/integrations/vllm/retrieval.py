"""RetrievalProposer: Graft without a draft head, as a proposer class of vLLM 0.32 and later.

    --speculative-config '{"method": "custom_class", "num_speculative_tokens": 8,
                           "model": "graft.integrations.vllm.retrieval.RetrievalProposer"}'

It is vLLM's documented way to bring a proposer, and needs no plugin.
"""

from __future__ import annotations

import os
from typing import Any

from graft.integrations.vllm.chains import Chains
from graft.integrations.vllm.cpu_sampling import guard
from graft.integrations.vllm.settings import ChainSettings
from graft.integrations.vllm.texts import UnnamedTexts


class RetrievalProposer:
    """Proposes the likeliest continuation found in the request's own text, in others, and in n-gram tables."""

    def __init__(self, vllm_config: Any) -> None:
        settings = ChainSettings.from_environment(os.environ)
        if vllm_config.device_config.device_type == "cpu":
            guard()
        self._max_length = vllm_config.model_config.max_model_len
        length = vllm_config.speculative_config.num_speculative_tokens
        self._chains = Chains(vllm_config.model_config.get_vocab_size(), length, settings, has_drafter=False)
        self._texts = UnnamedTexts(self._chains.grafter.finish)

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """A chain for every row, perhaps empty.

        sampled_token_ids: by row, the last step's tokens, none while its prompt is read. num_tokens_no_spec,
        token_ids_cpu: the rows' texts with these.
        """
        rows = [row for row, new in enumerate(sampled_token_ids) if new]
        counts = [int(num_tokens_no_spec[row]) for row in rows]
        seen = [
            (row, token_ids_cpu[row], count, len(sampled_token_ids[row]))
            for row, count in zip(rows, counts, strict=True)
        ]
        texts = dict(zip(rows, self._texts.grown(seen), strict=True))
        limits = {row: self._max_length - count - 1 for row, count in zip(rows, counts, strict=True)}
        rows = [row for row in rows if limits[row] > 0]
        proposed: list[list[int]] = [[] for _ in sampled_token_ids]
        if rows:
            chains = self._chains.begin([texts[row] for row in rows], [limits[row] for row in rows])
            for row, chain in zip(rows, self._chains.end(chains), strict=True):
                proposed[row] = chain
        return proposed

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is no model to load."""
