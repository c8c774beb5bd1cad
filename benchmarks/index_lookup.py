"""How long does a lookup in a datastore take, warm and from a cold disk, and how fast is one built and opened?

    python benchmarks/index_lookup.py --model smollm2-135m --tokens 1e6 --tokens 1e7 --tokens 1e8

Indexes the source code of the installed Python packages and of Python itself. Contexts come from held-out files. These
are chosen by name, so that copies of a file in other packages are held out too.
"""

import os
import random
import resource
import sysconfig
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import command_line

from graft.datastore.build import build_index
from graft.datastore.corpus import Corpus
from graft.datastore.format import HEADER
from graft.datastore.lookup import Datastore
from graft.hub.load import load_tokenizer

SUFFIXES = {".py", ".pyi", ".h", ".c", ".hpp", ".pyx", ".rst", ".md", ".txt"}
BYTES_PER_TOKEN = 3.4  # of such text, about
COUNT, LENGTH = 4, 16  # what DatastoreLookup asks for


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer is used")
    parser.add_argument("--tokens", action="append", type=float, help="approximate size of an index; may be repeated")
    parser.add_argument("--lookups", type=int, default=5000, help="how many are timed")
    options = parser.parse_args()
    torch.set_num_threads(1)

    tokenizer = load_tokenizer(options.model)
    corpus = Corpus.under([Path(sysconfig.get_path(name)) for name in ("purelib", "stdlib")])
    sources = [source for source in corpus.sources if source.path.suffix in SUFFIXES]
    random.Random(0).shuffle(sources)
    held_out = {source for source in sources if zlib.crc32(source.path.name.encode()) % 50 == 0}
    indexed = [source for source in sources if source not in held_out]
    contexts = draw_contexts(Corpus([s for s in sources if s in held_out]), tokenizer, options.lookups)
    with tempfile.TemporaryDirectory() as scratch:
        for size in options.tokens or [1e6]:
            chosen, num_bytes = [], 0
            for source in indexed:
                if num_bytes < size * BYTES_PER_TOKEN:
                    chosen.append(source)
                    num_bytes += source.num_bytes
            measure(Corpus(chosen), tokenizer, Path(scratch) / f"index-{size:.0f}", contexts)


def draw_contexts(corpus: Corpus, tokenizer: Any, count: int) -> list[list[int]]:
    """Contexts of 64 tokens from up to 300 documents."""
    rng = random.Random(0)
    documents: list[list[int]] = []
    for document, _ in corpus.documents():
        ids = tokenizer([str(document)], add_special_tokens=False, verbose=False)["input_ids"][0]
        if len(ids) > 128:
            documents.append(ids)
        if len(documents) == 300:
            break
    ends = [(ids, rng.randrange(64, len(ids) - LENGTH)) for ids in rng.choices(documents, k=count)]
    return [ids[end - 64 : end] for ids, end in ends]


def measure(corpus: Corpus, tokenizer: Any, folder: Path, contexts: list[list[int]]) -> None:
    seconds, header = timed(lambda: build_index(corpus, tokenizer, folder))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # the largest so far, in kB on Linux
    print(f"\n{header.tokens:,} tokens of {header.documents:,} documents, vocabulary {header.vocab_size:,}")
    print(f"  built in {seconds:.1f} s, {header.tokens / seconds / 1e6:.2f} M tokens/s; peak memory {peak:.1f} GB")
    print(f"  size {header.bytes / 1e6:.1f} MB, {header.bytes / header.tokens:.2f} bytes per token")

    drop_from_page_cache(folder)
    cold_open, store = timed(lambda: Datastore(folder))
    opens = [timed(lambda: Datastore(folder))[0] for _ in range(50)]
    with_tokenizer, _ = timed(lambda: Datastore(folder, tokenizer))
    print(f"  opens in {median(opens) * 1e3:.2f} ms, cold {cold_open * 1e3:.1f} ms, ", end="")
    print(f"with a check of the tokenizer {with_tokenizer * 1e3:.0f} ms")

    def look_up(all_contexts: list[list[int]]) -> list[tuple[float, Any]]:
        return [timed(lambda own=own: store.continuations(own, COUNT, LENGTH)) for own in all_contexts]

    show("first lookups, cold", look_up(contexts[:200]))
    look_up(contexts)
    results = look_up(contexts)
    show("lookups", results)
    found = [match for _, match in results if match.continuations]
    print(f"  matched {len(found) / len(results):.1%}, ", end="")
    print(f"length {median(m.length for m in found)}, occurrences {median(m.num_occurrences for m in found)} (medians)")


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def show(name: str, results: list[tuple[float, Any]]) -> None:
    ordered = sorted(seconds for seconds, _ in results)
    print(f"  {name}: median {median(ordered) * 1e6:.1f} us, p99 {ordered[int(0.99 * len(ordered))] * 1e6:.0f} us")


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name == HEADER or not hasattr(os, "posix_fadvise"):
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
