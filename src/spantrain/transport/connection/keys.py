"""CURVE key pairs."""

from dataclasses import dataclass, field

import zmq


@dataclass(frozen=True, kw_only=True)
class KeyPair:
    """A public key, which peers must know, and its secret; both in Z85 text of 40 characters."""

    public_key: str
    secret_key: str = field(repr=False)

    @classmethod
    def generate(cls) -> "KeyPair":
        """Make a new pair."""
        public, secret = zmq.curve_keypair()
        return cls(public_key=public.decode(), secret_key=secret.decode())
