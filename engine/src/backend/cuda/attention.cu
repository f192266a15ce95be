// Causal attention of each token over its own sequence's paged KV, positions 0 up to its own.
//
// q, out: [tokens, heads, head_dim]; kv: f16, blocks of [layer][K|V][token][kv_head][head_dim]; positions: [tokens];
// tables: where each token's block table starts in block_tables, [tokens]. head_dim is at most 256.
//
//   out = Σ_j e^(s_j - m) v_j / Σ_j e^(s_j - m),   s_j = q · k_j * scale,   m = max s_j
//
// Keys are taken in splits of 256 at absolute positions, each with its own maximum, and joined ascending: a token's result
// depends on its own position alone, whatever chunk or batch it is in.
// Grid: (heads, tokens); block: 4 warps. A warp scores one key at a time, lanes over elements; then threads weigh the
// values, an element each. Bound by memory where few tokens share keys: 4 bytes an element of a key and its value.

#define SPLIT 256u
#define HEAD_DIM_MAX 256u

// Element 0 of a token's head, keys or values.
DEVICE const unsigned short* head_of(const unsigned short* kv, unsigned block, unsigned offset, unsigned is_value,
                                     unsigned head, unsigned layer, unsigned layers, unsigned kv_heads,
                                     unsigned head_dim, unsigned block_tokens) {
  const unsigned long long plane = ((unsigned long long)block * layers + layer) * 2 + is_value;
  return kv + ((plane * block_tokens + offset) * kv_heads + head) * head_dim;
}

KERNEL(128)
attention(const float* q, const unsigned short* kv, const unsigned* positions, const unsigned* tables,
          const unsigned* block_tables, float scale, unsigned heads, unsigned kv_heads, unsigned head_dim,
          unsigned layer, unsigned layers, unsigned block_tokens, float* out) {
  SHARED float query[HEAD_DIM_MAX];
  SHARED float weights[SPLIT];
  SHARED float room[4];
  const unsigned head = blockIdx.x, token = blockIdx.y, thread = threadIdx.x;
  const unsigned lane = thread % WARP, warp = thread / WARP, kv_head = head / (heads / kv_heads);
  const unsigned* table = block_tables + tables[token];
  const unsigned keys = positions[token] + 1;
  const unsigned long long row = ((unsigned long long)token * heads + head) * head_dim;
  for (unsigned d = thread; d < head_dim; d += 128) query[d] = q[row + d];
  __syncthreads();

  // Of the splits so far: their maximum, the sum of weights, and this thread's elements of the weighted values.
  float max = 0.0f, sum = 0.0f, total[HEAD_DIM_MAX / 128] = {};
  for (unsigned first = 0; first < keys; first += SPLIT) {
    const unsigned count = keys - first < SPLIT ? keys - first : SPLIT;
    for (unsigned key = warp; key < count; key += 4) {
      const unsigned position = first + key;
      const unsigned short* k = head_of(kv, table[position / block_tokens], position % block_tokens, 0, kv_head,
                                        layer, layers, kv_heads, head_dim, block_tokens);
      float score = 0.0f;
      for (unsigned d = lane; d < head_dim; d += WARP) score = fmaf(query[d], from_half(k[d]), score);
      score = warp_sum(score) * scale;
      if (lane == 0) weights[key] = score;
    }
    __syncthreads();
    float split_max = from_bits(0xff800000u);
    for (unsigned key = thread; key < count; key += 128) split_max = fmaxf(split_max, weights[key]);
    split_max = block_max<4>(split_max, room);
    float split_sum = 0.0f;
    for (unsigned key = thread; key < count; key += 128) {
      const float weight = expf(weights[key] - split_max);
      weights[key] = weight;
      split_sum += weight;
    }
    split_sum = block_sum<4>(split_sum, room);

    const float joint = first == 0 ? split_max : fmaxf(max, split_max);
    const float old_factor = first == 0 ? 0.0f : expf(max - joint), new_factor = expf(split_max - joint);
    max = joint;
    sum = fmaf(split_sum, new_factor, sum * old_factor);
    for (unsigned i = 0; i < HEAD_DIM_MAX / 128; i++) {
      const unsigned d = thread + i * 128;
      if (d < head_dim) {
        float split = 0.0f;
        for (unsigned key = 0; key < count; key++) {
          const unsigned position = first + key;
          const unsigned short* v = head_of(kv, table[position / block_tokens], position % block_tokens, 1, kv_head,
                                            layer, layers, kv_heads, head_dim, block_tokens);
          split = fmaf(weights[key], from_half(v[d]), split);
        }
        total[i] = fmaf(split, new_factor, total[i] * old_factor);
      }
    }
    // Weights are read to the end before the next split's are written.
    __syncthreads();
  }
  for (unsigned i = 0; i < HEAD_DIM_MAX / 128; i++) {
    const unsigned d = thread + i * 128;
    if (d < head_dim) out[row + d] = total[i] / sum;
  }
}
