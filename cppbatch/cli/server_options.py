"""Options of `cppbatch serve` for the server: network, keys, limits, names, log."""

from __future__ import annotations

import json
import os
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cppbatch.cli.engine_options import Choice, Command, Switch, option, split_lists, with_options
from cppbatch.cli.sampling_options import sampling_default_options
from cppbatch.config import EngineConfig
from cppbatch.errors import LibraryError
from cppbatch.server.video import VideoSettings


def _find_template(_context: object, _option: object, given: str | None) -> str | None:
    if not given:
        return None
    from cppbatch.chat.template import find_template

    return find_template(given, _llama_cpp_names)


def _llama_cpp_names() -> tuple[str, ...]:
    from cppbatch.llama import builtin_template_names

    try:
        return builtin_template_names()
    except LibraryError:  # loading the model reports what is missing
        return ()


class _NamedPath(click.Path):
    """A path that is not empty: an empty one comes from an unset variable, and would be the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            self.fail("is empty; name a folder, or leave the option out", param, ctx)
        return super().convert(value, param, ctx)


def _keys(_context: object, _option: object, given: tuple[str, ...]) -> tuple[str, ...]:
    """Keeps empty keys, so that they are refused later: they come from an unset variable."""
    return tuple(key.strip() for each in given for key in each.split(","))


def _variables(_context: object, _option: object, given: str | None) -> dict[str, Any]:
    try:
        variables = json.loads(given or "{}")
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{given!r:.200} is not JSON: {error}") from None
    if not isinstance(variables, dict):
        raise click.BadParameter(f"{given!r} is not a JSON object")
    return variables


chat_template_option = option(
    "--chat-template", "--chat-template-file", "chat_template",
    llama_env="LLAMA_ARG_CHAT_TEMPLATE LLAMA_ARG_CHAT_TEMPLATE_FILE", metavar="NAME|FILE|TEXT", default=None,
    callback=_find_template,
    help="Chat template to use instead of the model's own: a llama.cpp template name such as chatml, a file, or Jinja "
    "source.",
)  # fmt: skip


def are_chats(config: EngineConfig, chat_template: str | None, given: bool | None, *, says: bool = True) -> bool:
    """Whether plain prompts are chat messages: as `given`, else if there is a chat template. `says`: print it."""
    if given is not None:
        return given
    from cppbatch.models.inspect import has_chat_template

    is_chat = chat_template is not None or has_chat_template(Path(config.model_path))
    if says:
        click.echo(_CHATS if is_chat else _TEXTS, err=True)
    return is_chat


_CHATS = "plain prompts are answered by the model's chat template; --raw continues them as they are"
_TEXTS = "plain prompts are continued as they are: the model has no chat template (set one with --chat-template)"


MEDIA_OPTIONS = [
    option(
        "--allowed-media-domains", multiple=True, metavar="HOST,...",
        callback=split_lists, show_default="none",
        help="Hosts from which images and audio may be fetched: example.org, *.example.org, * for all public hosts; "
        "for private hosts, an address or a network such as 10.0.0.0/8.",
    ),
    option(
        "--media-path", "--allowed-local-media-path", "media_path", metavar="DIR",
        type=click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True), default=None,
        help="Folder of images and audio files that requests may reference as file:// URLs. Default: none.",
    ),
    option(
        "--video-fps", llama_env="LLAMA_ARG_VIDEO_FPS", type=click.FloatRange(0.01, 120), default=4.0, metavar="N",
        help="Frames of a video that a model reads, per second. Videos need ffmpeg.",
    ),
    option(
        "--video-timestamp-interval", llama_env="LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL", type=click.IntRange(min=0),
        default=5000, metavar="MS", help="Milliseconds between the times in the text of a video; 0: none.",
    ),
    option(
        "--video-ffmpeg-dir", llama_env="LLAMA_ARG_VIDEO_FFMPEG_DIR", metavar="DIR", default=None,
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        help="Folder of ffmpeg. Default: it is searched in PATH.",
    ),
]  # fmt: skip
"""For every command that answers requests of clients."""


def take_video_settings(arguments: dict[str, Any]) -> VideoSettings:
    """The values of the options of videos, which are removed."""
    return VideoSettings(
        arguments.pop("video_fps"), arguments.pop("video_timestamp_interval"), arguments.pop("video_ffmpeg_dir")
    )


def _limit(_context: click.Context, _parameter: click.Parameter, tokens: int) -> int | None:
    return None if tokens < 0 else tokens


MODEL_SETTINGS = (
    "aliases", "tags", "chat_template", "thinking_tokens", "thinking_message", "reasoning_format", "skip_chat_parsing",
    "prefill_assistant", "parse_special", "spm_infill", "embd_normalize",
)  # fmt: skip
"""The options of `model_options` that are fields of `ServerSettings`."""
_THINKING: dict[str, dict[str, Any]] = {"auto": {}, "on": {"enable_thinking": True}, "off": {"enable_thinking": False}}


def take_template_variables(arguments: dict[str, Any]) -> dict[str, Any]:
    """Removes the options that set chat template variables, and returns these."""
    effort, preserves = arguments.pop("reasoning_effort"), arguments.pop("preserves_reasoning")
    found: dict[str, Any] = arguments.pop("template_variables") | _THINKING[arguments.pop("reasoning")]
    if effort not in (None, "default"):
        found |= {"reasoning_effort": effort, "reasoning_strength": effort}  # as llama-server
    if preserves is not None:
        found |= {name: preserves is is_kept for name, is_kept in _PRESERVED.items()}
    return found


_PRESERVED = {
    "preserve_thinking": True, "clear_thinking": False, "truncate_history_thinking": False, "drop_thinking": False,
}  # fmt: skip
"""The variables with which templates keep the reasoning of earlier messages, as in llama-server."""

_MODEL_OPTIONS = [
    option(
        "-a", "--alias", "aliases", llama_env="LLAMA_ARG_ALIAS", multiple=True,
        metavar="NAMES", callback=split_lists,
        help="Model names, separated by commas. Responses show the alphabetically first one instead of the file name; "
        "may be repeated.",
    ),
    option(
        "--tags", llama_env="LLAMA_ARG_TAGS", multiple=True, metavar="TAGS", callback=split_lists,
        help="Tags to show for the model in /v1/models, separated by commas; may be repeated.",
    ),
    chat_template_option,
    option(
        "--chat-template-kwargs", "template_variables",
        llama_env="LLAMA_ARG_CHAT_TEMPLATE_KWARGS", metavar="JSON", default=None, callback=_variables,
        help="Default chat template variables, as a JSON object; chat_template_kwargs in a request take precedence.",
    ),
    option(
        "-rea", "--reasoning", llama_env="LLAMA_ARG_REASONING", type=Switch(), default="auto",
        help="Default of the chat template variable enable_thinking. auto: true if the template supports reasoning, "
        "unless set by --chat-template-kwargs.",
    ),
    option(
        "--reasoning-budget", "thinking_tokens", llama_env="LLAMA_ARG_THINK_BUDGET",
        type=click.IntRange(-1), default=-1, callback=_limit,
        help="Maximum reasoning tokens before the answer starts, for chats without thinking_budget. -1: no limit.",
    ),
    option(
        "--reasoning-budget-message", "thinking_message", llama_env="LLAMA_ARG_THINK_BUDGET_MESSAGE", metavar="TEXT",
        default="", show_default=False, help="Text before the end of reasoning that has used up its tokens.",
    ),
    option(
        "--reasoning-effort", llama_env="LLAMA_ARG_REASONING_EFFORT", metavar="LEVEL", default=None,
        help="Default of the chat template variable reasoning_effort: minimal, low, medium, high, xhigh or max.",
    ),
    option(
        "--reasoning-preserve/--no-reasoning-preserve", "preserves_reasoning",
        llama_env="LLAMA_ARG_REASONING_PRESERVE", default=None,
        help="Tell the chat template to keep, or to drop, the reasoning of earlier messages. Default: as the template "
        "does.",
    ),
    option(
        "--reasoning-format", llama_env="LLAMA_ARG_THINK", default="auto",
        type=Choice(["auto", "none"], {"deepseek": "auto", "deepseek-legacy": "auto"}),
        help="auto: reasoning is returned as reasoning_content; none: in the content, with its tags.",
    ),
    option(
        "--skip-chat-parsing/--no-skip-chat-parsing", llama_env="LLAMA_ARG_SKIP_CHAT_PARSING", default=False,
        help="Return the whole text of chats as content, with reasoning and tool calls as the model writes them.",
    ),
    option(
        "--prefill-assistant/--no-prefill-assistant", llama_env="LLAMA_ARG_PREFILL_ASSISTANT", default=True,
        help="Continue a last message of the assistant, for requests without continue_final_message.",
    ),
    option("--spm-infill", is_flag=True, help="Put the suffix before the prefix in prompts of /infill."),
    option(
        "--embd-normalize", type=int, default=2,
        help="Norm of embeddings. 2: of length 1; -1: as computed; 0: the largest number is 32,760; 1, 3 ...: the norm "
        "of this order is 1.",
    ),
    option(
        "--parse-special", is_flag=True,
        help="Read the texts of control tokens, such as <|im_end|>, in messages and tools as control tokens, as "
        "llama-server does. Default: they are plain text.",
    ),
    sampling_default_options,
]  # fmt: skip
"""Options that can be set for each of several models."""

_OPTIONS = [
    option(
        "--host", "hosts", llama_env="LLAMA_ARG_HOST", multiple=True, metavar="ADDRESS,...",
        default=("127.0.0.1",), callback=split_lists,
        help="Address to listen on, or the path of a Unix socket that ends in .sock; may be repeated, or given as a "
        "comma-separated list. Without --host and --port, OLLAMA_HOST names both, if it is set.",
    ),
    option(
        "--port", llama_env="LLAMA_ARG_PORT", type=click.IntRange(0, 65535), default=8080,
        help="Port; 0: any free port.",
    ),
    option(
        "--reuse-port", llama_env="LLAMA_ARG_REUSE_PORT", is_flag=True,
        help="Let several servers listen on the same port; the system distributes connections over them.",
    ),
    option(
        "--api-prefix", "prefix", llama_env="LLAMA_ARG_API_PREFIX", metavar="/PATH", default="", show_default=False,
        help="Path before those of the server, without a slash at its end.",
    ),
    option(
        "--api-key", "api_keys", llama_env="LLAMA_API_KEY", multiple=True, metavar="KEY,...",
        callback=_keys,
        help="API key that clients must send, as a bearer token or in x-api-key; may be repeated, or given as a "
        "comma-separated list.",
    ),
    option(
        "--api-key-file", llama_env="LLAMA_ARG_API_KEY_FILE", metavar="FILE",
        help="File with API keys, one per line; or a *.toml file with the priority, rate, models and adapters of each "
        "key.",
    ),
    option(
        "--ssl-certfile", "--ssl-cert-file", "ssl_certfile", llama_env="LLAMA_ARG_SSL_CERT_FILE",
        metavar="FILE", help="Serve HTTPS with this certificate.",
    ),
    option(
        "--ssl-keyfile", "--ssl-key-file", "ssl_keyfile", llama_env="LLAMA_ARG_SSL_KEY_FILE",
        metavar="FILE", help="Private key, if in a separate file.",
    ),
    option(
        "--cors-origin", "--cors-origins", "cors_origins", llama_env="LLAMA_ARG_CORS_ORIGINS",
        multiple=True, metavar="ORIGIN,...", callback=split_lists, show_default="* with --api-key, else localhost",
        help="Origins whose web pages may use the server: https://example.org, localhost for any port of this machine, "
        "* for all, none; may be repeated.",
    ),
    option(
        "--cors-methods", llama_env="LLAMA_ARG_CORS_METHODS", metavar="METHOD,...",
        default="GET, POST, DELETE, OPTIONS", help="Methods that these web pages may use.",
    ),
    option(
        "--cors-headers", llama_env="LLAMA_ARG_CORS_HEADERS", metavar="HEADER,...", default="*",
        help="Request headers that these web pages may send; *: any.",
    ),
    option(
        "--cors-credentials/--no-cors-credentials", llama_env="LLAMA_ARG_CORS_CREDENTIALS", default=True,
        help="Let these web pages send cookies and the like; with --cors-origin *, always.",
    ),
    option(
        "--allowed-hosts", multiple=True, metavar="HOST,...", callback=split_lists,
        show_default="any with --api-key, else none",
        help="Host names that clients may use to reach the server, such as the name of a reverse proxy: example.org, "
        "*.example.org, * for all. IP addresses and localhost are always allowed, and with --host 0.0.0.0 also this "
        "machine's name.",
    ),
    option("--max-body-mb", type=int, default=16, help="Maximum MiB of a request body."),
    option("--max-file-mb", type=int, default=1024, help="Maximum MiB of an uploaded file."),
    option(
        "--data-dir", type=_NamedPath(path_type=Path), metavar="DIR", default=None,
        help="Folder for files and batches. Default: the user's data folder.",
    ),
    *MEDIA_OPTIONS,
    option("--max-media", type=int, default=16, help="Maximum images and audio files per request."),
    option(
        "--max-media-mb", type=int, default=64,
        help="Maximum MiB of images and audio per request; counted once for each completion.",
    ),
    option("--max-n", type=int, default=128, help="Maximum completions per prompt."),
    option(
        "--max-prompts-per-batch", type=int, default=256,
        help="Maximum prompts, or variants of one prompt, per request.",
    ),
    option(
        "--max-tokens", type=int, default=None,
        help="Maximum tokens per completion; also the default for requests that set no maximum.",
    ),
    option(
        "--request-timeout", type=float, default=None,
        help="Maximum seconds per request; a request that takes longer ends with the text so far.",
    ),
    option(
        "--max-concurrent", type=int, default=0,
        help="Maximum requests in progress; further requests are refused with 429; 0: only --max-queue limits them.",
    ),
    option(
        "--max-concurrent-per-key", type=int, default=0,
        help="Maximum requests in progress per API key, or per client address without keys; 0: unlimited.",
    ),
    option(
        "--idle-timeout", type=float, default=60,
        help="Seconds after which a client that stops sending its request or reading its response is disconnected.",
    ),
    option(
        "--drain-timeout", type=float, default=30,
        help="Seconds for running requests to finish after Ctrl-C or SIGTERM.",
    ),
    option(
        "--sse-ping-interval", llama_env="LLAMA_ARG_SSE_PING_INTERVAL", type=click.IntRange(-1), default=30,
        metavar="SECONDS",
        help="Silence after which a stream sends a ping, so that clients and proxies wait while a long prompt is "
        "computed; -1: never.",
    ),
    option("--metrics/--no-metrics", llama_env="LLAMA_ARG_ENDPOINT_METRICS", default=True, help="Serve /metrics."),
    *_MODEL_OPTIONS,
    option("--slots/--no-slots", llama_env="LLAMA_ARG_ENDPOINT_SLOTS", default=True, help="Serve /slots."),
    option(
        "--webui/--no-webui", "--ui/--no-ui", "webui", llama_env="LLAMA_ARG_UI LLAMA_ARG_WEBUI",
        default=True, help="Serve the web page at /.",
    ),
    option(
        "--path", "static_path", llama_env="LLAMA_ARG_STATIC_PATH", metavar="DIR", default=None,
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        help="Serve the files of this folder at / in place of the web page.",
    ),
    option(
        "--slot-save-path", metavar="DIR",
        type=click.Path(path_type=Path, exists=True, file_okay=False, writable=True, resolve_path=True), default=None,
        help="Folder in which POST /slots/{id} saves the cached prefixes of slots. Default: saving is disabled.",
    ),
    option(
        "--strict-model", is_flag=True,
        help="Refuse requests for models other than the loaded one and its aliases. By default, the loaded model "
        "answers to any name.",
    ),
    option(
        "--props", llama_env="LLAMA_ARG_ENDPOINT_PROPS", is_flag=True,
        help="Accept POST /props for compatibility with llama-server clients; it changes nothing.",
    ),
    option(
        "--log-prompts-dir", "prompts_dir", metavar="DIR", type=_NamedPath(path_type=Path), default=None,
        help="Write each prompt to a file in this folder. For debugging.",
    ),
    option(
        "--log-format", llama_env="LLAMA_ARG_LOG_JSONL", default="text", help="Log format.",
        type=Choice(["text", "json"], {"1": "json", "true": "json", "0": "text", "false": "text"}),
    ),
    option(
        "--log-file", llama_env="LLAMA_ARG_LOG_FILE", metavar="FILE", type=_NamedPath(path_type=Path), default=None,
        help="Append the lines of the log to this file too.",
    ),
    option(
        "--log-level", type=click.Choice(["debug", "info", "warning", "error", "off"]), default=None,
        help="Minimum log level. Default: warning, and info for requests, batches and workers.",
    ),
    option(
        "--access-log/--no-access-log", default=True,
        help="Log each request; requests for /health, /ready and the web page only at level debug.",
    ),
]  # fmt: skip


def model_options(command: Command) -> Command:
    """Adds the options for a model's names, chat template and sampling. The command gets their values."""
    return with_options(command, _MODEL_OPTIONS)


def _predict_path() -> str | None:
    """Vertex AI's path for predictions, from its environment variables; None elsewhere."""
    if os.environ.get("AIP_MODE") != "PREDICTION":
        return None
    return os.environ.get("AIP_PREDICT_ROUTE") or "/predict"


def _is_default(*names: str) -> bool:
    """Whether none of these options has been set, not even by a variable or a file."""
    context = click.get_current_context()
    return all(context.get_parameter_source(name) is ParameterSource.DEFAULT for name in names)


def server_options(command: Command) -> Command:
    """Adds the server's options. The command gets `settings`, a `ServerSettings`, and `address`, an `Address`."""

    @wraps(command)
    def with_settings(
        api_keys: tuple[str, ...],
        api_key_file: str | None,
        ssl_certfile: str | None,
        ssl_keyfile: str | None,
        **arguments: Any,
    ) -> Any:
        from cppbatch.server.address import Address, ollama_host, tls_context
        from cppbatch.server.auth.rules import ApiKey, Keys
        from cppbatch.server.http.hosts import names_of
        from cppbatch.server.http.limits import Limits
        from cppbatch.server.settings import ServerSettings

        keys: list[str | ApiKey] = list(api_keys)
        if api_key_file:
            from cppbatch.server.auth.key_file import read_keys

            keys += read_keys(api_key_file)
        hosts: tuple[str, ...] = arguments.pop("hosts")
        port: int = arguments.pop("port")
        if _is_default("hosts", "port") and (place := ollama_host()):
            hosts, port = place[:1], place[1]
            click.echo(f"OLLAMA_HOST: the address is {hosts[0]}, port {port}; --host and --port override it")
        limits = Limits(**{name: arguments.pop(name) for name in Limits.__struct_fields__})
        settings = ServerSettings(
            keys=Keys(keys),
            limits=limits,
            cors_origins=arguments.pop("cors_origins") or None,
            allowed_hosts=arguments.pop("allowed_hosts"),
            own_names=names_of(hosts),
            metrics=arguments.pop("metrics"),
            slots=arguments.pop("slots"),
            webui=arguments.pop("webui"),
            slot_save_path=arguments.pop("slot_save_path"),
            allowed_media_domains=arguments.pop("allowed_media_domains"),
            media_path=arguments.pop("media_path"),
            video=take_video_settings(arguments),
            predict_path=_predict_path(),
            strict_model=arguments.pop("strict_model"),
            props=arguments.pop("props"),
            drain_timeout=arguments.pop("drain_timeout"),
            data_dir=arguments.pop("data_dir"),
            sse_ping_interval=arguments.pop("sse_ping_interval"),
            static_path=arguments.pop("static_path"),
            prompts_dir=arguments.pop("prompts_dir"),
            cors_methods=arguments.pop("cors_methods"),
            cors_headers=arguments.pop("cors_headers"),
            cors_credentials=arguments.pop("cors_credentials"),
            template_variables=take_template_variables(arguments),
            **{name: arguments.pop(name) for name in MODEL_SETTINGS},
            sampling_defaults=arguments.pop("sampling_defaults"),
        )
        tls = tls_context(ssl_certfile, ssl_keyfile)
        address = Address(
            hosts=hosts,
            port=port,
            tls=tls,
            reuse_port=arguments.pop("reuse_port"),
            prefix=arguments.pop("prefix"),
        )
        address.check()
        return command(settings=settings, address=address, **arguments)

    return with_options(with_settings, _OPTIONS)
