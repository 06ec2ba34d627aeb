"""Over how many devices the work counts as spread, and in how many parts ranges are found. Pure: no torch.

    num_slices = compile_topology_num_slices if that is above 0, else nodes of torchrun, else accelerators, else 1
    count = quantization_local_shard_count, or num_slices where that is -1

In MaxDiffusion a slice is a group of TPUs with fast links; torch's nearest is a node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import SettingsError

log = logging.getLogger(__name__)

SLICES, SHARDS = "compile_topology_num_slices", "quantization_local_shard_count"
WORLD, LOCAL = "WORLD_SIZE", "LOCAL_WORLD_SIZE"


@dataclass(frozen=True, kw_only=True)
class Shards:
    """What the two keys come to.

    Attributes:
        num_slices: at least 1. found: where it comes from, in words.
        count: parts that ranges are found in; 0 leaves the weight's gradient unquantized.
    """

    num_slices: int
    found: str
    count: int

    @property
    def parts(self) -> int:
        """Parts that the range of a weight is found in: at least 1. The range is the same, bit for bit."""
        return max(1, self.count)

    @property
    def of_weight_gradient(self) -> int | None:
        """QtRule's bwd_weight_grad_shards: parts of the batch that have scales of their own; None for one."""
        return None if self.count == 1 else self.count

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def resolve(
    num_slices: int, shard_count: int, *, environment: Mapping[str, str], accelerators: Callable[[], int]
) -> Shards:
    """The two keys, resolved.

    Args:
        environment: of the process; torchrun says there how many processes there are, and how many on each node.
        accelerators: how many this process sees; asked only if nothing else tells.

    Raises:
        SettingsError: a value that cannot be, or an environment that torchrun has not made.
    """
    for name, value in ((SLICES, num_slices), (SHARDS, shard_count)):
        if value < -1:
            raise SettingsError(
                f"Cannot use {name}={value}", "it must be a whole number, at least -1", "Use -1 for the default"
            )
    slices, found = _slices(num_slices, environment, accelerators)
    made = Shards(num_slices=slices, found=found, count=slices if shard_count == -1 else shard_count)
    log.info("%s: %d (%s); %s: %d", SLICES, slices, found, SHARDS, made.count)
    return made


def _slices(asked: int, environment: Mapping[str, str], accelerators: Callable[[], int]) -> tuple[int, str]:
    if asked > 0:
        return asked, SLICES
    if WORLD in environment:
        world = _number(WORLD, environment[WORLD])
        local = _number(LOCAL, environment.get(LOCAL, "1"))
        if world % local:
            raise SettingsError(
                f"Cannot use {WORLD}={world} with {LOCAL}={local} from the environment",
                f"{world} processes cannot be divided into nodes of {local}",
                f"Start with torchrun, or set {SLICES}",
            )
        return world // local, "nodes"
    number = accelerators()
    return (number, "accelerators") if number > 0 else (1, "no accelerator")


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise SettingsError(
            f"Cannot use {name}={text!r:.40} from the environment",
            "it must be a whole number above 0, as torchrun sets it",
            f"Start with torchrun, or set {SLICES}",
        )
    return int(text)


def visible_accelerators() -> int:
    """How many accelerators this process sees. Imports torch."""
    from ...compat.hardware import probe

    return sum(device.kind != "cpu" for device in probe().devices)
