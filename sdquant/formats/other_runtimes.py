"""Models that were converted for a runtime of their own, told by their files' names: they are refused by its name."""

from __future__ import annotations

from pathlib import Path

from ..errors import UnsupportedFileError

# By suffix: whose models such files are, and how it is said.
_RUNTIMES = {
    ".onnx": "ONNX Runtime",
    ".engine": "TensorRT",
    ".trt": "TensorRT",
    ".mlmodel": "Core ML",
    ".mlmodelc": "Core ML",
    ".mlpackage": "Core ML",
    ".msgpack": "Flax",
    ".tflite": "TensorFlow Lite",
    ".pte": "ExecuTorch",
}


def runtime_of(path: Path) -> str | None:
    """Return the runtime that a file or folder is a model for; None if its name tells of none.

    OpenVINO has the graph in an .xml file, and the weights in a .bin file of the same name, as torch calls its pickles.
    """
    suffix = path.suffix.lower()
    pair = {".xml": ".bin", ".bin": ".xml"}.get(suffix)
    if pair is not None and path.with_suffix(pair).is_file():
        return "OpenVINO"
    return _RUNTIMES.get(suffix)


def converted_in(folder: Path) -> Path | None:
    """Return the first file in a folder that is a model for another runtime; None if there is none."""
    return next((path for path in sorted(folder.iterdir()) if runtime_of(path) is not None), None)


def converted(path: Path) -> UnsupportedFileError:
    """Return the error for such a model."""
    return UnsupportedFileError(
        f"Cannot load {path}",
        f"it is a model that was converted for {runtime_of(path)}, and runs there alone",
        "Use the original weights, as .safetensors or .gguf",
    )
