"""sdquant as a quantizer of diffusers: `from_pretrained(..., quantization_config=sdquant.Config("int8"))`.

The model gets sdquant's plain layers. `save_pretrained` and `sdquant.save` write the same: either folder loads with
`from_pretrained` and with `sdquant.load_model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core import METHOD, Packed, dtype_name, dtype_named, torch_dtypes
from ..errors import SettingsError, UnsupportedFileError
from ..models import install_packed, peft_hooks, quiet, set_tensor
from ..nn import LIKE_KEY, PACKED_PREFIX, QuantizedLayer, packed_of
from ._common import LoadingWeights, dequantize
from .config import Config

with quiet():  # what it imports besides has remarks to make
    from diffusers.quantizers import auto
    from diffusers.quantizers.base import DiffusersQuantizer


_SAID = ("quantization_config", "_pre_quantization_dtype")  # in the config of a quantized model


class Quantizer(DiffusersQuantizer):  # type: ignore[misc]  # diffusers has no types
    """Quantizer that diffusers calls while it loads one model, in the order of the methods here."""

    use_keep_in_fp32_modules = True
    requires_calibration = False
    pre_quantized: bool

    def __init__(self, quantization_config: Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.weights = LoadingWeights(quantization_config)
        self._names: dict[str, str] = {}  # key in the files -> parameter
        self._extra: set[str] = set()  # keys that belong to weights and are not loaded

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Check the compatibility matrix. Called again when `device_map="auto"` has become a table."""
        self.weights.check(quantized=self.pre_quantized, device_map=device_map)

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype:
        """Return float32 for None, with which diffusers would cast weights to the dtype of their placeholders."""
        return torch_dtype or torch.float32

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        """Return the names of the parameters that the files' tensors become."""
        if not self.pre_quantized:
            return loaded_keys
        self.weights.read(checkpoint_files)
        for name, weight in self.weights.prequantized.items():
            path = name.rpartition(".")[0]
            self._names |= {key: f"{path}.{PACKED_PREFIX}{part}" for part, key in weight.keys.items()}
            self._extra |= set(weight.extra)
        self._extra |= set(self.weights.ranges)  # which `Weights.mark` reads
        return [self._names.get(key, key) for key in loaded_keys if key not in self._extra]

    def _process_model_before_weight_loading(
        self, model: nn.Module, keep_in_fp32_modules: list[str] | None = None, **kwargs: Any
    ) -> None:
        keep = keep_in_fp32_modules or ()
        if self.pre_quantized and not self.weights.prequantized:
            # `from_single_file` tells neither that the file has to be quantized nor which file it is.
            self.pre_quantized = False
            self.weights.check(quantized=False)
            self.weights.plan(model, keep)
        elif self.pre_quantized:
            self.weights.hold_against(model)
            for name in self.weights.prequantized:
                self._stand_in(model, name)
        else:
            self.weights.plan(model, keep)

    def _stand_in(self, model: nn.Module, name: str) -> None:
        """Install an empty quantized layer, so that diffusers finds parameters for the parts."""
        headers = self.weights.headers
        parts = {
            part: torch.empty(headers[key].shape, dtype=dtype_named(headers[key].dtype), device="meta")
            for part, key in self.weights.prequantized[name].keys.items()
        }
        packed = Packed(spec=self.weights.specs[name], parts=parts)
        install_packed(model, self.weights.ties.get(name, (name,)), packed, "plain")

    def update_missing_keys(self, model: nn.Module, missing_keys: list[str], prefix: str) -> list[str]:
        """Return the missing keys without those that no file has, because the config says what they say.

        They are the markers of dtypes, which hold nothing, and what a layer adds to a state dict: the numbers of its
        scales and its rotation. diffusers would say that they "are newly initialized" and that one "should TRAIN".
        """
        layers = dict(model.named_modules())

        def is_stored(key: str) -> bool:
            path, _, name = key.rpartition(".")
            layer = layers.get(path)
            return name != LIKE_KEY and (not isinstance(layer, QuantizedLayer) or name in layer._parameters)

        return [key for key in missing_keys if is_stored(key)]

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a file's tensors under the names of the parameters.

        Raises:
            UnsupportedFileError: `from_single_file` has read a file that is already quantized. Without this check
                diffusers fails somewhere in its converters, or casts codes to floats.
        """
        if self.pre_quantized and not self.weights.prequantized:
            for name, tensor in state_dict.items():
                if tensor.ndim > 1 and tensor.dtype not in torch_dtypes.FLOATS:
                    raise UnsupportedFileError(
                        f"Cannot quantize a single file to {self.weights.spec} with diffusers",
                        f"it is already quantized: {name!r} is {dtype_name(tensor.dtype)}",
                        "Load it with sdquant.load_model(file, base=...)",
                    )
        return {self._names.get(key, key): value for key, value in state_dict.items() if key not in self._extra}

    def check_if_quantized_param(
        self, model: nn.Module, param_value: Tensor, param_name: str, state_dict: Mapping[str, Any], **kwargs: Any
    ) -> bool:
        """Return whether `create_quantized_param` places this parameter."""
        return param_name in self.weights.planned or (self.pre_quantized and f".{PACKED_PREFIX}" in param_name)

    def check_quantized_param_shape(self, *args: Any, **kwargs: Any) -> bool:
        """Return True: the placeholders have the shapes of the files."""
        return True

    def create_quantized_param(
        self,
        model: nn.Module,
        param_value: Tensor,
        param_name: str,
        target_device: torch.device,
        state_dict: Mapping[str, Tensor],
        unexpected_keys: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Install a part of a quantized weight, or quantize a float weight."""
        if self.pre_quantized:  # as it is in the file: diffusers has cast float parts to the model's dtype
            set_tensor(model, (param_name,), state_dict[param_name].to(target_device))
        else:
            self.weights.quantize(model, param_name, param_value.to(target_device))

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        for module in model.modules():
            like = module._parameters.get(LIKE_KEY) if isinstance(module, QuantizedLayer) else None
            if like is not None and like.device.type == "meta":
                part = next(tensor for name, tensor in module.named_parameters() if name.startswith(PACKED_PREFIX))
                empty = torch.empty(0, dtype=like.dtype, device=part.device)
                module._parameters[LIKE_KEY] = nn.Parameter(empty, requires_grad=False)
        for name in self.weights.prequantized:
            layer = model.get_submodule(name.rpartition(".")[0])
            packed = packed_of(layer)
            if packed is not None and packed.device.type != "meta":  # of what accelerate has taken away already
                self.weights.packed(name, packed.parts)
                if isinstance(layer, QuantizedLayer):
                    layer.lay_out(self.weights.compute_device(packed))
        self.weights.mark(model)
        self.weights.close()
        library_model: Any = model
        # from_single_file leaves it out, and with it what was saved.
        library_model.register_to_config(quantization_config=self.quantization_config.saved())
        peft_hooks.prepare(model)  # for `peft_hooks.owner_of`; of products alone no layer has done it
        return model

    def get_state_dict_and_metadata(
        self, state_dict: Mapping[str, Any], safe_serialization: bool = True
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the tensors and the metadata of the file that `save_pretrained` writes.

        Raises:
            ConflictError: a LoRA is on the model. SettingsError: the file would not be a safetensors file.
        """
        from ..saving import library_config, model_files

        model = peft_hooks.owner_of(state_dict)  # the quantizer itself does not know it, nor which copy of it this is
        peft_hooks.refuse_adapted("model", model, "saved")
        if not safe_serialization:
            raise SettingsError(
                "Cannot save a quantized model as a pickle (safe_serialization=False)",
                "how it is quantized is recorded in the metadata of a safetensors file",
                "Leave safe_serialization out",
            )
        return model_files.contents(model) if library_config(model) else (dict(state_dict), {})

    def _dequantize(self, model: nn.Module) -> nn.Module:
        library_model: Any = model
        dequantize(model)
        library_model._internal_dict = type(library_model._internal_dict)(
            {k: v for k, v in library_model.config.items() if k not in _SAID}
        )
        return model

    @property
    def is_serializable(self) -> bool:
        """Yes."""
        return True

    @property
    def supports_safetensors_serialization(self) -> bool:
        """Yes."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Return False: the weights are codes."""
        return False


auto.AUTO_QUANTIZER_MAPPING[METHOD] = Quantizer
auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = Config
