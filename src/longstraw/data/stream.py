"""The order in which prompts are drawn: a function of the seed, so that it can be resumed."""

from __future__ import annotations

import hashlib
import random

from longstraw.data.prompts import Prompt, PromptSet


class PromptStream:
    """An endless, resumable walk over a PromptSet: the n-th draw is a function of (seed, n) alone."""

    def __init__(self, prompts: PromptSet, seed: int, shuffle: bool) -> None:
        self._prompts = prompts.prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order: list[int] = []

    def at(self, position: int) -> Prompt:
        """The prompt at a position of the walk; every `len(prompts)` positions are one epoch."""
        epoch, place = divmod(position, len(self._prompts))
        if epoch != self._epoch:
            self._order = list(range(len(self._prompts)))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._prompts[self._order[place]]


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on the parts alone, the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
