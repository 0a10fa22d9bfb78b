"""The version, in one place; nothing else is here, so that whatever decides may name it."""

VERSION = "0.1.0"
