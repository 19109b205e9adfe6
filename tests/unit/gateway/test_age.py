"""Encryption to recipients: what is taken, what is refused, and who can read it."""

from __future__ import annotations

import base64
import random

import pyrage
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tinsmith import age
from tinsmith.errors import InvalidRequest

DATA = bytes(range(256)) * 1000


def test_each_recipient_reads_it_and_nobody_else():
    native, other = pyrage.x25519.Identity.generate(), pyrage.x25519.Identity.generate()
    key = rsa.generate_private_key(65537, 2048)
    public, private = serialization.PublicFormat.OpenSSH, serialization.PrivateFormat.OpenSSH
    openssh = serialization.Encoding.OpenSSH
    ssh = key.public_key().public_bytes(openssh, public).decode()
    pem = key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption())

    recipients = age.check_recipients([str(native.to_public()), f"{ssh} me@home"], "field")
    sealed = age.encrypt(DATA, recipients)

    for identity in (native, pyrage.ssh.Identity.from_buffer(pem)):
        assert pyrage.decrypt(sealed, [identity]) == DATA
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(sealed, [other])
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(sealed[:-1], [native])


def blob(*fields):
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


def ssh(kind, *fields):
    return f"{kind} {base64.b64encode(blob(kind.encode(), *fields)).decode()}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "invalid Bech32"),
        ("age1", "invalid Bech32"),
        ("AGE-SECRET-KEY-1", "invalid Bech32"),
        ("age1yubikey1qqq", "invalid Bech32"),
        ("ssh-dss AAAA", "invalid"),
        (ssh("ssh-ed25519", b"short"), "invalid SSH recipient"),
        (ssh("ssh-rsa", b"\x03", b"\x00" + b"\xff" * 128), "RsaModulusTooSmall"),
        (ssh("ssh-rsa", b"", b""), "Unsupported"),
        ("age1" + "q" * 9000, "9004 characters are over 8192"),
        ("\ud800", "encode"),
    ],
)
def test_what_is_no_recipient_is_refused_with_its_index(text, reason, capfd):
    good = str(pyrage.x25519.Identity.generate().to_public())
    with pytest.raises(InvalidRequest) as caught:
        age.check_recipients([good, text], "recipients")
    assert str(caught.value).startswith("recipients[1]: ")
    assert reason in str(caught.value)


def test_a_key_of_no_use_is_refused_before_something_is_encrypted_to_it(capfd):
    """A point of small order: whoever sees the file could read it."""
    with pytest.raises(InvalidRequest, match="malformed"):
        age.check_recipients([bech32("age", bytes(32))], "recipients")


def test_no_damaged_key_ends_in_anything_but_a_refusal(capfd):
    rng, refused = random.Random(3), 0
    raw = blob(b"ssh-rsa", b"\x01\x00\x01", b"\x00\xc0" + rng.randbytes(254))
    for _ in range(2000):
        damaged = bytearray(raw)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(24)] = rng.choice([0, 1, 255, rng.randrange(256)])
        try:
            age.check_recipients([f"ssh-rsa {base64.b64encode(damaged).decode()}"], "f")
        except InvalidRequest:
            refused += 1

    assert refused > 100


def bech32(prefix, data):
    """BIP 173."""
    letters = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
    number, bits = int.from_bytes(data, "big"), len(data) * 8
    pad = -bits % 5
    number, groups = number << pad, (bits + pad) // 5
    values = [(number >> 5 * i) & 31 for i in reversed(range(groups))]
    spread = [ord(c) >> 5 for c in prefix] + [0] + [ord(c) & 31 for c in prefix]
    check = 1
    for value in [*spread, *values, *[0] * 6]:
        top, check = check >> 25, (check & 0x1FFFFFF) << 5 ^ value
        for i, one in enumerate((0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)):
            check ^= one if top >> i & 1 else 0
    check ^= 1
    values += [(check >> 5 * (5 - i)) & 31 for i in range(6)]
    return f"{prefix}1" + "".join(letters[value] for value in values)
