"""ComfyUI's classes for nodes, made of their rows: with the V3 schema where ComfyUI has it, else as before.

Facts about both: `comfy_api/latest/_io.py` and `execution.py` of ComfyUI 0.33.0, and docs.comfy.org (V3 migration).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import comfy_swarm, display
from .comfy_load import scheme_problem

if TYPE_CHECKING:
    from .comfy_nodes import Input, Node

_CATEGORY = "model/loaders"


def has_v3() -> bool:
    """Return whether the running ComfyUI has the V3 schema."""
    return display.has("comfy_api.latest")


def v1_classes() -> dict[str, type]:
    """Return the classes of all nodes by their ids, as all versions of ComfyUI know them."""
    return {node.id: _v1(node) for node in comfy_swarm.nodes()}


def node_titles() -> dict[str, str]:
    """Return the titles of all nodes by their ids."""
    return {node.id: node.title for node in comfy_swarm.nodes()}


def v3_classes() -> list[type]:
    """Return the classes of all nodes in the V3 schema."""
    return [_v3(node) for node in comfy_swarm.nodes()]


async def entrypoint() -> Any:
    """Return the extension, as ComfyUI asks a package of V3 nodes for it."""
    from comfy_api.latest import ComfyExtension  # type: ignore[import-not-found]

    class Sdquant(ComfyExtension):  # type: ignore[misc]
        async def get_node_list(self) -> list[type]:
            return v3_classes()

    return Sdquant()


def _category() -> str:
    """Return where ComfyUI's own loader is in the menu of this version."""
    if not display.has("nodes"):
        return _CATEGORY
    return str(getattr(getattr(display.module("nodes"), "UNETLoader", None), "CATEGORY", _CATEGORY))


def _is_valid(quantize: str | None = None) -> bool | str:
    """Return True, or why a scheme cannot be used. ComfyUI leaves inputs that are named here to this check, so that a
    workflow of somebody with more libraries, or with options ("nf4,double_quant"), is told of them or runs.
    """
    return (quantize and scheme_problem(quantize)) or True


def _asks_scheme(node: Node) -> bool:
    return any(row.name == "quantize" for row in node.inputs)


def _v1(node: Node) -> type:
    def input_types(cls: type) -> dict[str, Any]:
        groups: dict[str, Any] = {"required": {}}
        for row in node.inputs:
            groups.setdefault("optional" if row.optional else "required", {})[row.name] = _v1_input(row)
        return groups

    def run(self: Any, **inputs: Any) -> Any:
        done = node.run(**inputs)
        if not node.shows:
            return (done,)
        return {"ui": {"text": [done]}, "result": (done,) * len(node.outputs)}

    def validate(cls: type, quantize: str | None = None) -> bool | str:
        return _is_valid(quantize)

    body: dict[str, Any] = {
        "INPUT_TYPES": classmethod(input_types),
        "RETURN_TYPES": tuple(row.type for row in node.outputs),
        "RETURN_NAMES": tuple(row.name for row in node.outputs),
        "OUTPUT_TOOLTIPS": tuple(row.tooltip for row in node.outputs),
        "FUNCTION": "run", "run": run, "OUTPUT_NODE": node.shows, "CATEGORY": _category(),
        "DESCRIPTION": node.summary, "SEARCH_ALIASES": [*node.aliases],
    }  # fmt: skip
    if _asks_scheme(node):
        body["VALIDATE_INPUTS"] = classmethod(validate)
    return type(node.id, (), body)


def _v1_input(row: Input) -> tuple[Any, dict[str, Any]]:
    options: dict[str, Any] = {"tooltip": row.tooltip}
    if row.default is not None:
        options["default"] = row.default
    return (row.type if row.choices is None else row.choices(), options)


def _v3(node: Node) -> type:
    from comfy_api.latest import io

    def define_schema(cls: type) -> Any:
        fields = {
            "node_id": node.id, "display_name": node.title, "category": _category(), "description": node.summary,
            "inputs": [_v3_input(io, row) for row in node.inputs],
            "outputs": [
                getattr(io, row.type.capitalize()).Output(display_name=row.name, tooltip=row.tooltip)
                for row in node.outputs
            ],
            "is_output_node": node.shows, "search_aliases": [*node.aliases],
        }  # fmt: skip
        known = io.Schema.__dataclass_fields__
        return io.Schema(**{name: value for name, value in fields.items() if name in known})

    def execute(cls: type, /, **inputs: Any) -> Any:
        done = node.run(**inputs)
        if not node.shows:
            return io.NodeOutput(done)
        return io.NodeOutput(*(done,) * len(node.outputs), ui={"text": [done]})

    def validate(cls: type, quantize: str | None = None) -> bool | str:
        return _is_valid(quantize)

    body: dict[str, Any] = {"define_schema": classmethod(define_schema), "execute": classmethod(execute)}
    if _asks_scheme(node):
        body["validate_inputs"] = classmethod(validate)
    return type(node.id, (io.ComfyNode,), body)


def _v3_input(io: Any, row: Input) -> Any:
    options: dict[str, Any] = {"optional": row.optional, "tooltip": row.tooltip}
    if row.default is not None:
        options["default"] = row.default
    if row.choices is not None:
        return io.Combo.Input(row.name, options=row.choices(), **options)
    return getattr(io, row.type.capitalize()).Input(row.name, **options)
