"""TargetRunner: runs transformers' own model over trees and chunks of prompt, one forward at a time.

It owns no sequences: a `TreeCache` does, and is passed in. Choosing and accepting tokens happens elsewhere.
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
    """A model, and the three verbs of a round: `prefill`, `verify`, `commit` (on the cache it opened)."""

    def __init__(self, model: PreTrainedModel, hidden_layers: Sequence[int] = (), chunk_size: int = 256) -> None:
        check_supported(model)
        self.model = model
        self.chunk_size = chunk_size
        self.is_exact = False  # whether it gives a token the same bits in any batch, or says why it cannot
        self._hidden_layers = tuple(hidden_layers)
        config = model.config.get_text_config()
        self._num_layers = config.num_hidden_layers
        self.vocab_size = _num_logits(model)
        self.max_positions = _max_positions(config)
        self.progress: Callable[[Report], None] = lambda report: None  # told of what takes time, once
        self._limit: CacheLimit | None = None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def num_setups(self) -> int:
        """Things done so far that are done once, such as captures: what took longer because of one is no measure."""
        return 0

    @property
    def mode(self) -> str:
        """How steps really run, in a few words: captured or eager, and where they are exact (docs/exactness.md)."""
        return "eager"

    def synchronize(self) -> None:
        """Waits until the device has done what this thread gave it; not for the whole device, as that is an error, and
        ends the capture, while another thread captures a graph."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def wait_for(self, verified: VerifyOutput) -> None:
        """Waits until it is there, though not for what the device was given to do since."""
        if verified.step is not None:
            verified.step.judged.wait()
        else:
            self.synchronize()

    def warm_up(self, cache: TreeCache, width: int) -> None:
        """Pays what the first verify of a width would pay, so that it can be timed."""

    def memory_report(self) -> dict[str, int]:
        """Bytes on the device beside the model's own and a generation's, by what they are for."""
        return {}

    def open(self, num_rows: int, num_slots: int) -> TreeCache:
        return TreeCache(self._num_layers, num_rows, num_slots, self._limit)

    def keep_to(self, limit: CacheLimit) -> None:
        """All caches that it opens from now on take no more than that together."""
        self._limit = limit

    def num_slots_of(self, num_rows: int, num_slots: int) -> int:
        """What a cache of that size takes of a limit, at the least."""
        return num_rows * num_slots

    def prefill(self, cache: TreeCache, row: int, tokens: Sequence[int]) -> Iterator[VerifyOutput]:
        """Commits a prompt to one row, a chunk at a time: a chunk is a tree with one path, all of it accepted."""
        for start in range(0, len(tokens), self.chunk_size):
            chunk = DraftTree.chain(torch.tensor([tokens[start : start + self.chunk_size]]))
            aim = cache.aim(slice(row, row + 1), chunk.width, self.device)
            verified = self._forward(cache, chunk, aim)
            cache.advance([chunk.width])
            yield verified

    def verify(self, cache: TreeCache, tree: DraftTree) -> VerifyOutput:
        """Judges every node of every row's tree, on the host, in one forward. Nothing is committed."""
        aim = cache.aim(slice(0, cache.num_rows), tree.width, self.device)
        return self._forward(cache, tree, aim)

    def prefill_batch(self, cache: TreeCache, prompts: Sequence[Sequence[int]]) -> None:
        """Commits a prompt to every row, all rows together and without their logits, a chunk at a time."""
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
        """Logits [B, V] after one token a row, tokens and lengths [B] on the device: a step that can be captured."""
        return self._forward(cache, DraftTree.roots(tokens), cache.aim_on_device(lengths)).logits[:, 0]

    @torch.no_grad()
    def _forward(self, cache: TreeCache, tree: DraftTree, aim: WritePosition, num_logits: int = 0) -> VerifyOutput:
        """One forward to where the cache was aimed. num_logits: for the last tokens only; 0 is for all."""
        tokens, tree = tree.tokens, tree.to(self.device)
        positions = self._clamped(tree.positions(aim.lengths))
        seen = attention.Visibility(aim, positions, tree.ancestors(), self.model.dtype)
        logits, hidden = self._run_model(cache, tree.tokens, positions, seen, num_logits)
        return VerifyOutput(tokens, logits.float(), hidden)

    def _clamped(self, positions: Tensor) -> Tensor:
        """Nodes past the model's last position cannot become text; they only must not break its tables."""
        return positions if self.max_positions is None else positions.clamp(max=self.max_positions - 1)

    def _run_model(
        self,
        cache: TreeCache,
        tokens: Tensor,
        positions: Tensor,
        seen: attention.Visibility | attention.Paths,
        num_logits: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Logits in the model's dtype, and inputs of the layers asked for, side by side."""
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
    """Hidden states [B, W, H] of some layers as [B, W, layers * H]; of none, with the first sizes of `like`."""
    return torch.cat(list(hidden), dim=-1) if hidden else like[..., :0]


def _num_logits(model: PreTrainedModel) -> int:
    """What the output layer really has, which may be more than the config's vocabulary."""
    output = model.get_output_embeddings()
    return output.weight.shape[0] if output is not None else model.config.get_text_config().vocab_size


def _max_positions(config: PreTrainedConfig) -> int | None:
    """The last position that means the same in every forward.

    With longrope the rotation of all tokens changes once a forward goes past the original context, so a tree that
    looks further than plain decoding would change the text: such a model ends there.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        return int(original)
    return limit
