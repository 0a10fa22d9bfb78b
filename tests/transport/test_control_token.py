"""The join token: text, proof, and what is told about it."""

import pytest

from spantrain.errors import UsageError
from spantrain.transport.control.credentials import JoinToken, ServerIdentity, WorkerIdentity

CERTIFICATE = b"some certificate"


def test_the_text_comes_back_whatever_its_case_and_the_spaces_around() -> None:
    token = JoinToken.create(CERTIFICATE)
    assert JoinToken.parse(token.text) == token
    assert JoinToken.parse(f" {token.text.upper()}\n") == token
    assert len(token.text) == 67
    assert token.text.isalnum()
    assert JoinToken.create(CERTIFICATE) != token


def test_a_mistyped_token_is_noticed_and_not_repeated() -> None:
    text = JoinToken.create(CERTIFICATE).text
    changed = ["a" if letter != "a" else "b" for letter in text]
    mistyped = [text[:index] + changed[index] + text[index + 1 :] for index in range(len(text))]
    for wrong in (*mistyped, text[:40], text + "a", text[3:], "", "st1", "é" * 67):
        with pytest.raises(UsageError, match="cut or mistyped") as caught:
            JoinToken.parse(wrong)
        assert not wrong or wrong == "st1" or wrong not in str(caught.value)


def test_a_proof_is_for_one_request_and_one_secret() -> None:
    token, other = JoinToken.create(CERTIFICATE), JoinToken.create(CERTIFICATE)
    seen, mine = WorkerIdentity.create("edge-1"), WorkerIdentity.create("edge-1")
    proof = token.proof(seen.request_der)
    assert token.accepts(seen.request_der, proof)
    assert not token.accepts(mine.request_der, proof)
    assert not other.accepts(seen.request_der, proof)
    assert not token.accepts(seen.request_der, b"")


def test_a_fingerprint_is_of_one_certificate() -> None:
    token = JoinToken.create(CERTIFICATE)
    assert token.matches(CERTIFICATE)
    assert not token.matches(CERTIFICATE + b"\0")


def test_the_coordinator_s_key_and_secret_are_not_in_reprs() -> None:
    identity = ServerIdentity.create()
    token = JoinToken.create(identity.certificate_der)
    assert "PRIVATE" not in repr(identity)
    assert repr(token.secret) not in repr(token)
