"""The V3 schema as custom nodes use it, with the signatures of ComfyUI 0.33.0 (783545f6, `comfy_api/latest/_io.py`)."""

from dataclasses import dataclass, field
from types import SimpleNamespace


class Input:
    def __init__(self, id, display_name=None, optional=False, tooltip=None, lazy=None, extra_dict=None, raw_link=None,
                 advanced=None):  # fmt: skip
        self.id, self.optional, self.tooltip = id, optional, tooltip


class WidgetInput(Input):
    def __init__(self, id, display_name=None, optional=False, tooltip=None, lazy=None, default=None, socketless=None):
        super().__init__(id, display_name, optional, tooltip, lazy)
        self.default = default


class ComboInput(WidgetInput):
    def __init__(self, id, options=None, display_name=None, optional=False, tooltip=None, lazy=None, default=None):
        super().__init__(id, display_name, optional, tooltip, lazy, default)
        self.options = options


class Output:
    def __init__(self, id=None, display_name=None, tooltip=None, is_output_list=False):
        self.id, self.display_name, self.tooltip = id, display_name, tooltip


@dataclass
class Schema:
    node_id: str
    display_name: str = None
    category: str = "sd"
    inputs: list = field(default_factory=list)
    outputs: list = field(default_factory=list)
    hidden: list = field(default_factory=list)
    description: str = ""
    search_aliases: list = field(default_factory=list)
    is_output_node: bool = False


class NodeOutput:
    def __init__(self, *args, ui=None, expand=None, block_execution=None):
        self.args, self.ui = args, ui


class ComfyNode:
    @classmethod
    def GET_SCHEMA(cls):
        return cls.define_schema()


class ComfyExtension:
    async def on_load(self):
        return None


def _type(input_class):
    return SimpleNamespace(Input=input_class, Output=Output)


io = SimpleNamespace(
    Schema=Schema, ComfyNode=ComfyNode, NodeOutput=NodeOutput, Combo=_type(ComboInput), String=_type(WidgetInput),
    Model=_type(Input), Clip=_type(Input),
)  # fmt: skip
