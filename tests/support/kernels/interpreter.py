"""Makes Triton's interpreter several times faster; its answers stay the same.

By itself it patches `triton.language` at each launch and at each call of a device function,
computes whether integers overflow and does not read the result, makes types and shapes anew for
each value, and compares shapes element by element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from triton import language as tl
from triton.language import core, semantic
from triton.runtime import interpreter


def make_it_fast() -> None:
    """Changes the interpreter of this process, before its first launch."""
    _skip_unread_checks()
    _make_types_once()
    _compare_types_by_name()
    _broadcast_known_shapes()
    _promote_known_types()
    _make_handles_directly()
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
        self.numel, self.shape = shape_of(kind.sizes)

    init_block_type = core.block_type.__init__
    states: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape if type(shape) is tuple else tuple(core._unwrap_shape(shape))
        key = (element_ty.name, sizes)
        if key not in states:
            init_block_type(self, element_ty, list(sizes))
            self.sizes = sizes
            states[key] = dict(self.__dict__)
        self.__dict__.update(states[key])

    def with_element_ty(self: Any, scalar: Any) -> Any:
        return self if scalar is self.element_ty else core.block_type(scalar, self.sizes)

    interpreter._get_np_dtype = np_dtype
    core.tensor.__init__ = init_tensor
    core.dtype.sizes = ()
    core.block_type.__init__, core.block_type.with_element_ty = make_block_type, with_element_ty


def _compare_types_by_name() -> None:
    """A name has the shape and the type of the elements; most values are no constexpr."""
    unwrap = core._unwrap_if_constexpr
    plain = (int, bool, float, str, type(None), core.dtype, core.block_type, core.tensor)

    def unwrap_if_constexpr(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    def is_same(self: Any, other: Any) -> bool:
        other = unwrap_if_constexpr(other)
        return isinstance(other, core.dtype) and self.name == other.name

    core._unwrap_if_constexpr = unwrap_if_constexpr
    core.dtype.__eq__ = core.block_type.__eq__ = is_same


def _broadcast_known_shapes() -> None:
    """Most pairs of values have one shape. Of others the shape is computed once."""
    find = semantic.TritonSemantic.broadcast_impl_value
    builder = interpreter.interpreter_builder
    make_tensor = core.tensor

    @cache
    def common(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
        return np.broadcast_shapes(one, other)

    def in_shape(value: Any, kind: Any) -> Any:
        kind = kind.with_element_ty(value.type.scalar)
        if value.type.is_block():
            return make_tensor(builder.create_broadcast(value.handle, kind.sizes), kind)
        return make_tensor(builder.create_splat(kind, value.handle), kind)

    def broadcast(self: Any, one: Any, other: Any) -> Any:
        sizes, other_sizes = one.type.sizes, other.type.sizes
        if sizes == other_sizes:
            return one, other
        if not other_sizes:
            return one, in_shape(other, one.type)
        if not sizes:
            return in_shape(one, other.type), other
        if len(sizes) != len(other_sizes):
            return find(self, one, other)
        wanted = common(sizes, other_sizes)
        kind = core.block_type(one.type.scalar, wanted)
        if sizes != wanted:
            one = in_shape(one, kind)
        return one, other if other_sizes == wanted else in_shape(other, kind)

    semantic.TritonSemantic.broadcast_impl_value = broadcast


def _promote_known_types() -> None:
    """Two values of one type of number keep it, except in divisions."""
    find = semantic.TritonSemantic.binary_op_type_checking_impl

    def check(self: Any, one: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        is_division = kwargs.get("div_or_mod") or len(args) == 4
        if not is_division and type(one) is type(other) is core.tensor:
            scalar = one.dtype
            if scalar.name == other.dtype.name and not scalar.is_ptr():
                return self.broadcast_impl_value(one, other)
        return find(self, one, other, *args, **kwargs)

    semantic.TritonSemantic.binary_op_type_checking_impl = check


def _make_handles_directly() -> None:
    """Without the check that numbers are no wider than their type."""

    def init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    interpreter.TensorHandle.__init__ = init_handle


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
