"""A card that is none, where there is no other: what of torch's devices offloading depends on, computed by the CPU.

    python -m tests.card                what it does with models, as JSON; about three minutes

`card.cpp` says what it can tell that a CPU cannot: copies that are not waited for, and memory that nobody else reaches.
A process that has plugged it in has a device called "card" until it ends, so that tests start one of their own.
"""

from __future__ import annotations

import ctypes
import subprocess
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).with_name("card.cpp")
COMPILER = "g++"


def build(folder: Path) -> Path:
    """Compile it; the library. Raises CalledProcessError with the compiler's words."""
    library, home = folder / "card.so", Path(torch.__file__).parent
    command = [COMPILER, "-O1", "-std=c++20", "-fPIC", "-shared", f"-I{home / 'include'}", str(SOURCE)]
    command += ["-o", str(library), f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


class Card:
    """The card of this process.

    Attributes:
        allocated, peak: bytes of its memory in use, now and the most there were.
        pinned: bytes of RAM that it reads by itself.
        async_copies: how many copies the program did not wait for.
    """

    allocated = property(lambda self: int(self._call("allocated")))
    peak = property(lambda self: int(self._call("peak")))
    total = property(lambda self: int(self._call("total")))
    pinned = property(lambda self: int(self._call("pinned")))
    async_copies = property(lambda self: int(self._call("async_copies")))

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        torch.utils.rename_privateuse1_backend("card")
        torch._register_device_module("card", _module(self))

    def _call(self, name: str, *arguments: Any, result: Any = ctypes.c_int64) -> Any:
        function = self._library[f"card_{name}"]
        function.restype = result
        return function(*arguments)

    def rate(self, bytes_a_second: float) -> None:
        """How fast it copies; 0 for as fast as memory is."""
        self._call("rate", ctypes.c_double(bytes_a_second))

    def own_rate(self, bytes_a_second: float) -> None:
        """How fast it copies in its own time; 0 for at once."""
        self._call("own_rate", ctypes.c_double(bytes_a_second))

    def next(self, seconds: float) -> None:
        """How long the next kernel takes in the card's own time; all others take none."""
        self._call("next", ctypes.c_double(seconds))

    @property
    def times(self) -> tuple[float, float, float]:
        """`times_of` the first card."""
        return self.times_of(0)

    def times_of(self, number: int) -> tuple[float, float, float]:
        """Of a card's own time, in seconds: when all that it was given to compute is done, how long it computed, and
        how long it copied."""
        busy = (self._call("busy", number, engine, result=ctypes.c_double) for engine in (0, 1))
        return self._call("end", number, result=ctypes.c_double), *busy

    def limit(self, nbytes: int) -> None:
        """How much memory it has."""
        self._call("limit", ctypes.c_int64(nbytes))

    def pin_limit(self, nbytes: int | None) -> None:
        """How much RAM the system pins for it; None for all."""
        self._call("pin_limit", ctypes.c_int64(-1 if nbytes is None else nbytes))

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        """As CUDA's of that name."""
        return int(self._call("register", ctypes.c_void_p(address), ctypes.c_int64(nbytes), result=ctypes.c_int))

    def cudaHostUnregister(self, address: int) -> int:
        return int(self._call("unregister", ctypes.c_void_p(address), result=ctypes.c_int))

    def reset_peak(self) -> None:
        self._call("reset_peak")

    def races(self) -> list[str]:
        """Accesses to the same bytes with no order between them, since this was asked last."""
        found = [self._call("race", i, result=ctypes.c_char_p).decode() for i in range(self._call("races"))]
        self._call("forget_races")
        return found


def _module(card: Card) -> ModuleType:
    """`torch.card`, with what torch.cuda and torch.xpu have of the same names."""

    @contextmanager
    def stream(of: torch.Stream) -> Iterator[None]:
        index, before = torch.accelerator.current_device_index(), torch.accelerator.current_stream(of.device)
        torch.accelerator.set_stream(of)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(index)

    module = ModuleType("torch.card")
    contents: dict[str, Any] = {
        "Stream": lambda device="card": torch.Stream(device),
        "Event": lambda: torch.Event("card"),
        "stream": stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(device),
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": torch.accelerator.current_device_index,
        "synchronize": torch.accelerator.synchronize,
        "mem_get_info": lambda device=None: (card.total - card.allocated, card.total),
        "empty_cache": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],  # checkpoints ask for it
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
    }
    vars(module).update(contents)
    return module
