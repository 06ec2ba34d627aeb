"""A driver for Triton that loads no kernel and launches nothing: what the processor does for a call is all that is
left."""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

from typing import Any

from triton.backends.compiler import GPUTarget


class _Utils:
    def load_binary(self, *_: Any) -> tuple[Any, int, int, int, int]:
        return None, 1, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "warpSize": 32, "multiprocessor_count": 132}

    def unload_module(self, module: Any) -> None: ...


class NoCard:
    """Stands for `triton.runtime.driver._active`.

    Attributes:
        launcher_cls: in place of the launcher that Triton builds in C. capability: of the card that kernels are for.
    """

    utils = _Utils()

    def __init__(self, launcher_cls: type, capability: int) -> None:
        self.launcher_cls, self.capability = launcher_cls, capability

    def get_current_device(self) -> int:
        """Return a number."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        """Return the one stream."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Return the card."""
        return GPUTarget("cuda", self.capability, 32)
