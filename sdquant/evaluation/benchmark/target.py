"""Find the component that is measured: the UNet or transformer of a model, alone if its files allow it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from ...core import LONE, MAIN
from ...errors import UnsupportedFileError
from ...formats import main_dtype
from ...planning import NOT_QUANTIZED, Request, prepare
from .specs import ModelUnderTest

if TYPE_CHECKING:
    from ...formats import Checkpoint
    from ...planning import Plan


def find_model(request: Request) -> ModelUnderTest:
    """Return the target for a request for the model as found.

    Raises:
        SdquantError: as `preparation.prepare`; or the model has no UNet or transformer.
    """
    plan = prepare(request)
    request = dataclasses.replace(request, path=plan.path, base=plan.base, revision=None, subfolder=None, token=None)
    name, src = _main(plan)
    pipeline: Request | None = request
    folder = Path(request.path) / name
    if plan.detected.container == "pipeline" and request.base is None and (folder / "config.json").is_file():
        request = dataclasses.replace(request, path=str(folder), components=None, parts=())
        plan = prepare(request)
        name, src = _main(plan)
    else:
        folder = Path(request.path)
        folder = folder if folder.is_dir() else folder.parent
    if name == LONE and pipeline is request:
        pipeline = None
    part = next(one for one in plan.components if one.name == name)
    return ModelUnderTest(
        asked=request,
        pipeline=pipeline,
        class_name=src.class_name or "",
        config=src.config or {},
        dtype=plan.dtype or main_dtype(src) or "float32",
        scheme=part.scheme,
        bytes=part.bytes,
        folder=folder if (folder / "config.json").is_file() else None,
        device=plan.device,
    )


def _main(plan: Plan) -> tuple[str, Checkpoint]:
    sources = plan.detected.sources
    name = next((one for one in (*MAIN, LONE) if one in sources), None)
    if name is None:
        raise UnsupportedFileError(
            f"Cannot measure {plan.path}",
            f"it has {', '.join(sources)}, but neither a UNet nor a transformer",
            "Use a pipeline, or a UNet or transformer",
        )
    return name, sources[name]


def request_for(target: ModelUnderTest, quant: str | None, **changes: str | None) -> Request:
    """Return the request for one scheme; None is the model as found."""
    return dataclasses.replace(target.asked, quant=quant, progress=False, **changes)  # type: ignore[arg-type]


def is_float(quant: str | None) -> bool:
    """Return whether a scheme leaves the model unquantized."""
    return quant is None or quant.strip().lower() == NOT_QUANTIZED
