"""Makes Triton's interpreter several times faster; its answers stay the same.

By itself it patches `triton.language` at each launch and at each call of a device function,
computes whether integers overflow and does not read the result, and makes types and shapes anew
for each value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from triton import language as tl
from triton.language import core
from triton.runtime import interpreter


def make_it_fast() -> None:
    """Changes the interpreter of this process, before its first launch."""
    _skip_unread_checks()
    _make_types_once()
    _patch_language_once()


def _skip_unread_checks() -> None:
    """Overflows are computed, and asserted only in the debug mode, which is off."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _make_types_once() -> None:
    of_scalar: dict[str, np.dtype[Any]] = {}
    find_dtype = interpreter._get_np_dtype

    def np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if isinstance(scalar, core.pointer_type):
            return np.dtype(np.uint64)
        if scalar.name not in of_scalar:
            of_scalar[scalar.name] = find_dtype(scalar)
        return of_scalar[scalar.name]

    @cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        sizes_of_tensor = core.tuple([core.constexpr(size) for size in sizes])
        return core.constexpr(int(np.prod(sizes, dtype=np.int64))), sizes_of_tensor

    def init_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = shape_of(tuple(kind.shape) if kind.is_block() else ())

    init_block_type = core.block_type.__init__
    states: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, tuple(core._unwrap_shape(shape)))
        if key not in states:
            init_block_type(self, element_ty, shape)
            states[key] = dict(self.__dict__)
        self.__dict__.update(states[key])

    interpreter._get_np_dtype = np_dtype
    core.tensor.__init__ = init_tensor
    core.block_type.__init__ = make_block_type


def _patch_language_once() -> None:
    scope = interpreter._LangPatchScope()
    builder = interpreter.interpreter_builder
    interpreter._patch_attr = _patch_attr
    for language in (tl, core):
        interpreter._patch_builtin(language, builder, scope)
        interpreter._patch_builtin(language.tensor, builder, scope)
        interpreter._patch_lang_tensor(language.tensor, scope)
        interpreter._patch_lang_core(language, scope)
    interpreter._patch_builtin(tl.math, builder, scope)
    interpreter._patch_builtin(core.tensor_descriptor_base, builder, scope)
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()


def _patch_attr(obj: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
    semantic = interpreter.interpreter_semantic
    # What `core.builtin` has wrapped only to see that there is a `_semantic`.
    inner = getattr(member, "__wrapped__", member)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return inner(*args, **kwargs)

    scope.set_attr(obj, name, call)
