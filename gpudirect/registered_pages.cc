// Pages of the host, registered with the driver for as long as they are there.
#include "gpudirect/registered_pages.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>

#include "absl/strings/str_cat.h"

namespace baton::gpudirect {
namespace {

constexpr std::chrono::seconds kCopyTime{1};

}  // namespace

void place_near(const Device& device, void* data, size_t bytes) {
  constexpr int kBits = 8 * sizeof(unsigned long);
  const int node = device.facts().value(kHostNumaId).value_or(-1);
  if (node < 0 || node >= kBits) return;
  const unsigned long nodes = 1UL << node;
  // Preferred: a node that is full gives way to others. Containers may forbid the call.
  syscall(SYS_mbind, data, bytes, MPOL_PREFERRED, &nodes, kBits + 1, 0);
}

absl::StatusOr<std::unique_ptr<RegisteredPages>> RegisteredPages::make(const Device& device,
                                                                       size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t size = (bytes + page - 1) / page * page;
  void* const data =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no ", size, " bytes of host memory for a CUDA device to read"));
  }
  std::unique_ptr<RegisteredPages> pages(new RegisteredPages(device, data, size));
  place_near(device, data, size);
  const Device::Current current(device);
  absl::Status status = current.status();
  if (status.ok()) {
    status =
        device.check(device.driver().cuMemHostRegister(data, size, kHostPortable | kHostDeviceMap),
                     absl::StrCat("registering ", size, " bytes of host memory"));
  }
  if (!status.ok()) return status;
  pages->registered_ = true;
  return pages;
}

RegisteredPages::~RegisteredPages() {
  if (registered_) {
    device_.give_back([&] { device_.driver().cuMemHostUnregister(data_); });
  }
  munmap(data_, size_);
}

absl::Status RegisteredPages::copy_to(DevicePointer to, size_t bytes) const {
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  const Driver& driver = device_.driver();
  const Stream stream = device_.stream(Direction::kToDevice);
  absl::Status status = device_.check(driver.cuMemcpyAsync(to, address(), bytes, stream),
                                      absl::StrCat("copying ", bytes, " bytes to a device"));
  if (!status.ok()) return status;
  // Also after an error: what is queued uses memory that would go.
  const auto begin = std::chrono::steady_clock::now();
  Result result = kNotReady;
  while (result != kSuccess && device_.alive().ok()) {
    result = driver.cuStreamQuery(stream);
    if (result != kSuccess && result != kNotReady) {
      status = device_.check(result, "waiting for a small copy");
    }
    if (result != kSuccess && std::chrono::steady_clock::now() - begin > kCopyTime) {
      status.Update(absl::DeadlineExceededError(
          absl::StrCat("a copy of ", bytes, " bytes has not ended in 1 s")));
      return status;
    }
  }
  return status;
}

}  // namespace baton::gpudirect
