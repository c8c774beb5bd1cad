"""Benchmark of the datastore: building rate, size, time to open, and time of a lookup, warm and from a cold disk.

    python bench/index_lookup.py --model smollm2-135m --tokens 1e6 --tokens 1e7 --tokens 1e8

Indexes the source code of the installed Python packages and of Python itself. Contexts come from files that are held
out, chosen by their name, so that a copy of a file in another package is held out with it.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import resource
import sysconfig
import tempfile
import time
import zlib
from pathlib import Path
from statistics import median

import torch

from graft.datastore.build import build_index
from graft.datastore.corpus import Corpus
from graft.datastore.format import HEADER
from graft.datastore.lookup import Datastore, Match
from graft.hub.load import load_tokenizer
from graft.progress import Report
from graft.spec_decode.candidates import Candidates
from graft.spec_decode.proposers import DatastoreLookup

SUFFIXES = {".py", ".pyi", ".h", ".c", ".hpp", ".pyx", ".rst", ".md", ".txt"}
BYTES_PER_TOKEN = 3.4  # of such text, about, to choose as many files as make the tokens asked for
COUNT, LENGTH = 4, 16  # what DatastoreLookup asks for


class History:
    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.num_prompt_tokens = len(ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders; Python's own if none")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", action="append", type=float, help="size of an index, about; may be repeated")
    parser.add_argument("--lookups", type=int, default=5000)
    parser.add_argument("--keep", type=Path, help="keep the indexes in this folder")
    options = parser.parse_args()
    torch.set_num_threads(1)

    tokenizer = load_tokenizer(options.model)
    paths = options.paths or [Path(sysconfig.get_path(name)) for name in ("purelib", "stdlib")]
    corpus = Corpus.under(paths)
    sources = [source for source in corpus.sources if options.paths or source.path.suffix in SUFFIXES]
    random.Random(0).shuffle(sources)
    held_out = [source for source in sources if is_held_out(source.path)]
    indexed = [source for source in sources if not is_held_out(source.path)]
    contexts, truths = draw_contexts(Corpus(held_out), tokenizer, options.lookups)

    with tempfile.TemporaryDirectory() as scratch:
        for size in options.tokens or [1e6]:
            folder = (options.keep or Path(scratch)) / f"index-{size:.0f}"
            chosen, num_bytes = [], 0
            for source in indexed:
                if num_bytes < size * BYTES_PER_TOKEN:
                    chosen.append(source)
                    num_bytes += source.num_bytes
            measure(Corpus(chosen), tokenizer, folder, contexts, truths)


def is_held_out(path: Path) -> bool:
    return zlib.crc32(path.name.encode()) % 50 == 0


def draw_contexts(corpus: Corpus, tokenizer: object, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Contexts of 64 tokens, and what followed each."""
    draw = random.Random(0)
    documents: list[list[int]] = []
    for document, _ in corpus.documents():
        ids = tokenizer([str(document)], add_special_tokens=False, verbose=False)["input_ids"][0]  # type: ignore[operator]
        if len(ids) > 128:
            documents.append(ids)
        if len(documents) == 300:
            break
    ends = [(ids, draw.randrange(64, len(ids) - LENGTH)) for ids in draw.choices(documents, k=count)]
    return [ids[end - 64 : end] for ids, end in ends], [ids[end : end + LENGTH] for ids, end in ends]


def measure(
    corpus: Corpus, tokenizer: object, folder: Path, contexts: list[list[int]], truths: list[list[int]]
) -> None:
    sorting = []

    def report(stage: Report) -> None:
        if stage.stage == "sorting":
            sorting.append(time.perf_counter())

    if not folder.exists():
        start = time.perf_counter()
        header = build_index(corpus, tokenizer, folder, report=report)
        total = time.perf_counter() - start
        sort = sum(end - begin for begin, end in zip(sorting[::2], sorting[1::2], strict=True))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # the largest so far, in kB on Linux
        print(f"\n{header.tokens:,} tokens of {header.documents:,} documents, vocabulary {header.vocab_size:,}")
        print(f"  built in {total:.1f} s, {header.tokens / total / 1e6:.2f} M tokens/s; peak memory {peak:.1f} GB")
        print(f"  of it sorting and writing {sort:.1f} s, {header.tokens / sort / 1e6:.2f} M tokens/s")
        print(f"  size {header.bytes / 1e6:.1f} MB, {header.bytes / header.tokens:.2f} bytes a token")

    out_of_memory(folder)
    start = time.perf_counter()
    store = Datastore(folder)
    cold_open = time.perf_counter() - start
    opens = [timed(lambda: Datastore(folder))[0] for _ in range(50)]
    with_tokenizer, _ = timed(lambda: Datastore(folder, tokenizer))
    print(f"  opens in {median(opens) * 1e3:.2f} ms, cold {cold_open * 1e3:.1f} ms, ", end="")
    print(f"with a check of the tokenizer {with_tokenizer * 1e3:.0f} ms")

    show("first lookups, cold", [timed(lambda c=c: look_up(store, c))[0] for c in contexts[:200]])
    for context in contexts:
        look_up(store, context)
    results = [timed(lambda c=c: look_up(store, c)) for c in contexts]
    show("lookups", [seconds for seconds, _ in results])
    lookup = DatastoreLookup(store)
    show("proposals", [timed(lambda c=c: propose(lookup, c))[0] for c in contexts])
    matches = [match for _, match in results]
    found = [match for match in matches if match.continuations]
    print(f"  matched {len(found) / len(matches):.1%}, ", end="")
    print(f"length {median(m.length for m in found)}, occurrences {median(m.num_occurrences for m in found)} (medians)")
    show_fit(lookup, contexts, truths)


def show_fit(lookup: DatastoreLookup, contexts: list[list[int]], truths: list[list[int]]) -> None:
    """How often a proposed token fitted the held-out text, if those before it did: what `prior` is made of."""
    tried, fitted = (torch.zeros(1, 2, lookup.prior.numel()) for _ in range(2))  # by agreement, source and score bucket
    for context, truth in zip(contexts, truths, strict=True):
        propose(lookup, context).count([truth], tried, fitted, memory=math.inf)
    print("  fitted, by match length (rows) and share (columns)")
    for row, counts in zip((fitted / tried)[0, 1].view(5, 5).tolist(), tried[0, 1].view(5, 5).tolist(), strict=True):
        print("   ", "  ".join(f"{rate:.2f} of {count:6.0f}" for rate, count in zip(row, counts, strict=True)))


def propose(lookup: DatastoreLookup, context: list[int]) -> Candidates:
    """Candidates with what the lookup proposes after the context."""
    candidates = Candidates(torch.tensor(context[-1:]), [context])
    chances = torch.nn.functional.pad(lookup.prior, (0, 0, 1, 0))[None]  # by agreement, source and score bucket
    lookup.propose(candidates, [History(context)], 1, chances, LENGTH)
    return candidates


def look_up(store: Datastore, context: list[int]) -> Match:
    return store.continuations(context, COUNT, LENGTH)


def timed(call):  # type: ignore[no-untyped-def]
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def show(name: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    print(f"  {name}: median {median(ordered) * 1e6:.1f} us, p99 {ordered[int(0.99 * len(ordered))] * 1e6:.0f} us")


def out_of_memory(folder: Path) -> None:
    """Asks the system to forget what it holds of the index's files."""
    for path in folder.iterdir():
        if path.name == HEADER or not hasattr(os, "posix_fadvise"):
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
