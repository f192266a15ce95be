// out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight, element by element.
//
// x, out: [tokens, width]; weight: [width].
// Grid: tokens; block: 256 threads, each with the elements i, i + 256, … Bound by memory: 12 bytes an element, of which
// the second read of x comes from the cache.

KERNEL(256) rms_norm(const float* x, const float* weight, float eps, unsigned width, float* out) {
  SHARED float room[8];
  const float* row = x + (unsigned long long)blockIdx.x * width;
  float squares = 0.0f;
  for (unsigned i = threadIdx.x; i < width; i += 256) squares = fmaf(row[i], row[i], squares);
  const float mean = block_sum<8>(squares, room) / (float)width;
  const float scale = 1.0f / sqrtf(mean + eps);
  for (unsigned i = threadIdx.x; i < width; i += 256) {
    out[(unsigned long long)blockIdx.x * width + i] = row[i] * scale * weight[i];
  }
}
