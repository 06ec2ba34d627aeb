"""Forge's load path: quantize in RAM as soon as the loader is done, before Forge's memory manager sees the model.

`modules.sd_models.forge_model_reload` calls `forge_loader` and sets the model only when that returns. So an error
raised here is shown to the user, and the failed model is never used. Errors in callbacks after the load would only be
printed, and the load would go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core import dtype_name, registry
from ..errors import ConflictError
from . import display, forge_lora, load_hooks, options

if TYPE_CHECKING:
    from ..settings import Settings
    from .host import Host
    from .monkeypatch import Patches
    from .status import Status


class Adapter:
    """Integration into Forge."""

    def __init__(self, host: Host, status: Status) -> None:
        self.host, self.status = host, status

    def install(self, patches: Patches) -> None:
        """Hook into loads."""
        patches.wrap(display.module("modules.sd_models"), "forge_loader", self._load)
        forge_lora.hook_patcher(patches)

    def changed(self) -> None:
        """Make Forge reload the model when it is next needed, because a setting changed."""
        display.module("modules.sd_models").model_data.forge_hash = ""

    def model_loaded(self, model: Any) -> None:
        """Do nothing: the loader's result is quantized already."""

    def _load(self, original: Any, sd: Any, *args: Any, **kwargs: Any) -> Any:
        load_hooks.begin(self.status, sd if isinstance(sd, str) else None)
        settings = options.read(self.host)
        if load_hooks.asked(settings):
            self._refuse(settings)
        engine = original(sd, *args, **kwargs)
        self.quantize(engine, settings)
        return engine

    def quantize(self, engine: Any, settings: Settings) -> None:
        """Quantize the parts of a model that was just loaded, as the settings say, and tell the status."""
        schemes = load_hooks.asked(settings)
        for name, module, patcher in engine_parts(engine):
            scheme = schemes.get("model" if name == "unet" else "text_encoder")
            if scheme is not None and not load_hooks.quantized_elsewhere(module):
                with display.working(f"Quantizing the {name} to {scheme}"):
                    self._quantize(name, module, scheme, settings)
                patcher.size = 0  # it is kept, and was that of the floats
                patcher.model_size()
                how = "after loading"
            else:
                how = load_hooks.AS_FOUND
            self.status.loaded(load_hooks.part_of(name, module, how))

    def _refuse(self, settings: Settings) -> None:
        load_hooks.refuse_load(settings, mode="post", offload="none", runtime=load_hooks.PLAIN)
        low = display.module("modules.sd_models").model_data.forge_loading_parameters.get("unet_storage_dtype")
        if low is not None and "model" in load_hooks.asked(settings):
            raise ConflictError(
                f"Cannot quantize to {load_hooks.asked(settings)['model']}, as sdquant's settings say",
                f"Forge's 'Diffusion in Low Bits' is set to {dtype_name(low)}",
                "Set one of the two to its default: 'Automatic', or 'as found'",
            )

    def _quantize(self, name: str, module: Any, scheme: str, settings: Settings) -> None:
        from ..nn import set_compute
        from ..planning import statistics_arguments
        from .forge_layers import quantize

        spec = registry.parse(scheme)
        statistics_arguments.require_statistics(spec)
        quantize(module, spec, settings["skip"])
        set_compute(module, settings["compute"])
        load_hooks.require_quantized(name, module, scheme)


def engine_parts(engine: Any) -> list[tuple[str, Any, Any]]:
    """Return the components of a Forge model that can be quantized: name, module, and Forge's patcher for it."""
    objects = engine.forge_objects
    rows = [("unet", objects.unet.model.diffusion_model, objects.unet)]
    if objects.clip is not None:
        rows.append(("text_encoder", objects.clip.cond_stage_model, objects.clip.patcher))
    return rows
