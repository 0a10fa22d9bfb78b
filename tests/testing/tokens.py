"""Tokens that are refused."""

from spantrain.transport.control.credentials import JoinToken


def token_with_wrong_secret(token: str) -> str:
    """Of the coordinator or master of a token, which lets nobody in by it."""
    return JoinToken(secret=bytes(16), fingerprint=JoinToken.parse(token.strip()).fingerprint).text
