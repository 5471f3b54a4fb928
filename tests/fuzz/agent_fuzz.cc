// Fuzzes what agents send each other: metadata below its code, and messages in frames.

#include "kvtransfer/internal/agent_messages.h"
#include "kvtransfer/metadata/agent_metadata.h"
#include "tests/std.h"

using baton::kvtransfer::AgentAssembler;
using baton::kvtransfer::AgentFrame;
using baton::kvtransfer::AgentMetadata;

namespace {

const baton::ClusterKey& key() {
  static const baton::ClusterKey key = *baton::ClusterKey::from_bytes("a key for the fuzzer only");
  return key;
}

void metadata(std::string_view bytes) {
  const auto first = AgentMetadata::decode_body(bytes);
  if (!first.ok()) {
    if (first.status().message().empty()) std::abort();
    return;
  }
  const std::string encoded = first->encode(key());
  const auto second = AgentMetadata::decode(encoded, key());
  if (!second.ok() || second->encode(key()) != encoded) std::abort();
}

// Frames behind each other, each with its length in front.
void messages(std::string_view bytes) {
  AgentAssembler parts;
  AgentFrame frame;
  while (bytes.size() > 2) {
    const size_t length = static_cast<uint8_t>(bytes[0]) | static_cast<uint8_t>(bytes[1]) << 8;
    bytes.remove_prefix(2);
    const auto whole = parts.add(bytes.substr(0, length), frame);
    if (!whole.ok() && whole.status().message().empty()) std::abort();
    bytes.remove_prefix(std::min(length, bytes.size()));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  metadata(bytes);
  messages(bytes);
  return 0;
}
