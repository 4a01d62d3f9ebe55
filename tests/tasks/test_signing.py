"""Signatures: the same from every process, under every part, and never the secret itself."""

from openrl.tasks import keys
from openrl.tasks.signing import Signer


def test_every_process_recognises_what_any_of_them_signed(store):
    signature = Signer(store).sign("GET", "t", "file", "17")
    assert Signer(store).verify(signature, "GET", "t", "file", "17")
    assert len(signature) == 64


def test_each_part_and_its_place_is_signed(store):
    signer = Signer(store)
    signature = signer.sign("GET", "t", "file", "17")
    for other in (
        ("PUT", "t", "file", "17"),
        ("GET", "t2", "file", "17"),
        ("GET", "t", "file2", "17"),
        ("GET", "t", "file", "18"),
        ("GET", "t", "file17", ""),
        ("GETt", "", "file", "17"),
        ("GET", "t", "file"),
        ('GET", "t', "file", "17"),
    ):
        assert not signer.verify(signature, *other), other


def test_a_signature_of_strange_text_is_only_wrong(store):
    for signature in ("", "x", "\u00e9" * 64, "\udcff", "0" * 64):
        assert not Signer(store).verify(signature, "GET")


def test_the_secret_is_drawn_once_and_is_an_installations_own(store):
    first = Signer(store).sign("x")
    secret = store.redis.get(keys.SIGNING)
    assert len(secret) == 64 and secret.decode() not in first
    Signer(store).sign("y")
    assert store.redis.get(keys.SIGNING) == secret
    store.redis.flushall()
    assert not Signer(store).verify(first, "x")
