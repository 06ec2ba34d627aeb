"""A1111's load path: quantize the UNet right after its weights are loaded, and dequantize it before the next load.

A1111 keeps the model and loads the next checkpoint's weights into it with `load_state_dict(strict=False)`, which would
silently skip packed layers. Before each image it requests the selected checkpoint, and reuses the loaded model if it
came from that file. If that model was quantized with other settings, it is loaded again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import IncompatibleError
from . import a1111_lora, a1111_state, display, kept_models, load_hooks, options

if TYPE_CHECKING:
    from ..settings import Settings
    from .host import Host
    from .monkeypatch import Patches
    from .status import Status


class Adapter:
    """Integration into A1111."""

    def __init__(self, host: Host, status: Status) -> None:
        self.host, self.status = host, status

    def install(self, patches: Patches) -> None:
        """Hook into loads."""
        self._patches = patches
        models = display.module("modules.sd_models")
        a1111_lora.hook_networks(patches)  # "Reload UI" loads scripts anew, and keeps the model
        patches.wrap(models, "load_model_weights", self._load)
        patches.wrap(models, "reload_model_weights", self._reload)

    def changed(self) -> None:
        """Do nothing: A1111 requests the model before each image."""

    def model_loaded(self, model: Any) -> None:
        """Do nothing: the weights were quantized right after they were loaded."""

    def _load(self, original: Any, model: Any, checkpoint_info: Any, *args: Any, **kwargs: Any) -> Any:
        from ..integrations import dequantize

        settings = options.read(self.host)
        scheme = load_hooks.asked(settings).get("model")
        _refuse(settings, model)
        load_hooks.begin(self.status, checkpoint_info.filename)
        dequantize(model.model.diffusion_model)
        result = original(model, checkpoint_info, *args, **kwargs)
        unet = model.model.diffusion_model
        kept_models.mark(model, settings)
        if scheme is None:
            self.status.loaded(load_hooks.part_of("unet", unet, load_hooks.AS_FOUND))
            return result
        try:
            self._quantize(unet, scheme, settings)
        except BaseException:  # of any kind, such as a missing library or too little memory: no float model stays
            kept_models.drop(model)
            raise
        a1111_lora.hook_networks(self._patches)
        a1111_lora.follow_networks(unet)
        a1111_state.show_floats(unet)
        self.status.loaded(load_hooks.part_of("unet", unet, "after loading"))
        return result

    def _reload(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        model = kept_models.request(original, args, kwargs, self.host, _refuse)
        kept_models.tell(self.status, model, lambda: [kept_models.reused_part("unet", model.model.diffusion_model)])
        return model

    def _quantize(self, unet: Any, scheme: str, settings: Settings) -> None:
        from ..loading import quantize

        with display.working(f"Quantizing the unet to {scheme}"):
            quantize(
                unet,
                scheme,
                skip=settings["skip"],
                runtime=load_hooks.PLAIN,
                compute=settings["compute"],
                device=load_hooks.device(),
                allow_incompatible=settings["allow_incompatible"],
            )


def _refuse(settings: Settings, model: Any) -> None:
    """Raise SdquantError if a model cannot be quantized as the settings say."""
    scheme = load_hooks.asked(settings).get("model")
    if scheme is None:
        return
    load_hooks.refuse_load(settings, mode="post", offload="none", runtime=load_hooks.PLAIN)
    if display.module("modules.lowvram").is_needed(model):
        raise IncompatibleError(
            f"Cannot quantize to {scheme} with --lowvram, --medvram or --medvram-sdxl",
            "A1111 then moves the parts of the UNet itself, with hooks on the layers that quantization replaces",
            "Start A1111 without these flags: the quantized UNet needs less memory. Or set the scheme to 'as found'",
        )
    storage = display.module("modules.shared").opts.data.get("fp8_storage")
    if storage == "Enable" or (storage == "Enable for SDXL" and hasattr(model, "conditioner")):
        raise IncompatibleError(
            f"Cannot quantize to {scheme} with A1111's 'FP8 weight'",
            "that option converts the UNet's weights to float8 before they can be quantized",
            "Set 'FP8 weight' to Disable in A1111's settings (Optimizations). Or set the scheme to 'as found'",
        )
