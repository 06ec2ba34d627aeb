"""Products of activations inside the modules that a rule names, quantized while those modules run.

`mark(model, rules)` gives each such module a class of its own, derived from its original one, whose call records which
module is running. While one is, a torch function mode sees every call of torch's functions and replaces products
(intercepted_ops.py). What is inside a module that no rule matches, or that holds a weight, runs unchanged: only the
module that makes the call is matched with the rules. Nothing is global: other threads and models are unaffected, and a
model without such rules is left untouched. torch.compile leaves a marked module out of its graphs: name attention
modules rather than all.

Not seen, and so not quantized: products that do not go through these functions of torch. Those are diffusers'
attention backends other than the native ones, kernels of other libraries, and `nn.MultiheadAttention`. A rule that
quantized nothing in the first run is named in a warning, and by `unused`.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..core import RANGE_BUFFER
from ..errors import IncompatibleError, SettingsError
from ..nn import packed_of
from . import product_ranges
from .intercepted_ops import OPERATIONS, Operation
from .providers.product import Site, refuse
from .qt.layers import QtLayer
from .qt.statistics import SiteStats
from .quant_spec import first
from .report import RulesReport, Unused, UnusedRuleWarning

if TYPE_CHECKING:
    from .qconfig import QuantizationRule, Rules

_NAMES = tuple({operation.name for operation in OPERATIONS.values()})
_ATTRIBUTE, _REPORT = product_ranges.MARK, "_sdquant_products"


@dataclass
class Interceptor:
    """Mark of a module whose products are quantized while it runs: `rules` by operation, and the module's path.

    Attributes:
        statistics: of the products with static ranges, while these are collected; if None, the module has the ranges.
    """

    path: str
    rules: dict[str, QuantizationRule]
    report: RulesReport
    statistics: SiteStats | None = None

    def site(self, module: nn.Module, rule: QuantizationRule) -> Site:
        """Return the quantization of products in `module`, which this mark belongs to, by one of its rules."""
        if not rule.act_static_scale:
            return Site(rule=rule)
        if self.statistics is None:
            return Site(rule=rule, known=lambda name: product_ranges.range_in(module, self.path, name))
        own = self.statistics
        return Site(rule=rule, collect=lambda name, limits, axis: own.range_for(name, limits, axis, rule))


@dataclass
class _Frame:
    """A running module, or None for one whose products are left alone, and the counts of its products."""

    module: nn.Module | None
    counts: Counter[str] = field(default_factory=Counter)


class _Running(threading.local):
    def __init__(self) -> None:
        self.frames: list[_Frame] = []


_running = _Running()


class _Interception(TorchFunctionMode):
    """Replaces products of activations in the running module. Calls made in here are not intercepted again."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operation = OPERATIONS.get(func)
        if operation is not None and _running.frames:
            done = _quantized(operation, _running.frames[-1], args, kwargs or {})
            if done is not None:
                return done
        return func(*args, **(kwargs or {}))


def _quantized(operation: Operation, frame: _Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    if frame.module is None:
        return None
    mark: Interceptor = frame.module.__dict__[_ATTRIBUTE]
    rule = mark.rules.get(operation.name)
    if rule is None:
        return None
    try:
        done = operation.handler(mark.site(frame.module, rule), frame.counts[operation.counted], *args, **kwargs)
    except SettingsError as error:
        what = f"{error.what} ({operation.name} in {mark.path or 'the model itself'!r})"
        raise SettingsError(what, error.why, error.fix) from error
    if done is not None:
        frame.counts[operation.counted] += operation.products
        if not mark.report.done[rule]:
            mark.report.rules.of(mark.path, operation.name)  # counts as used
        mark.report.done[rule] += 1
    return done


@contextmanager
def _inside(module: nn.Module) -> Iterator[None]:
    frames = _running.frames
    depth = len(frames)
    frames.append(_Frame(module))
    try:
        if depth:
            yield
        else:
            with _Interception():
                yield
    finally:
        del frames[depth:]


class Marked(nn.Module):
    """Comes before a module's own class in the class that `mark` gives it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # What `module.compile()` has made of the module is passed by, see `_run`.
        own = type(self).__mro__[2].__call__ is nn.Module.__call__
        return _run(self, self._call_impl if own else super().__call__, args, kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Apply `fn`, but keep the dtype of ranges: only their device changes (a scale cast to half is wrong)."""
        ranges = {name: self._buffers.pop(name) for name in [*self._buffers] if RANGE_BUFFER.fullmatch(name)}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, range in ranges.items():
            assert range is not None
            moved = fn(range)
            self._buffers[name] = moved if moved.dtype == range.dtype else range.to(moved.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take ranges from the state dict where the module has none, or some of another shape."""
        if self.__dict__[_ATTRIBUTE].statistics is None:
            for name in [key[len(prefix) :] for key in state_dict if key.startswith(prefix)]:
                value, own = state_dict[prefix + name], self._buffers.get(name)
                if RANGE_BUFFER.fullmatch(name) and (own is None or own.is_meta or own.shape != value.shape):
                    product_ranges.register_ranges(self, {name: value.clone()})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickles and copies name the class that can be imported.
        reduced = cast("tuple[Any, ...]", super().__reduce_ex__(protocol))
        return (_bare, (_original(type(self)),), *reduced[2:])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run(module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a marked module outside of compiled graphs: torch.compile traces modes and globals, but not reliably."""
    with _inside(module):
        return call(*args, **kwargs)


def _bare(kind: type[nn.Module]) -> nn.Module:
    cls = marked_class(kind)
    return cls.__new__(cls)


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def marked_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a marked module, named like the original: diffusers writes the name into configs."""
    if kind not in _classes:
        names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        _classes[kind] = type(kind.__name__, (Marked, kind), names)
    return _classes[kind]


def _original(kind: type[nn.Module]) -> type[nn.Module]:
    base = kind.__mro__[2]
    assert issubclass(base, nn.Module)
    return base


def mark(
    model: nn.Module, rules: Rules, statistics: Mapping[str, Tensor] | None = None, *, collects: bool = False
) -> int:
    """Quantize the products of activations that rules name in the model's modules. Replaces earlier marks.

    Call it last, when the model's layers are in place. The marks stay in copies and pickles, but not in state dicts and
    saved models, so that a model must be marked again after loading. Static ranges in the model stay if the rules still
    use them.

    Args:
        statistics: of calibration, for static ranges; of other operands, too.
        collects: whether the model collects ranges, rather than having them.

    Returns:
        The number of marked modules. If 0, the model is unchanged.

    Raises:
        SettingsError: a rule that products cannot follow, see `product.refuse`; statistics of another rule.
    """
    _clear(model)
    if not any(rule.products for rule in rules.rules):
        return 0
    report = RulesReport(rules=rules)
    matched, modules = followed(model, rules), dict(model.named_modules())
    for path, by_operation in matched.items():
        report.modules.update(set(by_operation.values()))
        if "attention" in type(modules[path]).__name__.lower():
            report.attention.update(set(by_operation.values()))
    if statistics and not collects:
        product_ranges.register_ranges(model, product_ranges.ranges_of(model, rules, statistics))
    for path, module in modules.items():
        static = any(rule.act_static_scale for rule in matched.get(path, {}).values())
        if not static or collects:
            product_ranges.drop(module)
        if path in matched:
            stats = SiteStats(path) if static and collects else None
            module.__dict__[_ATTRIBUTE] = Interceptor(path=path, rules=matched[path], report=report, statistics=stats)
            _give(module, marked_class(type(module)))
        elif _can_multiply(module) and any(not above or path.startswith(f"{above}.") for above in matched):
            module.register_forward_pre_hook(_shut)
            module.register_forward_hook(_open, always_call=True)
    model.__dict__[_REPORT] = report
    model.register_forward_hook(_tell)
    return len(matched)


def _refuse_both(path: str, by_operation: Mapping[str, QuantizationRule]) -> None:
    """Raise SettingsError if two rules have static ranges for products whose operands share names."""
    for qwix_name, names in product_ranges.COUNTED.items():
        static = {rule for name in names if (rule := by_operation.get(name)) is not None and rule.act_static_scale}
        if len(static) > 1:
            raise SettingsError(
                f"Cannot use two act_static_scale rules for {' and '.join(names)} in {path or 'the model itself'!r}",
                f"the ranges of both would have the same names: {qwix_name}0_lhs, {qwix_name}1_lhs and so on",
                "Use one rule for both operations",
            )


def unmark(model: nn.Module) -> None:
    """Undo `mark`, and remove static ranges of products."""
    _clear(model)
    for module in model.modules():
        product_ranges.drop(module)


def marks(model: nn.Module) -> dict[str, Interceptor]:
    """Return the marks in a model, by the path of their module."""
    return {path: module.__dict__[_ATTRIBUTE] for path, module in model.named_modules() if isinstance(module, Marked)}


def followed(model: nn.Module, rules: Rules) -> dict[str, dict[str, QuantizationRule]]:
    """Return `matching`, and check that products can follow the rules; the model may be on the meta device.

    Raises:
        SettingsError: they cannot, see `product.refuse`; or two rules would give the ranges of two products one name.
    """
    matched = matching(model, rules)
    for rule in dict.fromkeys(rule for by_operation in matched.values() for rule in by_operation.values()):
        refuse(rule, static=True)
    for path, by_operation in matched.items():
        _refuse_both(path, by_operation)
    return matched


def matching(model: nn.Module, rules: Rules) -> dict[str, dict[str, QuantizationRule]]:
    """Return the modules that `mark` would mark, by path, each with its rules by operation."""
    matched = {}
    for path, module in model.named_modules():
        if _can_multiply(module) and not _holds_weight(module):
            decided = {name: _first(rules, path, name) for name in _NAMES}
            by_operation = {name: rule for name, rule in decided.items() if rule is not None}
            if by_operation:
                matched[path] = by_operation
    return matched


def _clear(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Marked):
            _give(module, _original(type(module)))
            del module.__dict__[_ATTRIBUTE]
        module.__dict__.pop(_REPORT, None)
        for hook in (_shut, _open, _tell):
            _unhook(module, hook)


def _unhook(module: nn.Module, hook: Callable[..., Any]) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, one in hooks.items() if one is hook]:
            del hooks[key]
            module._forward_hooks_always_called.pop(key, None)


def unused(model: nn.Module) -> tuple[Unused, ...]:
    """Return the rules that name products of activations and have quantized none in this model; see `Report.unused`."""
    report = model.__dict__.get(_REPORT)
    return () if report is None else report.unused()


def _first(rules: Rules, path: str, operation: str) -> QuantizationRule | None:
    """Return the first matching rule if it quantizes products. Unlike `Rules.of` this does not count as use."""
    rule = first(rules.rules, path, operation)
    return rule if rule is not None and rule.products else None


def _give(module: nn.Module, kind: type[nn.Module]) -> None:
    module.__class__ = kind


def _holds_weight(module: nn.Module) -> bool:
    """Return whether a module multiplies by a weight of its own, including one that it dequantizes first."""
    return isinstance(module, (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)) or "weight" in module._parameters


def _can_multiply(module: nn.Module) -> bool:
    """Return whether a module's own forward may call a product: torch's modules do not, or it cannot be intercepted."""
    return not type(module).__module__.startswith("torch.nn.modules.")


def _tell(module: nn.Module, args: Any, output: Any) -> None:
    """Warn, after a model's first run, of rules that have quantized no product.

    Raises:
        IncompatibleError: nothing at all is quantized in the model, in spite of its rules.
    """
    report: RulesReport = module.__dict__[_REPORT]
    calibrates = any(mark.statistics is not None for mark in marks(module).values())  # which says itself what it lacks
    if (
        not report.done
        and not calibrates
        and not any(isinstance(one, QtLayer) or packed_of(one) is not None for one in module.modules())
    ):
        rules = ", ".join(repr(rule.module_path) for rule in report.modules)
        raise IncompatibleError(
            f"Cannot quantize a {type(module).__name__} by rules for {rules}",
            f"none of its weights is quantized, and none of the {len(marks(module))} modules that they match has "
            "multiplied activations with torch's functions",
            'Name modules that multiply activations, for example ".*attn.*", or add a rule with a weight_qtype',
        )
    _unhook(module, _tell)
    for row in unused(module):
        warnings.warn(f"{row}. It has quantized no products of activations", UnusedRuleWarning, stacklevel=2)


def _shut(module: nn.Module, args: Any) -> None:
    """Hook before an unmatched module inside a marked one, which clears the frames that Ctrl-C leaves behind."""
    if _running.frames:
        _running.frames.append(_Frame(None))


def _open(module: nn.Module, args: Any, output: Any) -> None:
    if _running.frames and _running.frames[-1].module is None:
        _running.frames.pop()
