"""Resolve the number of slices that the work is spread over, and of parts that ranges are computed in. No torch.

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
    """The two keys, resolved.

    Attributes:
        num_slices: at least 1. found: where it comes from, in words.
        count: parts that ranges are computed in; 0 leaves the weight gradient unquantized.
    """

    num_slices: int
    found: str
    count: int

    @property
    def parts(self) -> int:
        """Return the number of parts that a weight's range is computed in, at least 1. The result is bit-identical."""
        return max(1, self.count)

    @property
    def of_weight_gradient(self) -> int | None:
        """Return QtRule's bwd_weight_grad_shards: parts of the batch with scales of their own; None for one."""
        return None if self.count == 1 else self.count

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def resolve(
    num_slices: int, shard_count: int, *, environment: Mapping[str, str], accelerators: Callable[[], int]
) -> Shards:
    """Resolve the two keys.

    Args:
        environment: of the process; torchrun sets the number of processes in it, in total and on each node.
        accelerators: counts those that this process sees; called only if nothing else determines the slices.

    Raises:
        SettingsError: an invalid value, or an environment that torchrun has not set.
    """
    for name, value in ((SLICES, num_slices), (SHARDS, shard_count)):
        if value < -1:
            raise SettingsError(
                f"Cannot use {name}={value}", "it must be a whole number, at least -1", "Use -1 for the default"
            )
    slices, origin = _slices(num_slices, environment, accelerators)
    shards = Shards(num_slices=slices, found=origin, count=slices if shard_count == -1 else shard_count)
    log.info("%s: %d (%s); %s: %d", SLICES, slices, origin, SHARDS, shards.count)
    return shards


def _slices(num_slices: int, environment: Mapping[str, str], accelerators: Callable[[], int]) -> tuple[int, str]:
    if num_slices > 0:
        return num_slices, SLICES
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
    """Count the accelerators that this process sees. Imports torch."""
    from ...compat import hardware

    return sum(device.kind != "cpu" for device in hardware.probe().devices)
