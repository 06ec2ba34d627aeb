"""The text of the node that describes a file."""

from __future__ import annotations

from ..utils.byte_sizes import size


def file_description(path: str, name: str) -> str:
    """Describe a file by its header, a fact a line."""
    from ..models import detection

    detected = detection.read_headers(path, find_classes=False)
    lines = [
        name,
        f"{detected.family or 'unknown'} {detected.component or ''}, {detected.container}".strip(),
        f"quantization: {f'{detected.quant} ({detected.backend})' if detected.quant else 'none'}",
        f"weights: {size(detected.bytes)} in {detected.tensors} tensors",
        *detected.evidence,
        *(f"warning: {line}" for line in detected.warnings),
    ]
    return "\n".join(lines)
