"""Forge Neo: its load path is Forge's; its mover, and with it its LoRAs, are others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import forge, neo_lora

if TYPE_CHECKING:
    from .monkeypatch import Patches


class Adapter(forge.Adapter):
    """Integration into Forge Neo."""

    def install(self, patches: Patches) -> None:
        """Hook into loads and LoRAs."""
        super().install(patches)
        neo_lora.install(patches)
