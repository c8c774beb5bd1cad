"""TargetRunner: prefill and verify, the forwards of the target model, by transformers' own code.

It has no sequences: their KV cache, a `TreeCache`, is passed in. Tokens are chosen in `sampler` and accepted in
`spec_decode.acceptance`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from graft.model import attention
from graft.model.kv_cache import CacheLimit, TreeCache, WritePosition
from graft.model.loan import evaluating, tree_attention
from graft.model.support import check_supported
from graft.model.verified import VerifyOutput
from graft.progress import Report
from graft.spec_decode.tree import DraftTree


class TargetRunner:
    """Runs a target model over prompts (`prefill`) and draft trees (`verify`), on the KV caches that it opens."""

    def __init__(self, model: PreTrainedModel, hidden_layers: Sequence[int] = (), chunk_size: int = 256) -> None:
        check_supported(model)
        self.model = model
        self.chunk_size = chunk_size
        self.is_exact = False  # whether a token has the same bits in any batch
        self._hidden_layers = tuple(hidden_layers)
        config = model.config.get_text_config()
        self._num_layers = config.num_hidden_layers
        self.vocab_size = _num_logits(model)
        self.max_positions = _max_positions(config)
        self.progress: Callable[[Report], None] = lambda report: None  # told of one-time work
        self._limit: CacheLimit | None = None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def num_setups(self) -> int:
        """One-time set-ups done so far, such as graph captures: the time of a step with one tells nothing of others."""
        return 0

    @property
    def mode(self) -> str:
        """How steps run, in a few words: captured or eager, and where they are exact (docs/exactness.md)."""
        return "eager"

    def synchronize(self) -> None:
        """Waits for this thread's CUDA stream.

        Not for the whole device: that is an error while another thread captures a graph, and ends its capture.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def wait_for(self, verified: VerifyOutput) -> None:
        """Waits until a verify's output is there, but not for what the device was given to do since."""
        if verified.step is not None:
            verified.step.judged.wait()
        else:
            self.synchronize()

    def warm_up(self, cache: TreeCache, width: int) -> None:
        """Warm-up: does what only the first verify of a width does, so that the next can be timed."""

    def memory_report(self) -> dict[str, int]:
        """Bytes on the device beside the model's weights and a generation's own tensors, by purpose."""
        return {}

    def open(self, num_rows: int, num_slots: int) -> TreeCache:
        """A new KV cache for so many rows of so many tokens."""
        return TreeCache(self._num_layers, num_rows, num_slots, self._limit)

    def keep_to(self, limit: CacheLimit) -> None:
        """Limits the slots of all KV caches that it opens from now on, together."""
        self._limit = limit

    def num_slots_of(self, num_rows: int, num_slots: int) -> int:
        """Slots that a KV cache of this size takes of the limit, at the least."""
        return num_rows * num_slots

    def prefill(self, cache: TreeCache, row: int, tokens: Sequence[int]) -> Iterator[VerifyOutput]:
        """Commits a prompt to one row, chunk by chunk: a chunk is a tree with one path, all of it accepted."""
        for start in range(0, len(tokens), self.chunk_size):
            chunk = DraftTree.chain(torch.tensor([tokens[start : start + self.chunk_size]]))
            aim = cache.aim(slice(row, row + 1), chunk.width, self.device)
            verified = self._forward(cache, chunk, aim)
            cache.advance([chunk.width])
            yield verified

    def verify(self, cache: TreeCache, tree: DraftTree) -> VerifyOutput:
        """Logits after every node of every row's tree, in one forward. Nothing is committed. tree: on the host."""
        aim = cache.aim(slice(0, cache.num_rows), tree.width, self.device)
        return self._forward(cache, tree, aim)

    def prefill_batch(self, cache: TreeCache, prompts: Sequence[Sequence[int]]) -> None:
        """Prefill without logits: commits a prompt to every row, all rows together, chunk by chunk."""
        for start in range(0, max(map(len, prompts)), self.chunk_size):
            counts = [min(max(len(prompt) - start, 0), self.chunk_size) for prompt in prompts]
            width = max(counts)
            rows = [
                [*prompt[start : start + count], *[0] * (width - count)]
                for prompt, count in zip(prompts, counts, strict=True)
            ]
            aim = cache.aim(slice(0, cache.num_rows), width, self.device)
            self._forward(cache, DraftTree.chain(torch.tensor(rows)), aim, num_logits=1)
            cache.advance(counts)

    def step(self, cache: TreeCache, tokens: Tensor, lengths: Tensor) -> Tensor:
        """A plain decoding step that can be captured: logits [B, V] after tokens [B]. All on the device."""
        return self._forward(cache, DraftTree.roots(tokens), cache.aim_on_device(lengths)).logits[:, 0]

    @torch.no_grad()
    def _forward(self, cache: TreeCache, tree: DraftTree, aim: WritePosition, num_logits: int = 0) -> VerifyOutput:
        """One forward that writes at `aim`. num_logits: logits for that many last tokens only; 0: for all."""
        tokens, tree = tree.tokens, tree.to(self.device)
        positions = self._clamped(tree.positions(aim.lengths))
        seen = attention.Visibility(aim, positions, tree.ancestors(), self.model.dtype)
        logits, hidden = self._run_model(cache, tree.tokens, positions, seen, num_logits)
        return VerifyOutput(tokens, logits.float(), hidden)

    def _clamped(self, positions: Tensor) -> Tensor:
        """Positions at most the model's last: nodes beyond cannot become text, but must not index past its tables."""
        return positions if self.max_positions is None else positions.clamp(max=self.max_positions - 1)

    def _run_model(
        self,
        cache: TreeCache,
        tokens: Tensor,
        positions: Tensor,
        seen: attention.Visibility | attention.Paths,
        num_logits: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Logits in the model's dtype, and the hidden states asked for, concatenated."""
        with tree_attention(self.model), evaluating(self.model):
            output = self.model(
                input_ids=tokens,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=num_logits,
                output_hidden_states=bool(self._hidden_layers),
                tree=seen,
            )
        return output.logits, side_by_side(
            [output.hidden_states[layer] for layer in self._hidden_layers], output.logits
        )


def side_by_side(hidden: Sequence[Tensor], like: Tensor) -> Tensor:
    """Hidden states [B, W, H] of some layers as one [B, W, layers * H]; [B, W, 0] if there are none."""
    return torch.cat(list(hidden), dim=-1) if hidden else like[..., :0]


def _num_logits(model: PreTrainedModel) -> int:
    """Rows of the output layer, which may be more than the config's vocabulary."""
    output = model.get_output_embeddings()
    return output.weight.shape[0] if output is not None else model.config.get_text_config().vocab_size


def _max_positions(config: PreTrainedConfig) -> int | None:
    """The model's context length: positions below it mean the same in every forward. None: no limit.

    With longrope the rotation of all tokens changes once a forward goes past the original context, so a tree that
    reaches further than plain decoding would change the text: there such a model's context ends.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        return int(original)
    return limit
