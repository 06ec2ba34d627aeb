"""A1111's load path: the UNet is quantized as soon as its weights are loaded, and made floats before the next ones are.

A1111 keeps a model and loads the next checkpoint's weights into it. Into packed layers they would not go, and nothing
would say so: `load_state_dict(strict=False)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import IncompatibleError, SdquantError
from . import display, load, options

if TYPE_CHECKING:
    from ..settings import Settings
    from .host import Host
    from .patches import Patches
    from .status import Status


class Adapter:
    """What is done in A1111."""

    def __init__(self, host: Host, status: Status) -> None:
        self.host, self.status = host, status

    def install(self, patches: Patches) -> None:
        """Take part in loads."""
        patches.wrap(display.module("modules.sd_models"), "load_model_weights", self._load)

    def changed(self) -> None:
        """Nothing: the settings are for the next load."""

    def model_loaded(self, model: Any) -> None:
        """Nothing: the weights were quantized when they came."""

    def _load(self, original: Any, model: Any, checkpoint_info: Any, *args: Any, **kwargs: Any) -> Any:
        from ..integrations._shared import dequantize

        settings = options.read(self.host)
        scheme = load.asked(settings).get("model")
        if scheme is not None:
            load.refuse(settings, mode="post", offload="none", runtime=load.PLAIN)
            _refuse_moved(model, scheme)
        load.begin(self.status, checkpoint_info.filename)
        dequantize(model.model.diffusion_model)
        result = original(model, checkpoint_info, *args, **kwargs)
        unet = model.model.diffusion_model
        if scheme is None:
            self.status.loaded(load.part_of("unet", unet, load.AS_FOUND))
            return result
        try:
            self._quantize(unet, scheme, settings)
        except SdquantError:
            display.module("modules.sd_models").model_data.sd_model = None  # not to be used as it is
            raise
        self.status.loaded(load.part_of("unet", unet, "after loading"))
        return result

    def _quantize(self, unet: Any, scheme: str, settings: Settings) -> None:
        from ..quantizer import quantize

        with display.working(f"Quantizing the unet to {scheme}"):
            quantize(
                unet,
                scheme,
                skip=settings["skip"],
                runtime=load.PLAIN,
                device=load.device(),
                allow_incompatible=settings["allow_incompatible"],
            )


def _refuse_moved(model: Any, scheme: str) -> None:
    """Raise IncompatibleError if A1111 is to move the parts of this model by hooks of its own."""
    if display.module("modules.lowvram").is_needed(model):
        raise IncompatibleError(
            f"{scheme} was asked for with --lowvram, --medvram or --medvram-sdxl",
            "A1111 then moves the parts of the UNet itself, by hooks on the layers that would be replaced",
            "Start A1111 without these flags: the quantized UNet needs less memory. Or set the scheme to 'as found'",
        )
