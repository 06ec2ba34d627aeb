"""The "Quantization" section of the host's settings: built from `sdquant.settings`, and stored by the host."""

from __future__ import annotations

import functools
import html
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..compat import hardware, requirements
from ..core import registry
from ..errors import BackendUnavailableError, IncompatibleError, SdquantError
from ..planning import NOT_QUANTIZED, fields
from ..settings import Field, Settings
from . import display

if TYPE_CHECKING:
    from .host import Host

SECTION = ("sdquant", "Quantization")
_RULES = "rules"  # is in no list, nor is "none", which is "as found" here
PREFIX = "sdquant_"
# With these, LoRAs, ControlNets and the like do what they do on the original model (docs/web-uis.md: 0.999 and 0.98).
# Of each size the first whose package is there.
ADVISED = {"8 bits": ("int8", "int8_row"), "4 bits": ("sdnq-uint4", "w4a8")}
# Set once the old options of SD.Next were read in, so that what is changed here later stays.
IMPORTED = PREFIX + "imported"
# The options that SD.Next had until March 2026. It keeps what stands in its config, and reads nothing of it.
_OLD = ("bnb_", "quanto_", "optimum_quanto_", "nncf_")


def key_of(field: Field) -> str:
    """Return the host's name for a setting."""
    return PREFIX + field.name.replace(".", "_")


def add(host: Host, onchange: Callable[[], object]) -> None:
    """Add the section to the host's settings.

    Args:
        onchange: called after one of them was changed to a valid value.
    """
    shared = display.module("modules.shared")
    _note(shared, "about", _about(host))
    for row in host.fields():
        shared.opts.add_option(key_of(row), _option(shared, row, onchange))
    _note(shared, "theirs", _theirs(host))
    lacking = _lacking()
    if lacking:
        _note(shared, "lacking", lacking)


def read(host: Host) -> Settings:
    """Return the settings that the host stores, with defaults for those that the host decides itself.

    Raises:
        SdquantError: a stored value is not valid.
    """
    data = display.module("modules.shared").opts.data
    values = {}
    for row in host.fields():
        stored = data.get(key_of(row))
        if stored is not None:  # a host keeps only what differs from the default
            values[row.name] = row.parse(stored)
    return Settings(values)


def import_old(host: Host) -> tuple[str, ...]:
    """Import, once, SD.Next's former options for bitsandbytes, quanto and NNCF, which it no longer has.

    Returns:
        Sentences on the options that were imported and those that were not.
    """
    data = display.module("modules.shared").opts.data
    known = {row.name: row for row in host.fields()}
    old = {name: value for name, value in data.items() if name.startswith(_OLD)}
    if host.name != "sdnext" or not old or IMPORTED in data or any(key_of(row) in data for row in known.values()):
        return ()
    from ..settings import sdnext

    result = sdnext.read(json.dumps(old))
    refused = []
    for name, value in result.settings.to_dict().items():
        if name in known:
            try:
                _require_package(known[name], value)
            except BackendUnavailableError as error:  # no model would load
                refused.append(f"{known[name].label} stays as it is. {error}")
                continue
            data[key_of(known[name])] = known[name].shown(value)
    data[IMPORTED] = True
    left = (f"SD.Next's {name} was not imported: {why}" for name, why in result.left)
    return (*(f"SD.Next's {name} was read, see Quantization" for name in result.taken), *refused, *left)


def _require_package(row: Field, value: Any) -> None:
    """Check that the package of a scheme is installed.

    Raises:
        BackendUnavailableError: it is missing or too old.
        IncompatibleError: it is that of rules.
    """
    if row.kind == "scheme" and isinstance(value, str) and value != NOT_QUANTIZED:
        if registry.parse(value).scheme.name == _RULES:
            why = "the settings of a web UI have no list of rules"
            raise IncompatibleError("Cannot quantize to rules here", why, "Choose a scheme, or run: sdquant quantize")
        requirements.require(registry.parse(value).scheme, "post", "plain", hardware.versions())


def _option(shared: Any, row: Field, onchange: Callable[[], object]) -> Any:
    """Create the host's OptionInfo, with arguments that A1111, Forge and SD.Next all have."""
    import gradio

    default = row.shown(row.default)
    component: Any = gradio.Textbox
    args: Any = None
    if row.kind == "switch":
        component = gradio.Checkbox
    elif row.kind == "choice":
        component, args = gradio.Radio, {"choices": list(row.choices)}
    elif row.kind == "scheme":
        component, args = gradio.Dropdown, _choices(shared, row)
    option = shared.OptionInfo(
        default if row.kind == "switch" else str(default),
        row.label,
        component,
        args,
        onchange=functools.partial(_changed, shared, row, onchange),
        section=SECTION,
    )
    option.info(html.escape(row.help))
    return option


def _changed(shared: Any, row: Field, onchange: Callable[[], object]) -> None:
    """Validate a changed setting; called by the host. On an error, the host shows it and restores the old value.

    Only the single value can be checked: settings that are changed together are set one after the other.
    """
    try:
        value = row.parse(shared.opts.data.get(key_of(row), row.shown(row.default)))
        Settings({row.name: value})
        _require_package(row, value)
    except SdquantError as error:
        raise display.expected(error) from error
    onchange()


def _choices(shared: Any, row: Field) -> Callable[[], Mapping[str, Any]]:
    """Return a function for the choices of a list, including the current value: it may be a scheme with options."""

    def choices() -> Mapping[str, Any]:
        value = shared.opts.data.get(key_of(row))
        gone = {name for names in _without_package().values() for name in names}
        choices = [name for name in row.choices if name not in (*gone, _RULES, NOT_QUANTIZED)]
        first = _advised().values()
        choices[1:] = sorted(choices[1:], key=lambda name: name not in first)  # the first is "as found"
        more = [value] if isinstance(value, str) and value and value not in choices else []
        return {"choices": [*choices, *more]}

    return choices


def _note(shared: Any, name: str, text: str) -> None:
    """Add a text between the settings: an option without a label is one in every host."""
    import gradio

    option = shared.OptionInfo(text, "", gradio.HTML, section=SECTION)
    option.do_not_save = True  # A1111 and Forge keep values by this; SD.Next keeps only what differs from the default
    shared.opts.add_option(PREFIX + name, option)


def _about(host: Host) -> str:
    title = html.escape(host.title)
    rows = "".join(f"<li>{html.escape(text)}.</li>" for text in host.can)
    rows += "".join(f"<li><b>Not here:</b> {html.escape(text)}.</li>" for text in host.cannot)
    head = f"Choose a scheme for a part of the model: {title} uses it from the next model that it loads."
    advice = " or ".join(f"<code>{html.escape(name)}</code> ({size})" for size, name in _advised().items())
    keeps = f" For use with LoRAs and ControlNets take {advice}, which change least of what these do." if advice else ""
    return f"<p>{head} The tab sdquant shows what became of it.{keeps}</p><ul>{rows}</ul>"


def _advised() -> dict[str, str]:
    """Return the scheme to take here, by size."""
    usable = {row.name for row in requirements.usable(hardware.versions())}
    names_by_size = {size: next((name for name in names if name in usable), None) for size, names in ADVISED.items()}
    return {size: name for size, name in names_by_size.items() if name is not None}


def _without_package() -> dict[str, list[str]]:
    """Return the names of the schemes whose package is missing or too old here, by what to run."""
    versions = hardware.versions()
    usable = {row.name for row in requirements.usable(versions)}
    schemes: dict[str, list[str]] = {}
    for row in registry.schemes():
        line = requirements.pip_line(row.codec)
        if row.on_the_fly and row.name not in usable and line is not None:
            schemes.setdefault(line, []).append(row.name)
    return schemes


def _lacking() -> str:
    rows = "".join(
        f"<li>{html.escape(', '.join(names))}: <code>{html.escape(line)}</code></li>"
        for line, names in _without_package().items()
    )
    return (
        f"<p>Not in the lists, because their package is missing here, and how to get it:</p><ul>{rows}</ul>"
        if rows
        else ""
    )


def _theirs(host: Host) -> str:
    labels = {row.name: row.label for row in fields()}
    rows = "".join(f"<li>{html.escape(labels[name])}: {html.escape(text)}</li>" for name, text in host.theirs.items())
    return f"<p>Not to be chosen here, because {html.escape(host.title)} decides:</p><ul>{rows}</ul>"
