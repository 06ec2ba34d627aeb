"""What a config asks `load_model` for, and the size of its pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import SettingsError
from ...planning import bundled_models
from ...planning.request import Request, request
from .keys import key, keys
from .quantization import quantization_of

if TYPE_CHECKING:
    from .config import Config

_MODEL = "pretrained_model_name_or_path"
_SPECIAL = ("path", "quant")


def request_of(config: Config, **fixed: Any) -> Request:
    """The Request of a config.

    Args:
        fixed: values of fields that are not the config's (progress), or instead of it.

    Raises:
        SdquantError: the config names no model, or values that do not go together.
    """
    model = config[_MODEL].strip()
    if not model:
        raise SettingsError(
            f"{_MODEL} is not set", f"it is {key(_MODEL).help}", f"Set it in the file, or add {_MODEL}=digits-sd, say"
        )
    # A key of another command has its default here, whatever the file says.
    values = {
        row.field: config[row.name] if config.command in row.commands else row.default
        for row in keys()
        if row.field and row.field not in _SPECIAL
    }
    asked = quantization_of(config)
    values |= {"quant": asked.quant, "rules": asked.rules, "quant_stats": asked.quant_stats}
    if values["base"] is not None:
        values["base"] = bundled_models.place(values["base"])
    return request(bundled_models.place(model), **{**values, **fixed})


def require_command(config: Config, command: str) -> None:
    """Raise SettingsError for a config of another command: it has not been told which of its keys this one uses."""
    if config.command != command:
        raise SettingsError(
            f"A config that was read for {config.command or 'no command'} was given to {command}",
            "each command uses keys of its own, and what it does not use was not held against it",
            f'Read it with config.load(path, command="{command}")',
        )


def size_of(config: Config) -> tuple[int | None, int | None]:
    """Width and height in pixels; None for the model's own.

    Raises:
        SettingsError: resolution, width and height are set.
    """
    width, height, side = config.width, config.height, config.resolution
    if side is not None and width is not None and height is not None:
        raise SettingsError(
            f"resolution={side}, width={width} and height={height} were set",
            "resolution is both width and height",
            "Leave resolution out",
        )
    return width or side, height or side
