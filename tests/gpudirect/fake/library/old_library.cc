// libcuda.so of CUDA 11.3 out of the fake driver: its cuGetProcAddress does not say what it found.
#include "tests/gpudirect/fake/fake_driver.h"

using baton::gpudirect::FakeDriver;
using baton::gpudirect::Result;

// NOLINTNEXTLINE(readability-identifier-naming): the driver's name.
extern "C" __attribute__((visibility("default"))) Result cuGetProcAddress(
    const char* name, void** entry, int version, unsigned long long flags) {
  static auto* const driver = new FakeDriver({.version = 11030});
  static_cast<void>(driver);
  int found = 0;
  return FakeDriver::get_proc_address()(name, entry, version, flags, &found);
}
