"""TOML files of API keys: what is read, and how errors are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from cppbatch.errors import ConfigError
from cppbatch.server.auth.key_file import read_keys
from cppbatch.server.auth.rules import KeyRules, Keys

GOOD = """
[tiers.free]
priority = 20
requests_per_minute = 30
max_concurrent = 2
models = ["small"]

[tiers.paid]
priority = -10

[[keys]]
key = "s3cret-of-alice"
name = "alice"
tier = "free"
max_concurrent = 4
group = "team-a"
adapters = []

[[keys]]
key = "s3cret-of-bob"
name = "bob"
tier = "paid"

[[keys]]
key = "s3cret-without-rules"
"""


def write(folder: Path, text: str) -> str:
    path = folder / "keys.toml"
    path.write_text(text)
    return str(path)


def test_a_key_has_the_rules_of_its_tier_and_its_own(tmp_path: Path) -> None:
    keys = Keys(read_keys(write(tmp_path, GOOD)))
    assert keys.rules_of("s3cret-of-alice") == KeyRules(
        id="alice", name="alice", group="team-a", priority=20, requests_per_minute=30, max_concurrent=4,
        models=("small",), adapters=(),
    )  # fmt: skip
    assert keys.rules_of("s3cret-of-bob") == KeyRules(id="bob", name="bob", priority=-10)
    last = keys.rules_of("s3cret-without-rules")
    assert last
    assert (len(last.name), last.priority, last.models) == (8, 0, None)


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ('tier = "free"', 'tier = "fre"', 14, r"keys\[0\]\.tier: tier 'fre' not found; available: free, paid"),
        ("priority = 20", "priority = 200", 3, r"tiers\.free\.priority: expected `int` <= 100"),
        ("priority = -10", 'priority = "high"', 9, r"tiers\.paid\.priority: expected `int`, got `str`"),
        ("max_concurrent = 4", "max_concurrent = 0", 15, r"keys\[0\]\.max_concurrent: expected `int` >= 1"),
        (
            "max_concurrent = 4",
            "max_requests = 4",
            15,
            r"unknown setting `max_requests`; it must be one of .*requests_per_minute",
        ),
        ('group = "team-a"', 'group = "team a"', 16, r"keys\[0\]\.group: must consist of 1 to 64 letters"),
        ('key = "s3cret-of-bob"', 'key = "s3cret-of-alice"', 20, r"keys\[1\]\.key: .* the same key; change it"),
        ('name = "bob"', 'name = "alice"', 21, r"keys\[1\]\.name: .* the same name; change it"),
        ('key = "s3cret-of-bob"', 'key = "s3cret of bob"', 20, r"keys\[1\]\.key: the API key .*choose another"),
        ('key = "s3cret-of-bob"\n', "", 19, r"keys\[1\].*missing required field `key`"),
        ("[tiers.free]", "colour = 3\n[tiers.free]", 2, "unknown setting `colour`"),
        ("priority = 20", "priority = ", 3, "not valid TOML.*line 3"),
    ],
)
def test_an_error_is_reported_with_its_line_and_without_keys(
    tmp_path: Path, old: str, new: str, line: int, says: str
) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError, match=says) as refused:
        read_keys(write(tmp_path, GOOD.replace(old, new)))
    assert f"line {line}" in str(refused.value)
    assert "keys.toml" in str(refused.value)
    assert "s3cret" not in str(refused.value)


def test_lists_nested_deep_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys\.toml is not valid TOML: .* nested too deep"):
        read_keys(write(tmp_path, f"keys = {'[' * 3000}{']' * 3000}"))


@pytest.mark.parametrize("text", ["", "[tiers.a]\npriority = 1\n", "keys = 3", "tiers = []"])
def test_a_file_without_keys_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        read_keys(write(tmp_path, text))


def test_toml_under_another_name_is_not_read_as_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(GOOD[GOOD.index("[[keys]]") :])
    with pytest.raises(ConfigError, match=r"line 1: this is TOML; rename"):
        read_keys(str(path))
