"""Which architectures give, through Graft, the text of transformers' own `generate`? Makes a table for docs/models.md.

    python benchmarks/architectures.py                 # print the table
    python benchmarks/architectures.py llama gemma2    # of these
    python benchmarks/architectures.py --write docs/models.md

Models are tiny and random, in fp32. Their weights are large enough that texts are varied, since a text that repeats
itself proves little. Three prompts are decoded greedily alone, greedily together with padding on the left, and sampled
after the same `torch.manual_seed`, alone and together. Every round has a tree.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from common import command_line
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

import graft

START, END = "<!-- made by benchmarks/architectures.py -->", "<!-- end -->"
VOCAB, NUM_TOKENS = 97, 28
VARIED = 8  # distinct tokens of a text that proves something
COMMON = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False},
}
# Options by transformers' name of the architecture, added to the common ones; null removes one of these. Models that
# see images have `text_config`, to which the common options are added. `plain`: without the common options.
ARCHITECTURES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
MULTIMODAL = [name for name, options in ARCHITECTURES.items() if "text_config" in options]


def varied(name: str) -> PreTrainedModel:
    """The first of five random models whose greedy text is varied, or the one with the most varied text."""
    ids, found = prompts()[0][:1], {}
    for seed in range(5):
        model = make(name, seed)
        with torch.no_grad():
            text = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
        found.setdefault(len(text[0, ids.shape[1] :].unique()), model)
        if max(found) >= NUM_TOKENS // 2:
            break
    return found[max(found)]


def make(name: str, seed: int) -> PreTrainedModel:
    options = dict(ARCHITECTURES[name])
    attention = options.pop("attn_implementation", None)
    is_plain = options.pop("plain", False)
    if name in MULTIMODAL:
        options["text_config"] = COMMON | options["text_config"]
    elif not is_plain:
        options = COMMON | options
    config = AutoConfig.for_model(name, **{key: value for key, value in options.items() if value is not None})
    torch.manual_seed(seed)
    factory = AutoModelForImageTextToText if name in MULTIMODAL else AutoModelForCausalLM
    model = factory.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    model.generation_config.eos_token_id = None
    return model


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts of different lengths, padded on the left, and their mask."""
    lengths = (21, 9, 14)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB - 3, (3, max(lengths)), generator=generator)
    mask = torch.tensor([[0] * (max(lengths) - length) + [1] * length for length in lengths])
    return ids * mask, mask


def outcome_of(name: str) -> tuple[str, int]:
    """What the comparisons found, and the fewest distinct tokens of a greedy text; or why there are none, and 0."""
    try:
        model = varied(name)
    except Exception as error:
        return f"cannot be made here: {str(error).splitlines()[0]}", 0
    ids, mask = prompts()
    alone = [(row[keep.bool()][None], None) for row, keep in zip(ids, mask, strict=True)]
    base = {"max_new_tokens": NUM_TOKENS, "pad_token_id": 0, "return_dict_in_generate": True}
    distinct: list[int] = []

    def is_same(inputs: torch.Tensor, keep: torch.Tensor | None, **options: Any) -> bool:
        texts = []
        for own in ({}, {"custom_generate": graft.decode, "budget": 12, "profile": None, "draft": None}):
            torch.manual_seed(5)
            found = model.generate(inputs, attention_mask=keep, **base, **options, **own)
            texts.append(found.sequences[:, inputs.shape[1] :])
        if len(inputs) == 1:
            distinct.append(len(texts[0].unique()))
        return torch.equal(*texts)

    sampled = {"do_sample": True, "temperature": 0.9, "top_k": 20}
    try:
        greedy = [is_same(*each, do_sample=False) for each in alone]
        together = is_same(ids, mask, do_sample=False)
        drawn = [is_same(*each, **sampled) for each in (*alone, (ids, mask))]
    except graft.GraftError as error:
        return f"refused: {str(error).replace(type(model).__name__, 'the model')}", 0
    if all((*greedy, together, *drawn)):
        return "same text in all 8 comparisons", min(distinct)
    return f"same text: greedy {sum(greedy)} of 3, padded batch {together:d} of 1, sampled {sum(drawn)} of 4", min(
        distinct
    )


def table(outcomes: dict[str, tuple[str, int]]) -> str:
    """A line for every outcome. A number after a name: so few distinct tokens that the texts prove little."""
    groups: dict[str, list[str]] = {}
    for name, (outcome, distinct) in outcomes.items():
        groups.setdefault(outcome, []).append(f"`{name}` ({distinct})" if 0 < distinct < VARIED else f"`{name}`")
    lines = [f"| {outcome} | {', '.join(names)} |" for outcome, names in groups.items()]
    return "\n".join(["| outcome | architectures |", "|---|---|", *lines])


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    parser = command_line(__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="architectures by transformers' names; all if not given"
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table to this page")
    options = parser.parse_args()
    if unknown := set(options.names) - set(ARCHITECTURES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    outcomes = {}
    for name in options.names or list(ARCHITECTURES):
        outcomes[name] = outcome_of(name)
        print(name, *outcomes[name], file=sys.stderr, flush=True)
    made = table(outcomes)
    if options.write is None:
        print(made)
        return
    before, _, rest = options.write.read_text().partition(START)
    _, _, after = rest.partition(END)
    options.write.write_text(f"{before}{START}\n\n{made}\n\n{END}{after}")


if __name__ == "__main__":
    main()
