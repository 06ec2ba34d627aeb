"""Z-Image, as ComfyUI names it and all single files have it: Lumina's names. Its authors published it for diffusers."""

from __future__ import annotations

from collections.abc import Iterator

from .rows import OutputTensor, Rows, Shapes, of_blocks, of_rows

_PATCH = "2-1"  # pixels and frames of a patch; the published models have one kind
_FINAL = "final_layer."
_Z_IMAGE: Rows = (
    ("x_pad_token", "x_pad_token"),
    ("cap_pad_token", "cap_pad_token"),
    ("x_embedder.*", f"all_x_embedder.{_PATCH}.*"),
    (f"{_FINAL}linear.*", f"all_{_FINAL}{_PATCH}.linear.*"),
    (f"{_FINAL}adaLN_modulation.1.*", f"all_{_FINAL}{_PATCH}.adaLN_modulation.1.*"),
    *((f"{name}.*", f"{name}.*") for name in ("t_embedder.mlp.0", "t_embedder.mlp.2", "cap_embedder.0")),
    ("cap_embedder.1.*", "cap_embedder.1.*"),
)
_BLOCK: Rows = (
    ("attention.qkv.*", "attention.to_q.*", "attention.to_k.*", "attention.to_v.*"),
    ("attention.out.*", "attention.to_out.0.*"),
    ("attention.q_norm.*", "attention.norm_q.*"),
    ("attention.k_norm.*", "attention.norm_k.*"),
    *((f"feed_forward.w{i}.*", f"feed_forward.w{i}.*") for i in (1, 2, 3)),
    *((f"{part}_norm{i}.*", f"{part}_norm{i}.*") for part in ("attention", "ffn") for i in (1, 2)),
    ("adaLN_modulation.0.*", "adaLN_modulation.0.*"),
)


def z_image(shapes: Shapes) -> Iterator[OutputTensor]:
    yield from of_rows(shapes, _Z_IMAGE, "", "")
    for name in ("noise_refiner", "context_refiner", "layers"):
        yield from of_blocks(shapes, _BLOCK, name, name)
