// The memory that a rank publishes to ranks on the same machine, which map it read-only. A
// RegionTable for its process, a ControlBlock for each of its groups, and an Outbox for each rank
// that it talks to there.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "collectives/executor/call.h"
#include "collectives/executor/link.h"
#include "collectives/executor/memory.h"
#include "transport/region.h"

namespace baton::collectives::executor {

// Pieces of collectives in flight.
inline constexpr uint32_t kLanes = 8;

// A message: small ones carry their bytes with them, one cache line for up to 32 bytes; for large
// ones they tell where those can be read in place.
struct DirectMessage {
  static constexpr size_t kBytes = 8192;
  static constexpr size_t kInFirstLine = 32;
  static constexpr size_t kPayload = kBytes - 64;
  enum Kind : uint32_t { kInline = 1, kInPlace = 2 };

  alignas(64) std::atomic<uint64_t> number;  // of the message, written last
  uint32_t fingerprint;                      // of its call
  uint32_t kind;
  uint64_t sequence;  // of its call
  uint64_t length;    // bytes in all
  std::byte bytes[kInFirstLine + kPayload];

  // The message's `size` bytes: behind the head in its line if they fit, else in lines of their
  // own.
  const std::byte* payload(size_t size) const {
    return size <= kInFirstLine ? bytes : bytes + kInFirstLine;
  }
  std::byte* payload(size_t size) { return size <= kInFirstLine ? bytes : bytes + kInFirstLine; }
};
static_assert(sizeof(DirectMessage) == DirectMessage::kBytes);

// A packet about a send or a receive, and what is behind it: one cache line if that is short.
struct DirectPacket {
  static constexpr size_t kBytes = 8192;
  static constexpr size_t kInFirstLine = 24;
  static constexpr size_t kPayload = kBytes - 64;

  alignas(64) std::atomic<uint64_t> number;  // of the packet, written last
  Packet packet;
  uint32_t size;  // bytes behind it
  std::byte bytes[kInFirstLine - sizeof(uint32_t) + kPayload];

  const std::byte* payload() const { return const_cast<DirectPacket*>(this)->payload(size); }
  std::byte* payload(size_t length) {
    constexpr size_t kFirst = kInFirstLine - sizeof(uint32_t);
    return length <= kFirst ? bytes : bytes + kFirst;
  }
};
static_assert(sizeof(DirectPacket) == DirectPacket::kBytes);

// In a DirectMessage of kind kInPlace.
struct InPlaceRuns {
  uint32_t region;  // number in RegionTable::regions
  uint32_t runs;
  uint64_t offset;
  uint64_t run_bytes;
  uint64_t stride;
};

// The messages of this rank to one other.
struct Outbox {
  static constexpr uint32_t kPackets = 4;

  alignas(64) std::atomic<uint64_t> consumed[kLanes];  // messages of the other, by lane
  alignas(64) std::atomic<uint64_t> heard;             // packets of the other
  // So that a message's bytes lie 2 KiB into a page, where callers' buffers mostly do not begin: a
  // processor takes a load for one of a store just made where their places in a page are equal.
  std::byte apart[1920];
  DirectMessage messages[kLanes][schedules::kMessagesAhead];
  DirectPacket packets[kPackets];

  // Nothing has been sent. What messages carried before is left.
  void clear() {
    for (auto& count : consumed) count.store(0, std::memory_order_relaxed);
    heard.store(0, std::memory_order_relaxed);
    for (auto& lane : messages) {
      for (DirectMessage& message : lane) message.number.store(0, std::memory_order_relaxed);
    }
    for (DirectPacket& packet : packets) packet.number.store(0, std::memory_order_relaxed);
  }
};

// Memory of a process that peers may read in place. Only grows.
struct RegionTable {
  alignas(64) std::atomic<uint32_t> count;
  struct {
    char bytes[RemoteRegion::kEncodedBytes];
  } regions[Memory::kMaxRegions];
};

struct ControlBlock {
  static constexpr uint32_t kCalls = 64;

  alignas(64) std::atomic<uint32_t> sleeping;  // the rank waits in the kernel: wake it
  // The rank's calls have ended, well or not: what it sent in place may be written over any time.
  std::atomic<uint32_t> ended;
  alignas(64) std::atomic<uint64_t> entered;  // sequence of the last call
  CallDescriptor calls[kCalls];               // the last calls, by sequence
  // For calls that a DeviceExchange could run, by sequence: twice the sequence, plus one if this
  // rank has its memory on a device and is ready. A rank has 256 of them open at most, and none of
  // them ends before all have read this: a place is free when it comes round.
  static constexpr uint32_t kFlags = 512;
  std::atomic<uint64_t> on_device[kFlags];
};
static_assert(sizeof(ControlBlock) % 64 == 0);

}  // namespace baton::collectives::executor
