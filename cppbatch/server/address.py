"""Where a server listens: addresses and TLS."""

from __future__ import annotations

import ssl

import msgspec

from cppbatch.errors import ConfigError


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses to listen on."""

    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8080
    """0: any free port."""
    tls: ssl.SSLContext | None = None


def tls_context(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    """The TLS context for a certificate, whose key may be in the same file; None without one. Raises `ConfigError`."""
    if not certfile:
        if keyfile:
            raise ConfigError("--ssl-keyfile requires --ssl-certfile, the matching certificate")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(
            certfile, keyfile, password=""
        )  # otherwise OpenSSL asks for the password at the terminal
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = f"{certfile} and {keyfile}" if keyfile else certfile
        raise ConfigError(f"cannot use the TLS certificate in {files} ({_reason(error)})") from error
    return context


def _reason(error: Exception) -> str:
    """A readable reason; most of OpenSSL's errors have none."""
    if isinstance(error, ssl.SSLError):
        reasons = {"KEY_VALUES_MISMATCH": "the key does not match the certificate"}
        without_password = "they must be a certificate and its key in PEM format, without a password"
        return reasons.get(error.reason or "", without_password)
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
