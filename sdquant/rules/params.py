"""`quantize_params`: quantize float weights for a template, all at once or a few at a time (Qwix's ptq.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core import RANGE_BUFFER, is_range
from ..errors import SettingsError
from ..models import missing_parameters, set_tensor
from ..nn import LIKE_KEY, PACKED_PREFIX, QuantizedLayer
from ..utils.malloc_trim import Trimmer, trim
from . import product_ranges
from .core.static_range import of_operand, operand, static_range
from .interception import marks
from .packed_layout import ACT_SHAPE
from .packed_qarray import encode
from .providers.ptq import rule_of_layer
from .qconfig import OPERATIONS
from .quant_spec import operation_of
from .statistics_file import SAMPLE

if TYPE_CHECKING:
    from .core.static_range import StaticRange
    from .qconfig import QuantizationRule

_trimmer = Trimmer()  # of all calls: a model is often quantized weight by weight
_TOGETHER = "Check that the weights and the template belong to the same model"


class ParamTypeError(SettingsError, TypeError):
    """A parameter that is not a tensor, or of another size."""


class UnknownParamError(SettingsError, ValueError):
    """A parameter, or statistics, that the template does not have."""


class MissingStatisticsError(SettingsError, ValueError):
    """A layer, or product, for which calibration saw no data."""


def quantize_params(
    fp_params: Mapping[str, Tensor],
    template: nn.Module,
    quant_stats: Mapping[str, Tensor] | None = None,
    allow_extra_params: bool = False,
) -> dict[str, Tensor]:
    """Quantize float parameters as the template's layers require. The model is not run.

    Quantizing in subsets gives the same bits as all at once.

    Args:
        fp_params: by the names of the float model's state dict; all of it or a part.
        template: of `quantize_model(model, PtqProvider(rules))`, on the meta device or not. It is not changed.
        quant_stats: of calibration. The result includes the static ranges of all layers that it names.
        allow_extra_params: skip parameters that the template does not have, instead of raising.

    Returns:
        Tensors by the names of the template's state dict: `template.load_state_dict(..., strict=False, assign=True)`
        or `assign`.

    Raises:
        ParamTypeError (a TypeError): a value is not a tensor, or not of the template's size.
        UnknownParamError (a ValueError): the template has no such parameter.
        MissingStatisticsError (a ValueError): statistics of a layer that saw no data.
    """
    known = template.state_dict(keep_vars=True)
    quantized: dict[str, Tensor] = {}
    for name, value in fp_params.items():
        if not isinstance(value, Tensor):
            raise ParamTypeError(
                f"Cannot quantize parameter {name!r}", f"it is not a tensor but {type(value)}", "Pass a state dict"
            )
        layer = layer_of(template, name)
        if layer is not None:
            quantized |= _quantized(name, value, layer)
            _trimmer.add(value.nbytes)
        elif name in known:
            if value.shape != known[name].shape:
                raise _misfit(name, value, tuple(known[name].shape))
            quantized[name] = value
        elif not allow_extra_params:
            raise UnknownParamError(
                f"Cannot quantize parameter {name!r}", "it was not found in the template", _TOGETHER
            )
    return quantized | _static(template, quant_stats or {}, allow_extra_params)


def assign(template: nn.Module, params: Mapping[str, Tensor]) -> None:
    """Put the result of `quantize_params` into the template, without a copy."""
    for name, value in params.items():
        path, _, short = name.rpartition(".")
        module = template.get_submodule(path)
        if RANGE_BUFFER.fullmatch(short):
            product_ranges.register_ranges(template, {name: value})
        elif isinstance(module, QuantizedLayer) and short.startswith(PACKED_PREFIX):
            part = short.removeprefix(PACKED_PREFIX)
            module.set_part(part, value)
            if part == "act_scale":
                module.spec = replace(module.spec, details={**module.spec.details, ACT_SHAPE: list(value.shape)})
        else:
            set_tensor(template, (name,), value)


def load_params(
    template: nn.Module, files: Iterable[str | Path], quant_stats: Mapping[str, Tensor] | None = None
) -> None:
    """Quantize a checkpoint into a template, tensor by tensor from disk: one float weight is in memory at a time.

    Args:
        files: safetensors files, which together hold the float model's parameters.

    Raises:
        SettingsError: as of `quantize_params`; or a parameter is in none of the files. BadFileError: a damaged file.
    """
    from ..formats import SafetensorsFile

    for file in files:
        opened = SafetensorsFile(Path(file))
        try:
            for name in opened.tensors:
                assign(template, quantize_params({name: opened.get(name)}, template))
        finally:
            opened.close()
            trim()
    assign(template, quantize_params({}, template, quant_stats))
    require_complete(template)


def missing_params(template: nn.Module, params: Iterable[str] = ()) -> list[str]:
    """Return the float model's parameters that neither the template has values for nor `params` (the names in a result
    of `quantize_params`) contains, and missing static ranges as "<path>.<operation>0_lhs"."""
    provided, names = set(params), []
    for name in missing_parameters(template):
        path, _, short = name.rpartition(".")
        if name in provided or short == LIKE_KEY:
            continue
        layer = template.get_submodule(path)
        if not isinstance(layer, QuantizedLayer) or not short.startswith(PACKED_PREFIX):
            names.append(name)
        elif short.startswith(PACKED_PREFIX + "act_"):
            names.append(operand(path, operation_of(layer.spec.shape)))
        else:
            names.append(f"{path}.weight")
    names += _missing_products(template, provided)
    return list(dict.fromkeys(names))


def _missing_products(template: nn.Module, provided: set[str]) -> list[str]:
    """Name each rule whose products have no range at all: a template does not know which modules multiply."""
    known = [key for key in provided | set(template.state_dict(keep_vars=True)) if is_range(key)]
    names: dict[QuantizationRule, str] = {}
    served = set()
    for path, mark in marks(template).items():
        for operation, rule in mark.rules.items():
            if rule.act_static_scale and mark.statistics is None:
                prefix = f"{path}.{OPERATIONS[operation]}".lstrip(".")
                names.setdefault(rule, f"{prefix}0_lhs")
                if any(key.startswith(prefix) for key in known):
                    served.add(rule)
    return [name for rule, name in names.items() if rule not in served]


def require_complete(template: nn.Module, params: Iterable[str] = ()) -> None:
    """Raise SettingsError if something is missing; see `missing_params`."""
    names = missing_params(template, params)
    if names:
        raise SettingsError(
            "Cannot fill the template",
            f"{len(names)} of its parameters or static ranges are missing, the first of them {names[0]!r}",
            "Pass the rest of the state dict, or quant_stats",
        )


def layer_of(template: nn.Module, name: str) -> QuantizedLayer | None:
    """Return the quantized layer whose float weight is called `name`, or None."""
    path, _, short = name.rpartition(".")
    if short != "weight":
        return None
    try:
        module = template.get_submodule(path)
    except AttributeError:  # no such module
        return None
    return module if isinstance(module, QuantizedLayer) else None


def _quantized(name: str, value: Tensor, layer: QuantizedLayer) -> dict[str, Tensor]:
    path = name.removesuffix("weight")
    if value.numel() != torch.Size(layer.spec.shape).numel():
        raise _misfit(name, value, layer.spec.shape)
    packed = encode(value.detach().reshape(layer.spec.shape), rule_of_layer(layer))
    tensors = {f"{path}{PACKED_PREFIX}{part}": tensor for part, tensor in packed.parts.items()}
    if LIKE_KEY in layer._parameters:
        tensors[path + LIKE_KEY] = torch.empty(0, dtype=value.dtype, device=value.device)
    return tensors


def _static(template: nn.Module, statistics: Mapping[str, Tensor], allow_extra: bool) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    marked = marks(template)
    for prefix in sorted({name.rpartition(".")[0] for name in statistics if not name.endswith(SAMPLE)}):
        path, _, short = prefix.rpartition(".")
        mark = marked.get(path)
        rule = None if mark is None else product_ranges.static_rule(mark.report.rules, path, short)
        if rule is not None:
            tensors |= product_ranges.buffers(prefix, _found(of_operand, statistics, prefix, rule))
            continue
        try:
            layer = template.get_submodule(path)
        except AttributeError:
            layer = None
        if not isinstance(layer, QuantizedLayer) or not rule_of_layer(layer).act_static_scale:
            if allow_extra:
                continue
            raise UnknownParamError(
                f"Cannot use quant_stats of {prefix!r}", "the template has no static range there", _TOGETHER
            )
        of_layer = operation_of(layer.spec.shape), rule_of_layer(layer)
        static = _found(static_range, statistics, path, *of_layer)
        tensors[f"{path}.{PACKED_PREFIX}act_scale"] = static.scale
        if static.zero_point is not None:
            tensors[f"{path}.{PACKED_PREFIX}act_zero_point"] = static.zero_point
    return tensors


def _found(find: Callable[..., StaticRange], *arguments: Any) -> StaticRange:
    """Call `find`, and raise its SettingsError as a MissingStatisticsError."""
    try:
        return find(*arguments)
    except SettingsError as error:
        raise MissingStatisticsError(error.what, error.why, error.fix) from None


def _misfit(name: str, value: Tensor, expected: tuple[int, ...]) -> ParamTypeError:
    return ParamTypeError(
        f"Cannot quantize parameter {name!r}",
        f"its shape is {list(value.shape)}, but the template expects {list(expected)}",
        _TOGETHER,
    )
