"""Describe a model in memory as the planner describes one on disk, so that both are planned by the same rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import LONE, NO_OFFLOAD, TensorInfo
from ..formats import Checkpoint
from ..models import Detected, fitting
from ..offload import mode_named
from .component_files import ModelFiles
from .resolve import Resolved

if TYPE_CHECKING:
    from torch import nn

    from .request import Request


def source_of_model(model: nn.Module) -> Checkpoint:
    """Return the parameters of a model as a source without files. Only shapes, dtypes and layer types are read."""
    from ..models import tied

    ties = tied(model)
    tensors = {
        name: TensorInfo(
            dtype=str(row.dtype).removeprefix("torch."), shape=tuple(row.shape), nbytes=row.numel() * row.element_size()
        )
        for name, row in model.named_parameters()
        if ties[name][0] == name
    }
    kind = type(model).__name__
    return Checkpoint(
        path=Path(kind),
        files=(),
        tensors=tensors,
        home={},
        prequantized={},
        class_name=kind,
        layers=fitting.layers_of(model, ties),
    )


def resolve_loaded(what: str, parts: Mapping[str, nn.Module], request: Request, device: str) -> Resolved:
    """Return a request for loaded components as the planner takes it.

    Args:
        what: the name of the model in messages. parts: its components by name.
    """
    sources = {name: source_of_model(part) for name, part in parts.items()}
    detected = Detected(
        path=what, container="component" if set(parts) == {LONE} else "pipeline", family=None, component=None,
        quant=None, backend=None, prequantized=False, evidence=[], suffix_hint=None, types={}, sources=sources,
        tensors=sum(len(src.tensors) for src in sources.values()),
        bytes=sum(src.weight_bytes for src in sources.values()),
    )  # fmt: skip
    return Resolved(
        request=request, files=ModelFiles(path=what, base=None, detected=detected), detected=detected, device=device,
        dtype=None, specs=request.specs, offload_mode=mode_named(NO_OFFLOAD), budget=None,
    )  # fmt: skip
