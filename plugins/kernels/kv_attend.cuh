// Attention side of AsymKVAttention: queries over quantized blocks and fp16 rows, split over the context.
//
// The tokens a query sees are cut into tiles of 64: first its blocks, then its fp16 rows in order of
// position. A CTA takes one query token, a chunk of the query heads of one KV head and a run of tiles; a
// second kernel joins the runs. How tiles are cut depends on the node's shapes and the query's position only,
// never on the other rows or on the chunk a token came in, so neither do the bits of the result.
#pragma once
#include "e4m3.cuh"
#include "kv_int8.cuh"
#include "kv_rows.cuh"

namespace moec::kernels {

constexpr float kMinusInfinity = -INFINITY;

// Sum over the CTA, on every thread. `scratch` holds kWarps floats.
MOEC_DEVICE float block_sum(float v, float *scratch) {
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0)
    scratch[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0.0f;
  for (int w = 0; w < kWarps; w++)
    sum += scratch[w];
  return sum;
}

// Grid (S, Hq, b). Queries in the space of the ring rows, scale included, and the logit of each head's sink.
template <class T>
__global__ void MOEC_KERNEL prepare_queries(AttentionParams p, KvPlan plan, float *queries, float *sinks) {
  MOEC_DYN_SMEM(float, scratch);
  const int i = blockIdx.x, head = blockIdx.y, row = blockIdx.z,
            kv_head = head / (p.num_heads / p.num_kv_heads);
  if (i >= load_row(p, plan, row).added)
    return;
  const size_t index = static_cast<size_t>(row * p.tokens + i) * p.num_heads + head;
  const T *q = static_cast<const T *>(p.q) + index * p.k_dim;
  float centre = 0.0f;
  for (int c = threadIdx.x; c < p.k_dim; c += kThreads) {
    const int at = kv_head * p.k_dim + c;
    const float x = load(q + source_channel(p, plan, at));
    queries[index * p.k_dim + c] = (plan.quantized ? x * p.k_ref[at] : x) * p.scale;
    if (plan.quantized)
      centre += x * p.k_mean[at];
  }
  if (!p.has_sink_logits)
    return;
  centre = block_sum(centre, scratch); // keys are centred, so the sink logit has to be too
  if (threadIdx.x == 0)
    sinks[index] = p.sink_logits[head] - p.scale * centre;
}

// --- which tokens a query sees
// ------------------------------------------------------------------------------------

struct View {
  int blocks;      // quantized, from block 0
  int head_tokens; // fp16 tokens 0 .. head_tokens-1 (sinks)
  int first;       // then fp16 tokens first ..
  int tail_tokens;

  MOEC_DEVICE int rows() const { return head_tokens + tail_tokens; }
  MOEC_DEVICE int tiles() const { return blocks + ceil_div(rows(), kBlockTokens); }
  MOEC_DEVICE int token(int i) const { return i < head_tokens ? i : first + i - head_tokens; }
};

// For the query at position n, whose own key is in the cache already.
MOEC_DEVICE View view_of(const AttentionParams &p, const KvPlan &plan, int n) {
  if (!plan.quantized) {
    const int first = p.window ? at_least_zero(n - p.window + 1) : 0;
    return {0, 0, first, n - first + 1};
  }
  const int blocks = quantized_blocks(p, plan, MOEC_BUG(7) ? n + 1 : n),
            first = plan.sinks + blocks * kBlockTokens;
  return {blocks, smaller(plan.sinks, n + 1), first, at_least_zero(n - first + 1)};
}

// --- one CTA
// ------------------------------------------------------------------------------------------------------

// Shared memory of attend_tiles, in floats.
template <int HEADS> struct AttendShared {
  float *query;   // [HEADS][Dk]
  float *k_scale; // [Dk]
  float *k_zero;  // [Dk]
  float *weight;  // [HEADS][64]: logits, then probabilities
  float *top;     // [HEADS]: largest logit so far
  float *sum;     // [HEADS]: of exp(logit - top)
  float *rescale; // [HEADS]: factor of what was summed before this tile
  float *gather;  // [kThreads * 4]

  static MOEC_HD int floats(int k_dim) {
    return (HEADS + 2) * k_dim + HEADS * (kBlockTokens + 3) + kThreads * 4;
  }
  MOEC_DEVICE AttendShared(float *base, int k_dim) {
    query = base;
    k_scale = query + HEADS * k_dim;
    k_zero = k_scale + k_dim;
    weight = k_zero + k_dim;
    gather = weight + HEADS * kBlockTokens;
    top = gather + kThreads * 4;
    sum = top + HEADS;
    rescale = sum + HEADS;
  }
};

// A tile: a block, or up to 64 rows of fp16.
struct Tile {
  const uint8_t *block; // null: rows
  int first_row, count;
};

struct Query {
  const AttentionParams &p;
  const KvPlan &plan;
  __half *rows;
  RowState state;
  View view;
  int row, head; // head: the KV head

  MOEC_DEVICE Tile tile(int i) const {
    if (i < view.blocks)
      return {block_at(p, state.slot, head, i), 0, kBlockTokens};
    const int first = (i - view.blocks) * kBlockTokens;
    return {nullptr, first, smaller(kBlockTokens, view.rows() - first)};
  }
  MOEC_DEVICE const __half *source(const Tile &tile, int t) const {
    return token_row(p, plan, rows, row, state, view.token(tile.first_row + t), head);
  }
};

MOEC_DEVICE void load_quad(const __half *from, float *x) {
  for (int j = 0; j < 4; j++)
    x[j] = __half2float(from[j]);
}

// How to read blocks, as reference/kv_block.py dequantizes them: of the formats with 2 and 4 bits.
struct CodesOf2Bits {
  template <class Shared>
  static MOEC_DEVICE void load_key_scale(const KvPlan &plan, const uint8_t *block, const Shared &s, int c) {
    s.k_scale[c] = e4m3_decode(block[plan.k_scale + c]);
    s.k_zero[c] = static_cast<float>(static_cast<int8_t>(block[plan.k_zero + c]));
  }

  // Four channels of the key of token t.
  template <class Shared>
  static MOEC_DEVICE void key_quad(const KvPlan &plan, const uint8_t *block, const Shared &s, int t, int quad,
                                   int quads, float *x) {
    const int high_quads = plan.promoted / 4;
    const unsigned low = block[plan.k_lo + t * quads + quad];
    const unsigned high = quad < high_quads ? block[plan.k_hi + t * high_quads + quad] : 0u;
    for (int j = 0; j < 4; j++) {
      const int code = static_cast<int>((low >> 2 * j & 3u) + 4u * (high >> 2 * j & 3u)), c = quad * 4 + j;
      x[j] = s.k_scale[c] * (static_cast<float>(code) + s.k_zero[c]);
    }
  }

  static MOEC_DEVICE void value_quad(const Query &q, const uint8_t *block, int t, int quad, int quads,
                                     float *y) {
    const int groups = q.plan.v_groups, group = quad * 4 / q.plan.v_group;
    const float scale = e4m3_decode(block[q.plan.v_scale + t * groups + group]);
    const float low = e4m3_decode(block[q.plan.v_zero + t * groups + group]);
    const float ref = q.p.v_ref[q.head * groups + group];
    const unsigned byte = block[q.plan.v_codes + t * quads + quad];
    for (int j = 0; j < 4; j++)
      y[j] = (scale * static_cast<float>(byte >> 2 * j & 3u) + low) * ref;
  }
};

// The same of the format int8.
struct CodesOf8Bits {
  template <class Shared>
  static MOEC_DEVICE void load_key_scale(const KvPlan &plan, const uint8_t *block, const Shared &s, int c) {
    s.k_scale[c] = int8_step(block[plan.k_scale + c]);
  }

  template <class Shared>
  static MOEC_DEVICE void key_quad(const KvPlan &plan, const uint8_t *block, const Shared &s, int t, int quad,
                                   int quads, float *x) {
    const unsigned word = int8_quad(block + plan.k_lo, (t * quads + quad) * 4);
    for (int j = 0; j < 4; j++)
      x[j] = s.k_scale[quad * 4 + j] * int8_code(word, j);
  }

  static MOEC_DEVICE void value_quad(const Query &q, const uint8_t *block, int t, int quad, int quads,
                                     float *y) {
    const int groups = q.plan.v_groups, group = quad * 4 / q.plan.v_group;
    const float step = int8_step(block[q.plan.v_scale + t * groups + group]);
    const float ref = q.p.v_ref[q.head * groups + group];
    const unsigned word = int8_quad(block + q.plan.v_codes, (t * quads + quad) * 4);
    for (int j = 0; j < 4; j++)
      y[j] = step * int8_code(word, j) * ref;
  }
};

// Two neighbouring threads share a token, every second quad of channels each.
template <class Codes, int HEADS>
MOEC_DEVICE void tile_logits(const Query &q, const Tile &tile, const AttendShared<HEADS> &s) {
  const int t = threadIdx.x / 2, part = threadIdx.x % 2, quads = q.p.k_dim / 4;
  const bool seen = t < tile.count;
  const __half *source = tile.block || !seen ? nullptr : q.source(tile, t);
  float logit[HEADS];
#pragma unroll
  for (int h = 0; h < HEADS; h++)
    logit[h] = 0.0f;
  for (int quad = part; seen && quad < quads; quad += 2) {
    float x[4];
    if (tile.block)
      Codes::key_quad(q.plan, tile.block, s, t, quad, quads, x);
    else
      load_quad(source + quad * 4, x);
#pragma unroll
    for (int h = 0; h < HEADS; h++)
      for (int j = 0; j < 4; j++)
        logit[h] += x[j] * s.query[h * q.p.k_dim + quad * 4 + j];
  }
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    float sum = logit[h] + __shfl_xor_sync(kAllLanes, logit[h], 1);
    if (q.p.softcap > 0.0f)
      sum = q.p.softcap * tanhf(sum / q.p.softcap);
    if (part == 0)
      s.weight[h * kBlockTokens + t] = seen ? sum : kMinusInfinity;
  }
}

// Logits to probabilities relative to the running maximum; a warp takes every kWarps-th head.
template <int HEADS> MOEC_DEVICE void tile_softmax(const AttendShared<HEADS> &s) {
  const int lane = threadIdx.x % 32;
  for (int h = threadIdx.x / 32; h < HEADS; h += kWarps) {
    float *w = s.weight + h * kBlockTokens;
    const float a = w[lane], b = w[lane + 32], before = s.top[h];
    const float top = fmaxf(before, warp_max(fmaxf(a, b)));
    const float pa = expf(a - top), pb = expf(b - top), sum = warp_sum(pa + pb);
    w[lane] = pa;
    w[lane + 32] = pb;
    if (lane == 0) {
      const float rescale = expf(before - top); // the first tile: exp(-inf) = 0
      s.sum[h] = s.sum[h] * rescale + sum;
      s.rescale[h] = rescale;
      s.top[h] = top;
    }
    __syncwarp();
  }
}

// A thread owns four channels of every team-th token.
template <class Codes, int HEADS>
MOEC_DEVICE void tile_values(const Query &q, const Tile &tile, const AttendShared<HEADS> &s,
                             float acc[HEADS][4]) {
  const int quads = q.p.v_dim / 4, teams = kThreads / quads;
  const int quad = threadIdx.x % quads, team = threadIdx.x / quads;
#pragma unroll
  for (int h = 0; h < HEADS; h++)
    for (int j = 0; j < 4; j++)
      acc[h][j] *= s.rescale[h];
  for (int t = team; team < teams && t < tile.count; t += teams) {
    float y[4];
    if (tile.block)
      Codes::value_quad(q, tile.block, t, quad, quads, y);
    else
      load_quad(q.source(tile, t) + q.p.k_dim + quad * 4, y);
#pragma unroll
    for (int h = 0; h < HEADS; h++)
      for (int j = 0; j < 4; j++)
        acc[h][j] += s.weight[h * kBlockTokens + t] * y[j];
  }
}

template <class Codes, int HEADS>
MOEC_DEVICE void load_key_scales(const Query &q, const Tile &tile, const AttendShared<HEADS> &s) {
  if (!tile.block)
    return;
  for (int c = threadIdx.x; c < q.p.k_dim; c += kThreads)
    Codes::load_key_scale(q.plan, tile.block, s, c);
}

template <class Codes, int HEADS>
MOEC_DEVICE void run_tiles(const Query &q, int from, int to, const AttendShared<HEADS> &s,
                           float acc[HEADS][4]) {
  for (int i = from; i < to; i++) {
    const Tile tile = q.tile(i);
    load_key_scales<Codes>(q, tile, s);
    if (!MOEC_BUG(1))
      __syncthreads();
    tile_logits<Codes>(q, tile, s);
    __syncthreads();
    tile_softmax(s);
    if (!MOEC_BUG(2))
      __syncthreads();
    tile_values<Codes>(q, tile, s, acc);
    __syncthreads(); // everybody has left this tile's weights and scales
  }
}

// Joins the teams and writes sum p*y (relative to `top`) of every head of the chunk.
template <int HEADS>
MOEC_DEVICE void write_partials(const Query &q, const AttendShared<HEADS> &s, float acc[HEADS][4], int heads,
                                size_t index, float *partial) {
  const int quads = q.p.v_dim / 4, teams = kThreads / quads;
  const int quad = threadIdx.x % quads, team = threadIdx.x / quads;
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    if (h >= heads)
      break;
    __syncthreads();
    for (int j = 0; team < teams && j < 4; j++)
      s.gather[team * q.p.v_dim + quad * 4 + j] = acc[h][j];
    __syncthreads();
    for (int d = threadIdx.x; d < q.p.v_dim; d += kThreads) {
      float sum = 0.0f;
      for (int other = 0; other < teams; other++)
        sum += s.gather[other * q.p.v_dim + d];
      partial[(index + static_cast<size_t>(h) * q.plan.num_splits) * q.p.v_dim + d] = sum;
    }
  }
}

template <int HEADS>
MOEC_DEVICE void start_query(const Query &q, const AttendShared<HEADS> &s, const float *queries, int heads) {
  for (int i = threadIdx.x; i < HEADS * q.p.k_dim; i += kThreads)
    s.query[i] = i < heads * q.p.k_dim ? queries[i] : 0.0f;
  for (int h = threadIdx.x; h < HEADS; h += kThreads) {
    s.top[h] = kMinusInfinity;
    s.sum[h] = 0.0f;
  }
}

// Grid (splits, Hkv * head chunks, b * tokens of this pass). partial [b, pass, Hq, splits, Dv] and summary
// [..., 2] = (top, sum); an empty split writes sum 0 only.
template <class Codes, int HEADS>
__global__ void MOEC_KERNEL attend_tiles(AttentionParams p, KvPlan plan, int first_token, int pass_tokens,
                                         __half *rows, const float *queries, float *partial, float *summary) {
  MOEC_DYN_SMEM(float, base);
  const AttendShared<HEADS> s(base, p.k_dim);
  const int split = blockIdx.x, head = blockIdx.y / plan.head_chunks, chunk = blockIdx.y % plan.head_chunks;
  const int row = blockIdx.z / pass_tokens, local = blockIdx.z % pass_tokens, i = first_token + local;
  const RowState state = load_row(p, plan, row);
  if (i >= state.added)
    return;
  const int group = p.num_heads / p.num_kv_heads, first_head = head * group + chunk * HEADS;
  const int heads = smaller(HEADS, group - chunk * HEADS);
  const Query q{p, plan, rows, state, view_of(p, plan, state.cached + i), row, head};
  const int from = split * plan.tiles_per_split, to = smaller(from + plan.tiles_per_split, q.view.tiles());
  start_query(q, s, queries + (static_cast<size_t>(row * p.tokens + i) * p.num_heads + first_head) * p.k_dim,
              heads);
  float acc[HEADS][4];
#pragma unroll
  for (int h = 0; h < HEADS; h++)
    for (int j = 0; j < 4; j++)
      acc[h][j] = 0.0f;
  run_tiles<Codes>(q, from, to, s, acc);
  __syncthreads();
  const size_t index =
      (static_cast<size_t>(row * pass_tokens + local) * p.num_heads + first_head) * plan.num_splits + split;
  if (from < to)
    write_partials(q, s, acc, heads, index, partial);
  for (int h = threadIdx.x; h < heads; h += kThreads) {
    summary[(index + static_cast<size_t>(h) * plan.num_splits) * 2] = s.top[h];
    summary[(index + static_cast<size_t>(h) * plan.num_splits) * 2 + 1] = s.sum[h];
  }
}

// --- joining the splits
// -------------------------------------------------------------------------------------------

// Softmax over all splits of one head: `top` and the sum relative to it, the sink's share included.
MOEC_DEVICE void join_summaries(const KvPlan &plan, const float *summary, float sink, float *top,
                                float *sum) {
  *top = sink;
  for (int i = 0; i < plan.num_splits; i++)
    if (summary[2 * i + 1] > 0.0f)
      *top = fmaxf(*top, summary[2 * i]);
  *sum = sink == kMinusInfinity ? 0.0f : expf(sink - *top);
  for (int i = 0; i < plan.num_splits; i++)
    if (summary[2 * i + 1] > 0.0f)
      *sum += summary[2 * i + 1] * expf(summary[2 * i] - *top);
}

MOEC_DEVICE float join_channel(const AttentionParams &p, const KvPlan &plan, const float *partial,
                               const float *summary, float top, int d) {
  float value = 0.0f;
  for (int i = 0; i < plan.num_splits; i++)
    if (summary[2 * i + 1] > 0.0f)
      value += partial[static_cast<size_t>(i) * p.v_dim + d] * expf(summary[2 * i] - top);
  return value;
}

// As kv_append.cuh's rotate, for fp32 results that need no exact bits.
MOEC_DEVICE void rotate_back(const AttentionParams &p, const KvPlan &plan, float *values) {
  for (int stride = 1; stride < plan.v_group; stride *= 2) {
    __syncthreads();
    for (int i = threadIdx.x; i < p.v_dim / 2; i += kThreads) {
      const int first = i / stride * 2 * stride + i % stride;
      const float a = values[first], b = values[first + stride];
      values[first] = (a + b);
      values[first + stride] = (a - b);
    }
  }
  __syncthreads();
}

// Grid (Hq, tokens of this pass, b). Zero where there is no token. Shared memory: Dv floats.
template <class T>
__global__ void MOEC_KERNEL join_splits(AttentionParams p, KvPlan plan, int first_token, int pass_tokens,
                                        const float *partial, const float *summary, const float *sinks) {
  MOEC_DYN_SMEM(float, values);
  const int head = blockIdx.x, local = blockIdx.y, row = blockIdx.z, i = first_token + local;
  const size_t token = static_cast<size_t>(row * p.tokens + i) * p.num_heads + head;
  T *out = static_cast<T *>(p.out) + token * p.v_dim;
  if (i >= load_row(p, plan, row).added) {
    for (int d = threadIdx.x; d < p.v_dim; d += kThreads)
      store(out + d, 0.0f);
    return;
  }
  const size_t index =
      (static_cast<size_t>(row * pass_tokens + local) * p.num_heads + head) * plan.num_splits;
  float top, sum;
  join_summaries(plan, summary + 2 * index, p.has_sink_logits ? sinks[token] : kMinusInfinity, &top, &sum);
  const float norm = (plan.quantized ? plan.rotation_norm : 1.0f) / sum;
  for (int d = threadIdx.x; d < p.v_dim; d += kThreads)
    values[d] = join_channel(p, plan, partial + index * p.v_dim, summary + 2 * index, top, d) * norm;
  if (plan.quantized)
    rotate_back(p, plan, values);
  for (int d = threadIdx.x; d < p.v_dim; d += kThreads)
    store(out + d, values[d]);
}

} // namespace moec::kernels
