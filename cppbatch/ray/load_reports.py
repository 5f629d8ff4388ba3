"""How far replicas have loaded the model, and why one could not: in the key-value store of the cluster.

Serve tells neither: a replica takes no calls until its constructor has returned, and its errors are tracebacks.
"""

from __future__ import annotations

import contextlib

import msgspec
from ray.experimental import internal_kv

_NAMESPACE = "cppbatch-loading"


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a replica that loads, or that has failed to."""

    progress: float = 0.0
    """0.0 to 1.0."""
    error: str | None = None
    error_kind: str | None = None
    """The name of the exception in `cppbatch.errors`."""


_decode = msgspec.msgpack.Decoder(LoadReport).decode


def put_report(application: str, replica: str, report: LoadReport) -> None:
    """Replaces the report of a replica. Waits for the cluster, as all functions here do."""
    internal_kv._internal_kv_put(_key(application, replica), msgspec.msgpack.encode(report), namespace=_NAMESPACE)


def remove_report(application: str, replica: str) -> None:
    """A replica has loaded the model."""
    internal_kv._internal_kv_del(_key(application, replica), namespace=_NAMESPACE)


def remove_errors(application: str) -> None:
    """Removes the reports of replicas that have failed: another one begins to load."""
    for key in _keys(application):
        if (report := _get(key)) and report.error:
            internal_kv._internal_kv_del(key, namespace=_NAMESPACE)


def load_reports(application: str) -> list[LoadReport]:
    """The reports of all replicas that load, or have failed to."""
    return [report for key in _keys(application) if (report := _get(key))]


def _key(application: str, replica: str) -> str:
    return f"{application}/{replica}"


def _keys(application: str) -> list[bytes]:
    keys: list[bytes] = internal_kv._internal_kv_list(_key(application, ""), namespace=_NAMESPACE)
    return keys


def _get(key: bytes) -> LoadReport | None:
    value = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
    with contextlib.suppress(msgspec.DecodeError):
        return _decode(value) if value else None
    return None
