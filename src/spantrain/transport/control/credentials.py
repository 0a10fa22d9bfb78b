"""What makes a coordinator the same one for those that know it: its certificate, its authority, its token."""

import json
from dataclasses import dataclass
from pathlib import Path

from spantrain.config.files.parsing import parse_json
from spantrain.errors import UsageError
from spantrain.transport.control.certificates import Authority, ServerIdentity
from spantrain.transport.control.private_file import read_private, write_private
from spantrain.transport.control.token import JoinToken

_FIELDS = ("identity_key", "identity_certificate", "authority_key", "authority_certificate", "token")


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Of one coordinator."""

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
            write_private(path, made._text())
            return made
        try:
            return cls._of_text(text)
        except (ValueError, UsageError) as error:
            raise UsageError(
                f"{path}: holds no credentials of a coordinator ({error}); take it from a copy, or remove it: then all "
                "must join anew with a new token"
            ) from None

    def _text(self) -> str:
        values = (
            self.identity.key_pem.decode(),
            self.identity.certificate_pem.decode(),
            self.authority.key_pem.decode(),
            self.authority.certificate_pem.decode(),
            self.token.text,
        )
        return json.dumps(dict(zip(_FIELDS, values, strict=True)), indent=2) + "\n"

    @classmethod
    def _of_text(cls, text: str) -> "Credentials":
        """Read what `_text` made.

        Raises:
            ValueError: it is something else.
        """
        table = parse_json(text, "the file", error=UsageError)
        if not isinstance(table, dict) or not all(isinstance(table.get(name), str) for name in _FIELDS):
            raise ValueError(f"it needs {', '.join(_FIELDS)}")
        identity_key, identity, authority_key, authority = (table[name].encode() for name in _FIELDS[:4])
        try:
            token = JoinToken.parse(table["token"])
        except UsageError as error:
            raise ValueError(str(error)) from None
        kept = cls(
            identity=ServerIdentity.of_pem(identity_key, identity),
            authority=Authority.of_pem(authority_key, authority),
            token=token,
        )
        if not token.matches(kept.identity.certificate_der):
            raise ValueError("its token is of another certificate")
        return kept
