"""Pseudo-random integers that are the same on every machine and in every library version."""

import hashlib

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit integers one to one under a seed (the finalizer of splitmix64).

    Stages read their inputs and labels on their own (DESIGN 6), so they must agree on every draw; only integer
    arithmetic is used here because random streams of libraries may change between versions.
    """
    with np.errstate(over="ignore"):
        mixed = (values + np.uint64(seed % 2**64)) * _GOLDEN + _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(mixed ^ (mixed >> np.uint64(31)), dtype=np.uint64)


def derive_seed(seed: int, *parts: str | int) -> int:
    """Return a 63-bit seed for one purpose, e.g. `derive_seed(0, "unit", 3)`."""
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
