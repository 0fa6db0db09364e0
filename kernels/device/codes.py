"""Codes of 8 bits and the numbers that they stand for, in registers.

Numbers of e4m3 are 2^-8 of what they stand for: the float16 with the same bits at the same end. So chips without floats
of 8 bits read them, too. `kernels/kv_rows.py` says how rows of K and V are coded; these functions make the same bytes.
"""

import triton
import triton.language as tl

LEAST = tl.constexpr(2.0**-100)  # as in kernels/kv_rows.py
WHOLE = tl.constexpr(1.5 * 2.0**23)  # a float32 of this size has no fraction
SMALL = tl.constexpr(2.0**14)  # the spacing of float32 there is that of e4m3 below 2^-6


@triton.jit
def e4m3_numbers(codes, dtype: tl.constexpr):
    bits = codes.to(tl.uint16)
    return (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.float16, bitcast=True).to(dtype)


@triton.jit
def row_numbers(codes, CODE: tl.constexpr, dtype: tl.constexpr):
    """Return codes of rows as numbers, which any type of floats holds exactly. codes: uint8."""
    if CODE == "int8":
        return codes.to(tl.int8, bitcast=True).to(tl.float32).to(dtype)
    else:  # noqa: RET505 - else it is compiled, too
        return e4m3_numbers(codes, dtype)


@triton.jit
def magnitudes(values):
    """Return the bits of magnitudes as integers, which are in their order: infinity and NaN behind all others."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def row_scales(most, CODE: tl.constexpr):
    """Return the scales of rows. most: the greatest of `magnitudes` of each."""
    size = most.to(tl.float32, bitcast=True)
    scale = tl.math.div_rn(size, 127.0 if CODE == "int8" else 448.0)
    return tl.where(size < LEAST, 0.0, tl.where(size < float("inf"), scale, float("nan")))


@triton.jit
def row_codes(values, scale, CODE: tl.constexpr):
    """Return codes of values, rounded to the nearest, ties to even; uint8. scale: of a row's values, or of each."""
    scaled = tl.where(scale > 0.0, tl.math.div_rn(values, tl.where(scale > 0.0, scale, 1.0)), 0.0)
    if CODE == "int8":
        return (scaled + WHOLE - WHOLE).to(tl.int8).to(tl.uint8, bitcast=True)
    else:  # noqa: RET505 - else it is compiled, too
        bits = scaled.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)  # exponents' biases are 127 and 7
        units = (size.to(tl.float32, bitcast=True) + SMALL).to(tl.int32, bitcast=True) - 0x46800000
        return (((bits >> 24) & 0x80) | tl.where(size < 0x3C800000, units, normal)).to(tl.uint8)
