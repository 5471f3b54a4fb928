// Fuzzes parse_safetensors: whatever the file says, every tensor it yields lies inside the file.

#include "engine/files/safetensors.h"
#include "tests/std.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view file(reinterpret_cast<const char*>(data), size);
  const auto header = baton::engine::parse_safetensors(file);
  if (!header.ok()) {
    if (header.status().message().empty()) std::abort();
    return 0;
  }
  for (const auto& [name, tensor] : header->tensors) {
    if (tensor.begin > tensor.end || tensor.end > size || tensor.name != name) std::abort();
    uint8_t sum = 0;
    for (size_t i = tensor.begin; i < tensor.end; ++i) sum = static_cast<uint8_t>(sum + data[i]);
    static_cast<void>(sum);
  }
  return 0;
}
