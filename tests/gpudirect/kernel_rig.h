// Runs kernels on a device and in the emulation, compares what they wrote, and takes times.
#pragma once

#include "gpudirect/device.h"
#include "gpudirect/device_memory.h"
#include "gpudirect/launcher.h"
#include "gpudirect/registered_pages.h"
#include "tests/gpudirect/kernels/emulated_memory.h"
#include "tests/gpudirect/machine/waiting.h"
#include "tests/std.h"

namespace baton::gpudirect {

// Memory of a device for one comparison after the other, and a stream. What fails throws Failed.
class KernelRig {
 public:
  KernelRig(const Device& device, size_t bytes);

  const Device& device() const { return device_; }
  Stream stream() const { return device_.stream(Direction::kToDevice); }
  // Device memory until clear(), aligned to 256 bytes.
  DevicePointer allocate(size_t bytes);
  void clear() { used_ = 0; }
  void upload(DevicePointer to, const void* from, size_t bytes);
  void download(void* to, DevicePointer from, size_t bytes);
  void wait() const { wait_for(device_, stream()); }
  // Microseconds of one of `repeats` that are queued one behind the other.
  double time(int repeats, const std::function<absl::Status()>& queue) const;

 private:
  static constexpr size_t kStage = 4 << 20;
  const Device& device_;
  const std::unique_ptr<DeviceSlab> slab_;
  const std::unique_ptr<RegisteredPages> stage_;
  size_t used_ = 0;
};

// Where arrays lie for a kernel: `place(array)` for what it reads, `place(array, true)` for what it
// writes. On the host the arrays themselves.
class HostPlaces {
 public:
  template <class T>
  T* operator()(std::vector<T>& array, bool writes = false) {
    memory.allow(array, writes);
    return array.data();
  }
  kernels::EmulatedMemory memory;
};
// On the device copies of them.
class DevicePlaces {
 public:
  explicit DevicePlaces(KernelRig& rig) : rig_(rig) {}
  template <class T>
  T* operator()(std::vector<T>& array, bool writes = false) {
    const size_t bytes = array.size() * sizeof(T);
    const DevicePointer at = rig_.allocate(bytes);
    rig_.upload(at, array.data(), bytes);
    if (writes) written.push_back({at, reinterpret_cast<const std::byte*>(array.data()), bytes});
    return reinterpret_cast<T*>(static_cast<uintptr_t>(at));
  }
  struct Written {
    DevicePointer at;
    const std::byte* host;
    size_t bytes;
  };
  std::vector<Written> written;

 private:
  KernelRig& rig_;
};

// Compares every kernel on the device with the emulation: what differs, a line for each; empty when
// all bits are equal, but for tensor cores', which are near.
std::vector<std::string> compare_kernels(KernelRig& rig, const Launcher& launcher);

struct KernelRow {
  std::string name;
  std::string shape;
  double microseconds = 0;
  double gigabytes_per_second = 0;  // read and written
  double of_copy = 0;               // of a plain copy's rate in the same minute
  double teraflops = 0;             // of what multiplies
  double of_floor = 0;              // of the least bytes at that rate; 0: those it moves are
  double goal = 0;                  // for of_floor where it is told, or else of_copy; 0: none
};
// Times, with `bytes` in each of the larger arrays: 64 MiB and more for a rate that means
// something.
std::vector<KernelRow> time_kernels(KernelRig& rig, const Launcher& launcher, size_t bytes,
                                    int repeats);
std::string json_of(const KernelRow& row);

}  // namespace baton::gpudirect
