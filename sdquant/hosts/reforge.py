"""reForge: loads models by a module of its own, keeps several of them, and moves them as Forge Neo does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import display, forge, kept_models, load_hooks, options, patcher_lora

if TYPE_CHECKING:
    from ..settings import Settings
    from .monkeypatch import Patches


class Adapter(forge.Adapter):
    """Integration into reForge."""

    def install(self, patches: Patches) -> None:
        """Hook into loads, LoRAs and saving."""
        patches.wrap(display.module("modules_forge.forge_loader"), "load_model_for_a1111", self._load)
        patches.wrap(display.module("modules.sd_models"), "reload_model_weights", self._reload)
        patches.wrap(display.module("ldm_patched.modules.sd"), "save_checkpoint", _save)
        patcher_lora.hook_patcher(patches, display.module("ldm_patched.modules.model_patcher"))

    def changed(self) -> None:
        """Do nothing: reForge requests the model before each image."""

    def _load(self, original: Any, *args: Any, checkpoint_info: Any = None, **kwargs: Any) -> Any:
        load_hooks.begin(self.status, getattr(checkpoint_info, "filename", None))
        settings = options.read(self.host)
        _refuse(settings)
        engine = original(*args, checkpoint_info=checkpoint_info, **kwargs)
        try:
            self.quantize(engine, settings)
        except BaseException:  # of any kind, such as a missing library or too little memory: no float model stays
            kept_models.drop(engine)
            raise
        kept_models.mark(engine, settings)
        return engine

    def _reload(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        engine = kept_models.request(original, args, kwargs, self.host, lambda settings, _: _refuse(settings))
        if engine is not None:
            kept_models.tell(self.status, engine, lambda: _parts(engine))
        return engine


def _refuse(settings: Settings) -> None:
    if load_hooks.asked(settings):
        load_hooks.refuse_load(settings, mode="post", offload="none", runtime=load_hooks.PLAIN)


def _parts(engine: Any) -> list[Any]:
    return [kept_models.reused_part(name, module) for name, module, _ in forge.engine_parts(engine)]


def _save(original: Any, output_path: Any, model: Any, clip: Any = None, *args: Any, **kwargs: Any) -> Any:
    modules = model.model, getattr(clip, "cond_stage_model", None)
    fix = "Set sdquant's schemes to 'as found' and load the model again, or run: sdquant quantize"
    patcher_lora.refuse_packed(modules, "reForge", "reForge's save_checkpoint", fix)
    return original(output_path, model, clip, *args, **kwargs)
