"""SD.Next's load path: its own hooks for quantization, `create_config` before and `do_post_load_quant` after a load.

SD.Next catches errors of a load, shows them, and goes on with the model as it is. So after an error of sdquant, the
model is unloaded here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ConflictError, IncompatibleError, SdquantError
from ..settings import Settings, role_of
from . import display, load_hooks, options, sdnext_folders, sdnext_lora
from .status import ComponentStatus, Status

if TYPE_CHECKING:
    from torch import nn

    from .host import Host
    from .monkeypatch import Patches

# SD.Next's words for what it loads -> roles. The others (LLM, Control, any) are no parts of a pipeline.
MODULES = {"Model": "model", "TE": "text_encoder", "VAE": "vae"}
# Classes that accelerate may not take apart: a quantized layer runs with all its tensors on one device.
_WHOLE = ("QuantizedLinear", "QuantizedConv1d", "QuantizedConv2d", "QuantizedConv3d", "QuantizedEmbedding")


class Adapter:
    """Integration into SD.Next."""

    def __init__(self, host: Host, status: Status) -> None:
        self.host, self.status = host, status
        self._error: SdquantError | None = None

    def install(self, patches: Patches) -> None:
        """Hook into loads."""
        quant, models = display.module("modules.model_quant"), display.module("modules.sd_models")
        patches.wrap(models, "reload_model_weights", self._reload)
        patches.wrap(models, "load_diffuser", self._load)
        patches.wrap(quant, "create_config", self._config)
        patches.wrap(quant, "do_post_load_quant", self._post)
        sdnext_folders.hook_folders(patches)
        sdnext_lora.install(patches)
        whole = display.module("modules.sd_offload").no_split_module_classes
        ours = [name for name in _WHOLE if name not in whole]
        whole.extend(ours)
        patches.later(lambda: [whole.remove(name) for name in ours])

    def changed(self) -> None:
        """Do nothing: settings apply to the next load, like those of SD.Next's own quantization."""

    def told(self, error: SdquantError) -> None:
        """Record an error that SD.Next will catch."""
        self._error = error

    def model_loaded(self, model: Any) -> None:
        """Record the loaded components and how they were quantized."""
        for name, module in _parts(model):
            known = self.status.seen.parts.get(name)
            self.status.loaded(
                load_hooks.part_of(name, module, known.how if known is not None else load_hooks.AS_FOUND)
            )

    def _reload(
        self, original: Any, sd_model: Any = None, info: Any = None, op: str = "model", force: bool = False, **more: Any
    ) -> Any:
        """Replace the model in memory, which SD.Next unloads first: check the settings before it does.

        On an error, SD.Next restores the previous choice of the model, or shows the error next to the button.
        """
        if self._replaces(sd_model, info, op, force):
            try:
                self._refuse(options.read(self.host))
            except SdquantError as error:
                self.status.refused(error)
                raise display.expected(error) from error
        return original(sd_model, info=info, op=op, force=force, **more)

    @staticmethod
    def _replaces(sd_model: Any, info: Any, op: str, force: bool) -> bool:
        """Return whether SD.Next will unload a model to load another one, or the same one again."""
        models = display.module("modules.sd_models")
        model = sd_model or (models.model_data.sd_refiner if op == "refiner" else models.model_data.sd_model)
        checkpoint = (info or models.select_checkpoint(op=op)) if model is not None else None
        there = getattr(model, "sd_checkpoint_info", None)
        return checkpoint is not None and (force or there is None or there.filename != checkpoint.filename)

    def _load(self, original: Any, checkpoint_info: Any = None, op: str = "model", **kwargs: Any) -> Any:
        """Load a model: check the settings before, and unload it if the load fails halfway."""
        self._error = None
        load_hooks.begin(self.status, getattr(checkpoint_info, "path", None))
        try:
            self._refuse(options.read(self.host))
        except SdquantError as error:
            self.status.failed(error)
            display.failed(error)  # SD.Next's callers of this function catch nothing
            return None
        result = original(checkpoint_info, op=op, **kwargs)
        if self._error is not None:
            display.module("modules.sd_models").unload_model_weights(op=op)
        return result

    def _refuse(self, settings: Settings) -> None:
        """Raise if the settings are not supported, by themselves or together with SD.Next's own."""
        schemes = load_hooks.asked(settings)
        if not schemes:
            return
        opts = display.module("modules.shared").opts
        mode, runtime = settings["mode"], settings["runtime"] or load_hooks.PLAIN
        if mode == "pre" and runtime != load_hooks.PLAIN:
            raise IncompatibleError(
                f"Cannot combine mode=pre with runtime={runtime}",
                "in SD.Next only sdquant's plain layers can be created while a model loads",
                "Set the mode to post, or the runtime to plain",
            )
        load_hooks.refuse_load(
            settings,
            mode="post" if runtime != load_hooks.PLAIN else mode,
            offload=opts.diffusers_offload_mode,
            runtime=runtime,
        )
        for word, role in MODULES.items():
            if role in schemes and word in opts.sdnq_quantize_weights:
                raise ConflictError(
                    f"Cannot quantize {word} to {schemes[role]}, as sdquant's settings say",
                    f"{word} is also ticked in SD.Next's own 'Model Quantization', which uses SDNQ",
                    "Untick it there, or set its scheme here to 'as found'",
                )

    def _config(
        self,
        original: Any,
        kwargs: dict[str, Any] | None = None,
        allow: bool = True,
        module: str = "Model",
        modules_to_not_convert: list[str] | None = None,
        **more: Any,
    ) -> Any:
        """Return the arguments to load a component with, including our config if it is quantized while it loads."""
        settings = options.read(self.host)
        scheme = load_hooks.asked(settings).get(MODULES.get(module, ""))
        plain = settings["runtime"] in (None, load_hooks.PLAIN)
        if scheme is None or not allow or not plain or settings["mode"] == "post" or self._left_out(module):
            return original(kwargs, allow=allow, module=module, modules_to_not_convert=modules_to_not_convert, **more)
        from ..integrations import Config

        self._refuse(settings)
        skip = [name.strip(".") for name in modules_to_not_convert or () if name.strip(".")]
        return {
            **(kwargs or {}),
            "quantization_config": Config(scheme, skip=(*settings["skip"], *skip), compute=settings["compute"]),
        }

    def _post(self, original: Any, sd_model: Any, allow: bool = True) -> Any:
        """After a load of a pipeline or of one component, quantize what is not quantized yet."""
        sd_model = original(sd_model, allow=allow)
        settings = options.read(self.host)
        schemes = load_hooks.asked(settings)
        if schemes and not self._left_out("Model"):
            self._refuse(settings)
            for name, module in _parts(sd_model):
                role = role_of(name)
                if role is not None and role.name in schemes:
                    self._component(name, module, schemes[role.name], settings)
        return sd_model

    def _component(self, name: str, module: nn.Module, scheme: str, settings: Settings) -> None:
        """Quantize a component in place, unless that was done while it loaded or by another library."""
        if load_hooks.schemes_in(module):
            self.status.loaded(load_hooks.part_of(name, module, "while loading"))
            return
        if load_hooks.quantized_elsewhere(module):
            self.status.loaded(ComponentStatus(component=name, scheme=None, how="quantized already, as found", bytes=0))
            return
        from ..integrations import Config
        from ..loading import quantize

        with display.working(f"Quantizing the {name} to {scheme}"):
            quantize(
                module,
                scheme,
                skip=settings["skip"],
                runtime=settings["runtime"] or load_hooks.PLAIN,
                compute=settings["compute"],
                device=load_hooks.device(),
                allow_incompatible=settings["allow_incompatible"],
            )
        target: Any = module
        target.quantization_config = Config(scheme, skip=settings["skip"])  # by which SD.Next knows not to do it again
        self.status.loaded(load_hooks.part_of(name, module, "after loading"))

    def _left_out(self, module: str) -> bool:
        """Return whether SD.Next's user has excluded this type of model from quantization."""
        return module == "Model" and bool(display.module("modules.model_quant").dont_quant())


def _parts(model: Any) -> list[tuple[str, nn.Module]]:
    """Return the components by name; the name of a lone component follows from its class."""
    from torch import nn

    from ..models import is_pipeline, weight_parts

    if is_pipeline(model):
        return list(weight_parts(model).items())
    if not isinstance(model, nn.Module):
        return []
    library = type(model).__module__
    if library.startswith("transformers.") and "vision" not in type(model).__name__.lower():
        return [("text_encoder", model)]
    return [("model", model)] if library.startswith(("diffusers.models.unets", "diffusers.models.trans")) else []
