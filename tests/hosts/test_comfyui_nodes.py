"""The nodes as ComfyUI of 2026 is told of them: the V3 schema, and the files beside them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import sdquant
from sdquant.hosts import comfy_schema, comfy_swarm
from sdquant.hosts import host as host_rows
from tools.hosts import comfy_workflows

from .conftest import HERE
from .test_comfyui import theirs, written

FOLDER = Path(host_rows.__file__).parent / "comfyui"


def test_the_v3_schema_says_what_the_old_classes_say(comfy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not comfy_schema.has_v3()
    monkeypatch.syspath_prepend(str(HERE / "comfy_standin_v3"))
    assert comfy_schema.has_v3()
    extension = asyncio.run(comfy_schema.entrypoint())
    asyncio.run(extension.on_load())
    old = comfy_schema.v1_classes()
    new = {row.GET_SCHEMA().node_id: row for row in asyncio.run(extension.get_node_list())}
    assert old.keys() == new.keys() == {row.id for row in comfy_swarm.nodes()}
    for name, node in new.items():
        schema, before = node.GET_SCHEMA(), old[name]
        inputs = before.INPUT_TYPES()
        assert [one.id for one in schema.inputs] == [*inputs["required"], *inputs.get("optional", {})]
        assert [one.display_name for one in schema.outputs] == list(before.RETURN_NAMES)
        assert all(one.tooltip for one in (*schema.inputs, *schema.outputs)) and schema.search_aliases
        assert (schema.category, schema.is_output_node) == (before.CATEGORY, before.OUTPUT_NODE)
        assert hasattr(node, "validate_inputs") is any(one.id == "quantize" for one in schema.inputs)
    save_file({"x_embedder.weight": torch.zeros(4, 4)}, comfy.models / "some.safetensors")
    done = new["SdquantInspect"].execute(model_name="some.safetensors")
    assert done.ui == {"text": list(done.args)} and "some.safetensors" in done.args[0]


def test_the_files_beside_the_nodes_agree_with_them() -> None:
    project = pytest.importorskip("tomllib").loads((FOLDER / "pyproject.toml").read_text())
    assert project["project"]["version"] == sdquant.__version__
    assert {"PublisherId", "DisplayName"} <= project["tool"]["comfy"].keys()
    for path, text in comfy_workflows.written().items():
        assert path.read_text() == text, "run python -m tools.hosts.comfy_workflows"
    rows = {row.id: row for row in comfy_swarm.nodes()}
    for node in [one for nodes in comfy_workflows.WORKFLOWS.values() for one in nodes if one.kind in rows]:
        widgets = [one for one in rows[node.kind].inputs if one.type in ("COMBO", "STRING")]
        assert len(node.widgets) == len(widgets) and node.given.keys() == {
            one.name for one in rows[node.kind].inputs if one not in widgets
        }
    script = (FOLDER / "web" / "show_text.js").read_text()
    assert all((f'"{row.id}"' in script) is row.shows for row in comfy_swarm.nodes())


def test_swarmui_loads_nf4_files_by_the_node_that_it_asks_for(
    comfy: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its workflow generator writes it; where another package has the node, it stays that package's."""
    name = written(comfy, "nf4").name
    nodes = comfy.nodes.NODE_CLASS_MAPPINGS
    (model,) = nodes["UNETLoaderNF4"]().run(unet_name=name, bnb_dtype="nf4")
    (same,) = nodes["SdquantLoadDiffusionModel"]().run(model_name=name)
    assert torch.equal(theirs(model), theirs(same))
    other = SimpleNamespace(NODE_CLASS_MAPPINGS={"UNETLoaderNF4": object}, __spec__=object())
    monkeypatch.setitem(sys.modules, "nodes", other)  # type: ignore[arg-type]
    assert "UNETLoaderNF4" not in comfy_schema.v1_classes()
