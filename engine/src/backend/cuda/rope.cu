// Turns queries and keys by their positions, and stores keys and values.
//
// q: [tokens, heads, head_dim], turned in place; k, v: [tokens, kv_heads, head_dim], k turned in place; turns: cosine and
// sine of each pair, [positions, pairs, 2]; slots: block * block_tokens + offset, [tokens]; kv: f16, blocks of
// [layer][K|V][token][kv_head][head_dim].
// Pairs are elements 2i and 2i + 1, or i and i + pairs with `halves`; elements past the pairs stay as they are.
// Grid: tokens; block: 128 threads over pairs, then over elements. Bound by memory: reads and writes each element once.

// Which elements of a head pair i is.
DEVICE unsigned pair_first(unsigned i, unsigned halves) { return halves ? i : 2 * i; }
DEVICE unsigned pair_second(unsigned i, unsigned pairs, unsigned halves) { return halves ? i + pairs : 2 * i + 1; }

DEVICE void turn(float* row, unsigned heads, unsigned head_dim, unsigned pairs, unsigned halves, const float* turns) {
  for (unsigned i = threadIdx.x; i < heads * pairs; i += 128) {
    float* head = row + i / pairs * head_dim;
    const unsigned pair = i % pairs;
    const float cosine = turns[2 * pair], sine = turns[2 * pair + 1];
    float &first = head[pair_first(pair, halves)], &second = head[pair_second(pair, pairs, halves)];
    const float a = first, b = second;
    first = a * cosine - b * sine;
    second = a * sine + b * cosine;
  }
}

KERNEL(128)
rope_and_store(float* q, float* k, const float* v, const float* turns, const unsigned* positions,
               const unsigned* slots, unsigned short* kv, unsigned heads, unsigned kv_heads, unsigned head_dim,
               unsigned pairs, unsigned halves, unsigned layer, unsigned layers, unsigned block_tokens) {
  const unsigned token = blockIdx.x, row = kv_heads * head_dim;
  const float* turns_here = turns + (unsigned long long)positions[token] * pairs * 2;
  float* keys = k + (unsigned long long)token * row;
  const float* values = v + (unsigned long long)token * row;
  turn(q + (unsigned long long)token * heads * head_dim, heads, head_dim, pairs, halves, turns_here);
  turn(keys, kv_heads, head_dim, pairs, halves, turns_here);
  // Keys that one thread has turned another stores.
  __syncthreads();
  const unsigned block = slots[token] / block_tokens, offset = slots[token] % block_tokens;
  const unsigned long long plane = ((unsigned long long)block * layers + layer) * 2;
  unsigned short* stored_keys = kv + (plane * block_tokens + offset) * row;
  unsigned short* stored_values = kv + ((plane + 1) * block_tokens + offset) * row;
  for (unsigned i = threadIdx.x; i < row; i += 128) {
    stored_keys[i] = to_half(keys[i]);
    stored_values[i] = to_half(values[i]);
  }
}
