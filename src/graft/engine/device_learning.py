"""How the tables learn from prompt chunks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from graft.engine.device_rows import ReadChunk
from graft.engine.staging import Staging
from graft.model.verified import top_logits
from graft.tree.device.round import DeviceRound


def warm_up(round: DeviceRound, staging: Staging) -> None:
    """Compile the kernels of `learn_prompts`, by a token that belongs to no row and so changes nothing."""
    if round.tables is None:
        return
    successors = torch.zeros(1, round.tables.entries.shape[1], dtype=torch.int32, device=round.device)
    step, starts = staging.send([0, 0, 0, 1]).view(4, 1), staging.send([0])
    before, salts = staging.send([-1, -1]).view(2, 1), staging.send([0], torch.int64)
    round.learn([*step], starts, before, salts, successors, successors.float(), num_rows=1, is_text=True)


def learn_prompts(round: DeviceRound, chunks: Sequence[ReadChunk], staging: Staging) -> None:
    """Let the tables learn from the prompt chunks of the last step."""
    firsts = np.array([int(chunk.verified.index[0, 0]) for chunk in chunks])
    counts = [len(chunk.following) for chunk in chunks]
    first, end = int(firsts.min()), int((firsts + counts).max())
    columns = np.zeros((4, end - first), dtype=np.int64)  # tokens, parents, places and rows
    columns[3] = len(chunks)  # tokens of other prompts belong to no row
    for row, (chunk, start, count) in enumerate(zip(chunks, firsts - first, counts, strict=True)):
        places = np.arange(count)
        own = slice(start, start + count)
        columns[:3, own] = chunk.verified.tokens[0].numpy(), np.maximum(places - 1, 0), places
        columns[3, own] = row
    before = np.array([[-1, -1, *chunk.preceding][-2:][::-1] for chunk in chunks]).T
    numbers = staging.send(np.concatenate([columns.ravel(), firsts - first, before.ravel()]))
    step, starts, earlier = numbers.split([columns.size, len(chunks), 2 * len(chunks)])
    salts = staging.send([chunk.salt for chunk in chunks], torch.int64)
    output = chunks[0].verified  # all chunks are of the same step
    if output.highest is not None:
        successors, logits = (part[first:end] for part in output.highest)
    else:
        tokens, logits = top_logits(output.logits[first:end])
        successors = tokens.int()
    of_step = ([*step.view(4, -1)], starts, earlier.view(2, -1), salts, successors, logits)
    round.learn(*of_step, num_rows=len(chunks), is_text=True)
