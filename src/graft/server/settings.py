"""Server settings, from flags, then environment variables, then a YAML file."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml
from pydantic import TypeAdapter, ValidationError

from graft.engine.settings import SchedulerSettings
from graft.errors import GraftError
from graft.server.logs import LogFormat
from graft.settings import require, require_known

PREFIX = "GRAFT_SERVE_"
T = TypeVar("T")
Learning = Literal["auto", "shared", "key", "isolated", "off"]
ToolParser = Literal["auto", "hermes", "llama3", "qwen", "mistral", "pythonic"]
ReasoningParser = Literal["auto", "think", "none"]


@dataclass(frozen=True)
class ServeSettings(SchedulerSettings):
    """Settings of the HTTP server, and of its scheduler (inherited)."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()  # any of them gives access; none: no key is needed
    api_key_names: tuple[str, ...] = ()  # names of the keys in the log, in the same order; empty: key-1, key-2 ...
    # Host headers to allow beside local ones; `*.example.com` for all subdomains, `*` for any. If empty, a server on a
    # local address allows only local ones, any other server allows all.
    allowed_hosts: tuple[str, ...] = ()
    ssl_certfile: Path | None = None  # enables HTTPS
    ssl_keyfile: Path | None = None  # None: the key is in the certificate's file
    served_model_name: str | None = None  # None: the model's own
    tool_parser: ToolParser = "auto"  # how the model writes tool calls; auto: as its chat template says, else hermes
    reasoning_parser: ReasoningParser = "auto"  # auto: <think> is reasoning if the chat template has it
    # Which requests learn from each other: all (shared), those of one key (key), those of one user of a key (isolated),
    # none (off). auto: key if there are several API keys, else shared.
    learning: Learning = "auto"
    max_body_bytes: int = 2 << 20
    max_prompt_bytes: int | None = None  # checked before tokenizing; None: 16 per token of the context
    max_prompt_tokens: int | None = None  # None: the model's context
    max_tokens: int = 4096  # most tokens that a request may ask for
    default_max_tokens: int = 1024  # most tokens of a chat answer if the request sets no limit
    timeout: float = 600.0  # seconds for a request, with waiting
    read_timeout: float = 30.0  # seconds for a client to send its request
    shutdown_timeout: float = 30.0  # seconds for running requests when the server is stopped
    log_prompts: bool = False
    access_log: bool = False  # log every request, not only those that are decoded, refused or fail
    log_format: LogFormat = "text"
    page: bool = True  # serve the web page at /

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in (
            ("learning", Learning), ("tool_parser", ToolParser), ("reasoning_parser", ReasoningParser),
            ("log_format", LogFormat),
        ):  # fmt: skip
            known, value = get_args(kind), getattr(self, name)
            require(value in known, f"{name} is one of {', '.join(known)}, not {value!r}")
        require(0 <= self.port < 65536, f"port must be below 65536, not {self.port}")
        require(all(self.api_keys), "an API key must not be empty")
        num_names, num_keys = len(self.api_key_names), len(self.api_keys)
        require(num_names in (0, num_keys), f"there are {num_names} names for {num_keys} API keys: name all or none")
        printable = all(name.isprintable() and name.strip() for name in self.api_key_names)
        require(printable, "the name of an API key must be printable")
        for key in self.api_keys:  # the errors do not print the key, which is secret
            require(key == key.strip(), "an API key must not begin or end with a space: requests cannot send it")
            require(key.isascii(), "an API key must be ASCII: headers cannot hold other characters")
        for name in (
            "max_body_bytes", "max_prompt_bytes", "max_tokens", "default_max_tokens", "timeout", "read_timeout",
        ):  # fmt: skip
            value = getattr(self, name)
            require(value is None or value > 0, f"{name} must be more than 0, not {value}")
        require(all(self.allowed_hosts), "an allowed host must not be empty")
        require(self.ssl_keyfile is None or self.ssl_certfile is not None, "ssl_keyfile requires ssl_certfile")
        for name in ("ssl_certfile", "ssl_keyfile"):
            file = getattr(self, name)
            require(file is None or Path(file).is_file(), f"{name}: there is no file {file}")

    @property
    def sharing(self) -> Learning:
        """Which requests learn from each other and share the prefix cache: `learning`, with auto decided."""
        if self.learning != "auto":
            return self.learning
        return "key" if len(set(self.api_keys)) > 1 else "shared"

    @property
    def key_names(self) -> tuple[str, ...]:
        """A name for each API key, for the log."""
        return self.api_key_names or tuple(f"key-{number}" for number in range(1, len(self.api_keys) + 1))

    @property
    def shows_all_guesses(self) -> bool:
        """Whether round records include rejected guesses that may be other users' text.

        Without keys, and unless learning is kept apart, the server treats all who reach it as one user.
        """
        return not self.api_keys and self.sharing == "shared"

    @property
    def is_local(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def hosts(self) -> tuple[str, ...]:
        """Allowed Host headers; empty: any."""
        local = ["127.0.0.1", "localhost", "[::1]"]
        if self.is_local and self.host not in (*local, "::1"):
            local.append(f"[{self.host}]" if ":" in self.host else self.host)
        # Against DNS rebinding: a web page whose name resolves to a local address must not reach the server.
        return (*local, *self.allowed_hosts) if self.is_local or self.allowed_hosts else ()


SERVING = tuple(field.name for field in fields(ServeSettings))
_LISTS = ("api_keys", "api_key_names", "allowed_hosts")  # separated by commas in the environment
_TYPES: dict[str, TypeAdapter[Any]] = {"budget": TypeAdapter(int), "exact": TypeAdapter(bool)}  # of `load`'s options
_BOOL = "tag:yaml.org,2002:bool"


class _Loader(yaml.SafeLoader):
    """YAML that reads `off` as a string, as in `learning: off`. Boolean settings still understand it."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


def gather(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None, loading: tuple[str, ...]
) -> tuple[dict[str, Any], ServeSettings]:
    """Options for `load` (those that `loading` names), and the server's settings. Unknown names are errors."""
    known = (*SERVING, *loading)
    chosen = dict(_from_file(file)) if file is not None else {}
    for name, value in environment.items():
        if name.startswith(PREFIX):
            key = name.removeprefix(PREFIX).lower()
            chosen[key] = [part.strip() for part in value.split(",")] if key in _LISTS else value
    for key in chosen:
        require_known("setting", key, known)
    chosen |= flags
    own = {key: value for key, value in chosen.items() if key in SERVING}
    options = {key: value for key, value in chosen.items() if key in loading}
    for key in options.keys() & _TYPES.keys():
        options[key] = _checked(_TYPES[key], options[key], key)
    return options, _checked(TypeAdapter(ServeSettings), own, "settings")


def _checked(kind: TypeAdapter[T], value: Any, name: str) -> T:
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        name = ".".join(str(part) for part in first["loc"]) or name
        raise GraftError(str(cause) if isinstance(cause, GraftError) else f"{name}: {first['msg']}") from error


def _from_file(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise GraftError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    require(content is None or isinstance(content, dict), f"{path} must hold settings, as in `port: 8000`")
    return {str(key): value for key, value in (content or {}).items()}
