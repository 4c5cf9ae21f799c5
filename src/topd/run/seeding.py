"""Random numbers: one root seed, and a named stream for every use. No code reads or sets a global random state."""

import hashlib

import numpy as np


def stream(*name: int | str) -> np.random.Generator:
    """Generator that depends only on its name, for example (root seed, "sampling", step, prompt id), on every machine."""
    digest = hashlib.sha256(repr(name).encode()).digest()
    return np.random.default_rng(np.frombuffer(digest, dtype=np.uint32))
