// Commands of rank 0 to tensor-parallel ranks, and their reports: whatever the bytes, no crash; a
// command that is accepted encodes to itself again.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "engine/shard/commands.h"
#include "engine/shard/kv_calls.h"
#include "engine/shard/tier_calls.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using baton::engine::shard::Command;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  baton::engine::shard::KvReport::decode(input).IgnoreError();
  baton::engine::shard::TierReport::decode(input).IgnoreError();
  const auto command = Command::decode(input);
  if (!command.ok()) return 0;
  std::string bytes, bytes_again;
  command->encode(bytes);
  const auto again = Command::decode(bytes);
  if (!again.ok()) std::abort();
  again->encode(bytes_again);
  if (bytes_again != bytes) std::abort();
  return 0;
}
