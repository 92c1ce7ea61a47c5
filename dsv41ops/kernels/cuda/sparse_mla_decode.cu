// Sparse MLA decode on Hopper with mma.sync: one CTA serves 16 heads of one token, a cluster of
// CTAs shares the token's rows and joins its results through distributed shared memory.
//
// Tiles of 16 rows pass through a ring of slots in shared memory, as bytes. Score warps copy their
// tiles in by cp.async and multiply them with the queries; value warps turn the scores into
// probabilities and add up their slice of the 512 output columns. Both convert bytes to fragments
// in registers: bf16 tiles would cost more to hand over than a second conversion. Rows of the bf16
// record are fragments as they are.
//
// Compile-time: SCORE_WARPS, VALUE_WARPS, SLOTS, SWA_RECORD and RECORD (row bytes; RECORD 0: no
// compressed cache), CTAS_PER_SM, RANKS (CTAs of a cluster).

#include "cluster.cuh"
#include "common.cuh"

constexpr int HEADS = 16;                 // the m of every mma
constexpr int TILE = 16;                  // rows: a score tile, and the k of one mma over values
constexpr int HALVES = 8 / VALUE_WARPS;   // slices of 64 output columns per value warp
constexpr int THREADS = 32 * (SCORE_WARPS + VALUE_WARPS);
constexpr int SLICES = 32;                // of 16 output columns, shared out among the CTAs of a cluster
constexpr int MOST_SLICES = (SLICES + RANKS - 1) / RANKS;
constexpr int AHEAD = 2;                  // tiles that a score warp has in flight or in hand
// Probabilities may reach 2^PEAK_SLACK before a rescale; of the bf16 record 1, which is exact in bf16.
constexpr float PEAK_SLACK = BF16_ROWS ? 0.f : 1.f;

// ---------------------------------------------------------------- instructions

__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_f16(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
// (a & mask) | (b & other)
__device__ __forceinline__ u32 merge(u32 a, u32 mask, u32 b, u32 other) {
    return (a & mask) | (b & other);
}
// All value warps.
__device__ __forceinline__ void value_sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(32 * VALUE_WARPS) : "memory");
}

// ---------------------------------------------------------------- layout of a row in the ring

__device__ constexpr int pitch_of(int record) {
    // 584: 448 bytes of e4m3, 64 unused, 128 of bf16; so that swizzled pieces stay inside.
    return record == 584 ? 640 : record == 528 ? 512 : record == 288 ? 256 : record;
}
__device__ constexpr int scales_of(int record) { return record == 584 ? 8 : record == 528 ? 16 : record == 288 ? 32 : 0; }
// Of UE8M0 scales; e4m3 ones stay as they come.
__device__ constexpr int groups_of(int record) { return record == 584 ? 8 : record == 528 ? 16 : 0; }

constexpr int TILE_BYTES = TILE * max_of(pitch_of(SWA_RECORD), pitch_of(RECORD));
constexpr int TILE_SCALES = max_of(TILE * max_of(scales_of(SWA_RECORD), scales_of(RECORD)), 1);
constexpr int GROUPS = max_of(groups_of(SWA_RECORD), groups_of(RECORD));
constexpr int QUERY_BYTES = 32 * 512;  // 32 k-steps of one fragment each
// Whose order of columns the fragments follow: 288-byte rows leave no choice.
constexpr int QUERY_ORDER = RECORD == 288 ? 288 : SWA_RECORD;
static_assert(ONE_RECORD || (SWA_RECORD == 528 && RECORD == 288), "records");
static_assert(AHEAD * SCORE_WARPS <= SLOTS, "a score warp's first tiles wait for nobody");

enum : u32 { IN_F16, IN_BF16 };  // how a tile's values are multiplied

struct Info {
    u32 mode;
    float lift;      // log2 of what the tile's probabilities are multiplied by
    float lower;     // 2^-lift
    u32 unused;
};

struct Shared {
    alignas(128) u8 ring[SLOTS][TILE_BYTES];
    alignas(16) u8 query[QUERY_BYTES];
    alignas(16) float scores[SLOTS][HEADS][TILE];
    alignas(16) u8 scales[SLOTS][TILE_SCALES];
    alignas(16) u32 value_scales[SLOTS][max_of(GROUPS, 2) / 2][TILE];  // 16 bits of an even and an odd group
    alignas(16) float key_scales[SCORE_WARPS][QUERY_ORDER == 288 ? 1 : max_of(GROUPS, 1)][TILE];
    alignas(16) Info info[SLOTS];
    float tops[SLOTS][HEADS];                    // of a tile's scores
    float query_factor[HEADS];                   // what queries were divided by, a power of two
    u64 full[SLOTS], empty[SLOTS];
    u64 parts_here;
    // Peaks and sums of every CTA of the cluster, and the others' parts of this one's slices.
    alignas(16) float2 stats[RANKS][HEADS];
    alignas(16) float2 turn[32];
    alignas(128) float parts[max_of(RANKS - 1, 1)][RANKS > 1 ? MOST_SLICES : 1][RANKS > 1 ? HEADS : 1][16];
};
__device__ unsigned shared_bytes = sizeof(Shared);

constexpr int SLICE_BYTES = HEADS * 16 * sizeof(float);
static_assert(RANKS == 1 || SLICES * SLICE_BYTES <= SLOTS * TILE_BYTES, "the ring holds what is sent");

// Which 16-byte piece of a row lies where: rows that one instruction reads together never share
// a bank (rows k and k + 4, and four rows in a run).
__device__ __forceinline__ int swizzle(int row) {
    return ((row & 3) << 1) ^ ((row >> 2 & 1) * 5);
}
// Rows r, r + 4, r + 8, r + 12 lie side by side in score and scale tables: one lane needs them.
__device__ __forceinline__ int place(int row) { return (row & 3) * 4 + (row >> 2); }

// ---------------------------------------------------------------- bytes to bf16

// e4m3 bits at bf16's place: the value times 2^-120. Bytes 1 and 3, and bytes 0 and 2.
__device__ __forceinline__ u32 odd_bytes(u32 w) { return merge(w >> 4, 0x07f007f0u, w, 0x80008000u); }
__device__ __forceinline__ u32 even_bytes(u32 w) {
    return merge(w << 4, 0x07f007f0u, w << 8, 0x80008000u);
}
// e2m1 bits at f16's place: the value times 2^-14. Nibble N of both halves of a word.
template <int N> __device__ __forceinline__ u32 nibbles(u32 w) {
    constexpr u32 VALUE = 0x0e000e00u, SIGN = 0x80008000u;
    if constexpr (N == 0) return merge(w << 9, VALUE, w << 12, SIGN);
    if constexpr (N == 1) return merge(w << 5, VALUE, w << 8, SIGN);
    if constexpr (N == 2) return merge(w << 1, VALUE, w << 4, SIGN);
    return merge(w >> 3, VALUE, w, SIGN);
}

// ---------------------------------------------------------------- rows into the ring

// Lane r holds row r's place in 16 bytes, the unit of strides and alignment.
template <int R, bool ZERO_FILL>
__device__ __forceinline__ void copy_rows(const u8* bytes, u32 data, u32 exists, u32 ring, u32 scales, int lane) {
    auto copy = [&](u32 to, int r, int piece) {
        const u64 row = static_cast<u64>(__shfl_sync(~0u, data, r)) * 16;
        const u8* from = bytes + piece * 16;
        if (R != 584) hold(from);  // value warps of 584-byte rows have no registers to spare
        copy16(to, R == 584 ? bytes + row + piece * 16 : from + row, !ZERO_FILL || (exists >> r & 1));
    };
    if constexpr (R == 288) {
        const int odd = lane >> 4, piece = lane & 15;
#pragma unroll
        for (int i = 0; i < TILE; i += 2)
            copy(ring + (i + odd) * 256 + ((piece ^ swizzle(i + odd)) << 4), i + odd, piece);
        copy(scales + lane * 16, lane >> 1, 16 + (lane & 1));
    } else if constexpr (R == 1024) {
#pragma unroll
        for (int i = 0; i < 2 * TILE; ++i) {
            const int r = i >> 1, piece = lane + (i & 1) * 32;
            copy(ring + r * 1024 + ((piece ^ swizzle(r)) << 4), r, piece);
        }
    } else {
        // The last four pieces of lanes of a 584-byte row begin its bf16 part.
        const int place = R == 584 && lane >= 28 ? lane + 4 : lane;
#pragma unroll
        for (int r = 0; r < TILE; ++r) copy(ring + r * pitch_of(R) + ((place ^ swizzle(r)) << 4), r, lane);
        if constexpr (R == 584) {
            const int rest = lane & 3;
#pragma unroll
            for (int i = 0; i < TILE; i += 8) {
                const int r = i + (lane >> 2);
                copy(ring + r * 640 + (((36 + rest) ^ swizzle(r)) << 4), r, 32 + rest);
            }
        }
    }
}

// Lane r holds row r's slot; a row that does not exist is filled with zeros. Returns which exist.
template <int R>
__device__ __forceinline__ u32 copy_tile(const Pool& pool, int index, u32 ring, u32 scales, int lane) {
    const bool valid = static_cast<u32>(index) < pool.num_slots;
    const u32 exists = __ballot_sync(~0u, valid) & 0xffffu;
    const u32 slot = valid ? index : 0;
    const Place at = locate<R>(pool, slot);
    if (exists == 0xffffu)
        copy_rows<R, false>(pool.bytes, at.row_start, exists, ring, scales, lane);
    else
        copy_rows<R, true>(pool.bytes, at.row_start, exists, ring, scales, lane);
    if constexpr (R == 584)
        if (lane < TILE)
            copy_few<8>(scales + lane * 8, pool.bytes + static_cast<u64>(at.page_start + pool.page_size * 36) * 16 + at.row * 8, valid);
    if constexpr (R == 528)
        if (lane < TILE) copy16(scales + lane * 16, pool.bytes + static_cast<u64>(at.row_start + 32) * 16, valid);
    return exists;
}

// ---------------------------------------------------------------- scales

__device__ __forceinline__ void set_info(Info& info, int lane, u32 mode, int lift) {
    if (lane == 0)
        *reinterpret_cast<uint4*>(&info) = make_uint4(
            mode, __float_as_uint(static_cast<float>(lift)), static_cast<u32>(127 - lift) << 23, 0);
}

// Scales of a score warp's tile, into the tables of scores (f32) and of values (16 bits).
template <int R>
__device__ __forceinline__ void spread_scales(Shared& sh, int slot, u32 exists, int warp, int lane) {
    const int row = lane & 15, part = lane >> 4, at = place(row);
    const u8* raw = sh.scales[slot] + row * scales_of(R) + part * (scales_of(R) / 2);
    if constexpr (R == 288) {
        set_info(sh.info[slot], lane, IN_F16, 14);
    } else if constexpr (R == 1024) {
        set_info(sh.info[slot], lane, IN_BF16, 0);
    } else {
        constexpr int CODES = R == 584 ? 4 : 8;
        u32 words[CODES / 4];
        if constexpr (R == 584) {
            words[0] = *reinterpret_cast<const u32*>(raw);
            if (part == 1) words[0] = (words[0] & 0x00ffffffu) | 0x7f000000u;  // the pad byte
        } else {
            const uint2 codes = *reinterpret_cast<const uint2*>(raw);
            words[0] = codes.x, words[1] = codes.y;
        }
        if (!(exists >> row & 1)) {
#pragma unroll
            for (int i = 0; i < CODES / 4; ++i) words[i] = 0x7f7f7f7fu;
        }
        bool outside = false;
#pragma unroll
        for (int i = 0; i < CODES; ++i) outside |= (words[i / 4] >> (i % 4 * 8) & 255) - 113u > 21u;
        if (!__any_sync(~0u, outside)) {
            // e4m3 times 2^-14 .. 2^7 is exact in f16.
#pragma unroll
            for (int i = 0; i < CODES && R == QUERY_ORDER; ++i)
                sh.key_scales[warp][part * CODES + i][at] =
                    __uint_as_float(__byte_perm(words[i / 4], 0, 0x0444 | i % 4 << 12) >> 1);
#pragma unroll
            for (int i = 0; i < CODES / 2; ++i)
                sh.value_scales[slot][part * (CODES / 2) + i][at] =
                    __byte_perm(words[i / 2], 0, i & 1 ? 0x4342 : 0x4140) * 1024u - 112u * 0x04000400u;
            set_info(sh.info[slot], lane, IN_F16, 0);
        } else {
            u32 top = 0;
#pragma unroll
            for (int i = 0; i < CODES; ++i) {
                const u32 code = words[i / 4] >> (i % 4 * 8) & 255;
                top = max(top, code == 255 ? 254 : code);
            }
            top = __reduce_max_sync(~0u, top);
            // bf16's exponents are 120 from e4m3's: 2^120 is part of the scale. Where that
            // overflows, values are stored as 2^-64 or 2^-120 of theirs.
            const u32 lift = top <= 134 ? 0 : top <= 198 ? 64 : 120;
#pragma unroll
            for (int i = 0; i < CODES; i += 2) {
                const u32 even = words[i / 4] >> (i % 4 * 8) & 255, odd = words[i / 4] >> (i % 4 * 8 + 8) & 255;
                if (R == QUERY_ORDER) {
                    sh.key_scales[warp][part * CODES + i][at] = ue8m0(even);
                    sh.key_scales[warp][part * CODES + i + 1][at] = ue8m0(odd);
                }
                sh.value_scales[slot][(part * CODES + i) / 2][at] =
                    min(even + 120 - lift, 254u) << 7 | min(odd + 120 - lift, 254u) << 23;
            }
            set_info(sh.info[slot], lane, IN_BF16, lift);
        }
    }
}

// ---------------------------------------------------------------- queries

// Where the fragment of a k-step begins that lane `owner` (head, quad) reads. Neighbouring k-steps
// are turned against each other, so that a warp that writes several of them meets fewer conflicts.
__device__ __forceinline__ int query_place(int step, int owner) {
    return (step * 32 + (owner ^ ((step >> 1 & 1) << 2))) * 16;
}

// Columns 8 block .. 8 block + 7 of heads h and h + 8, to the k-steps that hold them.
template <int R>
__device__ __forceinline__ void put_query(u8* to, int h, int block, const float (&x)[8], const float (&y)[8]) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        int step, quad, first, second, gap;  // columns of the two register pairs: first, + gap
        if (R == 584 && block < 56) {
            step = (block >> 3) * 4 + (block & 1) * 2 + part, quad = block >> 1 & 3;
        } else if (R != 288) {
            step = (block >> 2) * 2 + part, quad = block & 3;
        } else {
            step = (block >> 4) * 8 + (block & 3) * 2 + part, quad = block >> 2 & 3;
        }
        if (R == 288) first = part * 2, second = first + 1, gap = 4;
        else first = part * 4, second = first + 2, gap = 1;
        uint4 a;
        if (R == 584 && block >= 56 || R == 1024)
            a = make_uint4(to_bf16x2(x[first], x[first + gap]), to_bf16x2(y[first], y[first + gap]),
                           to_bf16x2(x[second], x[second + gap]), to_bf16x2(y[second], y[second + gap]));
        else
            a = make_uint4(to_f16x2(x[first], x[first + gap]), to_f16x2(y[first], y[first + gap]),
                           to_f16x2(x[second], x[second + gap]), to_f16x2(y[second], y[second + gap]));
        *reinterpret_cast<uint4*>(to + query_place(step, h * 4 + quad)) = a;
    }
}

// Queries, scaled by a power of two per head into f16's range, as fragments in shared memory.
__device__ __forceinline__ void load_queries(Shared& sh, const Params& p, const u16* q, int heads_left,
                                             int warp, int lane) {
    constexpr int PAIRS = 8 / VALUE_WARPS;  // of heads h, h + 8, for this warp
    uint4 raw[PAIRS][2][2] = {};
#pragma unroll
    for (int i = 0; i < PAIRS; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int head = warp * PAIRS + i + half * 8;
            if (head < heads_left) {
                const uint4* from = reinterpret_cast<const uint4*>(q + head * p.q_head_stride);
                raw[i][half][0] = from[lane], raw[i][half][1] = from[lane + 32];
            }
        }
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int h = warp * PAIRS + i;
        float x[2][2][8];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 top = 0;
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const uint4 v = raw[i][half][part];
                const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) top = max(top, max(words[j] << 16 & 0x7fff0000u, words[j] & 0x7fff0000u));
            }
            top = __reduce_max_sync(~0u, top) >> 23;  // its exponent
            const int exponent = min(max(static_cast<int>(top) - 141, -112), 112);
            const float factor = __uint_as_float(static_cast<u32>(127 - exponent) << 23);
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const uint4 v = raw[i][half][part];
                const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    x[half][part][j * 2] = __uint_as_float(words[j] << 16) * factor;
                    x[half][part][j * 2 + 1] = __uint_as_float(words[j] & 0xffff0000u) * factor;
                }
            }
            if (lane == 0) sh.query_factor[h + half * 8] = __uint_as_float(static_cast<u32>(127 + exponent) << 23);
        }
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const int block = lane + part * 32;
            put_query<QUERY_ORDER>(sh.query, h, block, x[0][part], x[1][part]);
        }
    }
}

// ---------------------------------------------------------------- scores of one tile

// Of rows q, q + 4, q + 8 and q + 12: s += c * scale.
__device__ __forceinline__ void add_scaled(float (&s)[2][4], const float (&c)[2][4], float4 scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        s[0][half * 2] += c[0][half * 2] * scale.x;
        s[0][half * 2 + 1] += c[0][half * 2 + 1] * scale.y;
        s[1][half * 2] += c[1][half * 2] * scale.z;
        s[1][half * 2 + 1] += c[1][half * 2 + 1] * scale.w;
    }
}

template <int R>
__device__ __forceinline__ void score_tile(const Shared& sh, int slot, int warp, int lane, float (&s)[2][4]) {
    const int g = lane >> 2, q = lane & 3;
    const u8* tile = sh.ring[slot];
    auto fragment = [&](int step) { return *reinterpret_cast<const uint4*>(sh.query + query_place(step, lane)); };
    // Column n of the mma is row n/2, n/2 + 4 (odd n), or 8 further in the second n-tile.
    const int row = (g >> 1) + 4 * (g & 1);
    const u8* rows[2] = {tile + row * pitch_of(R), tile + (row + 8) * pitch_of(R)};
    const int turn = swizzle(row);  // the same for row + 8
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = 0.f;

    if constexpr (R == 584) {
#pragma unroll
        for (int chunk = 0; chunk < 7; ++chunk) {
            float c[2][4] = {};
            uint4 raw[2];
#pragma unroll
            for (int n = 0; n < 2; ++n)
                raw[n] = *reinterpret_cast<const uint4*>(rows[n] + (((chunk * 4 + q) ^ turn) << 4));
            const u32 words[2][4] = {{raw[0].x, raw[0].y, raw[0].z, raw[0].w},
                                     {raw[1].x, raw[1].y, raw[1].z, raw[1].w}};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                u32 b[2][2];
#pragma unroll
                for (int n = 0; n < 2; ++n)
                    b[n][0] = e4m3_to_f16(words[n][j], false), b[n][1] = e4m3_to_f16(words[n][j], true);
                const uint4 a = fragment(chunk * 4 + j);
#pragma unroll
                for (int n = 0; n < 2; ++n) mma_f16(c[n], a, b[n][0], b[n][1]);
            }
            add_scaled(s, c, *reinterpret_cast<const float4*>(&sh.key_scales[warp][chunk][q * 4]));
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint4 raw[2];
#pragma unroll
            for (int n = 0; n < 2; ++n)
                raw[n] = *reinterpret_cast<const uint4*>(rows[n] + (((32 + h * 4 + q) ^ turn) << 4));
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const uint4 a = fragment(28 + h * 2 + j);
#pragma unroll
                for (int n = 0; n < 2; ++n) mma_bf16(s[n], a, j ? raw[n].z : raw[n].x, j ? raw[n].w : raw[n].y);
            }
        }
    } else if constexpr (R == 1024) {
        float c[2][2][4] = {};  // fewer products wait for the one before
#pragma unroll 8
        for (int chunk = 0; chunk < 16; ++chunk) {
            uint4 raw[2];
#pragma unroll
            for (int n = 0; n < 2; ++n)
                raw[n] = *reinterpret_cast<const uint4*>(rows[n] + (((chunk * 4 + q) ^ turn) << 4));
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const uint4 a = fragment(chunk * 2 + j);
#pragma unroll
                for (int n = 0; n < 2; ++n) mma_bf16(c[j][n], a, j ? raw[n].z : raw[n].x, j ? raw[n].w : raw[n].y);
            }
        }
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[n][i] = c[0][n][i] + c[1][n][i];
    } else if constexpr (R == 528 && QUERY_ORDER == 288) {
        // A quad's lane holds a whole group of 32 columns per chunk: its scale goes into the keys.
        const bool exact = sh.info[slot].mode == IN_F16;
#pragma unroll 1
        for (int chunk = 0; chunk < 4; ++chunk) {
            const int group = chunk * 4 + q;
            u32 keys[2][16];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const u32 scale = sh.value_scales[slot][group >> 1][place(row + n * 8)];
                const u32 factor = exact ? __byte_perm(scale, 0, group & 1 ? 0x3232 : 0x1010) : 0x3c003c00u;
#pragma unroll
                for (int part = 0; part < 2; ++part) {
                    const uint4 raw = *reinterpret_cast<const uint4*>(rows[n] + (((group * 2 + part) ^ turn) << 4));
                    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const u32 low = __byte_perm(words[j * 2], words[j * 2 + 1], 0x5140);
                        const u32 high = __byte_perm(words[j * 2], words[j * 2 + 1], 0x7362);
                        u32* to = keys[n] + (part * 2 + j) * 4;
                        to[0] = mul_f16x2(e4m3_to_f16(low, false), factor), to[1] = mul_f16x2(e4m3_to_f16(low, true), factor);
                        to[2] = mul_f16x2(e4m3_to_f16(high, false), factor), to[3] = mul_f16x2(e4m3_to_f16(high, true), factor);
                    }
                }
            }
            if (exact) {
#pragma unroll
                for (int step = 0; step < 8; ++step) {
                    const uint4 a = fragment(chunk * 8 + step);
#pragma unroll
                    for (int n = 0; n < 2; ++n) mma_f16(s[n], a, keys[n][step * 2], keys[n][step * 2 + 1]);
                }
                continue;
            }
            // Scales that f16 does not hold, which is rare: one lane's group at a time.
#pragma unroll 1
            for (int lone = 0; lone < 4; ++lone) {
                float c[2][4] = {};
#pragma unroll
                for (int step = 0; step < 8; ++step) {
                    const uint4 a = fragment(chunk * 8 + step);
#pragma unroll
                    for (int n = 0; n < 2; ++n)
                        mma_f16(c[n], a, q == lone ? keys[n][step * 2] : 0, q == lone ? keys[n][step * 2 + 1] : 0);
                }
                const u8* codes = sh.scales[slot] + chunk * 4 + lone;
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) s[n][i] += c[n][i] * ue8m0(codes[(q + 8 * n + 4 * (i & 1)) * 16]);
            }
        }
    } else if constexpr (R == 528) {
#pragma unroll 4
        for (int chunk = 0; chunk < 16; ++chunk) {
            float c[2][4] = {};
            uint2 raw[2];
#pragma unroll
            for (int n = 0; n < 2; ++n)
                raw[n] = *reinterpret_cast<const uint2*>(
                    rows[n] + (((chunk * 2 + (q >> 1)) ^ turn) << 4) + (q & 1) * 8);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                u32 b[2][2];
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const u32 word = j ? raw[n].y : raw[n].x;
                    b[n][0] = e4m3_to_f16(word, false), b[n][1] = e4m3_to_f16(word, true);
                }
                const uint4 a = fragment(chunk * 2 + j);
#pragma unroll
                for (int n = 0; n < 2; ++n) mma_f16(c[n], a, b[n][0], b[n][1]);
            }
            add_scaled(s, c, *reinterpret_cast<const float4*>(&sh.key_scales[warp][chunk][q * 4]));
        }
    } else {
        const u8* codes = sh.scales[slot] + row * 32 + q * 2;
#pragma unroll
        for (int chunk = 0; chunk < 4; ++chunk) {
            uint4 raw[2];
            u32 scale[2][2];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                raw[n] = *reinterpret_cast<const uint4*>(rows[n] + (((chunk * 4 + q) ^ turn) << 4));
                const u32 pair = e4m3_to_f16(*reinterpret_cast<const u16*>(codes + n * 256 + chunk * 8), false);
                scale[n][0] = __byte_perm(pair, 0, 0x1010), scale[n][1] = __byte_perm(pair, 0, 0x3232);
            }
            const u32 words[2][4] = {{raw[0].x, raw[0].y, raw[0].z, raw[0].w},
                                     {raw[1].x, raw[1].y, raw[1].z, raw[1].w}};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                u32 b[2][4];
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const u32 w = words[n][j], f = scale[n][j >> 1];
                    b[n][0] = mul_f16x2(nibbles<0>(w), f), b[n][1] = mul_f16x2(nibbles<1>(w), f);
                    b[n][2] = mul_f16x2(nibbles<2>(w), f), b[n][3] = mul_f16x2(nibbles<3>(w), f);
                }
#pragma unroll
                for (int hh = 0; hh < 2; ++hh) {
                    const uint4 a = fragment(chunk * 8 + j * 2 + hh);
#pragma unroll
                    for (int n = 0; n < 2; ++n) mma_f16(s[n], a, b[n][hh * 2], b[n][hh * 2 + 1]);
                }
            }
        }
    }
}

// ---------------------------------------------------------------- values of one tile

// What a value warp reads of a tile: at once, as everything that follows depends on it.
template <int R> struct Bytes {
    static constexpr int WORDS = R == 288 ? 1 : R == 528 ? 2 : 4;  // of a row; a bf16 slice has four
    u32 words[HALVES][4][WORDS];  // rows q, q + 4, q + 8, q + 12
    u32 scales[HALVES][2];        // of rows q and q + 4, and of the other two
};

// Whether a slice of 64 columns is bf16 as it lies in the ring.
template <int R> __device__ __forceinline__ bool is_bf16(int slice) { return R == 1024 || R == 584 && slice == 7; }

template <int R>
__device__ __forceinline__ void load_bytes(const Shared& sh, int slot, int warp, int lane, Bytes<R>& to) {
    const int g = lane >> 2, q = lane & 3;
    const u8* rows = sh.ring[slot] + q * pitch_of(R);
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        const int slice = warp * HALVES + half;  // of 64 columns
        const bool odd_group = R == 584 ? slice & 1 : R == 528 ? g >> 2 : g >> 1 & 1;
        uint4 both = {};  // scales of an even and an odd group
        if constexpr (R == 288) {
            const u8* codes = sh.scales[slot] + q * 32 + slice * 4 + (g >> 2) * 2;
            both.x = *reinterpret_cast<const u16*>(codes), both.y = *reinterpret_cast<const u16*>(codes + 128);
            both.z = *reinterpret_cast<const u16*>(codes + 256), both.w = *reinterpret_cast<const u16*>(codes + 384);
        } else if constexpr (R != 1024) {
            both = *reinterpret_cast<const uint4*>(&sh.value_scales[slot][R == 584 ? slice >> 1 : slice][q * 4]);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            // These four rows share the swizzle but for the second and fourth: 5 further.
            const u8* row = rows + k * 4 * pitch_of(R);
            const int turn = swizzle(q) ^ ((k & 1) * 5);
            if constexpr (R == 288) {
                to.words[half][k][0] = *reinterpret_cast<const u32*>(
                    row + (((slice * 2 + (g >> 2)) ^ turn) << 4) + (g & 3) * 4);
            } else if (is_bf16<R>(slice)) {
                if constexpr (R == 584 || R == 1024) {
                    const int first = R == 584 ? 32 : slice * 8;
                    const uint4 v = *reinterpret_cast<const uint4*>(row + (((first + g) ^ turn) << 4));
                    to.words[half][k][0] = v.x, to.words[half][k][1] = v.y;
                    to.words[half][k][2] = v.z, to.words[half][k][3] = v.w;
                }
            } else {
                const uint2 v = *reinterpret_cast<const uint2*>(
                    row + (((slice * 4 + (g >> 1)) ^ turn) << 4) + (g & 1) * 8);
                to.words[half][k][0] = v.x, to.words[half][k][1] = v.y;
            }
        }
        if constexpr (R == 288)
            both = make_uint4(e4m3_to_f16(both.x, false), e4m3_to_f16(both.y, false),
                              e4m3_to_f16(both.z, false), e4m3_to_f16(both.w, false));
        const u32 group = odd_group ? 0x7632 : 0x5410;
        to.scales[half][0] = __byte_perm(both.x, both.y, group);
        to.scales[half][1] = __byte_perm(both.z, both.w, group);
    }
}

// acc[half * 8 + i]: columns slice + half * 64 + 8 n + i of the mma's column n. `plain` are the
// probabilities for bf16 values, `p` for the others.
template <int R>
__device__ __forceinline__ void add_values(const Bytes<R>& bytes, u32 mode, int warp, const uint4& p,
                                           const uint4& plain, float (&acc)[HALVES * 8][4]) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        const auto& words = bytes.words[half];
        const u32 scale0 = bytes.scales[half][0], scale1 = bytes.scales[half][1];
        if constexpr (R == 584 || R == 1024) {
            if (is_bf16<R>(warp * HALVES + half)) {
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int d = 0; d < 2; ++d) {
                        const u32 select = d ? 0x7632 : 0x5410;
                        const u32 b0 = __byte_perm(words[0][j], words[1][j], select);
                        const u32 b1 = __byte_perm(words[2][j], words[3][j], select);
                        mma_bf16(acc[half * 8 + j * 2 + d], plain, b0, b1);
                    }
                continue;
            }
        }
        if constexpr (R == 288) {
#pragma unroll
            for (int d = 0; d < 2; ++d) {
                const u32 select = d ? 0x7632 : 0x5410;
                const u32 low = __byte_perm(words[0][0], words[1][0], select);
                const u32 high = __byte_perm(words[2][0], words[3][0], select);
                const u32 b0[4] = {nibbles<0>(low), nibbles<1>(low), nibbles<2>(low), nibbles<3>(low)};
                const u32 b1[4] = {nibbles<0>(high), nibbles<1>(high), nibbles<2>(high), nibbles<3>(high)};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const u32 x = mul_f16x2(b0[i], scale0), y = mul_f16x2(b1[i], scale1);
                    mma_f16(acc[half * 8 + d * 4 + i], p, x, y);
                }
            }
        } else if (mode == IN_F16) {
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int d = 0; d < 2; ++d) {
                    const u32 select = d ? 0x7362 : 0x5140;  // two columns, of two rows each
                    const u32 low = __byte_perm(words[0][j], words[1][j], select);
                    const u32 high = __byte_perm(words[2][j], words[3][j], select);
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const u32 b0 = mul_f16x2(e4m3_to_f16(low, i), scale0);
                        const u32 b1 = mul_f16x2(e4m3_to_f16(high, i), scale1);
                        mma_f16(acc[half * 8 + j * 4 + d * 2 + i], p, b0, b1);
                    }
                }
        } else {
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int d = 0; d < 2; ++d) {
                    const u32 select = d ? 0x7632 : 0x5410;
                    const u32 low = __byte_perm(words[0][j], words[1][j], select);
                    const u32 high = __byte_perm(words[2][j], words[3][j], select);
#pragma unroll
                    for (int odd = 0; odd < 2; ++odd) {
                        const u32 b0 = mul_bf16x2(odd ? odd_bytes(low) : even_bytes(low), scale0);
                        const u32 b1 = mul_bf16x2(odd ? odd_bytes(high) : even_bytes(high), scale1);
                        mma_bf16(acc[half * 8 + j * 4 + d * 2 + odd], p, b0, b1);
                    }
                }
        }
    }
}

// N tiles of a value warp: probabilities from scores, then the values that they weigh.
template <int R, int N>
__device__ __forceinline__ void weigh_tiles(const Shared& sh, const int (&slots)[N], int warp, int lane,
                                            float (&peak)[2], float (&total)[2], float (&acc)[HALVES * 8][4]) {
    const int g = lane >> 2, q = lane & 3;
    uint4 info[N];
    float4 s[N][2];
    float top[2];
    Bytes<R> bytes[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
        info[n] = *reinterpret_cast<const uint4*>(&sh.info[slots[n]]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int head = half * 8 + g;
            s[n][half] = *reinterpret_cast<const float4*>(&sh.scores[slots[n]][head][q * 4]);
            const float t = sh.tops[slots[n]][head];
            top[half] = n == 0 ? t : fmaxf(top[half], t);
        }
        load_bytes<R>(sh, slots[n], warp, lane, bytes[n]);
    }
    const bool higher = top[0] > peak[0] + PEAK_SLACK || top[1] > peak[1] + PEAK_SLACK;
    if (__any_sync(~0u, higher)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float next = fmaxf(peak[half], top[half]);
            const float fade = exp2_fast(peak[half] - next);
            peak[half] = next, total[half] *= fade;
#pragma unroll
            for (int j = 0; j < HALVES * 8; ++j) acc[j][half * 2] *= fade, acc[j][half * 2 + 1] *= fade;
        }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float lift = R == 1024 ? 0.f : __uint_as_float(info[n].y), lower = R == 1024 ? 1.f : __uint_as_float(info[n].z);
        float4(&x)[2] = s[n];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float from = peak[half] - lift;
            x[half].x = exp2_fast(x[half].x - from), x[half].y = exp2_fast(x[half].y - from);
            x[half].z = exp2_fast(x[half].z - from), x[half].w = exp2_fast(x[half].w - from);
            total[half] += ((x[half].x + x[half].y) + (x[half].z + x[half].w)) * lower;
        }
        uint4 weights, plain;
        if (R == 288 || R != 1024 && (N > 1 || info[n].x == IN_F16))
            weights = make_uint4(to_f16x2(x[0].x, x[0].y), to_f16x2(x[1].x, x[1].y),
                                 to_f16x2(x[0].z, x[0].w), to_f16x2(x[1].z, x[1].w));
        else
            weights = make_uint4(to_bf16x2(x[0].x, x[0].y), to_bf16x2(x[1].x, x[1].y),
                                 to_bf16x2(x[0].z, x[0].w), to_bf16x2(x[1].z, x[1].w));
        if (R == 1024)
            plain = weights;
        else if (R == 584 && warp == VALUE_WARPS - 1)
            plain = make_uint4(to_bf16x2(x[0].x * lower, x[0].y * lower), to_bf16x2(x[1].x * lower, x[1].y * lower),
                               to_bf16x2(x[0].z * lower, x[0].w * lower), to_bf16x2(x[1].z * lower, x[1].w * lower));
        add_values<R>(bytes[n], N > 1 ? IN_F16 : info[n].x, warp, weights, plain, acc);
    }
}

// ---------------------------------------------------------------- the kernel

// This CTA's tiles: a run of the window's and a run of the selection's, cut to the lengths.
struct Work {
    int swa_first, swa_count, topk_first, topk_count;
    __device__ __forceinline__ int tile(int i, bool& in_swa) const {
        in_swa = i < swa_count;
        return in_swa ? swa_first + i : i < swa_count + topk_count ? topk_first + i - swa_count : -1;
    }
};

__device__ __forceinline__ int load_index(const Pool& pool, i64 token, int tile, int length, int lane) {
    const int at = tile * TILE + lane;
    return tile >= 0 && lane < TILE && at < length ? pool.indices[token * pool.indices_stride + at] : -1;
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
sparse_mla_decode(const __grid_constant__ Params p) {
    extern __shared__ Shared shared[];
    Shared& sh = shared[0];
    const int thread = threadIdx.x, lane = thread & 31;
    const int g = lane >> 2, q = lane & 3;
    const int rank = RANKS > 1 ? cluster_rank() : 0;
    const u32 unit = blockIdx.x / RANKS;
    const i64 token = unit / p.head_groups;
    const int first_head = unit % p.head_groups * HEADS;
    const int heads_left = p.num_heads - first_head;
    const int first_slice = SLICES * rank / RANKS, last_slice = SLICES * (rank + 1) / RANKS;

    // Shares by widths, not lengths: the first indices need not wait for the lengths.
    const int swa_tiles = (p.swa.width + TILE - 1) / TILE;
    const int topk_tiles = RECORD ? (p.topk.width + TILE - 1) / TILE : 0;
    const int begin = (swa_tiles + topk_tiles) * rank / RANKS;
    const int end = (swa_tiles + topk_tiles) * (rank + 1) / RANKS;
    Work work;
    work.swa_first = min(begin, swa_tiles), work.swa_count = min(end, swa_tiles) - work.swa_first;
    work.topk_first = max(begin - swa_tiles, 0), work.topk_count = max(end - swa_tiles, 0) - work.topk_first;
    const int score_warp = thread >> 5;
    auto prepare = [&] {
        if (thread == 0) {
#pragma unroll 1
            for (int slot = 0; slot < SLOTS; ++slot)
                init_barrier(sh.full[slot], 1), init_barrier(sh.empty[slot], VALUE_WARPS);
            if (RANKS > 1) {
                init_bytes_barrier(sh.parts_here);
                asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
                expect_bytes(sh.parts_here, (RANKS - 1) * (sizeof(sh.stats[0]) + (last_slice - first_slice) * SLICE_BYTES));
            }
        }
        __syncthreads();
        if (RANKS > 1) cluster_arrive();
    };
    // Clusters leave SMs free, where the next launch does this before it has to wait. Otherwise it is done while
    // indices are on their way.
    if (CTAS_PER_SM == 1) let_next_launch();
    if (RANKS > 1) prepare();
    wait_for_launch();
    bool guess_in_swa[AHEAD];
    int guess[AHEAD], first_indices[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
        guess[a] = work.tile(score_warp + a * SCORE_WARPS, guess_in_swa[a]);
        first_indices[a] = -1;
        if (score_warp < SCORE_WARPS)
            first_indices[a] = guess_in_swa[a] ? load_index(p.swa, token, guess[a], p.swa.width, lane)
                               : RECORD        ? load_index(p.topk, token, guess[a], p.topk.width, lane) : -1;
    }

    const int swa_len = clamp(p.swa.lens[token], 0, p.swa.width);
    const int topk_len = RECORD ? clamp(p.topk.lens[token], 0, p.topk.width) : 0;
    if (RANKS == 1) prepare();
    work.swa_count = clamp((swa_len + TILE - 1) / TILE - work.swa_first, 0, work.swa_count);
    work.topk_count = clamp((topk_len + TILE - 1) / TILE - work.topk_first, 0, work.topk_count);
    const int num_tiles = work.swa_count + work.topk_count;

    if (score_warp < SCORE_WARPS) {
        const int warp = score_warp;
        auto index_of = [&](int i) {
            bool in_swa;
            const int tile = work.tile(i, in_swa);
            return in_swa ? load_index(p.swa, token, tile, swa_len, lane)
                   : RECORD ? load_index(p.topk, token, tile, topk_len, lane) : -1;
        };
        auto copy = [&](int i, int index) {
            const int slot = i % SLOTS;
            const u32 ring = smem_address(sh.ring[slot]), scales = smem_address(sh.scales[slot]);
            if (i >= SLOTS) wait_barrier(sh.empty[slot], (i / SLOTS - 1) & 1);
            if (ONE_RECORD)
                return copy_tile<SWA_RECORD>(i < work.swa_count ? p.swa : p.topk, index, ring, scales, lane);
            if (i < work.swa_count) return copy_tile<SWA_RECORD>(p.swa, index, ring, scales, lane);
            return copy_tile<TOPK_RECORD>(p.topk, index, ring, scales, lane);
        };
        u32 exists[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int i = warp + a * SCORE_WARPS;
            bool in_swa;
            const int tile = work.tile(i, in_swa);
            if (tile != guess[a] || in_swa != guess_in_swa[a])
                first_indices[a] = index_of(i);
            else if (tile * TILE + lane >= (in_swa ? swa_len : topk_len))
                first_indices[a] = -1;
        }
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int i = warp + a * SCORE_WARPS;
            exists[a] = i < num_tiles ? copy(i, first_indices[a]) : 0;
            commit();
        }
        int index = index_of(warp + AHEAD * SCORE_WARPS);
        if (RANKS > 1) cluster_wait();
        __syncthreads();  // queries
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) factor[half] = sh.query_factor[half * 8 + g] * p.scale_log2;

#pragma unroll 1
        for (int i = warp; i < num_tiles; i += SCORE_WARPS) {
            const int slot = i % SLOTS;
            wait_group<AHEAD - 1>();
            __syncwarp();
            float s[2][4];
            float unit = 1.f;
            if (ONE_RECORD || i < work.swa_count) {
                spread_scales<SWA_RECORD>(sh, slot, exists[0], warp, lane);
                __syncwarp();
                score_tile<SWA_RECORD>(sh, slot, warp, lane, s);
                if (SWA_RECORD == 288) unit = 16384.f;
            } else {
                spread_scales<TOPK_RECORD>(sh, slot, exists[0], warp, lane);
                __syncwarp();
                score_tile<TOPK_RECORD>(sh, slot, warp, lane, s);
                if (TOPK_RECORD == 288) unit = 16384.f;
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float f = factor[half] * unit;
                float4 v = make_float4(s[0][half * 2] * f, s[0][half * 2 + 1] * f,
                                       s[1][half * 2] * f, s[1][half * 2 + 1] * f);
                if (exists[0] != 0xffffu) {
                    v.x = exists[0] >> q & 1 ? v.x : -INF;
                    v.y = exists[0] >> (q + 4) & 1 ? v.y : -INF;
                    v.z = exists[0] >> (q + 8) & 1 ? v.z : -INF;
                    v.w = exists[0] >> (q + 12) & 1 ? v.w : -INF;
                }
                float top = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                const int head = half * 8 + g;
                *reinterpret_cast<float4*>(&sh.scores[slot][head][q * 4]) = v;
                if (q == 0) sh.tops[slot][head] = top;
            }
            __syncwarp();
            arrive(sh.full[slot], lane);
            exists[0] = exists[1];
            const int coming = i + AHEAD * SCORE_WARPS;
            if (coming < num_tiles) {
                exists[1] = copy(coming, index);
                index = index_of(coming + SCORE_WARPS);
            }
            commit();
        }
        return;
    }

    const int warp = score_warp - SCORE_WARPS;
    load_queries(sh, p, p.q + token * p.q_token_stride + first_head * p.q_head_stride, heads_left, warp, lane);
    if (RANKS > 1) cluster_wait();
    __syncthreads();
    float acc[HALVES * 8][4];
    float peak[2], total[2];
#pragma unroll
    for (int i = 0; i < HALVES * 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] = 0.f;
    peak[0] = peak[1] = NO_PEAK, total[0] = total[1] = 0.f;

    auto free_slot = [&](int slot) {
        arrive(sh.empty[slot], lane);
    };
    int slot = 0;
    u32 parity = 0;
    auto step = [&] {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    };
#pragma unroll 1
    for (int i = 0; i < num_tiles;) {
        const int first[1] = {slot};
        wait_barrier(sh.full[slot], parity);
        step();
        ++i;
        const bool in_swa = ONE_RECORD || i <= work.swa_count;
        // Two tiles of one record together hide each other's latency. More columns leave no registers
        // for that, and a bf16 slice takes as many.
        if constexpr (HALVES == 1 && SWA_RECORD != 584) {
            if (i < num_tiles && (ONE_RECORD || i != work.swa_count)) {
                wait_barrier(sh.full[slot], parity);
                if (BF16_ROWS || sh.info[first[0]].mode == IN_F16 && sh.info[slot].mode == IN_F16) {
                    const int both[2] = {first[0], slot};
                    step();
                    ++i;
                    if (in_swa) weigh_tiles<SWA_RECORD, 2>(sh, both, warp, lane, peak, total, acc);
                    else weigh_tiles<TOPK_RECORD, 2>(sh, both, warp, lane, peak, total, acc);
                    __syncwarp();
                    free_slot(both[0]), free_slot(both[1]);
                    continue;
                }
            }
        }
        if (in_swa) weigh_tiles<SWA_RECORD, 1>(sh, first, warp, lane, peak, total, acc);
        else weigh_tiles<TOPK_RECORD, 1>(sh, first, warp, lane, peak, total, acc);
        __syncwarp();
        free_slot(first[0]);
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        total[half] += __shfl_xor_sync(~0u, total[half], 1);
        total[half] += __shfl_xor_sync(~0u, total[half], 2);
    }

    auto finish = [&](int head, float top, float sum) {  // the factor of the output, and lse
        float factor = sum;
        if (p.sink != nullptr) factor += exp2_fast(p.sink[first_head + head] * LOG2E - top);
        return make_float2(sum == 0.f ? 0.f : reciprocal(factor), log_sum(top, sum));
    };

    const bool turns = p.positions != nullptr && warp == VALUE_WARPS - 1;  // which has the columns
    const float2 own_turn = turns ? load_turn(p, blockIdx.x / RANKS / p.head_groups, lane) : NO_TURN;
    if constexpr (RANKS == 1) {
        if (turns) {
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int pair = (q * 2 + n) * 4 + i;
                    const float2 turn = make_float2(__shfl_sync(~0u, own_turn.x, pair), __shfl_sync(~0u, own_turn.y, pair));
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        turn_back(turn, acc[HALVES * 8 - 8 + i * 2][half * 2 + n],
                                  acc[HALVES * 8 - 8 + i * 2 + 1][half * 2 + n]);
                }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int head = half * 8 + g;
            if (head >= heads_left) continue;
            const float2 end = finish(head, peak[half], total[half]);
            if (warp == 0 && q == 0)
                p.lse[token * p.lse_token_stride + (first_head + head) * p.lse_head_stride] = end.y;
            u16* to = p.out + token * p.out_token_stride + (first_head + head) * p.out_head_stride;
#pragma unroll
            for (int h = 0; h < HALVES; ++h)
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    u32 packed[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        packed[i] = to_bf16x2(acc[h * 8 + i * 2][half * 2 + n] * end.x,
                                              acc[h * 8 + i * 2 + 1][half * 2 + n] * end.x);
                    *reinterpret_cast<uint4*>(to + (warp * HALVES + h) * 64 + (q * 2 + n) * 8) =
                        make_uint4(packed[0], packed[1], packed[2], packed[3]);
                }
        }
        return;
    }

    // Several CTAs: every one sends every other its part of the slices that the other completes,
    // with its peaks and sums. The ring holds what is sent: no one reads it any more.
    value_sync();
    u8* sent = sh.ring[0];
    // Where four columns of a head lie in parts, so that neither those who write fragments nor those
    // who read rows meet in a bank.
    auto place_of = [](int slice, int head, int four) {
        return ((slice * HEADS + (head ^ (slice & 1))) * 4 + (four ^ (slice & 3))) * 16;
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int head = half * 8 + g;
        if (warp == 0 && q == 0) sh.stats[rank][head] = make_float2(peak[half], total[half]);
#pragma unroll
        for (int h = 0; h < HALVES; ++h)
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    *reinterpret_cast<float4*>(sent + place_of((warp * HALVES + h) * 4 + q, head, n * 2 + i)) =
                        make_float4(acc[h * 8 + i * 4][half * 2 + n], acc[h * 8 + i * 4 + 1][half * 2 + n],
                                    acc[h * 8 + i * 4 + 2][half * 2 + n], acc[h * 8 + i * 4 + 3][half * 2 + n]);
    }
    if (turns) sh.turn[lane] = own_turn;
    publish();
    value_sync();
    static_assert(RANKS <= VALUE_WARPS, "a warp for every receiver");
    if (warp < RANKS && warp != rank && lane == 0) {
        const u32 barrier = remote(smem_address(&sh.parts_here), warp);
        const int first = SLICES * warp / RANKS, last = SLICES * (warp + 1) / RANKS;
        send(remote(smem_address(sh.parts[rank - (rank > warp)]), warp), smem_address(sent + first * SLICE_BYTES),
             (last - first) * SLICE_BYTES, barrier);
        send(remote(smem_address(sh.stats[rank]), warp), smem_address(sh.stats[rank]), sizeof(sh.stats[0]), barrier);
    }
    __syncwarp();
    wait_barrier(sh.parts_here, 0);
    cluster_arrive();
    const int fours = (last_slice - first_slice) * 4;
#pragma unroll 1
    for (int i = warp * 32 + lane; i < min(heads_left, HEADS) * fours; i += 32 * VALUE_WARPS) {
        const int head = i / fours, four = i - head * fours;
        const int slice = first_slice + (four >> 2);
        const int at = place_of(slice, head, four & 3);
        float2 stats[RANKS];
        float4 part[RANKS];
        float top = NO_PEAK, sum = 0.f;
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            stats[r] = sh.stats[r][head];
            top = fmaxf(top, stats[r].x);
            const u8* from = r == rank ? sent : reinterpret_cast<const u8*>(sh.parts[r - (r > rank)]) - first_slice * SLICE_BYTES;
            part[r] = *reinterpret_cast<const float4*>(from + at);
        }
        float4 out = {};
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            const float weight = exp2_fast(stats[r].x - top);
            sum += stats[r].y * weight;
            out.x += part[r].x * weight, out.y += part[r].y * weight;
            out.z += part[r].z * weight, out.w += part[r].w * weight;
        }
        const float2 end = finish(head, top, sum);
        if (rank == 0 && four == 0)
            p.lse[token * p.lse_token_stride + (first_head + head) * p.lse_head_stride] = end.y;
        out.x *= end.x, out.y *= end.x, out.z *= end.x, out.w *= end.x;
        const int column = slice * 16 + (four & 3) * 4;
        if (p.positions != nullptr && column >= 448) {
            turn_back(sh.turn[(column - 448) / 2], out.x, out.y);
            turn_back(sh.turn[(column - 448) / 2 + 1], out.z, out.w);
        }
        u16* to = p.out + token * p.out_token_stride + (first_head + head) * p.out_head_stride + column;
        *reinterpret_cast<uint2*>(to) = make_uint2(to_bf16x2(out.x, out.y), to_bf16x2(out.z, out.w));
    }
    cluster_wait();
}
