// Commands of rank 0 to tensor-parallel ranks: whatever the bytes, no crash; what is accepted
// encodes to itself again.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "engine/shard/commands.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using baton::engine::shard::Command;
  const auto command = Command::decode({reinterpret_cast<const char*>(data), size});
  if (!command.ok()) return 0;
  std::string bytes;
  command->encode(bytes);
  const auto again = Command::decode(bytes);
  if (!again.ok() || !(*again == *command)) std::abort();
  return 0;
}
