// libcuda.so.1 out of the fake driver, of two devices: for programs that load the driver by its
// name, as libbaton.so.0 does. They get memory of a device here, and look at its bytes.
#include <cstddef>
#include <cstdint>

#include "tests/gpudirect/fake/fake_driver.h"

using baton::gpudirect::FakeDriver;
using baton::gpudirect::Result;

namespace {

// Stays for as long as the process: what uses devices may end after static objects do.
FakeDriver& fake() {
  static auto* const driver = new FakeDriver({.devices = 2});
  return *driver;
}

}  // namespace

extern "C" {

// NOLINTNEXTLINE(readability-identifier-naming): the driver's name.
__attribute__((visibility("default"))) Result cuGetProcAddress_v2(const char* name, void** entry,
                                                                  int version,
                                                                  unsigned long long flags,
                                                                  int* found) {
  fake();
  return FakeDriver::get_proc_address()(name, entry, version, flags, found);
}
__attribute__((visibility("default"))) uint64_t fake_cuda_allocate(size_t bytes, int device) {
  return fake().allocate(bytes, device);
}
__attribute__((visibility("default"))) void fake_cuda_free(uint64_t at) { fake().free(at); }
// Where the bytes lie for the test, until they are freed.
__attribute__((visibility("default"))) void* fake_cuda_view(uint64_t at, size_t bytes) {
  return fake().view(at, bytes);
}
// What a real driver would have punished.
__attribute__((visibility("default"))) size_t fake_cuda_violations() {
  return fake().violations().size();
}

}  // extern "C"
