"""The server's settings; the engine's are in `cppbatch.config`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from cppbatch.engine.params import SamplingParams
from cppbatch.errors import ConfigError, InvalidRequest
from cppbatch.server.auth.rules import Keys
from cppbatch.server.http.hosts import ANY_ORIGIN, LOCAL, HostNames, MediaDomains, check_origin
from cppbatch.server.http.limits import Limits
from cppbatch.server.video import VideoSettings

_MAX_DRAIN = 86400
MOST_NORM = 100
"""The highest order of a norm of embeddings: a higher one is as good as the largest number."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Raises `ConfigError` for values out of range, naming the flag."""

    keys: Keys = Keys()
    """The valid API keys; empty: no key is required."""
    limits: Limits = Limits()
    cors_origins: tuple[str, ...] | None = None
    """The origins whose web pages may use the server, and special values (`cors`). None: the default."""
    cors_methods: str = "GET, POST, DELETE, OPTIONS"
    """The methods that these pages may use."""
    cors_headers: str = "*"
    """The request headers that they may send; *: any."""
    cors_credentials: bool = True
    """Whether they may send cookies and the like; always with * as origin, as in llama-server."""
    allowed_hosts: tuple[str, ...] = ()
    """Additional host names under which clients may reach the server (`HostNames`)."""
    own_names: tuple[str, ...] = ()
    """The server's own host names (`cross_site.names_of`)."""
    aliases: tuple[str, ...] = ()
    """Names of the model. Responses show the alphabetically first one instead of the file name, as in
    llama-server."""
    tags: tuple[str, ...] = ()
    """Tags of the model, shown in `/v1/models` only."""
    metrics: bool = True
    """Whether `/metrics` is served."""
    webui: bool = True
    """Whether the web page is served."""
    static_path: Path | None = None
    """A folder of files that is served in place of the web page."""
    prompts_dir: Path | None = None
    """A folder to which each prompt is written, for debugging; None: none is."""
    slots: bool = True
    """Whether `/slots` is served."""
    slot_save_path: Path | None = None
    """The folder for slot files; None: slots cannot be saved, restored or erased."""
    allowed_media_domains: tuple[str, ...] = ()
    """The hosts from which images and audio may be fetched (`MediaDomains`); empty: none."""
    media_path: Path | None = None
    """The folder of images and audio that requests may reference as file:// URLs; None: no such URLs."""
    video: VideoSettings = VideoSettings()
    """How videos are read."""
    predict_path: str | None = None
    """The path of Vertex AI's predictions; None: not served."""
    props: bool = False
    """Whether `POST /props` is answered."""
    strict_model: bool = False
    """Refuse requests that name another model."""
    drain_timeout: float = 30
    """Seconds for running requests to finish when the server shuts down."""
    chat_template: str | None = None
    """The text of a chat template; None: the model's own."""

    system: str | None = None
    """The system message of conversations without one; None: none."""
    template_variables: dict[str, Any] = {}
    """Chat template variables for requests that do not set them (--chat-template-kwargs, --reasoning)."""
    thinking_tokens: int | None = None
    """Maximum reasoning tokens for chats that set no limit (--reasoning-budget); None: no limit."""
    parse_special: bool = False
    """Read the texts of control tokens in messages and tools as control tokens, for requests that do not say."""
    thinking_message: str = ""
    """Text before the end of reasoning whose limit is reached."""
    reasoning_format: str = "auto"
    """none: reasoning is part of the content, with its tags."""
    skip_chat_parsing: bool = False
    """Return the whole text as content, with reasoning and tool calls."""
    prefill_assistant: bool = True
    """Continue a last message of the assistant, for requests that do not say."""
    spm_infill: bool = False
    """Put the suffix before the prefix in prompts of /infill."""
    embd_normalize: int = 2
    """The norm of vectors: -1 as computed, 0 the largest number is 32,760, 2 the length is 1."""
    sampling_defaults: dict[str, Any] = {}
    """Fields of `SamplingParams` for requests that do not set them (--temp, -n ...)."""

    sse_ping_interval: int = 30
    """Seconds of silence after which a stream sends a ping; -1: never."""
    data_dir: Path | None = None
    """The folder for files and batches; None: the user's data folder, if it is usable."""

    def __post_init__(self) -> None:
        MediaDomains(self.allowed_media_domains)  # checks them
        HostNames(self.allowed_hosts, "--allowed-hosts")
        for origin in self.origins:
            check_origin(origin)
        if not 0 <= self.drain_timeout <= _MAX_DRAIN:
            raise ConfigError(f"--drain-timeout is {self.drain_timeout}; it must be from 0 to {_MAX_DRAIN} seconds")
        if not -1 <= self.embd_normalize <= MOST_NORM:
            raise ConfigError(
                f"--embd-normalize is {self.embd_normalize}; it must be from -1 (as computed) to {MOST_NORM}"
            )
        try:
            SamplingParams(**self.sampling_defaults)
        except InvalidRequest as error:
            raise ConfigError(f"the server's default of {error.field} {error.message}") from error

    @property
    def media_domains(self) -> MediaDomains:
        """`allowed_media_domains`, validated."""
        return MediaDomains(self.allowed_media_domains)

    @property
    def host_names(self) -> HostNames | None:
        """The host names that requests may give. None: any, because a key is required, which a page using DNS rebinding
        does not know."""
        if self.keys and not self.allowed_hosts:
            return None
        return HostNames([*self.allowed_hosts, *self.own_names], "--allowed-hosts")

    @property
    def origins(self) -> tuple[str, ...]:
        """`cors_origins`, or the default: all if a key is required, otherwise only pages of this machine."""
        if self.cors_origins is not None:
            return self.cors_origins
        return (ANY_ORIGIN if self.keys else LOCAL,)
