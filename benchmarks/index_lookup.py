"""How long does a lookup in a datastore take, warm and from a cold disk, and how fast is one built and opened?

    python benchmarks/index_lookup.py --model smollm2-135m --tokens 1e6 --tokens 1e7 --tokens 1e8

Indexes the source code of the installed Python packages and of Python itself. Contexts come from files that are held
out, chosen by their name, so that a copy of a file in another package is held out with it.
"""

from __future__ import annotations

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
from common import command_line

from graft.datastore.build import build_index
from graft.datastore.corpus import Corpus
from graft.datastore.format import HEADER
from graft.datastore.lookup import Datastore, Match
from graft.hub.load import load_tokenizer

SUFFIXES = {".py", ".pyi", ".h", ".c", ".hpp", ".pyx", ".rst", ".md", ".txt"}
BYTES_PER_TOKEN = 3.4  # of such text, about, to choose as many files as make the tokens asked for
COUNT, LENGTH = 4, 16  # what DatastoreLookup asks for


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders; Python's own if none")
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer is used")
    parser.add_argument("--tokens", action="append", type=float, help="size of an index, about; may be repeated")
    parser.add_argument("--lookups", type=int, default=5000, help="how many are timed")
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
    contexts = draw_contexts(Corpus(held_out), tokenizer, options.lookups)

    with tempfile.TemporaryDirectory() as scratch:
        for size in options.tokens or [1e6]:
            folder = (options.keep or Path(scratch)) / f"index-{size:.0f}"
            chosen, num_bytes = [], 0
            for source in indexed:
                if num_bytes < size * BYTES_PER_TOKEN:
                    chosen.append(source)
                    num_bytes += source.num_bytes
            measure(Corpus(chosen), tokenizer, folder, contexts)


def is_held_out(path: Path) -> bool:
    return zlib.crc32(path.name.encode()) % 50 == 0


def draw_contexts(corpus: Corpus, tokenizer: object, count: int) -> list[list[int]]:
    """Contexts of 64 tokens."""
    draw = random.Random(0)
    documents: list[list[int]] = []
    for document, _ in corpus.documents():
        ids = tokenizer([str(document)], add_special_tokens=False, verbose=False)["input_ids"][0]  # type: ignore[operator]
        if len(ids) > 128:
            documents.append(ids)
        if len(documents) == 300:
            break
    ends = [(ids, draw.randrange(64, len(ids) - LENGTH)) for ids in draw.choices(documents, k=count)]
    return [ids[end - 64 : end] for ids, end in ends]


def measure(corpus: Corpus, tokenizer: object, folder: Path, contexts: list[list[int]]) -> None:
    if not folder.exists():
        start = time.perf_counter()
        header = build_index(corpus, tokenizer, folder)
        total = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # the largest so far, in kB on Linux
        print(f"\n{header.tokens:,} tokens of {header.documents:,} documents, vocabulary {header.vocab_size:,}")
        print(f"  built in {total:.1f} s, {header.tokens / total / 1e6:.2f} M tokens/s; peak memory {peak:.1f} GB")
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
    matches = [match for _, match in results]
    found = [match for match in matches if match.continuations]
    print(f"  matched {len(found) / len(matches):.1%}, ", end="")
    print(f"length {median(m.length for m in found)}, occurrences {median(m.num_occurrences for m in found)} (medians)")


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
