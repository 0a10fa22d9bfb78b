"""What makes a coordinator the same one for those that know it: its certificate, its authority, its token.

Certificates of one run: the coordinator's own, an authority for workers, a worker's key and request.

All are ECDSA on P-256. They carry no useful dates: a board without a battery believes that it is 1970, and a date could
only keep honest workers out. They live in memory and end with the process that made them, but for a coordinator that is
asked to keep its own (`credentials`).

The join token: everything a worker needs besides an address, in short text that can be printed and typed.

It holds a secret, which shows the coordinator that the worker was invited, and the fingerprint of the
coordinator's certificate, which shows the worker that nobody stands in between.
"""

import base64
import binascii
import datetime
import hashlib
import hmac
import json
import secrets
from dataclasses import field
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from spantrain.config.files.parsing import parse_json
from spantrain.config.files.text_files import make_private_folder, read_private, write_atomically
from spantrain.core.records import Record
from spantrain.errors import ProtocolError, UsageError
from spantrain.transport.control.protocol import COORDINATOR_NAME

_PREFIX = "st1"
_SECRET_BYTES = 16
_FINGERPRINT_BYTES = 20
_CHECK_BYTES = 4
_PROOF_CONTEXT = b"spantrain join 1\x00"


def fingerprint_of(certificate_der: bytes) -> bytes:
    """Return 20 bytes that stand for a certificate (SHA-256, cut short; 160 bits to find a second one)."""
    return hashlib.sha256(certificate_der).digest()[:_FINGERPRINT_BYTES]


class JoinToken(Record):
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
                f"{len(_PREFIX) + 64} that begin with {_PREFIX!r}): copy it again, whole, from where it was printed"
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


_UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion)
"""What the library raises at bytes that are none of its kind."""
_NOT_BEFORE = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)  # RFC 5280 4.1.2.5: no end


class _Certified:
    """A key, and a certificate of it that it has signed itself."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        """Use `create` or `of_pem` instead."""
        self._key = key
        self._certificate = certificate

    @classmethod
    def of_pem(cls, key_pem: bytes, certificate_pem: bytes) -> Self:
        """Return one that was kept.

        Raises:
            ValueError: they are not a key and its certificate.
        """
        try:
            key = serialization.load_pem_private_key(key_pem, password=None)
            certificate = x509.load_pem_x509_certificate(certificate_pem)
            public = certificate.public_key()
        except UnsupportedAlgorithm as error:
            raise ValueError(f"a key or a certificate of an algorithm that is not known here: {error}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != public:
            raise ValueError("a key and a certificate that do not belong together")
        return cls(key, certificate)

    @property
    def key_pem(self) -> bytes:
        """Its secret key, for whoever keeps it."""
        return _key_pem(self._key)

    @property
    def certificate_pem(self) -> bytes:
        """The certificate as gRPC takes it."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)


class ServerIdentity(_Certified):
    """The coordinator's key and its certificate, signed by itself: workers pin it, so nobody need vouch for it."""

    @classmethod
    def create(cls) -> "ServerIdentity":
        """Return a new identity."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(COORDINATOR_NAME)
        certificate = (
            _builder(name, name, key.public_key())
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(COORDINATOR_NAME)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate)

    @property
    def certificate_der(self) -> bytes:
        """The certificate, of which tokens hold the fingerprint."""
        return self._certificate.public_bytes(serialization.Encoding.DER)


class Authority(_Certified):
    """Signs the workers' certificates; the only root that the control port trusts."""

    @classmethod
    def create(cls) -> "Authority":
        """Return a new one."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("spantrain-workers")
        certificate = (
            _builder(name, name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate)

    def sign(self, request: x509.CertificateSigningRequest, name: str) -> bytes:
        """Return a worker's certificate (DER) with its device's name; nothing but the key is taken from the request."""
        public_key = request.public_key()
        assert isinstance(public_key, ec.EllipticCurvePublicKey)
        certificate = (
            _builder(_name(name), self._certificate.subject, public_key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.DER)

    @staticmethod
    def read_request(request_der: bytes) -> tuple[x509.CertificateSigningRequest, str]:
        """Return a request and the name it asks for.

        Raises:
            ProtocolError: not a request, not signed by its own key, another kind of key, or no single name.
        """
        try:
            request = x509.load_der_x509_csr(request_der)
            valid = request.is_signature_valid
            public_key = request.public_key()
            names = request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        except _UNREADABLE as error:
            raise ProtocolError(f"not a certificate request: {error}") from None
        if not valid or not isinstance(public_key, ec.EllipticCurvePublicKey) or public_key.curve.name != "secp256r1":
            raise ProtocolError("a certificate request must be signed by its own key, ECDSA on P-256")
        if len(names) != 1 or not isinstance(names[0].value, str):
            raise ProtocolError(f"a certificate request must hold one name, got {len(names)}")
        return request, names[0].value


class WorkerIdentity(Record):
    """A worker's key, which never leaves it, and its request for a certificate."""

    key_pem: bytes = field(repr=False)
    request_der: bytes

    @classmethod
    def create(cls, name: str) -> "WorkerIdentity":
        """Return a new key and a request in this device's name."""
        key = ec.generate_private_key(ec.SECP256R1())
        request = x509.CertificateSigningRequestBuilder().subject_name(_name(name)).sign(key, hashes.SHA256())
        return cls(key_pem=_key_pem(key), request_der=request.public_bytes(serialization.Encoding.DER))


def pem_of_der(certificate_der: bytes) -> bytes:
    """Return a certificate's text form.

    Raises:
        ProtocolError: it is not a certificate.
    """
    try:
        return x509.load_der_x509_certificate(certificate_der).public_bytes(serialization.Encoding.PEM)
    except _UNREADABLE as error:
        raise ProtocolError(f"not a certificate: {error}") from None


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


_FIELDS = ("identity_key", "identity_certificate", "authority_key", "authority_certificate", "token")


class Credentials(Record):
    """What one coordinator is known by."""

    identity: ServerIdentity
    authority: Authority
    token: JoinToken

    @classmethod
    def create(cls) -> "Credentials":
        """Return new ones."""
        identity = ServerIdentity.create()
        return cls(identity=identity, authority=Authority.create(), token=JoinToken.create(identity.certificate_der))

    @classmethod
    def kept_in(cls, path: Path) -> "Credentials":
        """Return those in a file, after making it, for its owner alone, if it is not there.

        Whoever joined by them joins again by them after the coordinator was started again.

        Raises:
            UsageError: the file is damaged, open to others, or cannot be written.
        """
        text = read_private(path)
        if text is None:
            made = cls.create()
            made.keep(path)
            return made
        try:
            return cls._of_text(text)
        except (ValueError, UsageError) as error:
            raise UsageError(
                f"{path}: holds no credentials of a coordinator ({error}); take it from a copy, or remove it: then all "
                "must join anew with a new token"
            ) from None

    def keep(self, path: Path) -> None:
        """Write them to a file for its owner alone, in a folder that is made if it is not there.

        Raises:
            UsageError: it cannot be written.
        """
        make_private_folder(path.parent)
        pems = (
            self.identity.key_pem,
            self.identity.certificate_pem,
            self.authority.key_pem,
            self.authority.certificate_pem,
        )
        values = (*(pem.decode() for pem in pems), self.token.text)
        text = json.dumps(dict(zip(_FIELDS, values, strict=True)), indent=2) + "\n"
        write_atomically(path, text, private=True)

    @classmethod
    def _of_text(cls, text: str) -> "Credentials":
        """Read what `keep` wrote.

        Raises:
            ValueError, UsageError: it is something else.
        """
        table = parse_json(text, "the file", error=UsageError)
        if not isinstance(table, dict) or not all(isinstance(table.get(name), str) for name in _FIELDS):
            raise ValueError(f"it needs {', '.join(_FIELDS)}")
        identity_key, identity, authority_key, authority = (table[name].encode() for name in _FIELDS[:4])
        token = JoinToken.parse(table["token"])
        kept = cls(
            identity=ServerIdentity.of_pem(identity_key, identity),
            authority=Authority.of_pem(authority_key, authority),
            token=token,
        )
        if not token.matches(kept.identity.certificate_der):
            raise ValueError("its token is of another certificate")
        return kept
