// The messages between two rails: an introduction over the authenticated connection, and an
// envelope in front of every frame that goes through UCX.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace baton::ucx {

// Names the rail that a message is for, and the message, whose number goes into its tags: they may
// come in any order, each once.
struct Envelope {
  static constexpr size_t kBytes = 16;
  uint32_t rail = 0;  // index of the rail at the receiver
  uint64_t number = 0;
  void encode(char* out) const;
  static Envelope decode(std::string_view message);  // at least kBytes
  bool operator==(const Envelope&) const = default;
};

// The UCX address and number of a rail.
struct Introduction {
  uint32_t rail = 0;    // Envelope::rail
  std::string address;  // of its engine, as UCX wrote it: never empty
  std::string encode() const;
  static std::optional<Introduction> decode(std::string_view words);
  bool operator==(const Introduction&) const = default;
};

}  // namespace baton::ucx
