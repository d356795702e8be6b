"""What triton's interpreter lacks, mended: bf16 products and rounding, adds of tiles, scalars."""

from __future__ import annotations

from typing import Any


def mend_interpreter() -> None:
    """Make interpreted bf16 dots, roundings, adds of tiles and scalars right. Safe to call again.

    The interpreter keeps bf16 as raw 16-bit integers and multiplies those bits (triton issue
    11584); it cuts fp32 to bf16 where every GPU rounds to nearest even; it has no atomic adds
    through descriptors; numpy 2.4 no longer turns a one-element array into an int.
    """
    import numpy
    import triton.language
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    if hasattr(builder, "autoflash_mended"):
        return
    plain_dot = builder.create_dot
    plain_cast = builder.cast_impl
    plain_patch = interpreter._patch_lang_tensor

    def as_fp32(operand):  # noqa: ANN001, ANN202 - triton's own handle type is private
        if operand.dtype != triton.language.bfloat16:
            return operand
        bits = operand.data.astype(numpy.uint32) << 16
        return interpreter.TensorHandle(bits.view(numpy.float32), triton.language.float32)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):  # noqa: ANN001, ANN202
        return plain_dot(self, as_fp32(a), as_fp32(b), d, input_precision, max_num_imprecise_acc)

    def cast_impl(self, source, kind):  # noqa: ANN001, ANN202
        to_bf16 = kind.scalar == triton.language.bfloat16
        if not to_bf16 or source.dtype.scalar != triton.language.float32:
            return plain_cast(self, source, kind)
        bits = source.data.view(numpy.uint32)
        nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # a NaN keeps its top bits, and the quiet one of them
        rounded = numpy.where(numpy.isnan(source.data), (bits >> 16) | 0x40, nearest_even)
        return interpreter.TensorHandle(rounded.astype(numpy.uint16), kind.scalar)

    def create_descriptor_reduce(self, kind, descriptor, value, indices):  # noqa: ANN001, ANN202
        ir: Any = interpreter._ir
        assert kind == ir.DESCRIPTOR_REDUCE_KIND.ADD and value.dtype == triton.language.float32
        pointers, inside = descriptor.materialize_pointers(indices)
        mask = interpreter.TensorHandle(inside, triton.language.int1)
        order = ir.MEM_SEMANTIC.RELAXED, ir.MEM_SYNC_SCOPE.GPU
        return self.create_atomic_rmw(ir.ATOMIC_OP.FADD, pointers, value, mask, *order)

    def patch_lang_tensor(tensor, scope):  # noqa: ANN001, ANN202
        plain_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    builder.create_dot = create_dot
    builder.create_descriptor_reduce = create_descriptor_reduce
    builder.cast_impl = cast_impl
    interpreter._patch_lang_tensor = patch_lang_tensor
    builder.autoflash_mended = True
