"""Forge Neo: its load path is Forge's; its mover, and with it its LoRAs, are others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import display, forge, patcher_lora

if TYPE_CHECKING:
    from .monkeypatch import Patches


class Adapter(forge.Adapter):
    """Integration into Forge Neo."""

    def install(self, patches: Patches) -> None:
        """Hook into loads, LoRAs and saving."""
        super().install(patches)
        patcher_lora.hook_patcher(patches, display.module("backend.patcher.base"))
        engine = display.module("backend.diffusion_engine.base").ForgeDiffusionEngine
        patches.wrap(engine, "save_unet", _save)
        patches.wrap(engine, "save_checkpoint", _save)


def _save(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
    objects = engine.forge_objects
    modules = objects.unet.model, getattr(objects.clip, "cond_stage_model", None)
    fix = "Set sdquant's schemes to 'as found' and load the model again, or run: sdquant quantize"
    patcher_lora.refuse_packed(modules, "Neo", "'Save Current Model'", fix)
    return original(engine, *args, **kwargs)
