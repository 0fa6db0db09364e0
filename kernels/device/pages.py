"""Moving whole pages, re-cutting them for another layout, and folding them to digests."""

import triton
import triton.language as tl


@triton.jit
def copy_pages(
    target_ptr, source_ptr, target_ids_ptr, source_ids_ptr, target_stride, source_stride, num_words,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one page's words from a page of `source` to a page of `target`. Grid: (pages, word blocks)."""
    entry = tl.program_id(0)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = source_ptr + tl.load(source_ids_ptr + entry).to(tl.int64) * source_stride
    target = target_ptr + tl.load(target_ids_ptr + entry).to(tl.int64) * target_stride
    tl.store(target + word, tl.load(source + word, word < num_words), word < num_words)


@triton.jit(do_not_specialize=["num_tokens"])
def reshard(
    target_ptr, source_ptr, target_ids_ptr, source_ids_ptr, factors_ptr, num_tokens, num_heads,
    target_page_stride, target_layer_stride, target_kv_stride, target_head_stride, target_slot_stride,
    source_page_stride, source_layer_stride, source_kv_stride, source_head_stride, source_slot_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TARGET_PAGE: tl.constexpr, SOURCE_PAGE: tl.constexpr,
    HAS_FACTORS: tl.constexpr, TO_FP8: tl.constexpr,
):  # fmt: skip
    """Fill one page of `target` for one layer, K or V, and head. Grid: (target pages, layers * 2 * heads).

    Both pointers already stand at the first head to copy.
    """
    entry = tl.program_id(0)
    plane = tl.program_id(1)
    layer, kv, head = plane // (2 * num_heads), plane // num_heads % 2, plane % num_heads
    slot = tl.arange(0, TARGET_PAGE)
    channel = tl.arange(0, BLOCK_D)
    token = entry * TARGET_PAGE + slot
    there = token < num_tokens
    source_page = tl.load(source_ids_ptr + token // SOURCE_PAGE, there, other=0).to(tl.int64)
    source = source_ptr + layer.to(tl.int64) * source_layer_stride + kv * source_kv_stride + head * source_head_stride
    rows = source_page * source_page_stride + token % SOURCE_PAGE * source_slot_stride
    mask = there[:, None] & (channel < HEAD_DIM)[None, :]
    values = tl.load(source + rows[:, None] + channel[None, :], mask, other=0.0)
    if HAS_FACTORS:
        values = values.to(tl.float32) * tl.load(factors_ptr + plane)
    if TO_FP8:
        values = tl.minimum(tl.maximum(values.to(tl.float32), -448.0), 448.0)
    target_page = tl.load(target_ids_ptr + entry).to(tl.int64)
    target = target_ptr + target_page * target_page_stride + layer.to(tl.int64) * target_layer_stride
    target += kv * target_kv_stride + head * target_head_stride
    tl.store(target + slot[:, None] * target_slot_stride + channel[None, :],
             values.to(target_ptr.dtype.element_ty), mask)  # fmt: skip


@triton.jit
def digest_pages(
    out_ptr, words_ptr, page_ids_ptr, page_stride, num_words, BLOCK: tl.constexpr, TURNS: tl.constexpr
):  # fmt: skip
    """Add the hash of TURNS * BLOCK words of one page to its digest. Grid: (pages, word blocks). out starts at 0."""
    entry = tl.program_id(0)
    words = words_ptr + tl.load(page_ids_ptr + entry).to(tl.int64) * page_stride
    total = tl.zeros([BLOCK], tl.uint64)
    for turn in range(TURNS):
        index = (tl.program_id(1) * TURNS + turn) * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(words + index, index < num_words, other=0).to(tl.uint64, bitcast=True)
        z = word + (index + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        z = z ^ (z >> 31)
        total += tl.where(index < num_words, z, z - z)
    tl.atomic_add(out_ptr + entry, tl.sum(total, 0).to(tl.int64, bitcast=True), sem="relaxed")
