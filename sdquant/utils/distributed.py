"""Several processes that share the work: the only module that uses torch.distributed.

    torchrun --nproc-per-node 4 -m sdquant quantize MODEL OUT -q nf4

torchrun starts the processes and tells each its rank in the environment. gloo transfers tensors on the CPU, nccl those
on GPUs. Without torchrun there is one process, and nothing is started or imported.

accelerate is not used: its PartialState is one for the whole process and stays as whoever asked first made it, so that
without a GPU it can say that there is one process, and gather from that one alone; and before 1.14 its `reduce` adds up
where a maximum is asked for.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import DistributedError, SettingsError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

TIMEOUT = "SDQUANT_PROCESS_TIMEOUT"  # seconds that a process waits for the others; one that ended is noticed at once
_TIMEOUT = 1800.0
_LOOK = "Look at the first message of another process: it says why that one ended"

_AT = re.compile(r"^\[[^]]*\] ?")  # gloo's errors begin with the place in its source

# Groups started so far. Each writes addresses of its own under it: one that read those of the group before would hang.
_STARTED = itertools.count()


@dataclass(frozen=True)
class Processes:
    """The processes that work together, seen from one of them. The methods are collectives: all of them call each.

    Attributes:
        rank: which one this is, from 0. count: how many there are. local_rank: which one on its node.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @property
    def group(self) -> Any:
        """Return torch's process group; None if there is only one process. Do not keep it: with torch 2.13, a
        process that still holds one at its exit, after the group's end, sometimes aborts."""
        if self.count == 1:
            return None
        from torch import distributed

        return distributed.group.WORLD

    @property
    def first(self) -> bool:
        """Return whether this is the process that prints and writes for all."""
        return self.rank == 0

    def gathered(self, value: T) -> list[T]:
        """Return the values of all processes, by rank. A value can be anything that pickles."""
        if self.count == 1:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.count
        with _collective("gathering a value of each process"):
            distributed.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self) -> None:
        """Wait until all processes are here."""
        self.gathered(None)

    def largest(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum of all processes' tensors (of one shape and dtype), NaN where one is NaN.

        Exactly one of the numbers that went in: they are gathered and compared here, since what gloo and nccl make of a
        NaN depends on the order. Zeros of both signs are one number.
        """
        if self.count == 1:
            return tensor
        import torch

        carried = tensor.contiguous() if tensor.is_cuda and self._on_cards else tensor.cpu().contiguous()
        rows = carried.new_empty(self.count, *carried.shape)
        with _collective("finding the largest of all processes' numbers"):
            torch.distributed.all_gather(list(rows), carried, group=self.group)
        return rows.amax(0).add(0.0).to(tensor.device)  # -0.0 becomes 0.0

    def least(self, tensor: Tensor) -> Tensor:
        """Return the elementwise minimum of all processes' tensors, as `largest`."""
        return tensor if self.count == 1 else -self.largest(-tensor)

    def summed(self, tensor: Tensor) -> Tensor:
        """Return the sum of all processes' tensors (int64, of one shape), on the CPU."""
        if self.count == 1:
            return tensor
        from torch import distributed

        total = tensor.cpu().clone()
        with _collective("adding up all processes' numbers"):
            distributed.all_reduce(total, group=self.group)
        return total

    @property
    def _on_cards(self) -> bool:
        from torch import distributed

        return "nccl" in str(distributed.get_backend_config(self.group))


ALONE = Processes()


@contextmanager
def processes(device: str = "cpu", timeout: float | None = None) -> Iterator[Processes]:
    """Yield the processes that torchrun has started, connected to each other; without torchrun, this one.

    What is started here ends here; a group that somebody else has started is used, and left as it is.

    Args:
        device: that this process computes on. If that is "cuda", or the GPU of its LOCAL_RANK, nccl is started besides
            gloo if there are GPUs for all, and "cuda" is from then on that GPU.
        timeout: seconds that a process waits for the others; default the environment variable SDQUANT_PROCESS_TIMEOUT,
            else 30 minutes. One that has ended is noticed at once.

    Raises:
        DistributedError: the processes do not find each other. SettingsError: an environment that torchrun has not
            made, or a torch without torch.distributed.
    """
    rank, count, local = _environment()
    if count == 1:
        yield ALONE
        return
    distributed = _torch_distributed()
    if distributed.is_initialized():
        yield Processes(distributed.get_rank(), distributed.get_world_size(), local)
        return
    seconds = _timeout() if timeout is None else timeout
    with _collective("starting the group of processes"):
        store = distributed.PrefixStore(f"sdquant-{next(_STARTED)}", _store(seconds))
        distributed.init_process_group(
            _backend(device, local), store=store, rank=rank, world_size=count, timeout=timedelta(seconds=seconds)
        )
    try:
        yield Processes(rank, count, local)
    finally:
        with contextlib.suppress(RuntimeError):  # of one that died: what it broke has been said, or is being raised
            distributed.destroy_process_group()
        gc.collect()  # what is left of the group must not live until the process exits: see `Processes.group`


@functools.cache
def _store(seconds: float) -> Any:
    """Return the store in which the processes exchange addresses; kept open, as others may still be reading it."""
    from torch.distributed.rendezvous import rendezvous

    return next(iter(rendezvous("env://", timeout=timedelta(seconds=seconds))))[0]


def launched() -> bool:
    """Return whether torchrun has started this process as one of several. Imports no torch.

    Raises:
        SettingsError: as `processes`.
    """
    return _environment()[1] > 1


def rank() -> int:
    """Return which of torchrun's processes this is, 0 without torchrun. Imports no torch.

    Raises:
        SettingsError: as `processes`.
    """
    return _environment()[0]


def label() -> str:
    """Return a prefix for the output of this process: "[1]" for the second; "" without torchrun. Never raises."""
    rank, count = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return f"[{rank}]" if rank.isdigit() and count.isdigit() and int(count) > 1 else ""


def local_rank() -> int:
    """Return this process's number on its node, 0 without torchrun: the index of its GPU. Never raises."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isascii() and text.isdigit() else 0


def _environment() -> tuple[int, int, int]:
    """Return rank, count and local rank; (0, 1, 0) without torchrun."""
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        return 0, 1, 0
    count, rank = _number("WORLD_SIZE"), _number("RANK")
    local = _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else 0
    if not rank < count or not local <= rank:
        raise SettingsError(
            f"Cannot use RANK={rank}, LOCAL_RANK={local} and WORLD_SIZE={count} from the environment",
            "there is no such process: RANK must be below WORLD_SIZE, and LOCAL_RANK at most RANK",
            "Start with torchrun, or remove them from the environment",
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if count > 1 and missing:
        raise SettingsError(
            f"Cannot connect the {count} processes of RANK and WORLD_SIZE in the environment",
            f"{missing[0]} is not set, by which they would find each other",
            "Start with torchrun, which sets it",
        )
    return rank, count, local


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.isascii() or not text.isdigit():
        raise SettingsError(
            f"Cannot use {name}={text!r:.40} from the environment",
            "it must be a whole number, as torchrun sets it",
            "Start with torchrun, or remove it from the environment",
        )
    return int(text)


def _timeout() -> float:
    text = os.environ.get(TIMEOUT, "")
    try:
        seconds = float(text) if text else _TIMEOUT
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise SettingsError(
            f"Cannot use {TIMEOUT}={text!r:.40} from the environment",
            "it must be the number of seconds that a process waits for the others, above 0",
            f"Use a number, such as {TIMEOUT}=600",
        )
    return seconds


def _torch_distributed() -> Any:
    from torch import distributed

    if not distributed.is_available() or not distributed.is_gloo_available():
        raise SettingsError(
            "Cannot run in several processes",
            "torchrun has started some, but torch on this platform is built without torch.distributed and gloo",
            "Start sdquant without torchrun",
        )
    return distributed


def _backend(device: str, local: int) -> str:
    """Return gloo; with nccl if each process of this node has a GPU of its own."""
    import torch

    if device not in ("cuda", f"cuda:{local}") or not torch.distributed.is_nccl_available():
        return "gloo"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if max(here, local + 1) > torch.cuda.device_count():
        return "gloo"  # nccl refuses two processes on a card
    torch.cuda.set_device(local)
    return "cpu:gloo,cuda:nccl"


@contextmanager
def _collective(doing: str) -> Iterator[None]:
    """Turn the errors of gloo and nccl when a process has ended into a DistributedError that says where to look."""
    try:
        yield
    except RuntimeError as error:
        message = _AT.sub("", str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0]
        late = "timed out" in message.lower() or "timeout" in message.lower()
        ended = "another process did not reach this point in time" if late else "another process has ended"
        fix = f"{_LOOK}, or set {TIMEOUT} to more seconds" if late else _LOOK
        raise DistributedError(f"{doing[0].upper()}{doing[1:]} failed", f"{ended} ({message:.200})", fix) from error
