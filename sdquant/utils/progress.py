"""Progress bars (tqdm). Those of short work are not seen: they come after two seconds and go at their end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

OnProgress = Callable[[int, int, str], None]  # work done, total, and what is being done
Tick = Callable[[int], object]  # called with the bytes done since the last call


def count_bar(label: str, total: int | None, unit: str, progress: bool, **options: Any) -> Any:
    """Return a bar that counts `unit`s; without `progress` it is not shown. options: further ones of tqdm."""
    from tqdm import tqdm

    return tqdm(desc=label, total=total, unit=unit, disable=not progress, **{"delay": 2, "leave": False, **options})


@contextmanager
def byte_bar(
    label: str, total: int, progress: bool, on_bytes: Callable[[int, int], None] | None = None
) -> Iterator[Tick]:
    """Show a bar over bytes; yield the function that advances it.

    Args:
        on_bytes: called with the bytes done and the total after each advance. What it raises is passed on.
    """
    done = 0
    with count_bar(label, total, "B", progress, unit_scale=True) as bar:

        def tick(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            bar.update(nbytes)
            if on_bytes is not None:
                on_bytes(done, total)

        yield tick


@contextmanager
def report_bar(label: str, unit: str, progress: bool) -> Iterator[OnProgress]:
    """Show a bar whose total and text come with the reports; yield the function that takes these."""
    with count_bar(label, None, unit, progress) as bar:

        def report(done: int, total: int, text: str) -> None:
            bar.total = total or None
            bar.set_postfix_str(text, refresh=False)
            bar.update(done - bar.n)
            bar.refresh()

        yield report
