"""sdquant as a quantizer of diffusers: `from_pretrained(..., quantization_config=sdquant.Config("int8"))`.

Weights are held in sdquant's plain layers. What `save_pretrained` writes is what `sdquant.save` writes, and the other
way round: either folder loads with `from_pretrained` and with `sdquant.load_model`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import backends, compat
from ..backends.base import Packed, PackedSpec, TensorInfo
from ..components import quiet, set_tensor, tied
from ..encoding import encode
from ..errors import BadFileError, IncompatibleError
from ..formats import safetensors
from ..formats.own import found_in, read_own

with quiet():  # what it imports besides has remarks to make
    from diffusers.quantizers import auto
    from diffusers.quantizers.base import DiffusersQuantizer
    from diffusers.quantizers.quantization_config import QuantizationConfigMixin

if TYPE_CHECKING:
    from ..backends.base import Found

METHOD = "sdquant"


class Method(str, Enum):
    """diffusers wants an enum with a value, and looks it up as the string that it is."""

    SDQUANT = METHOD


class Config(QuantizationConfigMixin):  # type: ignore[misc]  # diffusers has no types
    """What to quantize a diffusers model to while it is loaded.

    Args:
        quant: a scheme with its options: "int8", "nf4,double_quant".
        skip: modules to leave as they are, by a part of their path or a pattern with `*`.

    Raises:
        UnknownQuantError, SettingsError: no such scheme or option.
    """

    def __init__(self, quant: str = "int8", skip: Iterable[str] = ()) -> None:
        self.quant_method = Method.SDQUANT
        self.quant = str(backends.parse(quant))
        self.skip = list(skip)

    def to_dict(self) -> dict[str, Any]:
        """As it stands in a config.json."""
        return {"quant_method": METHOD, "quant": self.quant, "skip": self.skip}

    def to_diff_dict(self) -> dict[str, Any]:
        """The same; diffusers prints it."""
        return self.to_dict()

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The inverse of `to_dict`."""
        made = cls(quant=config_dict.get("quant", "int8"), skip=config_dict.get("skip") or [])
        return (made, kwargs) if return_unused_kwargs else made


class Quantizer(DiffusersQuantizer):  # type: ignore[misc]
    """Called by diffusers, in the order of the methods here, while it loads one model."""

    use_keep_in_fp32_modules = True
    requires_calibration = False

    def __init__(self, quantization_config: Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.spec = backends.parse(quantization_config.quant)
        self._names: dict[str, str] = {}  # key in the files -> parameter
        self._extra: set[str] = set()  # keys that belong to weights and are not loaded
        self._headers: dict[str, TensorInfo] = {}
        self._found: dict[str, Found] = {}
        self._specs: dict[str, PackedSpec] = {}
        self._planned: set[str] = set()
        self._ties: dict[str, tuple[str, ...]] = {}
        self._model: nn.Module | None = None

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Ask the matrix."""
        compat.check(self.quantization_config.quant, mode="found" if self.pre_quantized else "pre", runtime="plain")

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype:
        """None would have diffusers cast weights to the dtype of what stands in their place."""
        return torch_dtype or torch.float32

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        """The parameters that the files' tensors become."""
        if not self.pre_quantized:
            return loaded_keys
        files = [Path(file) for file in checkpoint_files]
        metadata: Mapping[str, str] = {}
        for file in files:
            infos, said = safetensors.read_header(file)
            self._headers |= infos
            metadata = metadata or said
        own = read_own(files[0], metadata)
        if not own.get("weights"):
            raise BadFileError(
                f"{files[0]} was to be loaded",
                "config.json says sdquant, and the file does not",
                "Save the model again",
            )
        self._specs = {name: PackedSpec.from_dict(row) for name, row in own["weights"].items()}
        self._found = found_in(files[0], own, self._specs, self._headers)
        for name, found in self._found.items():
            path = name.rpartition(".")[0]
            self._names |= {key: f"{path}.packed_{part}" for part, key in found.keys.items()}
            self._extra |= set(found.extra)
        return [self._names.get(key, key) for key in loaded_keys if key not in self._extra]

    def _process_model_before_weight_loading(
        self, model: nn.Module, keep_in_fp32_modules: list[str] | None = None, **kwargs: Any
    ) -> None:
        from ..quantizer import weights_to_quantize

        self._ties = tied(model)
        if self.pre_quantized:
            for name, found in self._found.items():
                self._stand_in(model, name, found)
            return
        skip = (*self.quantization_config.skip, *(keep_in_fp32_modules or ()))
        self._planned = weights_to_quantize(model, self.spec, "plain", skip)
        if not self._planned:
            raise IncompatibleError(
                f"{self.spec} was asked for on a {type(model).__name__}",
                "it has no weight that would be quantized",
                "Check skip=, or leave quantization_config out",
            )

    def _stand_in(self, model: nn.Module, name: str, found: Found) -> None:
        """An empty quantized layer, so that diffusers finds a place for the parts."""
        from ..install import install_packed

        spec = self._specs[name]
        shape = tuple(model.get_parameter(name).shape)
        if shape != spec.shape:
            raise BadFileError(
                f"Weight {name!r} of {list(spec.shape)} was to be loaded",
                f"the model wants {list(shape)}",
                "Check that the weights and the config belong together",
            )
        parts = {
            part: torch.empty(self._headers[key].shape, dtype=_dtype(self._headers[key]), device="meta")
            for part, key in found.keys.items()
        }
        install_packed(model, self._ties.get(name, (name,)), Packed(spec=spec, parts=parts), "plain")

    def update_missing_keys(self, model: nn.Module, missing_keys: list[str], prefix: str) -> list[str]:
        """Without the markers, which hold nothing."""
        from ..layers.quantized import LIKE

        return [key for key in missing_keys if key.rpartition(".")[2] != LIKE]

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A file's tensors under the names of the parameters."""
        return {self._names.get(key, key): value for key, value in state_dict.items() if key not in self._extra}

    def check_if_quantized_param(
        self, model: nn.Module, param_value: Tensor, param_name: str, state_dict: Mapping[str, Any], **kwargs: Any
    ) -> bool:
        """Whether `create_quantized_param` is to place this one."""
        return param_name in self._planned or (self.pre_quantized and ".packed_" in param_name)

    def check_quantized_param_shape(self, *args: Any, **kwargs: Any) -> bool:
        """The stand-ins were made in the shapes of the files."""
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
        """Place a part of a quantized weight, or quantize a weight."""
        from ..install import install_packed

        if self.pre_quantized:  # as it is in the file: diffusers has cast float parts to the model's dtype
            set_tensor(model, (param_name,), state_dict[param_name].to(target_device))
            return
        packed = encode(param_name, param_value.to(target_device), self.spec)
        install_packed(model, self._ties.get(param_name, (param_name,)), packed, "plain", self.spec)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        from ..layers.quantized import LIKE, QuantizedLayer

        for module in model.modules():
            like = module._parameters.get(LIKE) if isinstance(module, QuantizedLayer) else None
            if like is not None and like.device.type == "meta":
                part = next(tensor for name, tensor in module.named_parameters() if name.startswith("packed_"))
                empty = torch.empty(0, dtype=like.dtype, device=part.device)
                module._parameters[LIKE] = nn.Parameter(empty, requires_grad=False)
        self._model = model
        return model

    def get_state_dict_and_metadata(
        self, state_dict: Mapping[str, Any], safe_serialization: bool = True
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """The tensors and the metadata of the file that `save_pretrained` writes."""
        from ..saving import contents

        assert self._model is not None  # set after loading
        return contents(self._model)

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
        """No: the weights are codes."""
        return False


def _dtype(info: TensorInfo) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, info.dtype)  # one of the names that `read_header` lets through
    return dtype


auto.AUTO_QUANTIZER_MAPPING[METHOD] = Quantizer
auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = Config
