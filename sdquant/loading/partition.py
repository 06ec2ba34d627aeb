"""Partition a component's weights among processes by bytes. Pure: no torch, no files."""

from __future__ import annotations

from collections.abc import Mapping


def shares(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Split the names, in order, into `count` lists of about equal bytes, so that each process reads one run of a file.

    A weight belongs to the process in whose byte range its middle lies. With few weights, some lists are empty.
    """
    groups: list[list[str]] = [[] for _ in range(count)]
    total, before = sum(sizes.values()), 0
    for name, size in sizes.items():
        middle = 2 * before + size  # in half bytes, so that all is whole numbers
        groups[min(count - 1, middle * count // (2 * total)) if total else 0].append(name)
        before += size
    return groups
