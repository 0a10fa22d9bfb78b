"""The join token: everything a worker needs besides an address, in short text that can be printed and typed.

It holds a secret, which shows the coordinator that the worker was invited, and the fingerprint of the
coordinator's certificate, which shows the worker that nobody stands in between.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

from spantrain.errors import UsageError

_PREFIX = "st1"
_SECRET_BYTES = 16
_FINGERPRINT_BYTES = 20
_CHECK_BYTES = 4
_PROOF_CONTEXT = b"spantrain join 1\x00"


def fingerprint_of(certificate_der: bytes) -> bytes:
    """Return 20 bytes that stand for a certificate (SHA-256, cut short; 160 bits to find a second one)."""
    return hashlib.sha256(certificate_der).digest()[:_FINGERPRINT_BYTES]


@dataclass(frozen=True, kw_only=True)
class JoinToken:
    """A secret and a fingerprint; the last bytes of the text are a check against typing errors."""

    secret: bytes = field(repr=False)
    fingerprint: bytes

    @classmethod
    def create(cls, certificate_der: bytes) -> "JoinToken":
        """Return a token with a new secret for the coordinator that has this certificate."""
        return cls(secret=secrets.token_bytes(_SECRET_BYTES), fingerprint=fingerprint_of(certificate_der))

    @property
    def text(self) -> str:
        """The token as people carry it: 67 letters and digits."""
        body = self.secret + self.fingerprint
        return _PREFIX + base64.b32encode(body + _check(body)).decode("ascii").lower()

    @classmethod
    def parse(cls, text: str) -> "JoinToken":
        """Read the text form.

        Raises:
            UsageError: it is cut, mistyped, or not a token. The message does not repeat it.
        """
        clean = text.strip().lower()
        try:
            data = base64.b32decode(clean.removeprefix(_PREFIX).upper().encode("ascii"))
        except (binascii.Error, UnicodeEncodeError):
            data = b""
        body, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
        if not clean.startswith(_PREFIX) or len(body) != _SECRET_BYTES + _FINGERPRINT_BYTES or check != _check(body):
            raise UsageError(
                f"the join token is cut or mistyped (got {len(clean)} characters, wanted "
                f"{len(_PREFIX) + 64} that begin with {_PREFIX!r}): copy it again from the coordinator's output"
            )
        return cls(secret=body[:_SECRET_BYTES], fingerprint=body[_SECRET_BYTES:])

    def proof(self, request_der: bytes) -> bytes:
        """Return what shows that whoever made this certificate request holds the secret.

        It covers the request, and with it the key and the name, so that it is of no use with another one.
        """
        return hmac.digest(self.secret, _PROOF_CONTEXT + hashlib.sha256(request_der).digest(), "sha256")

    def accepts(self, request_der: bytes, proof: bytes) -> bool:
        """Whether a proof is right, in a time that does not depend on how wrong it is."""
        return hmac.compare_digest(self.proof(request_der), proof)

    def matches(self, certificate_der: bytes) -> bool:
        """Whether a certificate is the coordinator's that made this token."""
        return hmac.compare_digest(self.fingerprint, fingerprint_of(certificate_der))


def _check(body: bytes) -> bytes:
    return hashlib.sha256(b"spantrain token check" + body).digest()[:_CHECK_BYTES]
