"""The options of `cppbatch serve` that are about the server, not the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from cppbatch.cli.engine_options import option

Command = Callable[..., Any]

_OPTIONS = [
    option("--host", env="HOST", default="127.0.0.1", help="Address to listen on."),
    option("--port", env="PORT", type=click.IntRange(0, 65535), default=8080, help="Port; 0: any free one."),
    option(
        "--api-key", "api_keys", env="API_KEY", multiple=True, metavar="KEY",
        help="Key that clients must send, as a bearer token or in x-api-key; may be given several times.",
    ),
    option("--api-key-file", env="API_KEY_FILE", metavar="FILE", help="A file with such keys, one a line."),
    option("--ssl-certfile", env="SSL_CERTFILE", metavar="FILE", help="Serve https with this certificate."),
    option("--ssl-keyfile", env="SSL_KEYFILE", metavar="FILE", help="Its key, if it is in a file of its own."),
    option(
        "--cors-origin", "cors_origins", env="CORS_ORIGIN", multiple=True, metavar="ORIGIN",
        help="Let pages of this origin use the server from a browser; * for all; may be given several times.",
    ),
    option("--max-body-mb", env="MAX_BODY_MB", type=int, default=16, help="Most MiB of a request's body."),
    option("--max-file-mb", env="MAX_FILE_MB", type=int, default=1024, help="Most MiB of a file that is uploaded."),
    option(
        "--data-dir", env="DATA_DIR", type=click.Path(path_type=Path), metavar="DIR", default=None,
        help="Where files and batches are kept. Without it: in your own folder for data.",
    ),
    option("--max-n", env="MAX_N", type=int, default=128, help="Most completions of one prompt."),
    option(
        "--max-prompts-per-batch", env="MAX_PROMPTS_PER_BATCH", type=int, default=256,
        help="Most prompts, or settings of one prompt, of one request for many.",
    ),
    option(
        "--max-tokens", env="MAX_TOKENS", type=int, default=None,
        help="Most tokens of one completion, also of those that name no number.",
    ),
    option(
        "--request-timeout", env="REQUEST_TIMEOUT", type=float, default=None,
        help="Seconds that a request may take; then it ends with the text so far.",
    ),
    option(
        "--max-concurrent", env="MAX_CONCURRENT", type=int, default=0,
        help="Requests that are answered at once, more are refused with 429; 0: no limit but --max-queue.",
    ),
    option(
        "--max-concurrent-per-key", env="MAX_CONCURRENT_PER_KEY", type=int, default=0,
        help="As many of one API key, or without keys of one address; 0: no limit.",
    ),
    option(
        "--idle-timeout", env="IDLE_TIMEOUT", type=float, default=60,
        help="Seconds after which a client that stops sending its body, or reading its answer, is cut off.",
    ),
    option(
        "--drain-timeout", env="DRAIN_TIMEOUT", type=float, default=30,
        help="Seconds that running requests have to end in after Ctrl-C or SIGTERM.",
    ),
    option(
        "--alias", "aliases", env="ALIAS", multiple=True, metavar="NAME",
        help="A further name that the model answers to; may be given several times.",
    ),
    option(
        "--chat-template", env="CHAT_TEMPLATE", metavar="NAME|FILE|TEXT", default=None,
        help="Chat template to use instead of the model's own: a name such as chatml, a file, or Jinja itself.",
    ),
    option("--log-format", env="LOG_FORMAT", type=click.Choice(["text", "json"]), default="text", help="Of the log."),
]  # fmt: skip


def server_options(command: Command) -> Command:
    """Adds the server's options; the command gets `settings` and `address` in their place."""

    @wraps(command)
    def with_settings(
        api_keys: tuple[str, ...],
        api_key_file: str | None,
        ssl_certfile: str | None,
        ssl_keyfile: str | None,
        chat_template: str | None,
        **arguments: Any,
    ) -> Any:
        from cppbatch.chat.template import find_template
        from cppbatch.server.keys import Keys, read_keys
        from cppbatch.server.limits import Limits
        from cppbatch.server.listener import Address, tls_context
        from cppbatch.server.settings import ServerSettings

        limits = Limits(**{name: arguments.pop(name) for name in Limits.__struct_fields__})
        settings = ServerSettings(
            keys=Keys([*api_keys, *(read_keys(api_key_file) if api_key_file else [])]),
            limits=limits,
            cors_origins=arguments.pop("cors_origins"),
            aliases=arguments.pop("aliases"),
            drain_timeout=arguments.pop("drain_timeout"),
            data_dir=arguments.pop("data_dir"),
            chat_template=find_template(chat_template) if chat_template else None,
        )
        tls = tls_context(ssl_certfile, ssl_keyfile)
        address = Address(host=arguments.pop("host"), port=arguments.pop("port"), tls=tls)
        return command(settings=settings, address=address, **arguments)

    wrapped: Command = with_settings
    for add in reversed(_OPTIONS):
        wrapped = add(wrapped)
    return wrapped
