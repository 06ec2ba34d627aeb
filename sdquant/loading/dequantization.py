"""Weights of quantized files as floats, one by one: `sdquant.dequantize(path)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import COMPUTE_DTYPES, LONE, dtype_name
from ..errors import SettingsError
from ..utils.arguments import answered

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..formats import Checkpoint, Given


@answered
def dequantize(
    path: str | Path,
    *,
    config: Given | None = None,
    dtype: str | torch.dtype | None = "float32",
    allow_pickle: bool = False,
    variant: str | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors of a file or folder in any quantized format, dequantized, without loading a model.

        for name, tensor in sdquant.dequantize("flux1-dev-Q4_K.gguf", dtype="bfloat16"): ...
        state_dict = dict(sdquant.dequantize("model-fp8.safetensors"))  # all of it in memory

    It yields pairs, as `named_parameters()` and `state_dict().items()` do: one pass over a file is what conversions,
    comparisons and statistics need, no more than one weight is in memory, and `dict` makes a state dict of it that
    `safetensors.torch.save_file` takes. The headers are read and checked by the call itself, each weight when its turn
    comes. The values are those that the quantized weights have; what quantization has lost does not come back.

    Args:
        path: `.safetensors`, `.gguf`, folder of a component (also in shards), or pipeline folder. It need not be of a
            model that sdquant can load.
        config: where the file or folder says not how it is quantized: a `quantization_config`, or the path of a JSON
            file with one, such as config.json. optimum-quanto's weights below 8 bits need the model's whole config: the
            file does not have their shapes.
        dtype: of all floats: float32, float16 or bfloat16. None for the dtype that each weight was quantized from
            (bfloat16 where that is not recorded) and, of unquantized tensors, the one that they have.
        allow_pickle: also open .ckpt, .pt and .bin files; see `load_model`.
        variant: of the weights in a folder; see `load_model`.

    Returns:
        An iterator of (name, tensor), on the CPU, in the order of the files. Names are those in the file: X.weight for
        a quantized weight, of which no scale or marker is left over. In a pipeline folder they begin with the
        component's name: "unet.conv_in.weight". Tensors that are not floats are yielded as they are. Do not write into
        tensors: those that needed no conversion are mapped from the file.

    Raises:
        MissingComponentError: there is no such file or folder. UnsupportedFileError: it is quantized in a way that
            sdquant does not read, or does not show the shape of a weight. BadFileError: it is damaged; while iterating,
            too. ConflictError: `config` contradicts the file's own. SettingsError: an argument is invalid.
    """
    from ..models import stored_components, with_float_weights

    name = dtype_of(dtype)
    stored = stored_components(path, config=config, allow_pickle=allow_pickle, variant=variant)
    sources = {component: with_float_weights(src, name) for component, src in stored.items()}
    return _tensors(sources)


def dtype_of(dtype: str | torch.dtype | None) -> str | None:
    """Return the name of a dtype for floats.

    Raises:
        SettingsError: it is none that weights are kept in.
    """
    name = dtype if dtype is None or isinstance(dtype, str) else dtype_name(dtype)
    if name is not None and name not in COMPUTE_DTYPES:
        raise SettingsError(
            f"Cannot dequantize to {name}",
            "weights are dequantized to a dtype that models compute in",
            f"Use one of {', '.join(COMPUTE_DTYPES)}",
        )
    return name


def _tensors(sources: Mapping[str, Checkpoint]) -> Iterator[tuple[str, Tensor]]:
    for component, src in sources.items():
        prefix = "" if component == LONE else f"{component}."
        files = src.open()
        try:
            for key in src.tensors:
                yield prefix + key, src.read(files, key)
        finally:
            for file in files.values():
                file.close()
