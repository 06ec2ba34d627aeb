"""Compiled kernels with their arguments in order: a launch passes addresses alone."""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from triton.runtime import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from .launch_config import Launch

MOST_KEPT = 64  # launches of a layer: for as many numbers of rows
_STREAM = 3  # its place among what a launcher is given


class BoundLaunch:
    """A compiled kernel and its grid; all arguments but some addresses have their values already.

    Triton's launch hooks are left out: to describe a launch to none of them takes as long as ten launches.
    """

    __slots__ = ("arguments", "kernel", "places", "run")

    def __init__(self, launch: Launch, compiled: Any, at: Mapping[str, int]) -> None:
        """Bind what `launch` has compiled, except for some pointers: `at` says which of a call's addresses each is."""
        names = launch.kernel.arg_names
        values = {**launch.arguments, **dict.fromkeys(at, 0)}
        own = [value.data_ptr() if isinstance(value, Tensor) else value for value in map(values.get, names)]
        # The grid; the stream; function, its metadata, metadata of the launch and two hooks; then the kernel's own.
        before = [*(*launch.grid, 1, 1)[:3], 0, compiled.function, compiled.packed_metadata, None, None, None]
        self.arguments = before + own
        self.places = [(len(before) + names.index(name), index) for name, index in at.items()]
        self.kernel, self.run = compiled, compiled.run  # the kernel unloads its code when nobody holds it

    def __call__(self, device: int, addresses: list[int]) -> bool:
        """Launch on the current stream of `device`, which is the current one. Return whether this version of Triton
        passes arguments this way."""
        return self.on(driver.active.get_current_stream(device), addresses)

    def on(self, stream: Any, addresses: list[int]) -> bool:
        """Do the same on a stream of that device."""
        values = self.arguments.copy()  # another thread may be here at the same time
        for place, index in self.places:
            values[place] = addresses[index]
        values[_STREAM] = stream
        try:
            self.run(*values)
        except TypeError:
            return False
        return True


class BoundLaunches:
    """Launches of a layer by what tells them apart, such as the number of rows, on the device of its weight."""

    __slots__ = ("device", "launches", "where")

    def __init__(self, where: torch.device, index: int) -> None:
        self.where, self.device = where, index
        self.launches: dict[object, BoundLaunch | None] = {}

    def again(self, key: object, addresses: list[int]) -> bool:
        """Launch what `first` bound; return whether there is such, and this version of Triton can be bound."""
        bound = self.launches.get(key)
        return bound is not None and bound(self.device, addresses)

    def first(self, key: object, make: Callable[[], Launch], at: Mapping[str, int]) -> bool:
        """Have Triton itself launch what `make` makes, and compile it, and bind that for `again`, which could not.

        Args:
            at: which of the addresses each pointer of the kernel is; those of others stay as they are.
        """
        launches = self.launches
        if key in launches:
            launches[key] = None
            return False
        launch = make()
        compiled = launch(self.where)
        if len(launches) >= MOST_KEPT:
            launches = self.launches = {}  # another thread may be about to read the one before
        launches[key] = BoundLaunch(launch, compiled, at)
        return True


class LaunchSequence:
    """The launches of a call with activations of one shape, one after another.

    Attributes:
        m: rows of the activations. out: the shape of the results. size: bytes of memory for what is between launches;
            `pieces`: where its parts begin.
    """

    __slots__ = ("launches", "m", "out", "pieces", "size")

    def __init__(self, m: int, out: tuple[int, ...], size: int = 0, pieces: tuple[int, ...] = ()) -> None:
        self.launches: list[BoundLaunch] | None = None
        self.m, self.out, self.size, self.pieces = m, out, size, pieces

    def first(self, launches: Iterable[tuple[Launch, Mapping[str, int]]], where: torch.device) -> None:
        """Launch by Triton itself, which compiles, and keep what it compiled; `at` of each is as in `BoundLaunch`."""
        self.launches = [BoundLaunch(launch, launch(where), at) for launch, at in launches]

    def again(self, device: int, addresses: list[int]) -> bool:
        """Do as `BoundLaunch`, with all of them."""
        stream = driver.active.get_current_stream(device)
        for launch in self.launches or ():
            if not launch.on(stream, addresses):
                self.launches = []
        return bool(self.launches)
