// Commands of rank 0 to tensor-parallel ranks, and their reports: whatever the bytes, no crash;
// what is accepted writes itself again.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "engine/shard/commands.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  if (!baton::base::refused_or_same<baton::engine::shard::Command>(input) ||
      !baton::base::refused_or_same<baton::engine::shard::Report>(input)) {
    std::abort();
  }
  return 0;
}
