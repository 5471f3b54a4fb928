// Random sends and receives between ranks, and what must come of them whatever the order in which
// they meet: every message is taken once, whole, and those of equal source and tag in order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "collectives/communicator.h"
#include "tests/test.h"

namespace baton {

struct PlannedMessage {
  int from = 0, to = 0;
  int32_t tag = 0;
  size_t bytes = 0;
  uint64_t number = 0;  // among those of equal from, to and tag
};

// A call of one rank's. Receives name their source or kAnyRank.
struct PlannedCall {
  bool sends = false;
  int other = 0;
  PlannedMessage message;   // of a receive from any rank: only `to`, `tag` and `bytes` count
  bool registered = false;  // its memory is allocate()d
};

class MessagePlan {
 public:
  MessagePlan(uint64_t seed, int ranks, size_t messages, size_t most_bytes)
      : calls_(static_cast<size_t>(ranks)) {
    std::mt19937_64 random(seed);
    const auto below = [&](uint64_t n) { return random() % n; };
    // One size for each tag, and for each receiver and tag either receives from any or from one.
    const std::vector<int32_t> tags = {0, 1, -7, INT32_MAX, INT32_MIN, 42};
    std::vector<size_t> sizes = {
        0, 1 + below(64), 1 + below(9000), 8000 + below(60000), 1 + below(most_bytes), most_bytes};
    std::shuffle(sizes.begin(), sizes.end(), random);
    std::map<std::pair<int, int32_t>, bool> from_any;
    std::map<std::tuple<int, int, int32_t>, uint64_t> numbers;
    for (size_t i = 0; i < messages; ++i) {
      PlannedMessage message;
      message.from = static_cast<int>(below(static_cast<uint64_t>(ranks)));
      message.to = static_cast<int>(
          (static_cast<uint64_t>(message.from) + 1 + below(static_cast<uint64_t>(ranks) - 1)) %
          static_cast<uint64_t>(ranks));
      const size_t which = below(tags.size());
      message.tag = tags[which];
      message.bytes = sizes[which];
      message.number = numbers[{message.from, message.to, message.tag}]++;
      const auto [any, fresh] = from_any.try_emplace({message.to, message.tag}, below(3) == 0);
      calls_[static_cast<size_t>(message.from)].push_back(
          {true, message.to, message, below(2) == 0});
      calls_[static_cast<size_t>(message.to)].push_back(
          {false, any->second ? kAnyRank : message.from, message, below(2) == 0});
    }
    // Sends of equal tag to one rank stay in order, and receives likewise; all else is mixed.
    for (std::vector<PlannedCall>& calls : calls_) {
      std::vector<PlannedCall> mixed = calls;
      std::shuffle(mixed.begin(), mixed.end(), random);
      std::map<std::tuple<bool, int, int32_t>, std::vector<PlannedCall>> in_order;
      for (const PlannedCall& call : calls) in_order[key(call)].push_back(call);
      std::map<std::tuple<bool, int, int32_t>, size_t> next;
      for (PlannedCall& call : mixed) {
        const auto place = key(call);
        call = in_order[place][next[place]++];
      }
      calls = std::move(mixed);
    }
  }

  const std::vector<PlannedCall>& calls(int rank) const {
    return calls_[static_cast<size_t>(rank)];
  }

  // No two messages of a plan have equal bytes, nor a message at two places.
  static void fill(const PlannedMessage& message, std::byte* data) {
    const uint64_t seed = static_cast<uint64_t>(message.from * 31 + message.to) * 1000003 +
                          static_cast<uint64_t>(static_cast<uint32_t>(message.tag)) * 7919 +
                          message.number * 104729;
    for (size_t at = 0; at < message.bytes; at += sizeof(uint64_t)) {
      const uint64_t word = (seed + at) * 0x9e3779b97f4a7c15;
      std::memcpy(data + at, &word, std::min(sizeof word, message.bytes - at));
    }
  }

  // What one rank has got, by its calls in their order.
  class Checker {
   public:
    // `source`: who sent what this receive took.
    void check(const PlannedCall& call, int source, const std::byte* data) {
      if (call.other != kAnyRank) {
        ASSERT_EQ(source, call.other);
      }
      PlannedMessage wanted = call.message;
      wanted.from = source;
      wanted.number = next_[{source, call.message.tag}]++;
      std::vector<std::byte> bytes(wanted.bytes);
      fill(wanted, bytes.data());
      ASSERT_TRUE(std::equal(bytes.begin(), bytes.end(), data))
          << "message " << wanted.number << " of " << wanted.bytes << " bytes from " << source
          << " to " << wanted.to << ", tag " << wanted.tag;
    }

   private:
    std::map<std::pair<int, int32_t>, uint64_t> next_;
  };

 private:
  static std::tuple<bool, int, int32_t> key(const PlannedCall& call) {
    return {call.sends, call.other, call.message.tag};
  }
  std::vector<std::vector<PlannedCall>> calls_;  // by rank
};

// Memory for one call, of the communicator's or from elsewhere.
class CallMemory {
 public:
  CallMemory(Communicator& comm, size_t bytes, bool registered) : comm_(comm) {
    if (registered) {
      buffer_ = *comm.allocate(bytes + 1);
    } else {
      own_.resize(bytes + 1);
    }
  }
  ~CallMemory() {
    if (buffer_.data != nullptr) comm_.free(buffer_);
  }
  CallMemory(const CallMemory&) = delete;
  std::byte* data() { return buffer_.data != nullptr ? buffer_.data : own_.data(); }

 private:
  Communicator& comm_;
  CommBuffer buffer_;
  std::vector<std::byte> own_;
};

// Begins a planned call in this memory.
inline absl::StatusOr<Work> begin(Communicator& comm, const PlannedCall& call, std::byte* data) {
  const size_t bytes = call.message.bytes;
  CallOptions tagged;
  tagged.tag = call.message.tag;
  if (!call.sends) return comm.receive_async(data, bytes, DataType::kU8, call.other, tagged);
  MessagePlan::fill(call.message, data);
  return comm.send_async(data, bytes, DataType::kU8, call.other, tagged);
}

}  // namespace baton
