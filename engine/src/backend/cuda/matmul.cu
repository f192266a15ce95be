// out[t] = weights · x[t] + bias, with weights in the checkpoint's format.
//
// weights: [rows, cols] as stored, `row_bytes` a row; x: [tokens, cols]; bias: [rows] or none; out: [tokens, rows].
// Grid: (rows / 4, tokens / TOKENS); block: 4 warps, a row each. A lane adds up the products of its element of every run
// of 32, ascending, and the warp adds up its lanes: the order does not depend on how many tokens there are, so a token's
// result is the same bits in any batch. Bound by memory for few tokens: each weight is read once for TOKENS of them.

template <class Format, unsigned TOKENS>
DEVICE void matmul(const unsigned char* weights, unsigned long long row_bytes, const float* x, const float* bias,
                   unsigned rows, unsigned cols, unsigned tokens, float* out) {
  const unsigned row = blockIdx.x * 4 + threadIdx.y, lane = threadIdx.x;
  if (row >= rows) return;
  const unsigned first = blockIdx.y * TOKENS, count = tokens - first < TOKENS ? tokens - first : TOKENS;
  const unsigned char* run = weights + row * row_bytes;
  float sums[TOKENS];
  for (unsigned t = 0; t < TOKENS; t++) sums[t] = 0.0f;
  for (unsigned column = 0; column < cols; column += WARP, run += Format::BYTES) {
    const float weight = Format::element(run, lane, cols - column);
    for (unsigned t = 0; t < TOKENS; t++) {
      if (t < count && column + lane < cols) {
        sums[t] = fmaf(weight, x[(unsigned long long)(first + t) * cols + column + lane], sums[t]);
      }
    }
  }
  const float sum = warp_sums<TOKENS>(sums, lane);
  const unsigned t = lane * TOKENS / WARP;
  if (lane % (WARP / TOKENS) == 0 && t < count) {
    out[(unsigned long long)(first + t) * rows + row] = bias ? sum + bias[row] : sum;
  }
}

#define KERNEL_OF(Format)                                                                                            \
  KERNEL(128)                                                                                                        \
  matmul_1_##Format(const unsigned char* weights, unsigned long long row_bytes, const float* x, const float* bias,   \
                    unsigned rows, unsigned cols, unsigned tokens, float* out) {                                     \
    matmul<Format, 1>(weights, row_bytes, x, bias, rows, cols, tokens, out);                                         \
  }                                                                                                                  \
  KERNEL(128)                                                                                                        \
  matmul_8_##Format(const unsigned char* weights, unsigned long long row_bytes, const float* x, const float* bias,   \
                    unsigned rows, unsigned cols, unsigned tokens, float* out) {                                     \
    matmul<Format, 8>(weights, row_bytes, x, bias, rows, cols, tokens, out);                                         \
  }
EACH_FORMAT(KERNEL_OF)
#undef KERNEL_OF
