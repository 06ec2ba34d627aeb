"""Who of several processes does what: a component's weights, shared out by bytes. Pure: no torch, no files."""

from __future__ import annotations

from collections.abc import Mapping


def shares(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Names for each of `count` processes, about the same bytes each, in their order: each reads one run of the files.

    A weight is for the one in whose run its middle lies. Some get nothing where there are few weights.
    """
    made: list[list[str]] = [[] for _ in range(count)]
    total, before = sum(sizes.values()), 0
    for name, size in sizes.items():
        middle = 2 * before + size  # in half bytes, so that all is whole numbers
        made[min(count - 1, middle * count // (2 * total)) if total else 0].append(name)
        before += size
    return made
