"""The one place that imports OpenVINO."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from ...utils.no_telemetry import no_telemetry


@cache
def library() -> Any:
    """Import OpenVINO and return what is used of it: `ov`, `ops` (an opset), `FrontEndManager`, `ConversionExtension`,
    `ModuleExtension`, `Decoder` (of traced models)."""
    with no_telemetry():
        ov: Any = import_module("openvino")  # by name, as it ships no types
        frontend: Any = import_module("openvino.frontend")
        pytorch: Any = import_module("openvino.frontend.pytorch")
        decoder: Any = import_module("openvino.frontend.pytorch.ts_decoder")
        ops: Any = import_module("openvino.opset13")
    return SimpleNamespace(
        ov=ov,
        ops=ops,
        FrontEndManager=frontend.FrontEndManager,
        ConversionExtension=pytorch.ConversionExtension,
        ModuleExtension=pytorch.ModuleExtension,
        Decoder=decoder.TorchScriptPythonDecoder,
    )


@cache
def core() -> Any:
    """Return OpenVINO's runtime, one per process."""
    return library().ov.Core()
