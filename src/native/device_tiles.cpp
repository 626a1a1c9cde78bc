// Tiles of an array in host memory pass through slots of a device, where a kernel changes them. All calls of the driver
// for a stretch of tiles are made here, one after the other, so a thread of Python needs its lock once for all of them.
//
// The driver is opened by name, so the library builds and loads where there is none. Its types are pointers and plain
// numbers; what is declared here is what its documentation has.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#endif

#include "zerostd_native.h"

struct zs_driver {
  int (*copy)(uint64_t target, uint64_t source, size_t num_bytes, void* stream);
  int (*launch)(void* function, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y,
                unsigned threads_z, unsigned shared, void* stream, void** parameters, void** extra);
  int (*record)(void* event, void* stream);
  int (*wait)(void* stream, void* event, unsigned flags);
  int (*synchronize)(void* event);
  int (*parameter)(void* function, size_t index, size_t* offset, size_t* num_bytes);
  int (*name)(int error, const char** name);
};

namespace {

constexpr int64_t kMostParameters = 64;

uint64_t address_of(const zs_device_array& array, int64_t start, int64_t slot) {
  if (!array.moves) return array.addresses[slot];
  return array.addresses[0] + static_cast<uint64_t>(start / array.unit * array.unit_bytes);
}

size_t bytes_of(const zs_device_array& array, int64_t count) {
  return static_cast<size_t>((count + array.unit - 1) / array.unit * array.unit_bytes);
}

void* pointer(uint64_t handle) { return reinterpret_cast<void*>(static_cast<uintptr_t>(handle)); }

int copy_all(const zs_driver& driver, const zs_device_copy* copies, int64_t number, int64_t start, int64_t count,
             int64_t slot, void* stream) {
  for (int64_t at = 0; at < number; ++at) {
    const zs_device_copy& each = copies[at];
    const int error = driver.copy(address_of(each.target, start, slot), address_of(each.source, start, slot),
                                  bytes_of(each.source, count), stream);
    if (error) return error;
  }
  return 0;
}

int launch(const zs_driver& driver, const zs_device_tiles& tiles, int64_t start, int64_t count, int64_t slot) {
  uint64_t values[kMostParameters];
  void* parameters[kMostParameters];
  for (int64_t at = 0; at < tiles.num_parameters; ++at) {
    const zs_device_parameter& each = tiles.parameters[at];
    values[at] = each.kind == ZS_DEVICE_NUMBER  ? each.number
                 : each.kind == ZS_DEVICE_COUNT ? static_cast<uint64_t>(count)
                                                : address_of(each.array, start, slot);
    parameters[at] = &values[at];  // numbers of 4 bytes are its first ones
  }
  const auto programs = static_cast<unsigned>((count + tiles.per_program - 1) / tiles.per_program);
  return driver.launch(pointer(tiles.function), programs, 1, 1, static_cast<unsigned>(tiles.threads), 1, 1,
                       static_cast<unsigned>(tiles.shared_bytes), pointer(tiles.streams[1]), parameters, nullptr);
}

int queue(const zs_driver& driver, const zs_device_tiles& tiles, int64_t start, int64_t slot) {
  void* const up = pointer(tiles.streams[0]);
  void* const update = pointer(tiles.streams[1]);
  void* const down = pointer(tiles.streams[2]);
  const uint64_t* const events = tiles.events[slot];
  const int64_t count = std::min(tiles.tile, tiles.count - start);
  int error = driver.synchronize(pointer(events[2]));  // what was in the slot is home
  if (!error) error = copy_all(driver, tiles.copies, tiles.num_up, start, count, slot, up);
  if (!error) error = driver.record(pointer(events[0]), up);
  if (!error) error = driver.wait(update, pointer(events[0]), 0);
  if (!error) error = launch(driver, tiles, start, count, slot);
  const zs_device_copy* copies = tiles.copies + tiles.num_up;
  if (!error) error = copy_all(driver, copies, tiles.num_beside, start, count, slot, update);
  if (!error) error = driver.record(pointer(events[1]), update);
  if (!error) error = driver.wait(down, pointer(events[1]), 0);
  if (!error) error = copy_all(driver, copies + tiles.num_beside, tiles.num_down, start, count, slot, down);
  if (!error) error = driver.record(pointer(events[2]), down);
  return error;
}

bool is_good(const zs_device_tiles& tiles) {
  if (tiles.count < 0 || tiles.tile < 1) return false;
  if (tiles.per_program < 1 || tiles.threads < 1 || tiles.shared_bytes < 0) return false;
  if (tiles.first_slot < 0 || tiles.first_slot >= ZS_DEVICE_SLOTS) return false;
  if (tiles.num_up < 0 || tiles.num_beside < 0 || tiles.num_down < 0) return false;
  if (tiles.num_parameters < 0 || tiles.num_parameters > kMostParameters) return false;
  for (int64_t at = 0; at < tiles.num_up + tiles.num_beside + tiles.num_down; ++at) {
    for (const zs_device_array* array : {&tiles.copies[at].source, &tiles.copies[at].target}) {
      if (array->unit < 1 || array->unit_bytes < 1 || (array->moves && tiles.tile % array->unit)) return false;
    }
  }
  for (int64_t at = 0; at < tiles.num_parameters; ++at) {
    const zs_device_parameter& each = tiles.parameters[at];
    if (each.kind != ZS_DEVICE_ARRAY) continue;
    if (each.array.unit < 1 || (each.array.moves && tiles.tile % each.array.unit)) return false;
  }
  return true;
}

}  // namespace

zs_driver* zs_open_driver(const char* library) {
#if defined(__unix__) || defined(__APPLE__)
  void* const handle = library == nullptr ? nullptr : dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return nullptr;
  auto* const driver = new zs_driver{};
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    return function != nullptr;
  };
  const bool is_whole = find(driver->copy, "cuMemcpyAsync") && find(driver->launch, "cuLaunchKernel") &&
                        find(driver->record, "cuEventRecord") && find(driver->wait, "cuStreamWaitEvent") &&
                        find(driver->synchronize, "cuEventSynchronize") &&
                        find(driver->parameter, "cuFuncGetParamInfo") && find(driver->name, "cuGetErrorName");
  if (is_whole) return driver;  // for as long as the process lives
  delete driver;
  dlclose(handle);
#else
  (void)library;
#endif
  return nullptr;
}

int32_t zs_driver_parameters(const zs_driver* driver, uint64_t function, int64_t* sizes, int64_t most) {
  int32_t number = 0;
  size_t offset = 0;
  size_t num_bytes = 0;
  while (number < most && driver->parameter(pointer(function), static_cast<size_t>(number), &offset, &num_bytes) == 0) {
    sizes[number++] = static_cast<int64_t>(num_bytes);
  }
  return number;
}

const char* zs_driver_error(const zs_driver* driver, int32_t error) {
  const char* name = nullptr;
  return driver->name(error, &name) == 0 && name != nullptr ? name : "unknown error";
}

int32_t zs_queue_tiles(const zs_driver* driver, const zs_device_tiles* tiles) {
  if (driver == nullptr || tiles == nullptr || !is_good(*tiles)) return -ZS_BAD_ARGUMENT;
  int64_t slot = tiles->first_slot;
  for (int64_t start = 0; start < tiles->count; start += tiles->tile) {
    const int error = queue(*driver, *tiles, start, slot);
    if (error) return error;
    slot = (slot + 1) % ZS_DEVICE_SLOTS;
  }
  return ZS_OK;
}
