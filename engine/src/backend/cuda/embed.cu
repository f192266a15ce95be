// out[t] = table[tokens[t]], read from the checkpoint's format.
//
// table: [rows, cols] as stored, `row_bytes` a row; tokens: [tokens]; out: [tokens, cols] in f32.
// Grid: (runs of 32 columns / 4, tokens); block: 4 warps, a run each. Bound by memory: a row is read once, and written as
// four bytes an element.

template <class Format>
DEVICE void embed(const unsigned char* table, unsigned long long row_bytes, const unsigned* tokens, unsigned cols,
                  float* out) {
  const unsigned run = blockIdx.x * 4 + threadIdx.y, column = run * WARP + threadIdx.x;
  const unsigned token = blockIdx.y;
  if (run * WARP >= cols) return;
  const unsigned char* row = table + tokens[token] * row_bytes;
  const float x = Format::element(row + (unsigned long long)run * Format::BYTES, threadIdx.x, cols - run * WARP);
  if (column < cols) out[(unsigned long long)token * cols + column] = x;
}

#define KERNEL_OF(Format)                                                                                            \
  KERNEL(128)                                                                                                        \
  embed_##Format(const unsigned char* table, unsigned long long row_bytes, const unsigned* tokens, unsigned cols,    \
                 float* out) {                                                                                       \
    embed<Format>(table, row_bytes, tokens, cols, out);                                                              \
  }
EACH_FORMAT(KERNEL_OF)
#undef KERNEL_OF
