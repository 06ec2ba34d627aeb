"""Peak memory of a network's activations, besides its weights, computed without weights and without memory.

    of_pipeline(pipe)                 every component, from one image made with fake tensors: shapes only, no weights;
                                      and the operations of the calls (`work`)
    of_component(unet)                the same of a UNet or transformer without its pipeline, for a step
    with measured(pipe) as peaks:     the peaks of what really runs, at the price of some microseconds an operation
        pipe("a handwritten seven")

Both follow each storage from the operation that allocates it to its last reference. Memory that a kernel allocates
inside is not visible; where that is much, `_workspace` estimates what it frees before it returns, and `_kernel` what
libraries keep from then on.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from ..errors import SettingsError
from ..kernels import onednn
from . import dummy_inputs
from .call_hooks import ENTRIES, announce, wrap
from .op_counts import Work, product
from .pipelines import components_of

log = logging.getLogger(__name__)


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that are allocated while it is active.

    A storage that is an operation's input but no operation's output existed before: weights and inputs. A view shares
    the storage of its base.

    Args:
        work: collects what the operations compute, if not None.
        names: names of weights, by the address of their storage.

    Attributes:
        live, peak: bytes that are allocated now, and their maximum so far.
        kernels: bytes that libraries keep from then on, by what they are for.
    """

    def __init__(self, work: Work | None = None, names: Mapping[int, str] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self._made = 0
        self.kernels: dict[object, int] = {}
        self._work, self._names = work, names or {}
        self._known: dict[int, tuple[Any, int]] = {}  # by address: a weak reference, and the bytes that it counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._know(tensor, new=False)
        out, before = func(*args, **kwargs), self._made
        for tensor in _tensors(out):
            self._know(tensor, new=True)
        self.peak = max(self.peak, self.live + _workspace(func, args, out))
        self.kernels.update(_kernel(func, args))
        if self._work is not None:
            weights = (self._names.get(tensor.untyped_storage()._cdata) for tensor in _tensors(args))
            self._work.add(product(func, args, out, next(filter(None, weights), None)), self._made - before)
        return out

    def _know(self, tensor: Tensor, *, new: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        nbytes = storage.nbytes() if new else 0
        self._known[key] = weakref.ref(storage, lambda _: self._gone(key)), nbytes
        self.live += nbytes
        self._made += nbytes
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int) -> None:
        self.live -= self._known.pop(key)[1]


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors that have a storage. Wrapper tensors are skipped: the tensors inside count themselves."""
    for leaf in tree_iter(tree):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not _wraps(leaf):
            yield leaf


def _wraps(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ and hasattr(tensor, "__tensor_flatten__")


def _workspace(func: Any, args: Any, out: Any) -> int:
    """Return the bytes that a kernel allocates besides its output, if they are many.

    oneDNN's convolutions on the CPU copy an input and a weight that are not channels_last into its own blocked order, a
    16-bit input of 1x1 twice; the output is made in that order first (seen with torch 2.13's memory profiler; 1x1 in
    float32 is a plain product). Blocks are of 16 channels, which matters below that, and is left out here. With AMX
    oneDNN has other kernels for 16 bits that take up to 1.4 times as much here, and for 1x1 less; these are not known
    well enough to predict. If oneDNN has none for 16 bits (AVX2 only), torch materializes the im2col patches of all
    images at once, and copies an input that is channels_last.
    """
    if func is not torch.ops.aten.convolution.default or args[0].device.type != "cpu":
        return 0
    x, weight = args[0], args[1]
    point = all(side == 1 for side in weight.shape[2:])
    if x.dim() != 4:
        return 0
    if onednn.multiplies(x.dtype) is False:
        patches = 0 if point else out.numel() // max(out.shape[1], 1) * weight[0].numel()
        return int((patches + (0 if x.is_contiguous() else x.numel())) * x.element_size())
    if x.is_contiguous(memory_format=torch.channels_last) or (point and x.dtype == torch.float32):
        return 0
    return int((x.numel() * (2 if point else 1) + weight.numel()) * x.element_size())


def _kernel(func: Any, args: Any) -> dict[object, int]:
    """Return the bytes of the code that oneDNN generates and caches on the CPU for an operation, by its shapes.

    Seen with torch 2.13 on a Zen 4 (AVX-512 with bf16): 0.55 to 0.66 MB for a product in bfloat16, 0.055 to 0.08 MB for
    a convolution; nothing for products in other dtypes, which are MKL's. A network has some tens of such shapes.
    """
    is_product = func in _PRODUCTS
    if not is_product and func is not torch.ops.aten.convolution.default:
        return {}
    x = args[-1 if is_product else 0]
    if x.device.type != "cpu" or onednn.multiplies(x.dtype) is False:
        return {}
    shapes = tuple(tuple(tensor.shape) for tensor in _tensors(args))
    if not is_product:
        return {shapes[:2]: 70_000}
    return {shapes[-2:]: 600_000} if x.dtype == torch.bfloat16 else {}


_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def trace_of(module: nn.Module, *args: Any, method: str = "forward", **kwargs: Any) -> Trace:
    """Return the peak memory and the work of one call of the module: with its output, without its weights and inputs.

    Args:
        module: its weights may be on the meta device; they are not touched.
        args, kwargs: the call's arguments; of tensors only shapes and dtypes count.

    Raises:
        Exception: any error of a module that reads the values of its tensors, which do not exist here.
    """
    shapes = _Shapes(module)
    shapes.run(getattr(module, method), args, kwargs)
    return shapes.trace


@dataclass(frozen=True)
class Trace:
    """Memory and operations of a component's calls.

    Attributes:
        peak: peak bytes besides its weights.
        work: the operations of all calls together.
        kernels: bytes that libraries keep from then on, on the CPU.
    """

    peak: int
    work: Work
    kernels: int


class _Shapes:
    """Traces a module's calls with tensors that have shapes but no values."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._peak, self._work = 0, Work()
        self._kernels: dict[object, int] = {}

    @property
    def trace(self) -> Trace:
        """Return the trace of the calls so far."""
        return Trace(self._peak, self._work, sum(self._kernels.values()))

    def run(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the output of a call, as real tensors of zeros."""
        args, kwargs = tree_map_only(Tensor, self._shape, (args, kwargs))
        with self._without_values() as names, torch.no_grad(), self._mode, Tracker(self._work, names) as tracker:
            out = method(*args, **kwargs)
        self._peak = max(self._peak, tracker.peak)
        self._kernels.update(tracker.kernels)
        return tree_map_only(Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype, device="cpu"), out)

    def _shape(self, tensor: Tensor) -> Tensor:
        with self._mode:
            return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu")

    @contextmanager
    def _without_values(self) -> Iterator[dict[int, str]]:
        """Replace the weights by fake tensors meanwhile; yield the weights' names by the fakes' storage address."""
        fakes: dict[int, Any] = {}  # what is tied stays tied
        before = []
        names: dict[int, str] = {}
        for path, owner in self._module.named_modules():
            each: tuple[Any, Any] = (owner._parameters, owner._buffers)
            for tensors in each:
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    before.append((tensors, name, tensor))
                    if id(tensor) not in fakes:
                        shape = self._shape(tensor)
                        is_weight = isinstance(tensor, nn.Parameter)
                        fakes[id(tensor)] = nn.Parameter(shape, requires_grad=False) if is_weight else shape
                    tensors[name] = fakes[id(tensor)]
                    if tensor.dim() > 1:
                        names.setdefault(tensors[name].untyped_storage()._cdata, f"{path}.{name}" if path else name)
        try:
            yield names
        finally:
            for tensors, name, tensor in before:
                tensors[name] = tensor


def of_pipeline(
    pipe: Any, *, width: int | None = None, height: int | None = None, prompt: str = "a picture"
) -> dict[str, Trace | None]:
    """Return the memory and the operations of each component while one image is generated; no weight is read.

    The pipeline itself runs for a step or two; its components' calls are traced, and return zeros.

    Args:
        pipe: its components may be on the meta device. They must not be in use.
        width, height: in pixels; None for what the model was made for.

    Returns:
        Traces by component, in the order of their first calls; then those that were not called, with empty traces. All
        None if a component reads the values of tensors, which do not exist here.
    """
    from .generate import draw

    parts = components_of(pipe)
    called: dict[str, _Shapes] = {}
    shapes = {name: _Shapes(part) for name, part in parts.items()}
    undo = []
    for name, part in parts.items():
        for method in ENTRIES:
            if hasattr(part, method):
                undo.append(_replace(part, method, shapes[name], partial(called.setdefault, name, shapes[name])))
        undo.append(announce(part, torch.device("cpu")))  # though its weights are on the meta device
    try:
        draw(pipe, [prompt], seeds=[0], steps=1, width=width, height=height)
    except Exception as error:  # of a network or pipeline that nobody has written this for
        log.debug("cannot estimate the activations from shapes: %s: %s", type(error).__name__, error)
        return dict.fromkeys(parts)
    finally:
        for back in reversed(undo):
            back()
    return {name: one.trace for name, one in (called | shapes).items()}


def of_component(module: nn.Module, *, width: int | None = None, height: int | None = None) -> Trace | None:
    """Return the memory and the operations of one step of a UNet or transformer for one image (see `dummy_inputs`).

    Args:
        module: of diffusers; its weights may be on the meta device.
        width, height: of the image in pixels; None for what the model was made for.

    Returns:
        None if the inputs of the class are not known, or it reads the values of tensors, which do not exist here.

    Raises:
        SettingsError: it cannot generate an image of that size.
    """
    name, config = type(module).__name__, getattr(module, "config", None)
    if config is None or not dummy_inputs.knows(name):
        return None
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    shapes = _Shapes(module)
    try:
        args, kwargs = dummy_inputs.of_one_image(name, config, width=width, height=height)
        shapes.run(module.forward, args, dummy_inputs.moved(kwargs, torch.device("meta"), dtype))
    except SettingsError:
        raise
    except Exception as error:  # of a network whose config is unlike those of its class
        log.debug("cannot estimate the activations from shapes: %s: %s", type(error).__name__, error)
        return None
    return shapes.trace


def _replace(part: nn.Module, method: str, shapes: _Shapes, before: Callable[[], Any]) -> Callable[[], None]:
    original, earlier = getattr(part, method), part.__dict__.get(method)
    running: list[bool] = []

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if running:  # its own call of itself is traced already
            return original(*args, **kwargs)
        running.append(True)
        before()
        try:
            return shapes.run(original, args, kwargs)
        finally:
            running.clear()

    def back() -> None:
        if earlier is None:
            part.__dict__.pop(method, None)
        else:
            part.__dict__[method] = earlier

    part.__dict__[method] = call
    return back


@contextmanager
def measured(model: Any) -> Iterator[Mapping[str, int]]:
    """Measure the peak activation memory of each component's calls, in bytes, while the operations really run.

    Args:
        model: a pipeline or a module, on any device.
    """
    peaks: dict[str, int] = {}
    undo = []
    for name, part in components_of(model).items():
        running: list[Tracker] = []

        def before(_: str, running: list[Tracker] = running) -> None:
            running.append(Tracker().__enter__())  # type: ignore[no-untyped-call]

        def after(_: str, running: list[Tracker] = running, name: str = name) -> None:
            tracker = running.pop()
            tracker.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            peaks[name] = max(peaks.get(name, 0), tracker.peak)

        undo.append(wrap(part, before, after))
    try:
        yield peaks
    finally:
        for back in reversed(undo):
            back()
