"""API keys and their rules: priority, rate, models, adapters, sharing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from cppbatch.engine.model_info import AdapterInfo
from cppbatch.engine.params import replace_fields
from cppbatch.engine.request import BACKGROUND, GenerationRequest
from cppbatch.errors import ConfigError, Forbidden, InvalidRequest


class KeyRules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of a key. Batches store them as JSON, and run with the rules of the key that created them."""

    id: str
    """Unique among keys; persists across restarts."""
    name: str
    """Shown in the log."""
    group: str | None = None
    """Keys with the same group share cached prefixes, files and batches. None: no sharing."""
    priority: int | None = None
    """The highest priority of its requests, also the default. None: unrestricted."""
    requests_per_minute: int | None = None
    max_concurrent: int | None = None
    """Maximum requests in progress; None: --max-concurrent-per-key."""
    models: tuple[str, ...] | None = None
    """Names of the allowed models; None: all."""
    adapters: tuple[str, ...] | None = None
    """Names of the LoRA adapters and control vectors that its requests may set; None: all."""

    @property
    def owner(self) -> str:
        """The owner of the key's cached prefixes, files and batches: its group, or the key itself."""
        return f"key:{self.id}" if self.group is None else f"group:{self.group}"

    def check_model(self, names: Collection[str], asked: str | None = None) -> None:
        """Raises `Forbidden` unless the key may use the model with these names, and `asked` is one of them."""
        if self.models is None:
            return
        if not self.may_use(names) or (asked is not None and asked not in names):
            wanted = "this server's model" if asked is None else repr(asked)
            raise Forbidden("model", f"{wanted} is not allowed with this API key; allowed: {_join_names(self.models)}")

    def may_use(self, names: Collection[str]) -> bool:
        """Whether the key may use the model with these names."""
        return self.models is None or not set(self.models).isdisjoint(names)

    def engine_requests(
        self,
        requests: Sequence[GenerationRequest],
        adapters: Sequence[AdapterInfo],
        vectors: Sequence[AdapterInfo] = (),
    ) -> list[GenerationRequest]:
        """The requests after applying the key's rules: with its priority, and the salt of its owner.

        `adapters`, `vectors`: the LoRA adapters and control vectors of the engine. Raises `Forbidden` for those that
        the key does not allow, and `InvalidRequest` for a higher priority than the key's.
        """
        return [self._engine_request(request, adapters, vectors) for request in requests]

    def _engine_request(
        self, request: GenerationRequest, adapters: Sequence[AdapterInfo], vectors: Sequence[AdapterInfo]
    ) -> GenerationRequest:
        if self.adapters is not None:
            self._check_adapters("lora", request.lora, adapters)
            if request.control_vectors is not None:  # those of --control-vector apply to all keys
                self._check_adapters("control_vectors", request.control_vectors, vectors)
        # A digest, because with the owner a salt can exceed the length that requests may have.
        salt = sha256(f"{self.owner}\n{request.cache_salt}".encode(errors="surrogatepass"))
        return replace_fields(request, cache_salt=salt.hexdigest(), priority=self._priority(request.priority))

    def _priority(self, asked: int) -> int:
        if self.priority is None or asked >= BACKGROUND:  # background requests cannot overtake other keys
            return asked
        if asked < 0:
            raise InvalidRequest(
                "priority", f"is {asked}; it is added to the priority of the API key, so it must be 0 or more"
            )
        return min(self.priority + asked, BACKGROUND)

    def _check_adapters(
        self, field: str, wanted: Mapping[str | int, float] | None, known: Sequence[AdapterInfo]
    ) -> None:
        assert self.adapters is not None
        from cppbatch.engine.lora_sets import adapter_set  # imports numpy, and keys are read before a model is chosen

        names = [known[number].name for number, _ in adapter_set(wanted, known, field)]
        if wrong := [name for name in names if name not in self.adapters]:
            raise Forbidden(
                field,
                f"{_join_names(wrong)} is not allowed with this API key; allowed: {_join_names(self.adapters)}. Use "
                f"these in `{field}`, or send {{}} to use the model without",
            )

    def check_sets_adapters(self) -> None:
        """Raises `Forbidden` if the key may not change the adapters for all requests."""
        if self.adapters is not None:
            raise Forbidden(
                "lora-adapters", "this API key may not set the scales for all requests; send `lora` with each request"
            )


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


_USABLE = re.compile(r"[\x21-\x7e]+")  # characters that a header can contain unescaped
_LABEL_LENGTH, _ID_LENGTH = 8, 32


class ApiKey(NamedTuple):
    """A key with its rules. Only the key's digest is stored."""

    digest: bytes
    rules: KeyRules


def api_key(key: str, what: str = "the API key", *, name: str | None = None, **rules: Any) -> ApiKey:
    """A key and its rules (`KeyRules`). Without a name, the log shows the first digits of its SHA-256.

    Raises `ConfigError` for a key that clients cannot send; the message starts with `what` and does not contain the
    key.
    """
    if not _USABLE.fullmatch(key):
        raise ConfigError(f"{what} is empty, or contains characters other than visible ASCII: choose another one")
    digest = _digest(key)
    label = name or digest.hex()[:_LABEL_LENGTH]
    return ApiKey(digest, KeyRules(id=name or digest.hex()[:_ID_LENGTH], name=label, **rules))


class Keys:
    """The valid keys."""

    def __init__(self, keys: Iterable[str | ApiKey] = ()) -> None:
        """A string is a key without rules. Raises `ConfigError` for a key that clients cannot send, and for a key with
        two different sets of rules."""
        self._rules: dict[bytes, KeyRules] = {}
        for i, given in enumerate(keys, 1):
            key = api_key(given, f"API key {i}") if isinstance(given, str) else given
            if self._rules.setdefault(key.digest, key.rules) != key.rules:
                raise ConfigError(
                    f"the API key {key.rules.name} is given twice with different rules (--api-key, --api-key-file): "
                    "remove one of them"
                )

    def __bool__(self) -> bool:
        return bool(self._rules)

    def rules_of(self, given: str) -> KeyRules | None:
        """The rules of a valid key, otherwise None. Looks up digests, so timing reveals nothing about the keys."""
        return self._rules.get(_digest(given))


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
