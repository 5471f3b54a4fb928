// What rank 0 of a tensor-parallel model tells the others, and what they report.
//
// A load and a send have the number that rank 0's session or store knows them by. A rank's half of
// them moves without rank 0; each time rank 0 asks, the others report what has changed. A block of
// the KV tiers is named as rank 0 names it for all ranks (RankKeys).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kvtransfer/kv_connector.h"
#include "kvtransfer/tiers/tier_record.h"
#include "kvtransfer/tiers/tier_store.h"
#include "transport/base/fields.h"
#include "transport/clock.h"

namespace baton::engine::shard {

// The version of all messages below: raise it with each change; ranks of two releases may meet.
inline constexpr int kCommandsVersion = 4;

// A worker of a prefill, as KvTransfer::At.
struct KvPlace {
  std::string agent, address;

  static void fields(auto& wire, auto& m) { wire(m.agent, m.address); }
};

// Calls of a KvSession.
enum class KvCallKind : uint8_t {
  kStartLoad = 1,  // start_load() of what is said, for this rank's heads
  kEndLoad,        // end_load() of `id`, again and again until that is true
  kOpen,           // open() the transfer's name, of so many tokens
  kRestart,        // of `id`, as the next three
  kHold,
  kDrop,
  kFail,  // fail() with `why`
};

struct KvCall {
  KvCallKind kind = KvCallKind::kEndLoad;
  uint64_t id = 0;                  // of the load or send
  kvtransfer::KvTransfer transfer;  // kStartLoad, all but its workers; kOpen: its name
  std::vector<KvPlace> workers;     // kStartLoad
  uint64_t tokens = 0;              // likewise
  uint32_t first_token = 0;         // kStartLoad, as those of KvLoad
  std::vector<uint32_t> blocks;     // which have the same numbers at all ranks
  Time timeout{}, silence{};
  bool push = false;
  absl::Status why;  // kFail

  static void fields(auto& wire, auto& m) {
    wire.kind(m.kind, KvCallKind::kFail);
    wire(m.id);
    if (m.kind == KvCallKind::kFail) wire(m.why);
    if (m.kind != KvCallKind::kStartLoad && m.kind != KvCallKind::kOpen) return;
    wire(m.transfer.transfer, m.tokens);
    if (m.kind == KvCallKind::kOpen) return;
    wire(m.transfer.agent, m.transfer.address, m.transfer.finished, m.transfer.ranks, m.workers,
         m.first_token, m.blocks, m.timeout, m.silence, m.push);
  }
};

enum class TierCallKind : uint8_t {
  kFind = 1,  // how many of `keys`, from the first on, are here
  kSave,      // keys[0] is what blocks[0] holds
  kLoad,      // TierStore::load()
  kEndLoad,   // end_load() of `id`, again and again until that is true
  kFlush,     // TierStore::flush(); for tests
};

// Each has a number of its own, but kEndLoad, which has that of the load.
struct TierCall {
  TierCallKind kind = TierCallKind::kFlush;
  uint64_t id = 0;
  std::vector<kvtransfer::tiers::TierKey> keys;  // kFind, kSave, kLoad
  std::vector<uint32_t> blocks;                  // kSave, kLoad: one for each key
  Time timeout{};                                // kLoad

  static void fields(auto& wire, auto& m) {
    wire.kind(m.kind, TierCallKind::kFlush);
    wire(m.id, m.keys, m.blocks, m.timeout);
    const bool pairs = m.kind == TierCallKind::kSave || m.kind == TierCallKind::kLoad;
    wire.require(m.blocks.size() == (pairs ? m.keys.size() : 0) && (!pairs || !m.keys.empty()));
  }
};

enum class CommandKind : uint8_t {
  kStop = 1,  // there will be no more
  kStep,      // make the calls, compute the chunks and send what they complete
  kSync,      // make the calls, then send a Report (Group::exchange())
};

// The model checks what is asked of it by itself.
struct Command {
  // As SequenceChunk in engine/model/model.h.
  struct Chunk {
    std::vector<int32_t> tokens;
    int32_t position = 0;
    std::vector<uint32_t> blocks;
    bool wants_logits = false;
    bool wants_all_logits = false;

    static void fields(auto& wire, auto& m) {
      wire(m.tokens, m.position, m.blocks, m.wants_logits, m.wants_all_logits);
    }
  };
  // The first `tokens` tokens of a send are computed by a chunk, in every layer.
  struct Send {
    uint64_t id = 0;
    uint64_t tokens = 0;
    uint32_t chunk = 0;

    static void fields(auto& wire, auto& m) { wire(m.id, m.tokens, m.chunk); }
  };

  CommandKind kind = CommandKind::kStop;
  std::vector<KvCall> calls;         // kStep, kSync: in this order
  std::vector<TierCall> tier_calls;  // kStep, kSync: in this order, before the step
  std::vector<Chunk> chunks;         // kStep
  std::vector<Send> sends;           // kStep

  static void fields(auto& wire, auto& m) {
    wire.kind(m.kind, CommandKind::kSync);
    if (m.kind == CommandKind::kStop) return;
    wire(m.calls, m.tier_calls);
    if (m.kind == CommandKind::kStep) wire(m.chunks, m.sends);
  }
};

enum class EventKind : uint8_t {
  kLoaded = 1,  // every layer is here
  kLoadFailed,  // it will never be, and why
  kLoadQuiet,   // after kEndLoad: no byte can arrive any more, and the number is forgotten
  kReleased,    // after kHold or kFail: nothing reads the blocks, and the number is forgotten
  // From KV tiers:
  kFound,     // to kFind: `found`
  kUnpinned,  // to kSave: the block is not read any more, saved or not
};

struct Event {
  EventKind kind = EventKind::kLoaded;
  uint64_t id = 0;
  absl::Status why{};
  kvtransfer::tiers::TierFound found{};

  static void fields(auto& wire, auto& m) {
    wire.kind(m.kind, EventKind::kUnpinned);
    wire(m.id);
    if (m.kind == EventKind::kLoadFailed) wire(m.why);
    if (m.kind != EventKind::kFound) return;
    wire(m.found.blocks);
  }
};

// What a rank has to say, in as many bytes at each. Zeros are a rank with nothing to say.
struct Report {
  static constexpr size_t kBytes = 3072;

  bool more = false;                   // there are other events: ask again
  kvtransfer::tiers::TierStats tiers;  // host_bytes, and what went wrong; the rest is zero
  std::vector<Event> kv_events;        // each is told once
  std::vector<Event> tier_events;      // likewise

  // Moves from `events` into a list of this report what finds room.
  void take(std::deque<Event>& events, std::vector<Event>& list) {
    std::string bytes;
    base::FieldWriter wire(bytes);
    contents(wire, *this);
    for (; !events.empty(); events.pop_front()) {
      wire(events.front());
      if (bytes.size() > kBytes) break;
      list.push_back(std::move(events.front()));
    }
    more |= !events.empty();
  }

  static void contents(auto& wire, auto& m) {
    wire(m.more, m.tiers.host_bytes, m.tiers.dropped, m.tiers.silences, m.tiers.missed,
         m.tiers.corrupt);
    wire(m.kv_events, m.tier_events);
  }
  static void fields(auto& wire, auto& m) {
    contents(wire, m);
    wire.fill(kBytes);
  }
};

}  // namespace baton::engine::shard

// Compiled once, in follower.cc, where fuzzers watch it.
namespace baton::base {
extern template absl::StatusOr<engine::shard::Command> read_fields<engine::shard::Command>(
    std::string_view, std::string_view);
extern template absl::StatusOr<engine::shard::Report> read_fields<engine::shard::Report>(
    std::string_view, std::string_view);
extern template void write_fields<engine::shard::Command>(const engine::shard::Command&,
                                                          std::string&);
extern template void write_fields<engine::shard::Report>(const engine::shard::Report&,
                                                         std::string&);
}  // namespace baton::base
