// Commands of rank 0 to tensor-parallel ranks, and their reports: whatever the bytes, no crash;
// what is accepted writes itself again.

#include "engine/shard/commands.h"
#include "tests/fuzz/expect.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  expect(baton::base::refused_or_same<baton::engine::shard::Command>(input));
  expect(baton::base::refused_or_same<baton::engine::shard::Report>(input));
  return 0;
}
