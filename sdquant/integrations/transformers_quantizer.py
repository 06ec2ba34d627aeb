"""sdquant as a quantizer of transformers, for the text encoders: `from_pretrained(..., quantization_config=...)`.

transformers loads through converters: the tensors of a weight, whose keys in a file have different endings ("weight",
"weight.absmax"), are collected and passed to an operation, which puts a quantized layer into the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core import METHOD, dtype_name
from ..models import float32_of_model, install_packed, key_names, quiet
from ..rules import product_ranges
from ._common import LoadingWeights, dequantize
from .config import Config

if TYPE_CHECKING:
    from ..core import PrequantizedWeight

with quiet():  # what it imports besides has remarks to make
    from transformers.core_model_loading import ConversionOps, WeightConverter
    from transformers.quantizers import auto
    from transformers.quantizers.base import HfQuantizer


class Quantizer(HfQuantizer):
    """Quantizer that transformers calls while it loads one model, in the order of the methods here."""

    requires_calibration = False
    pre_quantized: bool

    def __init__(self, quantization_config: Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)  # type: ignore[arg-type]  # it does what is used of one
        self.weights = LoadingWeights(quantization_config)
        self.dtype = torch.float32

    def validate_environment(self, device_map: Any = None, **kwargs: Any) -> None:
        """Check the compatibility matrix."""
        self.weights.check(quantized=self.pre_quantized, device_map=device_map)

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Store the dtype, to which the operations below cast unquantized tensors, and return it."""
        self.dtype = dtype
        return dtype

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: Iterable[str] | None = None, **kwargs: Any
    ) -> None:
        library_model: Any = model
        for name, source in library_model.all_tied_weights_keys.items():  # tied by transformers only when all is loaded
            path, _, leaf = name.rpartition(".")
            library_model.get_submodule(path)._parameters[leaf] = library_model.get_parameter(source)
        if self.pre_quantized:
            self.weights.read(checkpoint_files or ())
            self.weights.hold_against(model)
            product_ranges.stand_in(
                model, ((key, tuple(self.weights.headers[key].shape)) for key in self.weights.ranges)
            )
        else:
            self.weights.plan(model, ())

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        """Return whether `_Encode` installs this parameter. Called again in the end for missing ones."""
        return not self.pre_quantized and param_name in self.weights.planned

    def get_quantize_ops(self) -> ConversionOps:
        """Return the operation that quantizes one weight."""
        return _Encode(self)

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Return the converter for the key endings of quantized weights in the files."""
        if not self.pre_quantized:
            return []
        endings = {_pattern("weight")}
        for weight in self.weights.prequantized.values():
            endings |= {_ending(weight, key) for key in (*weight.keys.values(), *weight.extra)}
        return [WeightConverter(sorted(endings), "weight", [_Read(self)])]

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        self.weights.mark(model)
        self.weights.close()
        library_model: Any = model
        if isinstance(self.quantization_config, Config):
            library_model.config.quantization_config = self.quantization_config.saved()
        ours = [one for one in library_model._weight_conversions if any(isinstance(op, _Op) for op in _operations(one))]
        key_names.remember(
            model, tuple(one for one in library_model._weight_conversions if one not in ours), quantized=True
        )
        self.weights.check(quantized=self.pre_quantized, device_map=getattr(model, "hf_device_map", None))
        return model

    def is_serializable(self) -> bool:
        """Yes."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Return False: the weights are codes."""
        return False

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the tensors and the metadata of the file that `save_pretrained` writes."""
        from ..saving import library_config, model_files

        if not library_config(model):  # it is a float model again
            return dict(model.state_dict()), {}
        tensors, metadata = model_files.contents(model)
        library_model: Any = model
        config: Any = library_model.config.quantization_config
        method = config["quant_method"] if isinstance(config, dict) else config.quant_method
        return model_files.guarded(model, tensors) if method == METHOD else tensors, metadata

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        dequantize(model, dtype)
        return model


class SdnqConfig(Config):
    """Config of a config.json in SDNQ's format, so that such files from sdquant load without the sdnq package too."""

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Return the config for SDNQ's `weights_dtype`; see `Config.from_dict`."""
        word = str(config_dict.get("weights_dtype", "")).replace("float8_e4m3fn", "fp8")
        return super().from_dict({"quant": f"sdnq-{word}"}, return_unused_kwargs, **kwargs)


def _operations(conversion: Any) -> list[Any]:
    return getattr(conversion, "operations", [])


def _ending(weight: PrequantizedWeight, key: str) -> str:
    """Return the pattern for a key of a quantized weight: what follows the path of its module."""
    return _pattern(key.removeprefix(weight.name.rpartition(".")[0] + "."))


def _pattern(ending: str) -> str:
    return rf"(?<=\.){re.escape(ending)}$"  # whole words: the ending "scale" is not that of "input_scale"


class _Op(ConversionOps):
    def __init__(self, quantizer: Quantizer) -> None:
        self.hf_quantizer = quantizer  # by this name transformers knows that it is not to cast the tensors

    def __deepcopy__(self, memo: Any) -> _Op:
        return self  # transformers copies it for every weight, and all are to have the one quantizer


class _Encode(_Op):
    """Operation that quantizes a float weight and installs it in the model."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **known: Any
    ) -> dict[str, list[Tensor]]:
        model, name, missing = known["model"], known["full_layer_name"], known["missing_keys"]
        (tensor,) = (value[0] if isinstance(value, list) else value for value in input_dict.values())
        self.hf_quantizer.weights.quantize(model, name, tensor)
        _arrived(self.hf_quantizer.weights, model, name, missing)
        return {}


class _Read(_Op):
    """Operation that installs a quantized weight from its tensors, or passes a float one on."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **known: Any
    ) -> dict[str, list[Tensor]]:
        model, name, missing = known["model"], known["full_layer_name"], known["missing_keys"]
        weights = self.hf_quantizer.weights
        tensors = {pattern: value[0] if isinstance(value, list) else value for pattern, value in input_dict.items()}
        weight = weights.prequantized.get(name)
        if weight is None:
            (tensor,) = tensors.values()
            parameter = model.get_parameter(name)
            dtype = dtype_name(self.hf_quantizer.dtype)
            target_dtype: torch.dtype = getattr(torch, float32_of_model(model).dtype(name, dtype))
            return {"weight": [tensor.to(target_dtype).reshape(parameter.shape)]}
        parts = {part: tensors[_ending(weight, key)].contiguous() for part, key in weight.keys.items()}
        packed = weights.packed(name, parts)
        install_packed(model, weights.ties[name], packed, "plain", device=weights.compute_device(packed))
        _arrived(weights, model, name, missing)
        return {}


def _arrived(weights: LoadingWeights, model: nn.Module, name: str, missing_keys: set[str]) -> None:
    """Tell transformers that a weight and those tied to it are there, and need neither values nor a tie."""
    library_model: Any = model
    for each in weights.ties[name]:
        missing_keys.discard(each)
        library_model.all_tied_weights_keys.pop(each, None)
        library_model.get_submodule(each.rpartition(".")[0])._is_hf_initialized = True


auto.AUTO_QUANTIZER_MAPPING[METHOD] = Quantizer
auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = Config
# The sdnq package puts its own there when it is imported, before or after.
auto.AUTO_QUANTIZER_MAPPING.setdefault("sdnq", Quantizer)
auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault("sdnq", SdnqConfig)
