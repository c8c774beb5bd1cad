"""Settings of the SGLang plugin, read from the environment, and checks of SGLang's own flags."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from graft.errors import GraftError
from graft.settings import Settings, require, require_known
from graft.spec_decode.policy_settings import MAX_BUDGET

SWITCH = "GRAFT_SGLANG"
HEAD = "LlamaForCausalLMEagle3"  # the class that SGLang loads an EAGLE-3 head with
_USUAL_TOKENS = 128  # a step of this many tokens takes little longer than one of a few, since reading weights dominates
_ONE_SIZE = ("enable_dp_attention", "enable_two_batch_overlap", "enable_pdmux")  # SGLang's flags that allow one size
_LEAST_PLACES = 4  # of a default tree; with 64 requests, 2 places gained less
_MOST_TOKENS = 256  # of a step of the smallest trees
_WORDS = {word: yes for yes, words in ((True, "1 true on yes"), (False, "0 false off no")) for word in words.split()}
_WANTED = {"bool": "1 or 0", "int": "a whole number"}  # for error messages, by the type of a setting


@dataclass(frozen=True)
class SGLangSettings(Settings):
    """Settings of the plugin; `GRAFT_SGLANG_BUDGET=31` sets `budget`."""

    places: str | None = None  # "2:48,16:8": trees of 48 places up to 2 requests, of 8 above; None: the default sizes
    budget: int | None = None  # nodes of a row beside the root; None: --speculative-num-draft-tokens less 1
    max_depth: int | None = None  # greatest depth of a tree; None: limited only by its nodes
    isolated: bool = False  # requests learn nothing from each other
    log: int | None = None  # rounds between two lines in SGLang's log; None: no lines

    def __post_init__(self) -> None:
        for name in ("budget", "max_depth", "log"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{_variable(name)} must be at least 1, not {value}")
        if self.budget is not None:
            require(
                self.budget <= MAX_BUDGET,
                f"{_variable('budget')} must be at most {MAX_BUDGET}, not {self.budget}",
            )


def from_environment(environment: Mapping[str, str]) -> SGLangSettings | None:
    """The settings, or None if the plugin is not switched on. Unknown names are errors."""
    types = {_variable(field.name): (field.name, str(field.type)) for field in fields(SGLangSettings)}
    found: dict[str, Any] = {}
    for name in sorted(environment):
        if name.startswith(f"{SWITCH}_"):
            require_known("environment variable", name, list(types))
            setting, its_type = types[name]
            found[setting] = _read(name, environment[name], its_type.partition(" ")[0])
    settings = SGLangSettings.of(found)
    return settings if _read(SWITCH, environment.get(SWITCH) or "0", "bool") else None


def _variable(setting: str) -> str:
    """The environment variable of a setting, such as `GRAFT_SGLANG_BUDGET` for `budget`."""
    return f"{SWITCH}_{setting.upper()}"


def _read(name: str, text: str, its_type: str) -> bool | int | str:
    if its_type == "str":
        return text
    try:
        return _WORDS[text.strip().lower()] if its_type == "bool" else int(text)
    except (KeyError, ValueError):
        raise GraftError(f"{name} must be {_WANTED[its_type]}, not {text!r}") from None


def check_server(server_args: Any, settings: SGLangSettings) -> None:
    """Refuse flags of SGLang with which Graft cannot work. server_args: SGLang's complete `ServerArgs`."""
    algorithm = str(server_args.speculative_algorithm)
    require(algorithm == "EAGLE3", f"{SWITCH}=1 needs --speculative-algorithm EAGLE3, not {algorithm}")
    topk, num_places = server_args.speculative_eagle_topk, server_args.speculative_num_draft_tokens
    require(
        topk is not None and topk >= 2, f"--speculative-eagle-topk must be 2 or more, not {topk}: Graft verifies trees"
    )
    require(
        num_places is not None and 2 <= num_places <= MAX_BUDGET + 1,
        f"--speculative-num-draft-tokens must be between 2 and {MAX_BUDGET + 1}, not {num_places}",
    )
    require(
        settings.budget is None or settings.budget < num_places,
        f"{_variable('budget')} ({settings.budget}) must be less than --speculative-num-draft-tokens ({num_places})",
    )
    require(getattr(server_args, "pp_size", 1) == 1, "Graft works without pipeline parallelism: leave out --pp-size")
    sizes_for(server_args, settings)
    for name in ("speculative_adaptive", "speculative_use_rejection_sampling"):
        flag = "--" + name.replace("_", "-")
        require(not getattr(server_args, name, False), f"Graft replaces what {flag} does: leave it out")
    config = Path(str(server_args.speculative_draft_model_path)) / "config.json"
    if config.is_file():  # a head on the hub is checked after loading
        try:
            facts = dict(json.loads(config.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise GraftError(f"cannot read {config}: {' '.join(str(error).split())}") from error
        check_head(facts)


class TreeSize(NamedTuple):
    """The size of a batch's trees."""

    max_requests: int | None  # largest batch that has this size; None: any
    places: int  # of each tree, with the root; 1: no tree
    steps: int  # levels that the head drafts


def sizes_for(server_args: Any, settings: SGLangSettings, captured: Sequence[int] = ()) -> list[TreeSize]:
    """The sizes of a server's trees. Some flags allow only one size, because ranks or half batches could disagree.

    captured: the batch sizes for which SGLang captures graphs.
    """
    most = (server_args.speculative_num_draft_tokens, server_args.speculative_num_steps)
    one = [name for name in _ONE_SIZE if getattr(server_args, name, False)]
    if one and settings.places is None:
        return [TreeSize(None, *most)]
    sizes = tree_sizes(settings.places, *most, server_args.max_running_requests, max(captured, default=None))
    flags = ", ".join("--" + name.replace("_", "-") for name in one)
    require(not one or len(sizes) == 1, f"{_variable('places')} must name one size of trees with {flags}")
    return sizes


def tree_sizes(
    places: str | None,
    num_places: int,
    num_steps: int,
    max_requests: int | None = None,
    largest_graph: int | None = None,
) -> list[TreeSize]:
    """The tree sizes by the number of requests decoded together, the fewest requests first.

    places: as in `SGLangSettings`. num_places, num_steps: SGLang's flags, the most of each. max_requests: the most
    requests that can be decoded together. largest_graph: the largest batch with a CUDA graph; None: unknown.
    """
    by_requests = _usual_places(num_places, largest_graph) if places is None else _read_places(places, num_places)
    sizes = []
    for most, own in by_requests:
        # The number of levels of a tree that doubles its width at every level.
        steps = num_steps if own == num_places else min(max(own - 1, 1).bit_length(), num_steps)
        sizes.append(TreeSize(most, own, steps))
        if max_requests is not None and most >= max_requests:
            break
    return [*sizes[:-1], sizes[-1]._replace(max_requests=None)]


def captured_sizes(captured: Sequence[int], above: int, most: int | None) -> list[int]:
    """The batch sizes with CUDA graphs that are needed for batches above `above`, up to `most` requests.

    captured: all batch sizes for which SGLang captures graphs. Batches are padded to the next larger one.
    """
    needed = [size for size in captured if size > above and (most is None or size <= most)]
    larger = [size for size in captured if most is not None and size > most]
    if larger and most not in needed:
        needed.append(min(larger))
    return needed or [max(captured)]


def _usual_places(num_places: int, largest_graph: int | None) -> list[tuple[int, int]]:
    """The default sizes: all requests together have at most 128 places, or 256 of the smallest trees.

    Larger batches have no trees, and nor have batches without a CUDA graph, if they have more than 128 places.
    """
    found, own = [], num_places
    while own >= _LEAST_PLACES:
        smaller, most = 1 << ((own - 1).bit_length() - 1), max(_USUAL_TOKENS // own, 1)  # the next smaller power of two
        if smaller < _LEAST_PLACES:
            most = max(min(_MOST_TOKENS // own, largest_graph or _MOST_TOKENS), most)
        found.append((most, own))
        own = smaller
    return [*found, (found[-1][0] + 1, 1)] if found else [(1, num_places)]


def _read_places(text: str, num_places: int) -> list[tuple[int, int]]:
    name = _variable("places")
    try:
        found = [(int(most), int(own)) for most, own in (part.split(":") for part in text.split(","))]
    except ValueError:
        raise GraftError(f'{name} must be pairs of requests and places like "2:48,16:8", not {text!r}') from None
    numbers, all_places = zip(*found, strict=True)
    require(
        numbers[0] >= 1 and list(numbers) == sorted(set(numbers)),
        f"{name} must name growing numbers of requests, from 1, not {', '.join(map(str, numbers))}",
    )
    require(
        list(all_places) == sorted(set(all_places), reverse=True),
        f"{name} must name fewer places for more requests, not {', '.join(map(str, all_places))}",
    )
    for own in all_places:
        require(
            1 <= own <= num_places,
            f"{name} must have places between 1 and --speculative-num-draft-tokens ({num_places}), not {own}",
        )
    return found


def check_head(config: Mapping[str, Any]) -> None:
    """Refuse a head that SGLang would not load as an EAGLE-3 head, or would compute differently."""
    check_residual(bool(config.get("norm_before_residual")))
    architectures = config.get("architectures") or []
    named = ", ".join(map(str, architectures)) or "nothing"
    require(
        list(architectures) == [HEAD],
        f'the head\'s config.json must say "architectures": ["{HEAD}"], by which SGLang knows an EAGLE-3 head; '
        f"it names {named}",
    )


def check_residual(is_normed: bool) -> None:
    """Refuse a head that takes the residual after the norm (`norm_before_residual`)."""
    require(
        not is_normed,
        "SGLang does not know the head's normed residual (norm_before_residual): train another with graft train",
    )
