"""Rules of API keys: their effect on engine requests, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cppbatch.cluster.link import Check, decode_for_worker, encode
from cppbatch.engine.model_info import AdapterInfo
from cppbatch.engine.request import BACKGROUND, GenerationRequest
from cppbatch.errors import Forbidden, InvalidRequest
from cppbatch.server.auth.rules import KeyRules

ADAPTERS = [AdapterInfo(name="style", path="style.gguf", scale=1.0), AdapterInfo(name="sql", path="s.gguf", scale=0.0)]


def rules(**fields: Any) -> KeyRules:
    return KeyRules(**{"id": "alice", "name": "alice", **fields})


def allowed(key: KeyRules, **fields: Any) -> GenerationRequest:
    (request,) = key.engine_requests([GenerationRequest(id="r", prompt="a", **fields)], ADAPTERS)
    return request


@pytest.mark.parametrize(
    ("of_key", "asked", "becomes"),
    [(None, 0, 0), (None, -50, -50), (-10, 0, -10), (-10, 5, -5), (20, 0, 20), (20, 90, 100), (-10, BACKGROUND, 100)],
)
def test_priorities_count_from_the_keys_own(of_key: int | None, asked: int, becomes: int) -> None:
    assert allowed(rules(priority=of_key), priority=asked).priority == becomes


def test_a_better_priority_than_the_keys_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="priority: is -1; it is added to the priority of the API key"):
        allowed(rules(priority=-10), priority=-1)


def salts_of(key: KeyRules) -> set[str]:
    return {allowed(key, cache_salt=salt).cache_salt for salt in ("", "s", "key:bob", "group:team", "group:team\ns")}


def test_only_keys_of_a_group_share_salts() -> None:
    alice, bob, named_as_group = rules(), rules(id="bob"), rules(id="team")
    team = [rules(id="carol", group="team"), rules(id="dave", group="team")]
    assert salts_of(team[0]) == salts_of(team[1])
    different = [salts_of(key) for key in (alice, bob, named_as_group, team[0])]
    assert len(set.union(*different)) == sum(map(len, different))


def test_the_longest_salt_of_the_longest_name_reaches_a_worker() -> None:
    request = allowed(rules(id="k" * 1000), cache_salt="s" * 1024)
    received = decode_for_worker(encode(Check(request)))
    assert isinstance(received, Check)
    assert received.request.cache_salt == request.cache_salt


@pytest.mark.parametrize(
    ("of_key", "lora", "is_allowed"),
    [
        (None, {"sql": 1}, True),
        (("style",), None, True),  # the server's own are {"style": 1}
        (("sql",), None, False),
        (("sql",), {}, True),
        (("sql",), {"sql": 0.5}, True),
        (("sql",), {1: 0.5}, True),
        (("sql",), {0: 0.5}, False),
        (("sql",), {"style": 0, "sql": 1}, True),
        ((), {"sql": 1}, False),
        ((), {}, True),
    ],
)
def test_adapters_that_are_not_for_the_key_are_refused(
    of_key: tuple[str, ...] | None, lora: dict[str | int, float] | None, is_allowed: bool
) -> None:
    if is_allowed:
        assert allowed(rules(adapters=of_key), lora=lora).lora == lora
    else:
        with pytest.raises(Forbidden, match="is not allowed with this API key") as refused:
            allowed(rules(adapters=of_key), lora=lora)
        assert refused.value.field == "lora"


def test_a_key_may_only_set_its_own_control_vectors_and_gets_those_of_the_server() -> None:
    vectors = [AdapterInfo(name="calm", path="calm.gguf", scale=1.0), AdapterInfo(name="loud", path="l", scale=0.0)]
    key = rules(adapters=("loud",))
    allowed_scales: list[dict[str | int, float] | None] = [None, {}, {"loud": 1.0}, {1: 0.5}, {"calm": 0}]
    for scales in allowed_scales:
        request = GenerationRequest(id="r", prompt="a", lora={}, control_vectors=scales)
        assert key.engine_requests([request], ADAPTERS, vectors)[0].control_vectors == scales
    with pytest.raises(Forbidden, match="'calm' is not allowed with this API key; allowed: 'loud'") as refused:
        key.engine_requests([GenerationRequest(id="r", prompt="a", lora={}, control_vectors={0: 1})], ADAPTERS, vectors)
    assert refused.value.field == "control_vectors"


def test_a_model_is_for_the_key_under_any_of_its_names() -> None:
    names = ("small-Q4_0", "small", "fast")
    rules().check_model(names, "anything")
    for asked in (None, *names):
        rules(models=("small", "other")).check_model(names, asked)
    for of_key, asked in ((("other",), None), (("other",), "small"), (("small",), "other"), ((), None)):
        with pytest.raises(Forbidden, match="is not allowed with this API key"):
            rules(models=of_key).check_model(names, asked)


def test_rules_survive_in_the_record_of_a_batch() -> None:
    key = rules(group="team", priority=3, requests_per_minute=5, models=("a",), adapters=())
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(key))), KeyRules) == key
