// What differs between the compilers that these kernels meet: NVRTC and nvcc for a GPU, g++ for the tests' stand-in.
//
// Every kernel is compiled with this and weights.cuh before it, as one source: NVRTC brings no headers.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

// A kernel of at most so many threads a block, found by its name.
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define DEVICE static __device__ __forceinline__
#define SHARED __shared__

// IEEE half precision to single precision, exactly.
DEVICE float from_half(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

// Rounded to the nearest, ties to even.
DEVICE unsigned short to_half(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

DEVICE float from_bits(unsigned bits) { return __uint_as_float(bits); }

#else
#include "fibers.hpp"
#endif

// Lanes of a warp.
#define WARP 32u
#define ALL_LANES 0xffffffffu

// The upper half of single precision.
DEVICE float from_bfloat(unsigned short bits) { return from_bits((unsigned)bits << 16); }

// The sum of a value over a warp, in every lane; always added in the same order.
DEVICE float warp_sum(float x) {
  for (unsigned distance = WARP / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(ALL_LANES, x, distance);
  return x;
}

// The sums of N values over a warp, each in the same order as `warp_sum`: in lane l that of value l * N / 32. With every
// exchange a lane gives half of its values away, so that there are N + 1 exchanges for 8 values instead of 40.
template <unsigned N> DEVICE float warp_sums(float (&x)[N], unsigned lane) {
  unsigned distance = WARP / 2;
  for (unsigned half = N / 2; half > 0; half /= 2, distance /= 2) {
    for (unsigned i = 0; i < half; i++) {
      const float given = lane & distance ? x[i] : x[i + half], kept = lane & distance ? x[i + half] : x[i];
      x[i] = kept + __shfl_xor_sync(ALL_LANES, given, distance);
    }
  }
  float sum = x[0];
  for (; distance > 0; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
  return sum;
}

// The greatest of a value over a warp, in every lane.
DEVICE float warp_max(float x) {
  for (unsigned distance = WARP / 2; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, distance));
  }
  return x;
}

// Both over a block of `WARPS` warps that lie along x, in every thread; `room` has an element for each warp. Every
// thread of the block takes part, and room may be used again at once.
template <unsigned WARPS> DEVICE float block_sum(float x, float* room) {
  x = warp_sum(x);
  if (threadIdx.x % WARP == 0) room[threadIdx.x / WARP] = x;
  __syncthreads();
  float sum = room[0];
  for (unsigned warp = 1; warp < WARPS; warp++) sum += room[warp];
  __syncthreads();
  return sum;
}

template <unsigned WARPS> DEVICE float block_max(float x, float* room) {
  x = warp_max(x);
  if (threadIdx.x % WARP == 0) room[threadIdx.x / WARP] = x;
  __syncthreads();
  float max = room[0];
  for (unsigned warp = 1; warp < WARPS; warp++) max = fmaxf(max, room[warp]);
  __syncthreads();
  return max;
}
