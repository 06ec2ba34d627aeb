"""A packed weight as ComfyUI sees it: a tensor of the float weight's shape and dtype.

ComfyUI detects the model of a state dict by its shapes, counts its parameters, renames them, and for some models
rewrites weights. So a packed weight is passed as a tensor. The layers of `comfy_ops` take the packed tensors out of it;
any other use of its values dequantizes it first, which is correct but takes more memory. Writing into it is an error.
"""

from __future__ import annotations

from typing import ClassVar

from ..nn import packed_tensor


class ComfyPackedTensor(packed_tensor.PackedTensor):
    """Packed weight in a state dict, with error texts for ComfyUI."""

    way_out: ClassVar[str] = (
        "Remove the node that changes weights (such as a LoRA by hooks), or load the model without sdquant"
    )
    way_out_of_fusing: ClassVar[str] = way_out


class Counted(ComfyPackedTensor):
    """Packed weight in a layer's state dict, which reports its packed size in bytes: ComfyUI plans its offload by that.

    (ComfyUI reads `nbytes`; before 2026, `nelement() * element_size()`.)
    """

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Return the size of the packed tensors in bytes."""
        return self.packed.nbytes

    def nelement(self) -> int:
        """Return a number of elements whose size is at least that of the packed tensors."""
        return -(-self.packed.nbytes // self.element_size())
