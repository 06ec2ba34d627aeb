"""Convert a config to the Request for `load_model`, and to the size of its images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import SettingsError
from ...models import bundled_place
from ...planning import Request, make_request
from .keys import key, keys
from .quantization import quantization_of

if TYPE_CHECKING:
    from .config import RunConfig

_MODEL = "pretrained_model_name_or_path"
_SPECIAL = ("path", "quant")


def request_of(config: RunConfig, **fixed: Any) -> Request:
    """Return the Request of a config.

    Args:
        fixed: values of fields that a config does not have (progress), or that replace its own.

    Raises:
        SdquantError: the config names no model, or its values contradict each other.
    """
    model = config[_MODEL].strip()
    if not model:
        raise SettingsError(
            f"{_MODEL} is not set",
            f"it is {key(_MODEL).help}",
            f"Set it in the file, or add {_MODEL}=digits-sd for example",
        )
    # A key of another command has its default here, whatever the file says.
    values = {
        row.field: config[row.name] if config.command in row.commands else row.default
        for row in keys()
        if row.field and row.field not in _SPECIAL
    }
    quantization = quantization_of(config)
    values |= {"quant": quantization.quant, "rules": quantization.rules, "quant_stats": quantization.quant_stats}
    if values["base"] is not None:
        values["base"] = bundled_place(values["base"])
    return make_request(bundled_place(model), **{**values, **fixed})


def require_command(config: RunConfig, command: str) -> None:
    """Raise SettingsError for a config loaded for another command: its keys were not checked for this one."""
    if config.command != command:
        raise SettingsError(
            f"Cannot use a config loaded for {config.command or 'no command'} to {command}",
            f"each command has its own keys, and this config was not checked for keys that {command} does not use",
            f'Load it with config.load(path, command="{command}")',
        )


def size_of(config: RunConfig) -> tuple[int | None, int | None]:
    """Return width and height in pixels; None for the model's own.

    Raises:
        SettingsError: resolution, width and height are all set.
    """
    width, height, side = config.width, config.height, config.resolution
    if side is not None and width is not None and height is not None:
        raise SettingsError(
            f"Cannot use resolution={side} together with width={width} and height={height}",
            "resolution sets both width and height",
            "Leave resolution out",
        )
    return width or side, height or side
