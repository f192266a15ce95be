// Weights as the checkpoint stores them, one element at a time. Formats: `checkpoint::quant`.
#pragma once

// A row is read in runs of 32 elements, of which each lane of a warp takes one. `run` points at a run's first byte, and
// `left` says how many elements of the row there are from there on: rows of single elements may end within a run.

DEVICE float half_at(const unsigned char* bytes) { return from_half((unsigned short)(bytes[0] | bytes[1] << 8)); }

struct F32 {
  static const unsigned BYTES = 4 * WARP;
  DEVICE float element(const unsigned char* run, unsigned lane, unsigned left) {
    return lane < left ? ((const float*)run)[lane] : 0.0f;
  }
};

struct F16 {
  static const unsigned BYTES = 2 * WARP;
  DEVICE float element(const unsigned char* run, unsigned lane, unsigned left) {
    return lane < left ? from_half(((const unsigned short*)run)[lane]) : 0.0f;
  }
};

struct BF16 {
  static const unsigned BYTES = 2 * WARP;
  DEVICE float element(const unsigned char* run, unsigned lane, unsigned left) {
    return lane < left ? from_bfloat(((const unsigned short*)run)[lane]) : 0.0f;
  }
};

// Low nibbles are the first half of the block, high nibbles the second.
DEVICE float nibble(const unsigned char* quants, unsigned lane) {
  const unsigned pair = quants[lane % 16];
  return (float)(lane < 16 ? pair & 15 : pair >> 4);
}

struct Q4_0 {
  static const unsigned BYTES = 18;
  DEVICE float element(const unsigned char* run, unsigned lane, unsigned) {
    return half_at(run) * (nibble(run + 2, lane) - 8.0f);
  }
};

struct Q4_1 {
  static const unsigned BYTES = 20;
  DEVICE float element(const unsigned char* run, unsigned lane, unsigned) {
    return half_at(run) * nibble(run + 4, lane) + half_at(run + 2);
  }
};

struct Q8_0 {
  static const unsigned BYTES = 34;
  DEVICE float element(const unsigned char* run, unsigned lane, unsigned) {
    return half_at(run) * (float)(signed char)run[2 + lane];
  }
};

// Gives `KERNEL_OF(type)` for each type, under the names that launchers use.
#define EACH_FORMAT(KERNEL_OF) KERNEL_OF(F32) KERNEL_OF(F16) KERNEL_OF(BF16) KERNEL_OF(Q4_0) KERNEL_OF(Q4_1) KERNEL_OF(Q8_0)
