"""Replay: runs policies on recorded answers, without the target model, in seconds on a laptop.

A trace holds the drafter's proposals at every position of an answer, and the target's top-k tokens at every node of a
dense tree there. A replayed policy grows its own trees, and the recorded answer decides what is accepted. The target's
top-k tokens are unknown outside the recorded tree, so n-gram tables learn a little less than in live decoding.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from graft.engine import Engine
from graft.errors import GraftError
from graft.files import replacing
from graft.model import KVCache, TargetRunner, VerifyOutput
from graft.model.noise import ComingDraws
from graft.model.sampler import SamplingSettings
from graft.model.verified import NUM_SUCCESSORS
from graft.request.batch import Batch
from graft.request.sequence import Sequence as TokenSequence
from graft.request.sequence import TreeRow
from graft.request.stats import Clock, Stats
from graft.settings import require
from graft.spec_decode.acceptance import Accepted
from graft.spec_decode.policies.base import DraftResult, Policy
from graft.spec_decode.proposers.base import TargetTopK
from graft.spec_decode.proposers.drafter import KEPT_OF_A_LEVEL, Drafter, DraftState, LevelByLevel, TreeSettings
from graft.tree.candidates import Level
from graft.tree.tree import PADDING, ROOT, DraftTree

FORMAT = "graft-trace-2"
_NUM_RECORDED = 60  # nodes of the recorded dense tree


@dataclass(frozen=True)
class Trace:
    """One recorded answer. Sizes: P prompt tokens, A answer tokens, D drafted nodes, J verified nodes (root first)."""

    prompt: Tensor  # [P]
    answer: Tensor  # [A]
    prompt_successors: Tensor  # [P - 1, k] the target's top-k after every prompt token but the last
    prompt_logits: Tensor  # [P - 1, k] their logits less the highest
    drafted: Tensor  # [A, D] drafted tokens, level by level, before each answer token
    parents: Tensor  # [A, D]
    q: Tensor  # [A, D]
    judged: Tensor  # [A, J] tokens of the verified tree
    judged_parents: Tensor  # [A, J]
    successors: Tensor  # [A, J, k] the target's top-k after every node
    logits: Tensor  # [A, J, k] their logits less the highest


class Recorder(Policy):
    """A policy that records. It drafts and verifies the whole dense tree before every token, but accepts nothing."""

    drafts = True

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._levels: list[Level] = []
        self.prompts: defaultdict[Any, list[tuple[Tensor, Tensor]]] = defaultdict(list)  # by sequence, chunk by chunk
        self.rounds: defaultdict[Any, list[dict[str, Tensor]]] = defaultdict(list)

    def read(self, batch: Batch, row: int, verified: VerifyOutput, following: list[int]) -> None:
        super().read(batch, row, verified, following)
        successors, logits = _likeliest(verified)
        self.prompts[batch.sequences[row]].append((successors[0], logits[0]))

    def grow(self, batch: Batch, roots: Tensor, clock: Clock) -> DraftResult:
        assert self.drafter is not None
        drafted = islice(self.drafter.passes(batch.draft, roots, keep=KEPT_OF_A_LEVEL), self.drafter.max_passes)
        self._levels = [level for levels in drafted for level in levels]
        candidates = self.new_candidates(batch, roots)
        for level in self._levels:
            zeros = torch.zeros_like(level.tokens)
            candidates.add(level.tokens, level.parents, level.probabilities, zeros + 1, zeros)
        candidates.merge()
        tree, _ = candidates.best(_NUM_RECORDED, len(self._levels))
        # Nodes of source 0 are verified but never accepted, so every round adds one token.
        hidden = DraftTree(
            tree.max_depth,
            tree.tokens,
            tree.parents,
            tree.probabilities,
            torch.zeros_like(tree.sources),
            tree.score_bucket,
        )
        return DraftResult(hidden, [self.drafter.max_passes] * len(roots))

    def learn(self, batch: Batch, tree: DraftTree, verified: VerifyOutput, accepted: Accepted, seconds: float) -> None:
        super().learn(batch, tree, verified, accepted, seconds)
        successors, logits = _likeliest(verified)
        fields = {
            "drafted": torch.cat([level.tokens for level in self._levels], dim=1),
            "parents": torch.cat([level.parents for level in self._levels], dim=1),
            "q": torch.cat([level.probabilities for level in self._levels], dim=1),
            "judged": tree.tokens,
            "judged_parents": tree.parents,
            "successors": successors,
            "logits": logits,
        }
        for row, sequence in enumerate(batch.sequences):
            self.rounds[sequence].append({name: value[row] for name, value in fields.items()})


def record(engine: Engine, prompts: Sequence[list[int]], max_new_tokens: int) -> list[Trace]:
    """Decode the prompts together, greedily, and record every position. The engine's policy must be a `Recorder`."""
    recorder = engine.policy
    assert isinstance(recorder, Recorder)
    settings = SamplingSettings(max_new_tokens=max_new_tokens)
    sequences = [TokenSequence(prompt, settings, engine.eos_token_ids) for prompt in prompts]
    for _ in engine.rounds(sequences):
        pass
    traces = []
    by_prompt: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}  # equal prompts are prefilled only once
    for sequence in sequences:
        rounds = recorder.rounds.pop(sequence)
        prompt = tuple(sequence.ids[: sequence.num_prompt_tokens])
        chunks = by_prompt.setdefault(prompt, recorder.prompts.pop(sequence, []))
        columns = {name: torch.stack([r[name] for r in rounds]) for name in rounds[0]}
        k = NUM_SUCCESSORS
        successors = torch.cat([c[0] for c in chunks]) if chunks else torch.zeros(0, k, dtype=torch.int64)
        logits = torch.cat([c[1] for c in chunks]) if chunks else torch.zeros(0, k)
        traces.append(
            Trace(
                prompt=torch.tensor(prompt),
                answer=torch.tensor(sequence.new_ids),
                prompt_successors=successors,
                prompt_logits=logits,
                **columns,
            )
        )
    return traces


def save_traces(
    path: Path, traces: Sequence[Trace], tree: TreeSettings, vocab_size: int, task: str, **facts: str | int | None
) -> None:
    """Write all traces of a task to one file. facts: further metadata."""
    tensors = {
        f"{i}/{name}": _small(value).contiguous()
        for i, trace in enumerate(traces)
        for name, value in vars(trace).items()
    }
    about = {"format": FORMAT, "task": task, "vocab_size": vocab_size, "depth": tree.depth, "topk": tree.topk, **facts}
    with replacing(path, is_private=True) as file:
        file.write(save(tensors, metadata={"about": json.dumps(about)}))


def read_traces(path: Path) -> tuple[list[Trace], dict[str, Any]]:
    """The traces of a file, and its metadata."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("about", "{}"))
            is_ours = isinstance(about, dict) and about.get("format") == FORMAT
            require(is_ours, f"{path} holds no traces that this version reads; record them anew")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        count = 1 + max(int(name.split("/")[0]) for name in tensors)
        fields = Trace.__dataclass_fields__
        return [Trace(**{name: _wide(tensors[f"{i}/{name}"]) for name in fields}) for i in range(count)], about
    except GraftError:
        raise
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise GraftError(f"{path} cannot be read as traces: {error}") from error


class ReplayedDrafter(LevelByLevel):
    """A drafter that proposes the recorded drafts. Its state is a trace and a position in it."""

    hidden_layers: tuple[int, ...] = ()
    knows_draws = False  # its drafts were made before
    num_setups = bytes_per_token = 0

    def __init__(self, settings: TreeSettings) -> None:
        self.settings = settings

    def open(self, cache: KVCache, texts: Sequence[Sequence[int]] = ()) -> DraftState:
        raise NotImplementedError("a replay makes its own state")

    def warm_up(self, target: TargetRunner, max_rows: int) -> None: ...

    def read(self, state: Any, row: int, verified: VerifyOutput, following: Sequence[int]) -> None: ...

    def learn(self, state: Any, verified: VerifyOutput, nodes: Any, tokens: Any) -> None: ...

    def levels(
        self,
        state: Any,
        roots: Tensor,
        keep: int | None = None,
        draws: ComingDraws | None = None,
    ) -> Iterator[Level]:
        trace, place = state.trace, state.place
        parents, q = trace.parents[place], trace.q[place]
        start, first_parent, paths = 0, 0, torch.ones(1)
        topk = self.settings.topk
        beams, first_beam = torch.zeros(1, dtype=torch.int64), 0  # used if fewer beams are asked for than recorded
        for depth in range(self.settings.depth + 1):
            end = start + (topk if depth == 0 else min(KEPT_OF_A_LEVEL, topk * topk))
            own, at = q[start:end], parents[start:end]
            path = paths[at - first_parent] * own
            level = Level(trace.drafted[place, start:end][None], at[None], own[None], path[None])
            if keep is not None and keep < topk:
                narrow, places = _narrowed(level, beams, first_beam, keep)
                first_beam += len(beams)
                beams = (1 + start + places).where(narrow.probabilities[0] > 0, -1)
                level = narrow
            yield level
            paths, first_parent, start = path, 1 + start, end


def _narrowed(level: Level, beams: Tensor, first: int, keep: int) -> tuple[Level, Tensor]:
    """The `keep` likeliest nodes of a recorded level that are children of some beams, and their indices in the level.

    beams: the beams' numbers in the recorded tree; in the narrower tree they are `first`, `first` + 1 and so on. If too
    few children were recorded, the rest is padding.
    """
    is_below = level.parents[..., None] == beams  # [1, n, beams]
    known = is_below.any(dim=-1)
    below = Level(
        level.tokens,
        first + is_below.int().argmax(dim=-1),
        level.probabilities.where(known, 0.0),
        level.path_probabilities.where(known, 0.0),
    )
    best = below.path_probabilities.topk(keep).indices
    return below.at(best), best[0]


def replay(policy: Policy, trace: Trace, max_new_tokens: int | None = None) -> Stats:
    """Statistics of the rounds in which the policy decodes a recorded answer.

    max_new_tokens: the limit of the recording, which cuts trees near the end; None: the length of the answer.
    """
    policy.prepare()
    settings = SamplingSettings(max_new_tokens=max_new_tokens or len(trace.answer))
    ended = [int(trace.answer[-1])] if len(trace.answer) < settings.most_new_tokens else []
    sequence = TokenSequence(trace.prompt.tolist(), settings, ended)
    state = SimpleNamespace(trace=trace, place=0)
    batch = Batch([sequence], cast(Any, None), cast(Any, None), state)
    if len(trace.prompt) > 1:
        read = _verified(trace.prompt[None, :-1], trace.prompt_successors, trace.prompt_logits)
        policy.learn_top_k(TargetTopK.of_chunk(read, [], policy.salt_of(sequence)))
    answer, clock = trace.answer.tolist(), Clock()
    with torch.no_grad():
        while sequence.finish_reason is None:
            batch.begin_round(0)
            place = state.place = sequence.num_new
            draft_result = policy.grow(batch, torch.tensor([sequence.ids[-1]]), clock)
            nodes = accepted_nodes(draft_result.tree, answer[place:])
            tokens = answer[place : place + len(nodes) + 1]
            nodes = nodes[: len(tokens)]
            policy.learn_top_k(_recorded_top_k(trace, place, draft_result.tree, sequence.ids, policy.salt_of(sequence)))
            policy.learn_accepted(draft_result.tree, Accepted([nodes], [tokens]), seconds=1.0)
            sequence.stats.draft_passes += draft_result.passes[0]
            # The sequence does not read the logits of the policy's own nodes, so the recorded ones will do.
            verified = _verified(trace.judged[place][None], trace.successors[place], trace.logits[place])
            sequence.extend(tokens, nodes, TreeRow(draft_result.tree, verified, 0, policy.sources))
    policy.finish(sequence)
    return sequence.stats


def replayed_target(about: dict[str, Any]) -> TargetRunner:
    """A stand-in for the target runner, of which a policy only needs the vocabulary size."""
    return cast(TargetRunner, SimpleNamespace(vocab_size=about["vocab_size"], num_setups=0))


def accepted_nodes(tree: DraftTree, following: Sequence[int]) -> list[int]:
    """The nodes of the only row's tree that the following tokens lead to, from the root on."""
    tokens, parents, sources = (field[0].tolist() for field in (tree.tokens, tree.parents, tree.sources))
    children = {(p, t): n for n, (p, t, s) in enumerate(zip(parents, tokens, sources, strict=True)) if s > ROOT}
    path: list[int] = []
    for token in following:
        node = children.get((path[-1] if path else 0, token))
        if node is None:
            break
        path.append(node)
    return path


def _recorded_top_k(trace: Trace, place: int, tree: DraftTree, history: Sequence[int], salt: int) -> TargetTopK:
    """The target's top-k tokens at the nodes of a policy's tree at a position. history: the text so far.

    For an accepted node they were recorded where that node was the root. For a rejected node they are known only if it
    is in the recorded dense tree. Other nodes are left out, with everything below them.
    """
    recorded = {path: node for node, path in enumerate(_paths(trace.judged[place], trace.judged_parents[place]))}
    answer = trace.answer.tolist()[place:]
    kept: dict[int, int] = {}  # node of the policy's tree -> its number among those kept
    tokens, parents, found = list[int](), list[int](), list[tuple[int, int]]()
    nodes = zip(
        _paths(tree.tokens[0], tree.parents[0]), tree.parents[0].tolist(), tree.sources[0].tolist(), strict=True
    )
    for node, (path, parent, source) in enumerate(nodes):
        depth = len(path) - 1
        is_accepted = list(path[1:]) == answer[:depth] and depth < len(answer)
        if source == PADDING or (node and parent not in kept) or not (is_accepted or path in recorded):
            continue
        kept[node] = len(kept)
        tokens.append(path[-1])
        parents.append(kept[parent] if node else 0)
        found.append((place + depth, 0) if is_accepted else (place, recorded[path]))
    ids = torch.tensor([tokens])
    zeros = torch.zeros_like(ids)
    own = DraftTree(0, ids, torch.tensor([parents]), zeros.float(), zeros, zeros)
    successors, logits = (torch.stack([part[at] for at in found]) for part in (trace.successors, trace.logits))
    return TargetTopK.of_trees(_verified(ids, successors, logits), own, [history], [salt])


def _paths(tokens: Tensor, parents: Tensor) -> list[tuple[int, ...]]:
    """The tokens from the root to each node. Parents come before their children."""
    paths: list[tuple[int, ...]] = []
    for node, (token, parent) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
        paths.append((*paths[parent], token) if node else (token,))
    return paths


def _verified(tokens: Tensor, successors: Tensor, logits: Tensor) -> VerifyOutput:
    """A verify output of one row with the target's top-k tokens only."""
    count = tokens.shape[1]
    nothing = torch.empty(count, 0)
    highest = (successors.int(), logits.contiguous())
    return VerifyOutput(tokens, torch.arange(count)[None], [count], nothing, nothing, highest)


def _likeliest(verified: VerifyOutput) -> tuple[Tensor, Tensor]:
    """The target's top-k tokens at each node, and their logits less the highest, which are small enough for fp16."""
    successors, logits = verified.likeliest()
    return successors.long(), logits - logits[:, :, :1]


def _small(values: Tensor) -> Tensor:
    """The smallest dtype that fits: fp16 for logits, uint16 or int32 for token ids and indices."""
    if values.dtype.is_floating_point:
        return values.half()
    fits = values.numel() == 0 or int(values.max()) < 2**16
    return values.to(torch.uint16 if fits else torch.int32)


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.dtype == torch.float16 else values.to(torch.int64)
