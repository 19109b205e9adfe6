"""API keys and tokens: which are taken, whose they are, and where they come from."""

from __future__ import annotations

import time

import jwt
import pytest
from msgspec import structs
from structlog.testing import capture_logs

from tinsmith import keys
from tinsmith.bus.views import View
from tinsmith.config_decode import Given, decode_section
from tinsmith.errors import ConfigError, Unauthorized
from tinsmith.messages.registry import ApiKey
from tinsmith.messages.table import API_KEYS, SECRETS
from tinsmith_gateway.auth import Keyring, read_keys
from tinsmith_gateway.config import GatewayConfig
from tinsmith_gateway.openness import is_local
from tinsmith_gateway.tokens import InvalidToken, Tokens

KEY = keys.new_key()
ENTRY = ApiKey(
    digest=keys.digest(KEY),
    owner=keys.owner_of_name("alice"),
    name="alice",
    last_four=KEY[-4:],
    created_ns=1,
    project_id="p1",
)


@pytest.fixture
def made(fake):
    return View(fake.table(API_KEYS), lambda entry: entry.owner)


@pytest.fixture
def ring(made):
    made.apply(ENTRY.digest, ENTRY)
    return Keyring(["tml-a", "tml-b"], made)


@pytest.fixture
async def tokens(fake):
    made = Tokens(fake, 600)
    await made.start()
    return made


def test_each_key_has_an_owner_of_its_own(ring):
    assert ring.owner("tml-a") == ring.owner("tml-a") != ring.owner("tml-b")


def test_an_owner_does_not_give_the_key_away():
    assert "secret" not in keys.owner_of_key("tml-secret")


@pytest.mark.parametrize("presented", [None, "", "tml-", "tml-A", "tml-a ", "tml-\udcff", "tml-ü"])
def test_anything_else_is_unauthorized(ring, presented):
    with pytest.raises(Unauthorized, match="X-API-Key"):
        ring.owner(presented)


def test_a_made_key_has_at_least_128_random_bits_and_none_comes_twice():
    assert len({keys.new_key() for _ in range(100)}) == 100
    assert len(bytes.fromhex(KEY.removeprefix("tml-"))) * 8 >= 128


def test_a_made_key_is_known_by_its_digest_alone(ring):
    caller = ring.caller(KEY)

    assert (caller.name, caller.project_id) == ("alice", "p1")
    assert KEY.removeprefix("tml-") not in repr(ENTRY)


def test_all_keys_of_a_name_have_one_owner_and_no_configured_key_is_theirs():
    assert keys.owner_of_name("alice") == keys.owner_of_name("alice")
    assert keys.owner_of_name("tml-a") != keys.owner_of_key("tml-a")


def test_a_revoked_key_is_told_so(ring, made):
    caller = ring.caller(KEY)
    made.apply(ENTRY.digest, structs.replace(ENTRY, revoked_ns=2))

    with pytest.raises(Unauthorized, match="revoked"):
        ring.caller(KEY)
    with pytest.raises(Unauthorized, match="revoked"):
        ring.check_not_revoked(caller)


def test_an_expired_key_is_told_so(ring, made):
    caller = ring.caller(KEY)
    made.apply(ENTRY.digest, structs.replace(ENTRY, expires_ns=time.time_ns()))

    with pytest.raises(Unauthorized, match="expired"):
        ring.caller(KEY)
    ring.check_not_revoked(caller)  # what was begun in time may end


def test_a_revoked_entry_wins_over_the_configuration(made):
    made.apply(ENTRY.digest, structs.replace(ENTRY, revoked_ns=2))

    with pytest.raises(Unauthorized, match="revoked"):
        Keyring([KEY], made).caller(KEY)


async def test_a_token_stands_for_its_key_and_ends_with_it(made, tokens):
    made.apply(ENTRY.digest, ENTRY)
    ring = Keyring([], made, tokens)
    token = tokens.issue(ring.caller(KEY))

    assert ring.caller(token) == ring.caller(KEY)._replace(is_by_token=True)

    made.apply(ENTRY.digest, structs.replace(ENTRY, revoked_ns=2))
    with pytest.raises(Unauthorized, match="revoked"):
        ring.caller(token)


async def test_every_gateway_reads_what_another_has_signed(fake, made, tokens):
    other = Tokens(fake, 600)
    await other.start()
    ring = Keyring(["tml-a"], made, other)

    assert ring.owner(tokens.issue(ring.caller("tml-a"))) == ring.owner("tml-a")


@pytest.mark.parametrize(
    ("claims", "algorithm", "secret"),
    [
        ({}, "HS256", b"another secret of 32 bytes......"),
        ({}, "HS512", None),
        ({}, "none", None),
        ({"exp": 1}, "HS256", None),
        ({"exp": None}, "HS256", None),
        ({"aud": "another"}, "HS256", None),
    ],
    ids=["secret", "algorithm", "unsigned", "expired", "no-end", "audience"],
)
@pytest.mark.filterwarnings("ignore::jwt.warnings.InsecureKeyLengthWarning")
async def test_a_token_of_another_make_is_refused(fake, ring, tokens, claims, algorithm, secret):
    now_s = int(time.time())
    good = {"aud": "tinsmith", "sub": "x", "iat": now_s, "exp": now_s + 600, "key": ENTRY.digest}
    made = {name: value for name, value in (good | claims).items() if value is not None}
    known = secret or (await fake.table(SECRETS).get("tokens")).key
    token = jwt.encode(made, None if algorithm == "none" else known, algorithm=algorithm)

    with pytest.raises(InvalidToken, match="/api/v1/auth/token"):
        tokens.key_digest(token)


async def test_tokens_are_not_taken_where_none_are_given_out(ring, tokens):
    with pytest.raises(InvalidToken, match="exchange_keys"):
        ring.caller(tokens.issue(ring.caller(KEY)))


def test_open_mode_takes_requests_from_here_without_a_key(made):
    ring = Keyring([], made, is_open=True)

    assert ring.caller(None, is_local=True) == ring.caller("tml-local")
    with pytest.raises(Unauthorized, match="missing"):
        ring.caller(None, is_local=False)
    with pytest.raises(Unauthorized, match="not a key"):
        ring.caller("tml-other", is_local=True)


def test_without_open_mode_a_key_is_needed_everywhere(ring):
    for presented in (None, "tml-local"):
        with pytest.raises(Unauthorized):
            ring.caller(presented, is_local=True)


@pytest.mark.parametrize(
    ("host", "origin", "is_ours"),
    [
        ("127.0.0.1:8400", None, True),
        ("localhost", None, True),
        ("[::1]:8400", None, True),
        ("localhost:8400", "http://localhost:3000", True),
        ("evil.example:8400", None, False),
        ("127.0.0.1.evil.example", None, False),
        ("127.0.0.1:8400", "https://evil.example", False),
        ("127.0.0.1:8400", "null", False),
        ("", None, False),
    ],
)
def test_only_requests_that_no_page_from_elsewhere_sent_are_local(host, origin, is_ours):
    assert is_local(host, origin) is is_ours


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_open_mode_listens_on_this_machine(host):
    assert GatewayConfig(open_mode=True, host=host).open_mode


@pytest.mark.parametrize(
    "fields",
    [
        {"host": "0.0.0.0"},
        {"host": ""},
        {"host": "::"},
        {"host": "192.0.2.1"},
        {"host": "gateway.example"},
        {"public_url": "https://train.example"},
    ],
    ids=str,
)
def test_open_mode_anywhere_else_is_refused_in_one_line(fields):
    given = {key: Given(value, "tinsmith.toml") for key, value in fields.items()}
    given["open_mode"] = Given(True, "tinsmith.toml")

    with pytest.raises(ConfigError, match=r"open_mode.*127\.0\.0\.1") as caught:
        decode_section(GatewayConfig, given, "gateway")

    assert "\n" not in str(caught.value)


def test_keys_come_from_the_configuration_and_from_the_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# team\ntml-b  # bob\n\ntml-c\n")
    config = GatewayConfig(api_keys=("tml-a",), api_key_file=str(file))

    assert read_keys(config, tmp_path / "absent") == ("tml-a", "tml-b", "tml-c")


def test_the_generated_key_is_used_when_none_is_configured(tmp_path):
    default = tmp_path / "api-key"
    default.write_text("tml-generated\n")

    assert read_keys(GatewayConfig(), default) == ("tml-generated",)


def test_the_generated_key_is_not_used_beside_configured_ones(tmp_path):
    default = tmp_path / "api-key"
    default.write_text("tml-generated\n")

    assert read_keys(GatewayConfig(api_keys=("tml-a",)), default) == ("tml-a",)


def test_a_gateway_without_any_key_says_how_to_make_one(made, tmp_path):
    with capture_logs() as told:
        Keyring(read_keys(GatewayConfig(), tmp_path / "absent"), made).warn_if_empty()

    assert [entry["remedy"] for entry in told] == ["make one with 'tinsmith keys create OWNER'"]


@pytest.mark.parametrize("key", ["secret", "tml-", "tml-\n"])
def test_a_key_that_no_client_can_send_is_named_by_its_number_only(tmp_path, key):
    with pytest.raises(ConfigError, match="key number 2") as caught:
        read_keys(GatewayConfig(api_keys=("tml-a", key)), tmp_path / "absent")

    assert "secret" not in str(caught.value)


def test_a_key_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match="absent"):
        read_keys(GatewayConfig(api_key_file=str(tmp_path / "absent")), tmp_path / "x")
