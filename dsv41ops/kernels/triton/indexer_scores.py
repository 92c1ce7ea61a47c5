"""Scores of the states that a token may see: a program takes a share and keeps the best of it."""

import triton
import triton.language as tl

from dsv41ops.kernels.triton.common import INT32_MAX, bf16_to_f32, kernel, locate_token
from dsv41ops.kernels.triton.dcp_local_seq_lens import owned_states
from dsv41ops.kernels.triton.records import INTERPRETED, decode_e4m3, decode_e8m0
from dsv41ops.kernels.triton.selection import ABSENT, INFINITY, append, shorten, to_key
from dsv41ops.layouts import INDEX_FP8, INDEX_HEAD_DIM

HEAD_DIM = tl.constexpr(INDEX_HEAD_DIM)
FP8 = tl.constexpr(INDEX_FP8.row_bytes)


@triton.jit
def _global_states(local, stripe, first_owned, interleave, SHARDED: tl.constexpr):
    state = local
    if SHARDED:
        state = local // interleave * stripe + first_owned + local % interleave
    return state.to(tl.int32)


@triton.jit
def _owned_below(states, stripe, first_owned, interleave, SHARDED: tl.constexpr):
    """How many states below a global one this rank owns."""
    owned = states
    if SHARDED:
        owned = owned_states(states, 1, stripe, first_owned, interleave)
    return owned


@triton.jit
def _block_numbers(
    entry,
    num_entries,
    blocks_ptr,
    block_size,
    whole_blocks,
    stripe,
    first_owned,
    interleave,
    FILTER: tl.constexpr,
    SHARDED: tl.constexpr,
):
    """Global numbers of the blocks that are looked at; -1: none.

    Without a filter these are all blocks or, where each of them is one rank's, those of this rank.
    """
    inside = entry < num_entries
    if FILTER:
        blocks = tl.load(blocks_ptr + entry, mask=inside, other=-1)
        blocks = tl.where(blocks == INT32_MAX, -1, blocks)
    else:
        blocks = entry
        if SHARDED:
            first = tl.where(inside & (whole_blocks != 0), entry, 0) * block_size
            first = _global_states(first, stripe, first_owned, interleave, SHARDED)
            blocks = tl.where(whole_blocks != 0, first // block_size, entry)
        blocks = tl.where(inside, blocks, -1)
    return blocks


@triton.jit
def _rows(
    row,
    limit,
    num_visible,
    num_entries,
    blocks_ptr,
    block_size,
    whole_blocks,
    stripe,
    first_owned,
    interleave,
    BY_BLOCK: tl.constexpr,
    FILTER: tl.constexpr,
    SHARDED: tl.constexpr,
    LB: tl.constexpr,
):
    """Local states of rows, and whether they are any. Of blocks, each has LB rows."""
    if BY_BLOCK:
        blocks = _block_numbers(
            row // LB,
            num_entries,
            blocks_ptr,
            block_size,
            whole_blocks,
            stripe,
            first_owned,
            interleave,
            FILTER,
            SHARDED,
        )
        num_blocks = num_visible // block_size + (num_visible % block_size > 0).to(tl.int32)
        start = tl.where((blocks >= 0) & (blocks < num_blocks), blocks, 0) * block_size
        end = start + tl.minimum(block_size, num_visible - start)
        end = tl.where((blocks >= 0) & (blocks < num_blocks), end, start)
        first = _owned_below(start, stripe, first_owned, interleave, SHARDED)
        last = _owned_below(end, stripe, first_owned, interleave, SHARDED)
        local = first + row % LB
        valid = local < tl.minimum(last, limit)
    else:
        local = row
        valid = local < limit
    return local, valid


@triton.jit
def _scaled_queries(q_ptr, q_head_stride, HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    """A token's queries in f16 ``[HEAD_BLOCK, 128]``, each times a power of two that brings its
    largest value to 2^14 .. 2^15, so that they are as exact as a f32 sum needs them; and the
    inverses of the powers."""
    head = tl.arange(0, HEAD_BLOCK)
    column = tl.arange(0, HEAD_DIM)
    pointers = q_ptr + head.to(tl.int64)[:, None] * q_head_stride + column[None, :]
    q = bf16_to_f32(tl.load(pointers, mask=(head < HEADS)[:, None], other=0.0))
    largest = tl.max(q.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    exponent = tl.minimum(tl.maximum(largest >> 23, 15), 254)
    power = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return (q * power[:, None]).to(tl.float16), inverse


@triton.jit
def _dot(keys, queries):
    if INTERPRETED:
        products = tl.dot(keys.to(tl.float32), queries.to(tl.float32), input_precision="ieee")
    else:
        products = tl.dot(keys, queries)
    return products


@triton.jit
def _fp8_products(row_ptrs, mask, queries):
    """``[N, HEAD_BLOCK]`` f32, without the keys' scales; queries ``[128, HEAD_BLOCK]``."""
    codes = tl.load(
        row_ptrs[:, None] + tl.arange(0, HEAD_DIM)[None, :], mask=mask[:, None], other=0
    )
    if INTERPRETED:
        keys = decode_e4m3(codes)
    else:
        keys = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return _dot(keys, queries)


@triton.jit
def _e2m1_to_f16(codes):
    """Low four bits of each code, times 2^-14."""
    bits = ((codes & 8) << 12) | ((codes & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _group_codes(words):
    """``[N, 4]`` UE8M0 codes of the groups of 32 values."""
    return (words[:, None] >> (8 * tl.arange(0, 4))[None, :]) & 0xFF


@triton.jit
def _mxfp4_products(row_ptrs, mask, words, even_queries, odd_queries):
    """``[N, HEAD_BLOCK]`` f32, less the largest scale of each key; queries ``[64, HEAD_BLOCK]`` of
    the even and of the odd columns.

    A key is scaled in f16 to its largest group's scale, exactly unless another group's is less
    than 2^-21 of that.
    """
    N: tl.constexpr = mask.shape[0]
    codes = _group_codes(words)
    exponents = tl.maximum(29 + codes - tl.max(codes, 1)[:, None], 0)
    powers = (exponents << 10).to(tl.int16).to(tl.float16, bitcast=True)
    powers = tl.reshape(tl.broadcast_to(powers[:, :, None], [N, 4, 16]), [N, 64])
    packed = tl.load(row_ptrs[:, None] + tl.arange(0, 64)[None, :], mask=mask[:, None], other=0)
    packed = packed.to(tl.int32)
    products = _dot(_e2m1_to_f16(packed) * powers, even_queries)
    return products + _dot(_e2m1_to_f16(packed >> 4) * powers, odd_queries)


@triton.jit
def _load_words(pointers, mask, ALIGNED: tl.constexpr):
    """Four bytes each."""
    if ALIGNED:
        words = tl.load(pointers.to(tl.pointer_type(tl.int32), bitcast=True), mask=mask, other=0)
    else:
        words = tl.load(pointers, mask=mask, other=0).to(tl.int32)
        for byte in tl.static_range(1, 4):
            words |= tl.load(pointers + byte, mask=mask, other=0).to(tl.int32) << (8 * byte)
    return words


@kernel
def _indexer_scores_kernel(
    q_ptr,
    weights_ptr,
    cache_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    candidate_blocks_ptr,
    first_token,
    num_tokens,
    num_requests,
    q_token_stride: tl.int64,
    q_head_stride: tl.int64,
    weights_stride: tl.int64,
    page_stride: tl.int64,
    num_pages,
    states_per_page,
    table_stride: tl.int64,
    table_rows,
    table_columns,
    candidates_stride: tl.int64,
    num_candidates,
    compress_ratio,
    block_size,
    whole_blocks,
    stripe,
    first_owned,
    interleave,
    num_splits,
    topk,
    num_candidate_blocks,
    scratch_ptr,
    counts_ptr,
    block_scratch_ptr,
    block_counts_ptr,
    offsets_ptr,
    sums_ptr,
    sorted_ptr,
    RECORD: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    SHARDED: tl.constexpr,
    FILTER: tl.constexpr,
    BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BN: tl.constexpr,
    LB: tl.constexpr,
    TILES: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per token and split of its states, in tiles of BN rows.

    TILES tiles at a time are scored into memory, then those above the floor are appended to the
    program's list, which is shortened to the ``topk`` best before it could overflow SIZE; the best
    blocks likewise. Tokens vary fastest: those of a request read the same keys at a time.
    """
    BY_BLOCK: tl.constexpr = FILTER or BLOCKS
    NB: tl.constexpr = BN // LB
    DATA_BYTES: tl.constexpr = RECORD - 4
    CHUNK: tl.constexpr = TILES * BN
    BLOCK_CHUNK: tl.constexpr = CHUNK // LB
    program = tl.program_id(0) * num_splits + tl.program_id(1)
    token = first_token + tl.program_id(0)
    split = tl.program_id(1)
    request, position, _, _ = locate_token(query_start_loc_ptr, seq_lens_ptr, num_requests, token)
    num_visible = (position + 1) // compress_ratio  # 0 for padding, whose position is -1
    num_visible = num_visible.to(tl.int32)
    limit = _owned_below(num_visible, stripe, first_owned, interleave, SHARDED)
    in_table = tl.where(request < table_rows, table_columns, 0).to(tl.int64) * states_per_page
    limit = tl.minimum(limit.to(tl.int64), in_table).to(tl.int32)
    table_row = block_table_ptr + tl.maximum(request, 0).to(tl.int64) * table_stride

    blocks_ptr = candidate_blocks_ptr
    if FILTER:
        blocks_ptr = candidate_blocks_ptr + token.to(tl.int64) * candidates_stride
        num_entries = tl.where(limit > 0, num_candidates, 0)
        place = tl.arange(0, CANDIDATES)
        listed = tl.load(blocks_ptr + place, mask=place < num_entries, other=-1)
        following = tl.load(blocks_ptr + place + 1, mask=place + 1 < num_entries, other=-1)
        # As unsigned numbers: -1 comes last.
        falls = (following.to(tl.uint32) < listed.to(tl.uint32)).to(tl.int32)
        if tl.sum(falls, 0) > 0:
            ordered = tl.sort(tl.where(listed < 0, INT32_MAX, listed))
            blocks_ptr = sorted_ptr + program.to(tl.int64) * CANDIDATES
            tl.store(blocks_ptr + place, ordered)
            tl.debug_barrier()
    elif BLOCKS:
        last = _global_states(limit - 1, stripe, first_owned, interleave, SHARDED)
        num_entries = tl.where(
            whole_blocks != 0, tl.cdiv(limit, block_size), last // block_size + 1
        )
        num_entries = tl.where(limit > 0, num_entries, 0)
    else:
        num_entries = limit
    newest = tl.where(num_visible > 0, (num_visible - 1) // block_size, -1)

    num_tiles = tl.cdiv(num_entries, NB if BY_BLOCK else BN)
    share = tl.maximum(tl.cdiv(num_tiles, num_splits), MIN_TILES)
    tile = tl.minimum(split * share, num_tiles)
    last_tile = tl.minimum(tile + share, num_tiles)

    keys_ptr = scratch_ptr + program.to(tl.int64) * (2 * SIZE)
    block_keys_ptr = block_scratch_ptr + program.to(tl.int64) * (2 * BLOCK_SIZE)
    offsets_ptr = offsets_ptr + program.to(tl.int64) * CHUNK
    sums_ptr = sums_ptr + program.to(tl.int64) * (2 * CHUNK)
    words_ptr = (sums_ptr + CHUNK).to(tl.pointer_type(tl.int32), bitcast=True)
    count = 0
    block_count = 0
    if tile < last_tile:
        queries, inverse = _scaled_queries(
            q_ptr + token.to(tl.int64) * q_token_stride, q_head_stride, HEADS, HEAD_BLOCK
        )
        if RECORD == FP8:
            even_queries = tl.trans(queries)
            odd_queries = even_queries
        else:
            pairs = tl.reshape(queries, [HEAD_BLOCK, HEAD_DIM // 2, 2])
            even_queries, odd_queries = tl.split(pairs)
            even_queries = tl.trans(even_queries)
            odd_queries = tl.trans(odd_queries)
        head = tl.arange(0, HEAD_BLOCK)
        weights = tl.load(
            weights_ptr + token.to(tl.int64) * weights_stride + head, mask=head < HEADS, other=0.0
        )
        weights = weights * inverse
        floor = tl.full([], ABSENT, tl.int32)
        block_floor = floor
        chunk_row = tl.arange(0, CHUNK)
        while tile < last_tile:
            num_rows = (last_tile - tile) * BN
            local, valid = _rows(
                tile * BN + chunk_row,
                limit,
                num_visible,
                num_entries,
                blocks_ptr,
                block_size,
                whole_blocks,
                stripe,
                first_owned,
                interleave,
                BY_BLOCK,
                FILTER,
                SHARDED,
                LB,
            )
            valid = valid & (chunk_row < num_rows)
            page = tl.load(table_row + local // states_per_page, mask=valid, other=-1)
            cached = (page >= 0) & (page < num_pages)
            page_start = page.to(tl.int64) * page_stride
            row = (local % states_per_page).to(tl.int64)
            offsets = tl.where(cached, page_start + row * DATA_BYTES, -1)
            tl.store(offsets_ptr + chunk_row, offsets)
            scales_start = states_per_page.to(tl.int64) * DATA_BYTES
            # Those of fp8 are needed after the products only; they arrive meanwhile.
            words = _load_words(cache_ptr + page_start + scales_start + row * 4, cached, ALIGNED)
            if RECORD != FP8:
                tl.store(words_ptr + chunk_row, words)
            tl.debug_barrier()

            for i in tl.range(tl.cdiv(tl.minimum(num_rows, CHUNK), BN), num_stages=STAGES):
                offs = i * BN + tl.arange(0, BN)
                start = tl.load(offsets_ptr + offs)
                row_ptrs = cache_ptr + start
                if ALIGNED:
                    row_ptrs = tl.multiple_of(row_ptrs, 16)
                if RECORD == FP8:
                    products = _fp8_products(row_ptrs, start >= 0, even_queries)
                else:
                    scale_words = tl.load(words_ptr + offs)
                    products = _mxfp4_products(
                        row_ptrs, start >= 0, scale_words, even_queries, odd_queries
                    )
                # Not by a maximum, which would lose a NaN.
                terms = tl.where(products < 0, 0.0, products) * weights[None, :]
                if HEADS != HEAD_BLOCK:
                    terms = tl.where((head < HEADS)[None, :], terms, 0.0)
                tl.store(sums_ptr + offs, tl.sum(terms, 1))
            tl.debug_barrier()

            sums = tl.load(sums_ptr + chunk_row, mask=chunk_row < num_rows, other=0.0)
            if RECORD == FP8:
                scores = sums * words.to(tl.float32, bitcast=True)
            else:
                scores = sums * decode_e8m0(tl.max(_group_codes(words), 1))
            keys = tl.where(cached, to_key(scores), ABSENT)
            numbers = _global_states(local, stripe, first_owned, interleave, SHARDED)
            count = append(keys, numbers, floor, keys_ptr, keys_ptr + SIZE, count)
            tile += TILES
            if (count > topk) & ((count > SIZE - CHUNK) | (tile >= last_tile)):
                floor = shorten(keys_ptr, keys_ptr + SIZE, count, topk, SIZE)
                count = topk.to(tl.int32)
            if BLOCKS:
                blocks = _block_numbers(
                    (tile - TILES) * NB + tl.arange(0, BLOCK_CHUNK),
                    num_entries,
                    blocks_ptr,
                    block_size,
                    whole_blocks,
                    stripe,
                    first_owned,
                    interleave,
                    FILTER,
                    SHARDED,
                )
                of_blocks = tl.max(tl.reshape(keys, [BLOCK_CHUNK, LB]), 1)
                any_cached = tl.max(tl.reshape(cached.to(tl.int32), [BLOCK_CHUNK, LB]), 1)
                of_blocks = tl.where((blocks == newest) & (any_cached > 0), INFINITY, of_blocks)
                block_count = append(
                    of_blocks,
                    blocks,
                    block_floor,
                    block_keys_ptr,
                    block_keys_ptr + BLOCK_SIZE,
                    block_count,
                )
                if (block_count > num_candidate_blocks) & (
                    (block_count > BLOCK_SIZE - BLOCK_CHUNK) | (tile >= last_tile)
                ):
                    block_floor = shorten(
                        block_keys_ptr,
                        block_keys_ptr + BLOCK_SIZE,
                        block_count,
                        num_candidate_blocks,
                        BLOCK_SIZE,
                    )
                    block_count = num_candidate_blocks.to(tl.int32)
            tl.debug_barrier()  # the chunk's memory is used again
    tl.store(counts_ptr + program, count)
    if BLOCKS:
        tl.store(block_counts_ptr + program, block_count)
