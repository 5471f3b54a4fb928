// libcuda.so.1 out of the fake driver, of two devices: for programs that load the driver by its
// name, as libbaton.so.0 does. They get memory of a device here, and look at its bytes.
//
// FAKE_CUDA_CONTROL names a pipe (mkfifo) by which a test has it fail while a server uses it. A
// line "lose" loses the device; "fail NAME RESULT" has the next call of that name fail once. The
// pipe is removed when that is done.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

#include "tests/gpudirect/fake/fake_driver.h"

using baton::gpudirect::FakeDriver;
using baton::gpudirect::Result;

namespace {

void obey(FakeDriver& driver, const std::string& pipe) {
  std::ifstream in(pipe);  // waits for whoever writes
  std::string what, name;
  int result = 0;
  in >> what >> name >> result;
  if (what == "lose") driver.lose();
  if (what == "fail") driver.fail_next(name, static_cast<Result>(result));
  unlink(pipe.c_str());
}

// Stays for as long as the process: what uses devices may end after static objects do.
FakeDriver& fake() {
  static auto* const driver = [] {
    auto* made = new FakeDriver({.devices = 2});
    if (const char* pipe = std::getenv("FAKE_CUDA_CONTROL"); pipe != nullptr) {
      std::thread([made, pipe = std::string(pipe)] { obey(*made, pipe); }).detach();
    }
    return made;
  }();
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
// What a real driver would have punished. To ask again and again is no fault here: another process
// may be late, and what a stream waits for is in its hands.
__attribute__((visibility("default"))) size_t fake_cuda_violations() {
  size_t count = 0;
  for (const std::string& what : fake().violations()) {
    count += what.find("asked again and again") == std::string::npos ? 1 : 0;
  }
  return count;
}

}  // extern "C"
