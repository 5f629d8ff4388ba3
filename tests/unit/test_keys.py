"""Keys of one line each, and allowed origins: what is read, and what is refused. `test_key_file.py` has TOML."""

from __future__ import annotations

from pathlib import Path

import pytest

from cppbatch.errors import ConfigError
from cppbatch.server.auth.key_file import read_keys
from cppbatch.server.auth.rules import Keys, api_key
from cppbatch.server.settings import ServerSettings

SECRETS = ["first-s3cret", "second-s3cret"]


def test_a_file_has_a_key_a_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("\ufeff# those of the team\n\n  first-s3cret \nsecond-s3cret\r\n   # not this\n", encoding="utf-8")
    assert read_keys(str(path)) == [api_key(secret) for secret in SECRETS]


@pytest.mark.parametrize(
    "content", [None, b"", b"# none\n\n", b"\xff\xfe\x00"], ids=["missing", "empty", "none", "bytes"]
)
def test_a_file_without_keys_is_an_error_that_names_it(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"keys\.txt"):
        read_keys(str(path))


@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "line\nbreak"])
def test_a_key_that_no_header_can_hold_is_refused_unrepeated(key: str) -> None:
    with pytest.raises(ConfigError, match="API key 2") as refused:
        Keys(["good", key])
    assert not key or key not in str(refused.value)


def test_a_wrong_line_of_a_file_is_named_and_its_key_is_not(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    path.write_text("# ours\nfirst-s3cret\ntwo w0rds\n")
    with pytest.raises(ConfigError, match=r"keys\.txt, line 3: the API key .* choose another one") as refused:
        read_keys(str(path))
    assert "w0rds" not in str(refused.value)


def test_a_key_that_is_repeated_without_rules_is_one_key() -> None:
    assert Keys([*SECRETS, *SECRETS]).rules_of(SECRETS[0]) == api_key(SECRETS[0]).rules


def test_a_key_with_two_sets_of_rules_is_refused() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        Keys([SECRETS[0], api_key(SECRETS[0], name="alice", priority=5)])


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/", "https://example.org/page", ""])
def test_an_invalid_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="--cors-origin"):
        ServerSettings(cors_origins=(origin,))
