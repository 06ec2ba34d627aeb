"""Guard pipelines with offloaded components: a subclass while they are offloaded, and detection of new ones.

Only a class can intercept a pipeline's call and its attribute assignments, so an offloaded pipeline gets a subclass of
its class with guards. Pipelines can share components (`from_pipe`, `Other(**pipe.components)`): one that gets an
offloaded component belongs to that component's mode from then on.
"""

from __future__ import annotations

import copy
import functools
import inspect
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import nn

from ..models import libraries
from .actions import CallTreatment, kind, methods, used_by
from .handle import HANDLE
from .state_guards import guarded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .handle import OffloadHandle

_HANDLES = "_sdquant_offloads"  # on a pipeline: the handles of its components' modes


def take(pipe: Any, handle: OffloadHandle) -> None:
    """Guard a pipeline."""
    handles = pipe.__dict__.setdefault(_HANDLES, [])
    if handle not in handles:
        handles.append(handle)
    cls: Any = type(pipe)
    if not hasattr(cls, "_sdquant_class"):
        pipe.__class__ = _class_of(cls)
    _notice_new_ones()


def release(pipe: Any, handle: OffloadHandle) -> None:
    """Remove the guards of a pipeline's mode."""
    handles = pipe.__dict__.get(_HANDLES, [])
    if handle in handles:
        handles.remove(handle)
    if not handles and hasattr(type(pipe), "_sdquant_class"):
        pipe.__dict__.pop(_HANDLES, None)
        pipe.__class__ = type(pipe)._sdquant_class


def _handles(pipe: Any) -> list[OffloadHandle]:
    """Return the handles that move weights, in a fixed order, so that threads cannot deadlock."""
    return sorted((handle for handle in pipe.__dict__.get(_HANDLES, ()) if handle.works), key=id)


@functools.cache
def _class_of(cls: Any) -> Any:
    """Return the subclass with guards. It has the same name, which diffusers looks up and writes to files."""
    names = used_by(cls, ("__call__",))
    body: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_sdquant_class": cls,
        "__setattr__": _set,
        "__delattr__": _delete,
        "__copy__": _copy,
        "__deepcopy__": _refuse_copy,
        "__reduce_ex__": _refuse_pickle,
    }
    for name in methods(cls):
        what = kind(name, names)
        if what is not CallTreatment.SAFE:
            body[name] = _guard(cls, name, what)
    if isinstance(inspect.getattr_static(cls, "__call__", None), FunctionType):
        body["__call__"] = _call(cls)
    return type(cls)(cls.__name__, (cls,), body)


def _guard(cls: Any, name: str, what: CallTreatment) -> Callable[..., Any]:
    @functools.wraps(getattr(cls, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(super(_class_of(cls), self), name)
        return guarded(_handles(self), self, name, what, method, args, kwargs)

    return call


def _call(cls: Any) -> Callable[..., Any]:
    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for handle in _handles(self):
                stack.enter_context(handle.calling())
            return super(_class_of(cls), self).__call__(*args, **kwargs)

    return call


def _set(self: Any, name: str, value: Any) -> None:
    earlier = self.__dict__.get(name)
    joins = isinstance(value, nn.Module) and HANDLE not in value.__dict__
    with _exchanging(self, value is not earlier and (joins or isinstance(earlier, nn.Module))):
        super(_class_of(type(self)._sdquant_class), self).__setattr__(name, value)


def _delete(self: Any, name: str) -> None:
    with _exchanging(self, isinstance(self.__dict__.get(name), nn.Module)):
        super(_class_of(type(self)._sdquant_class), self).__delattr__(name)


@contextmanager
def _exchanging(pipe: Any, does: bool) -> Iterator[None]:
    """Let the modes rest while a component is set or removed; they are applied again when the pipeline is used."""
    handles = _handles(pipe) if does else []
    for handle in handles:
        handle.rest()
    yield
    for handle in handles:
        handle.look_again()


def _copy(self: Any) -> Any:
    """Return a shallow copy, which shares the components and belongs to the same modes."""
    cls = type(self)._sdquant_class
    duplicate = cls.__new__(cls)
    duplicate.__dict__.update({name: value for name, value in self.__dict__.items() if name != _HANDLES})
    for handle in _handles(self):
        handle.owners.adopt(duplicate)
    return duplicate


def _refuse_copy(self: Any, memo: Any) -> Any:
    for handle in _handles(self):
        handle.refuse("copy")
    self.__class__ = type(self)._sdquant_class
    return copy.deepcopy(self, memo)


def _refuse_pickle(self: Any, protocol: Any) -> Any:
    for handle in _handles(self):
        handle.refuse("pickle")
    return super(_class_of(type(self)._sdquant_class), self).__reduce_ex__(protocol)


@functools.cache
def _notice_new_ones() -> None:
    """Have diffusers' pipelines check for offloaded components that are set on them; done once per process."""
    library = libraries.diffusers()
    for pipelines in (library.DiffusionPipeline, getattr(library, "ModularPipeline", None)):
        if pipelines is not None:
            _notice_in(pipelines)


def _notice_in(pipelines: Any) -> None:
    set_attribute = pipelines.__setattr__

    @functools.wraps(set_attribute)
    def __setattr__(self: Any, name: str, value: Any) -> None:
        set_attribute(self, name, value)
        handle = value.__dict__.get(HANDLE) if isinstance(value, nn.Module) else None
        if handle is not None and handle.works:
            handle.owners.adopt(self)

    pipelines.__setattr__ = __setattr__
