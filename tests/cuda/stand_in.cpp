// A libcuda.so.1 for machines without a GPU: device memory is memory of the host, and kernels run as fibers.
//
// The host's code (cudarc, and all of the CUDA backend) runs unchanged, and is held to what a driver asks of it: copies
// must lie within allocations, launches within the limits of a device, and memory is full of bytes that are no numbers until
// it is written. Not here: anything asynchronous, several streams at once, time.
//
// STAND_IN_DEVICES, STAND_IN_MEMORY_MIB, STAND_IN_DRIVER (a thousand times the major version, ten times the minor),
// STAND_IN_CAPABILITY (as 90) say what is there; STAND_IN_FAIL names a function that fails, and after how many calls
// (`cuLaunchKernel:12`).

#include "compat.cuh"
#include "weights.cuh"

#include "attention.cu"
#include "embed.cu"
#include "matmul.cu"
#include "rms_norm.cu"
#include "rope.cu"
#include "rows.cu"

#include <map>
#include <mutex>
#include <utility>

namespace {

using Result = int;
using Pointer = std::uint64_t;

constexpr Result SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101,
                 INVALID_IMAGE = 200, NOT_FOUND = 500, LAUNCH_FAILED = 719;

unsigned long setting(const char* name, unsigned long otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtoul(text, nullptr, 10) : otherwise;
}

// True for the call of that function which is to fail, and every later one: a device that is lost stays lost.
bool fails(const char* function) {
  static std::mutex mutex;
  static std::map<std::string, unsigned long> calls;
  const char* wanted = std::getenv("STAND_IN_FAIL");
  if (!wanted) return false;
  const std::string name(wanted, std::strcspn(wanted, ":"));
  if (name != function) return false;
  const char* after = std::strchr(wanted, ':');
  std::lock_guard<std::mutex> lock(mutex);
  return calls[name]++ >= (after ? std::strtoul(after + 1, nullptr, 10) : 0);
}

// A kernel that takes its arguments from where a launch has put them.
using Run = void (*)(dim3, dim3, void**);

template <auto Kernel> struct Adapter;
template <class... Arguments, void (*Kernel)(Arguments...)> struct Adapter<Kernel> {
  template <std::size_t... At>
  static void call(dim3 grid, dim3 size, void** arguments, std::index_sequence<At...>) {
    fibers::launch(grid, size, [=] { Kernel(*static_cast<Arguments*>(arguments[At])...); });
  }
  static void run(dim3 grid, dim3 size, void** arguments) {
    call(grid, size, arguments, std::index_sequence_for<Arguments...>{});
  }
};

#define NAMED(kernel) {#kernel, Adapter<kernel>::run}
#define NAMED_FORMAT(Format) NAMED(embed_##Format), NAMED(matmul_1_##Format), NAMED(matmul_8_##Format),

const std::map<std::string, Run> kernels = {
    EACH_FORMAT(NAMED_FORMAT) NAMED(rms_norm), NAMED(rope_and_store), NAMED(attention),
    NAMED(gate_silu), NAMED(add), NAMED(select_rows),
};

struct Memory {
  std::mutex mutex;
  std::map<Pointer, std::size_t> allocations;
  std::size_t used = 0;

  static std::size_t total() { return setting("STAND_IN_MEMORY_MIB", 4096) << 20; }

  bool has(Pointer start, std::size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    auto after = allocations.upper_bound(start);
    if (after == allocations.begin()) return false;
    const auto& [first, size] = *--after;
    return start + bytes <= first + size;
  }
} memory;

thread_local void* context;

template <class T> T* made() { return static_cast<T*>(std::malloc(1)); }

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

Result cuInit(unsigned) { return setting("STAND_IN_DEVICES", 1) ? SUCCESS : NO_DEVICE; }

Result cuDriverGetVersion(int* version) {
  *version = static_cast<int>(setting("STAND_IN_DRIVER", 13000));
  return SUCCESS;
}

Result cuDeviceGetCount(int* count) {
  *count = static_cast<int>(setting("STAND_IN_DEVICES", 1));
  return SUCCESS;
}

Result cuDeviceGet(int* device, int number) {
  if (number < 0 || static_cast<unsigned long>(number) >= setting("STAND_IN_DEVICES", 1)) return INVALID_DEVICE;
  *device = number;
  return SUCCESS;
}

Result cuDeviceGetName(char* name, int bytes, int) {
  std::snprintf(name, bytes, "stand-in for a GPU");
  return SUCCESS;
}

Result cuDeviceTotalMem_v2(std::size_t* bytes, int) {
  *bytes = Memory::total();
  return SUCCESS;
}

// The numbers of CUdevice_attribute that are asked for: 75 and 76 are the capability, 115 memory pools, which it has not.
Result cuDeviceGetAttribute(int* value, int attribute, int) {
  const int capability = static_cast<int>(setting("STAND_IN_CAPABILITY", 90));
  *value = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : 0;
  return SUCCESS;
}

// NVRTC looks for it in any driver of this process, and takes no for an answer.
Result cuGetExportTable(const void**, const void*) { return NOT_FOUND; }

Result cuDevicePrimaryCtxRetain(void** made_context, int device) {
  *made_context = reinterpret_cast<void*>(static_cast<std::intptr_t>(device + 1));
  return SUCCESS;
}
Result cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
Result cuCtxSetCurrent(void* other) {
  context = other;
  return SUCCESS;
}
Result cuCtxGetCurrent(void** present) {
  *present = context;
  return SUCCESS;
}
Result cuCtxSynchronize() { return SUCCESS; }

Result cuMemGetInfo_v2(std::size_t* free_bytes, std::size_t* total) {
  std::lock_guard<std::mutex> lock(memory.mutex);
  *total = Memory::total();
  *free_bytes = *total - memory.used;
  return SUCCESS;
}

Result cuMemAlloc_v2(Pointer* pointer, std::size_t bytes) {
  if (bytes == 0) return INVALID_VALUE;
  if (fails("cuMemAlloc")) return OUT_OF_MEMORY;
  std::lock_guard<std::mutex> lock(memory.mutex);
  if (bytes > Memory::total() - memory.used) return OUT_OF_MEMORY;
  void* start = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (!start) return OUT_OF_MEMORY;
  std::memset(start, 0xFF, bytes);
  *pointer = reinterpret_cast<Pointer>(start);
  memory.allocations[*pointer] = bytes;
  memory.used += bytes;
  return SUCCESS;
}

Result cuMemFree_v2(Pointer pointer) {
  std::lock_guard<std::mutex> lock(memory.mutex);
  const auto found = memory.allocations.find(pointer);
  if (found == memory.allocations.end()) return INVALID_VALUE;
  memory.used -= found->second;
  memory.allocations.erase(found);
  std::free(reinterpret_cast<void*>(pointer));
  return SUCCESS;
}

Result cuMemcpyHtoDAsync_v2(Pointer to, const void* from, std::size_t bytes, void*) {
  if (fails("cuMemcpyHtoD")) return LAUNCH_FAILED;
  if (!memory.has(to, bytes)) return INVALID_VALUE;
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return SUCCESS;
}

Result cuMemcpyDtoHAsync_v2(void* to, Pointer from, std::size_t bytes, void*) {
  if (fails("cuMemcpyDtoH")) return LAUNCH_FAILED;
  if (!memory.has(from, bytes)) return INVALID_VALUE;
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return SUCCESS;
}

Result cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, std::size_t bytes, void*) {
  if (!memory.has(from, bytes) || !memory.has(to, bytes)) return INVALID_VALUE;
  std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  return SUCCESS;
}

Result cuMemsetD8Async(Pointer to, unsigned char byte, std::size_t bytes, void*) {
  if (!memory.has(to, bytes)) return INVALID_VALUE;
  std::memset(reinterpret_cast<void*>(to), byte, bytes);
  return SUCCESS;
}

Result cuStreamCreate(void** stream, unsigned) {
  *stream = made<void>();
  return SUCCESS;
}
Result cuStreamDestroy_v2(void* stream) {
  std::free(stream);
  return SUCCESS;
}
Result cuStreamSynchronize(void*) { return fails("cuStreamSynchronize") ? LAUNCH_FAILED : SUCCESS; }
Result cuStreamWaitEvent(void*, void*, unsigned) { return SUCCESS; }
Result cuStreamIsCapturing(void*, int* status) {
  *status = 0;
  return SUCCESS;
}
Result cuEventCreate(void** event, unsigned) {
  *event = made<void>();
  return SUCCESS;
}
Result cuEventDestroy_v2(void* event) {
  std::free(event);
  return SUCCESS;
}
Result cuEventRecord(void*, void*) { return SUCCESS; }
Result cuEventQuery(void*) { return SUCCESS; }
Result cuEventSynchronize(void*) { return SUCCESS; }

// Machine code is taken for what it is by its first bytes; its kernels are looked up by name.
Result cuModuleLoadData(void** module, const void* image) {
  if (std::memcmp(image, "\x7f" "ELF", 4)) return INVALID_IMAGE;
  *module = made<void>();
  return SUCCESS;
}
Result cuModuleUnload(void* module) {
  std::free(module);
  return SUCCESS;
}
Result cuModuleGetFunction(void** function, void*, const char* name) {
  const auto found = kernels.find(name);
  if (found == kernels.end()) return NOT_FOUND;
  *function = reinterpret_cast<void*>(found->second);
  return SUCCESS;
}
Result cuFuncSetAttribute(void*, int, int) { return SUCCESS; }
Result cuFuncGetAttribute(int* value, int, void*) {
  *value = 0;
  return SUCCESS;
}

Result cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared_bytes, void*, void** arguments, void**) {
  if (fails("cuLaunchKernel")) return LAUNCH_FAILED;
  const bool has_room = block_x * block_y * block_z <= 1024 && shared_bytes <= 227 << 10;
  if (!grid_x || !grid_y || !grid_z || grid_y > 65535 || grid_z > 65535 || !has_room) return INVALID_VALUE;
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> lock(one_at_a_time);
  reinterpret_cast<Run>(function)({grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, arguments);
  return SUCCESS;
}

Result cuGetErrorName(Result error, const char** name) {
  switch (error) {
    case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; break;
    case INVALID_DEVICE: *name = "CUDA_ERROR_INVALID_DEVICE"; break;
    case INVALID_IMAGE: *name = "CUDA_ERROR_INVALID_IMAGE"; break;
    case NOT_FOUND: *name = "CUDA_ERROR_NOT_FOUND"; break;
    case LAUNCH_FAILED: *name = "CUDA_ERROR_LAUNCH_FAILED"; break;
    default: return INVALID_VALUE;
  }
  return SUCCESS;
}

Result cuGetErrorString(Result error, const char** text) {
  switch (error) {
    case INVALID_VALUE: *text = "invalid argument"; break;
    case OUT_OF_MEMORY: *text = "out of memory"; break;
    case NO_DEVICE: *text = "no CUDA-capable device is detected"; break;
    case INVALID_DEVICE: *text = "invalid device ordinal"; break;
    case INVALID_IMAGE: *text = "device kernel image is invalid"; break;
    case NOT_FOUND: *text = "named symbol not found"; break;
    case LAUNCH_FAILED: *text = "unspecified launch failure"; break;
    default: return INVALID_VALUE;
  }
  return SUCCESS;
}

}
