// Operations on elements, and on whole rows. Grid: elements / 256 (of a row, and rows); block: 256 threads, an element each.
// All bound by memory.

// gate[i] = gate[i] / (1 + e^-gate[i]) * up[i]: 12 bytes an element.
KERNEL(256) gate_silu(float* gate, const float* up, unsigned long long elements) {
  const unsigned long long i = (unsigned long long)blockIdx.x * 256 + threadIdx.x;
  if (i < elements) gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

// x[i] = x[i] + delta[i]: 12 bytes an element.
KERNEL(256) add(float* x, const float* delta, unsigned long long elements) {
  const unsigned long long i = (unsigned long long)blockIdx.x * 256 + threadIdx.x;
  if (i < elements) x[i] += delta[i];
}

// out[i] = x[rows[i]]: x: [any, width], out: [rows, width]; grid: (width / 256, rows); 8 bytes an element.
KERNEL(256) select_rows(const float* x, const unsigned* rows, unsigned width, float* out) {
  const unsigned column = blockIdx.x * 256 + threadIdx.x;
  if (column >= width) return;
  out[(unsigned long long)blockIdx.y * width + column] = x[(unsigned long long)rows[blockIdx.y] * width + column];
}
