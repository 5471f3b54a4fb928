// What two rails tell each other: an introduction, over the authenticated connection, and an
// envelope in front of every frame that goes through UCX.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace baton::ucx {

// Names the rail that a message is for, and proves that it comes from its peer.
struct Envelope {
  static constexpr size_t kBytes = 16;
  uint32_t rail = 0;   // index of the rail at the receiver
  uint64_t token = 0;  // random; told to the peer once it had proved itself
  void encode(char* out) const;
  static Envelope decode(std::string_view message);  // at least kBytes
  bool operator==(const Envelope&) const = default;
};

// Where a rail is found.
struct Introduction {
  Envelope to;          // what messages for it begin with
  std::string address;  // of its engine, as UCX wrote it: never empty
  std::string encode() const;
  static std::optional<Introduction> decode(std::string_view words);
  bool operator==(const Introduction&) const = default;
};

}  // namespace baton::ucx
