"""`graft index`: build a datastore of the user's own text, or describe one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from graft.cli.terminal import ProgressBars, aside, notes, print_facts
from graft.datastore.format import SHARD_TOKENS
from graft.hub.registry import DEFAULT_MODEL, check_model_name

index = typer.Typer(
    name="index",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Build and inspect an index of your own text, from which Graft can draft.",
)


@index.command()
def build(
    paths: Annotated[list[Path], typer.Argument(help="Text files, .jsonl files, or folders of text and source code.")],
    out: Annotated[Path, typer.Option(help="Folder of the new index.")],
    model: Annotated[
        str, typer.Option(help="The model to tokenize for: a packaged model, a folder or a hub id.")
    ] = DEFAULT_MODEL,
    shard_tokens: Annotated[int, typer.Option(help="Tokens sorted at once; fewer need less memory.")] = SHARD_TOKENS,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing index.")] = False,
) -> None:
    """Index files and folders for a model, and print the index's folder.

    A line of a .jsonl file is {"text"}, {"prompt"}, {"prompt", "answer"} or {"turns"}; other files are plain text.

    Hidden folders and binary files are skipped. The folder appears only once the index is complete.

    [dim]Example:[/] graft index build ~/notes src/ answers.jsonl --out my-index
    """
    from graft.datastore.build import build_index, check_build
    from graft.datastore.corpus import Corpus

    check_model_name(model)
    corpus = Corpus.under(paths)
    check_build(corpus, out, shard_tokens, force)
    aside(f"Loading the tokenizer of {model} ...")

    from graft.hub.load import load_tokenizer

    options = {"model": model, "sources": [str(path) for path in paths]}
    with ProgressBars() as progress:
        header = build_index(
            corpus,
            load_tokenizer(model),
            out,
            shard_tokens=shard_tokens,
            options=options,
            force=force,
            report=progress.show,
        )
    for reason, skipped in sorted(corpus.skipped.items()):
        notes().print(f"skipped {skipped.count} {reason}, such as {skipped.first}", markup=False, soft_wrap=True)
    notes().print(f"{header.tokens:,} tokens of {header.documents:,} documents", markup=False)
    print(out)


@index.command()
def info(
    folder: Annotated[Path, typer.Argument(help="Folder of an index.")],
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte against its checksum.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Describe an index and how it was built. Exits with 2 if it is damaged.

    [dim]Example:[/] graft index info my-index
    """
    from graft.datastore.format import check_parts, read_header

    header = read_header(folder)
    check_parts(folder, header, whole=verify)
    facts: dict[str, Any] = {
        "tokens": header.tokens,
        "documents": header.documents,
        "bytes": header.bytes,
        "shards": len(header.shards),
        "vocab_size": header.vocab_size,
        "tokenizer": header.tokenizer,
        **header.options,
    }
    if as_json:
        print(json.dumps(facts))
    else:
        print_facts(facts)
