"""A few values of each layer's weight, in a file of statistics: they tell whether it is about a model's own weights.

Weights in another dtype, quantized ones, and those of a fine-tuned model are near, and so is what their layers get.
Weights of another training have nothing to do with them, and statistics of their inputs do harm.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING

from ..errors import SettingsError
from .statistics_file import SAMPLE, component_in, names_in, read_tensor

if TYPE_CHECKING:
    from torch import Tensor, nn

_ROWS, _COLUMNS = 4, 16
_LAYERS = 12  # of a component that are compared, evenly spaced: a layer whose rows a file has reordered is outvoted
# |v - w|^2 over the larger of |v|^2 and |w|^2, in the median layer. Two trainings come to 2, a fourth of the sign to 1;
# rounding to float8 to 0.001, to 4 bits to 0.01, to 2 bits to 0.1 or 0.2.
_OTHER, _FAR = 0.5, 0.03


def samples_of(models: Mapping[str, nn.Module], paths: Container[str]) -> dict[str, Tensor]:
    """Return the samples of the linear and convolution layers in some models, by their names in the file.

    Args:
        models: by component. paths: "<component>.<path>" of the layers that count.
    """
    samples = {}
    for component, model in models.items():
        state = model.state_dict()  # has the weights that an offload mode keeps elsewhere, which is suspended once
        for path, _ in model.named_modules():  # layers of rules among them, which compute in ways of their own
            name = f"{component}.{path}".rstrip(".")
            weight = state.get(f"{path}.weight".lstrip(".")) if name in paths else None
            if weight is not None and weight.ndim > 1 and weight.device.type != "meta":
                samples[f"{name}{SAMPLE}"] = sample(weight)
    return samples


def sample(weight: Tensor) -> Tensor:
    """Return the first values of a few rows of a weight: float32, on the CPU."""
    import torch

    count = min(len(weight), _ROWS)
    rows = [weight[number * len(weight) // count].flatten()[:_COLUMNS] for number in range(count)]
    return torch.cat([weight.new_empty(0), *rows]).detach().float().cpu()


def refuse_other_weights(
    file: str, component: str, names: Container[str], read: Callable[[str], Tensor]
) -> tuple[str, ...]:
    """Return a sentence if a model's weights are far from those that a file of statistics is about; () if they are
    near, or the file does not say.

    Args:
        component: see `statistics_file.component_in`. names: of the weights. read: returns one by its name.

    Raises:
        SettingsError: they have nothing to do with each other.
    """
    distances = sorted(_distances(file, component, names, read))
    if not distances:
        return ()
    median = distances[(len(distances) - 1) // 2]
    what = f"the {component}" if component else "this model"
    if median >= _OTHER:
        raise SettingsError(
            f"Cannot use quant_stats={file!r} for {what}",
            f"it was calibrated with other weights: the values that it keeps of {len(distances)} layers have nothing "
            "to do with those of the model",
            "Calibrate this model: sdquant calibrate MODEL --prompt ... -o FILE; or name the file that was made of it",
        )
    if median < _FAR:
        return ()
    return (
        f"quant_stats was calibrated with weights that are {100 * median**0.5:.0f}% away from those of {what}, as a "
        "fine-tuned model's are, or those of a copy in 2 or 3 bits: calibrating this model may give better results",
    )


def _distances(file: str, component: str, names: Container[str], read: Callable[[str], Tensor]) -> list[float]:
    """Return how far the weights of some layers are from those that the file is about: 0 if they are the same."""
    from .core.static_range import spellings

    component = component_in(file, component)
    prefix = f"{component}." if component else ""
    paths = sorted(
        name.removeprefix(prefix).removesuffix(SAMPLE)
        for name in names_in(file)
        if name.endswith(SAMPLE) and name.startswith(prefix)
    )
    weights = [(path, name) for path in paths if (name := _name_in(names, spellings(path))) is not None]
    distances = []
    for path, name in weights[:: -(-len(weights) // _LAYERS) or 1]:
        known, own = read_tensor(file, f"{prefix}{path}{SAMPLE}").double(), sample(read(name)).double()
        if known.shape != own.shape:
            continue  # a layer of another size, which is refused by those who need it
        most = max(float(known.square().sum()), float(own.square().sum()))
        distance = float((known - own).square().sum()) / most if most else 0.0
        if distance == distance:  # not NaN: weights that are not finite are refused elsewhere
            distances.append(distance)
    return distances


def _name_in(names: Container[str], paths: list[str]) -> str | None:
    return next((f"{path}.weight" for path in paths if f"{path}.weight" in names), None)
