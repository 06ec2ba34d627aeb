"""Products of activations inside the modules that a rule names, quantized while those modules run.

`mark(model, rules)` gives each such module a class of its own, derived from the one it had, whose call notes which
module is running. While one is, a torch function mode sees every call of torch's functions and replaces products
(operations.py). What is inside a module that no rule matches, or that holds a weight, runs as it is: a rule is looked
up for the module that makes the call, and only for that. Nothing is global: other threads and other models see nothing,
and a model without such rules is left untouched. torch.compile leaves a marked module out of its graphs: name those
that attend, rather than all.

Not seen, and so not quantized: products that do not go through these functions of torch. Those are diffusers'
attention backends other than the native ones, kernels of other libraries, and `nn.MultiheadAttention`. A rule that
quantized nothing in the first run is named in a warning, and by `unused`.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..compat import SdquantWarning
from ..errors import SettingsError
from .operations import OPERATIONS, Operation
from .spec import first
from .straight import refuse

if TYPE_CHECKING:
    from .rule import QuantizationRule, Rules

_NAMES = tuple({operation.name for operation in OPERATIONS.values()})
_ATTRIBUTE, _REPORT = "_sdquant_mark", "_sdquant_products"


class UnusedRuleWarning(SdquantWarning):
    """A rule that names products of activations has quantized none."""


@dataclass(frozen=True, kw_only=True)
class Unused:
    """A rule that has quantized no product yet, and why."""

    rule: QuantizationRule
    why: str

    def __str__(self) -> str:
        return f"The rule for {self.rule.module_path!r} with op_names={list(self.rule.op_names)}: {self.why}"


@dataclass
class Report:
    """What the rules have done in a model. One for all of its marks.

    Attributes:
        rules: as they were given.
        modules: how many modules each rule that names products decides for.
        done: how many calls each has quantized.
    """

    rules: Rules
    modules: Counter[QuantizationRule] = field(default_factory=Counter)
    done: Counter[QuantizationRule] = field(default_factory=Counter)


@dataclass
class Mark:
    """What a module does while it runs: `rules` by operation, under the module's path."""

    path: str
    rules: dict[str, QuantizationRule]
    report: Report


@dataclass
class _Frame:
    """A module that is running; None of a mark is one whose products are left alone. Counts its products."""

    mark: Mark | None
    counts: Counter[str] = field(default_factory=Counter)


class _Running(threading.local):
    def __init__(self) -> None:
        self.frames: list[_Frame] = []


_running = _Running()


class _Interception(TorchFunctionMode):
    """Replaces products of activations in the module that is running. Calls made in here are not seen again."""

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
    mark = frame.mark
    rule = mark.rules.get(operation.name) if mark is not None else None
    if mark is None or rule is None:
        return None
    try:
        done = operation.handler(rule, frame.counts[operation.counted], *args, **kwargs)
    except SettingsError as error:
        what = f"{operation.name} in {mark.path or 'the model itself'!r}: {error.what}"
        raise SettingsError(what, error.why, error.fix) from error
    if done is not None:
        frame.counts[operation.counted] += operation.products
        if not mark.report.done[rule]:
            mark.report.rules.of(mark.path, operation.name)  # counts as used
        mark.report.done[rule] += 1
    return done


@contextmanager
def _inside(mark: Mark) -> Iterator[None]:
    frames = _running.frames
    depth = len(frames)
    frames.append(_Frame(mark))
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
        return _run(self.__dict__[_ATTRIBUTE], self._call_impl if own else super().__call__, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickles and copies name the class that can be imported.
        made = cast("tuple[Any, ...]", super().__reduce_ex__(protocol))
        return (_bare, (_original(type(self)),), *made[2:])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run(mark: Mark, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A marked module's call, outside of compiled graphs: torch.compile traces modes and globals, but not reliably."""
    with _inside(mark):
        return call(*args, **kwargs)


def _bare(kind: type[nn.Module]) -> nn.Module:
    made = marked_class(kind)
    return made.__new__(made)


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def marked_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a marked module: named like its own, which diffusers writes into configurations."""
    if kind not in _classes:
        names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        _classes[kind] = type(kind.__name__, (Marked, kind), names)
    return _classes[kind]


def _original(kind: type[nn.Module]) -> type[nn.Module]:
    base = kind.__mro__[2]
    assert issubclass(base, nn.Module)
    return base


def mark(model: nn.Module, rules: Rules) -> int:
    """Have the rules that name products of activations quantize them in the model's modules. Marks it anew.

    To be called last, when the model's layers are in place. The marks stay in copies and pickles; state dicts and saved
    models have none, so that a model that is loaded again is to be marked again.

    Returns:
        How many modules do so. If 0, the model is as it was.

    Raises:
        SettingsError: a rule that products cannot follow, see `straight.refuse`.
    """
    unmark(model)
    if not any(rule.products for rule in rules.rules):
        return 0
    report = Report(rules=rules)
    found: dict[str, dict[str, QuantizationRule]] = {}
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if _can_multiply(module) and not _holds_weight(module):
            decided = {name: _first(rules, path, name) for name in _NAMES}
            chosen = {name: rule for name, rule in decided.items() if rule is not None}
            if chosen:
                found[path] = chosen
                report.modules.update(set(chosen.values()))
    for rule in report.modules:
        refuse(rule)
    for path, module in modules.items():
        if path in found:
            _put(module, Mark(path=path, rules=found[path], report=report))
        elif _can_multiply(module) and any(_under(path, above) for above in found):
            module.register_forward_pre_hook(_shut)
            module.register_forward_hook(_open, always_call=True)
    model.__dict__[_REPORT] = report
    model.register_forward_hook(_tell)
    return len(found)


def unmark(model: nn.Module) -> None:
    """Take back what `mark` did."""
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
    """The rules that name products of activations and have quantized none in this model yet."""
    report = model.__dict__.get(_REPORT)
    if report is None:
        return ()
    return tuple(Unused(rule=rule, why=_why(report, rule)) for rule in _named(report.rules) if not report.done[rule])


def _named(rules: Rules) -> list[QuantizationRule]:
    return [rule for rule in rules.rules if rule.products]


def _why(report: Report, rule: QuantizationRule) -> str:
    count = report.modules[rule]
    if not count:
        return "no module's path matches it, or earlier rules match them all and decide"
    return (
        f"none of the {count} modules that it decides for called one of torch's functions for it (diffusers' "
        'attention backends other than "native" call kernels of their own, and so does nn.MultiheadAttention)'
    )


def _first(rules: Rules, path: str, operation: str) -> QuantizationRule | None:
    """The rule that decides, if it quantizes products. Unlike `Rules.of` this does not count as use."""
    rule = first(rules.rules, path, operation)
    return rule if rule is not None and rule.products else None


def _put(module: nn.Module, made: Mark) -> None:
    module.__dict__[_ATTRIBUTE] = made
    _give(module, marked_class(type(module)))


def _give(module: nn.Module, kind: type[nn.Module]) -> None:
    module.__class__ = kind


def _holds_weight(module: nn.Module) -> bool:
    """Whether a module multiplies by a weight of its own, perhaps one that it dequantizes first."""
    return isinstance(module, (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)) or "weight" in module._parameters


def _can_multiply(module: nn.Module) -> bool:
    """Whether a module's own forward may call a product: torch's own do not, or it cannot be seen."""
    return not type(module).__module__.startswith("torch.nn.modules.")


def _under(path: str, above: str) -> bool:
    return not above or path.startswith(f"{above}.")


def _tell(module: nn.Module, args: Any, output: Any) -> None:
    """After a model's first run."""
    _unhook(module, _tell)
    for row in unused(module):
        warnings.warn(f"{row}. It was to quantize products of activations", UnusedRuleWarning, stacklevel=2)


def _shut(module: nn.Module, args: Any) -> None:
    """Before a module inside a marked one that no rule matches. What Ctrl-C leaves behind, the marked one clears."""
    if _running.frames:
        _running.frames.append(_Frame(None))


def _open(module: nn.Module, args: Any, output: Any) -> None:
    if _running.frames and _running.frames[-1].mark is None:
        _running.frames.pop()
