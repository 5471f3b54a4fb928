// What rank 0's connector has those of the other ranks do, and what they say of it, as bytes.
//
// A load and a job have the number that rank 0's connector knows them by. A rank's half of a load
// or job moves without rank 0; each time rank 0 asks, the others report what has changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvtransfer/kv_connector.h"
#include "transport/base/wire.h"

namespace baton::engine::shard {

enum class KvCallKind : uint8_t {
  kStartLoad = 1,  // KvConnector::start_load() with `load`
  kEndLoad,        // end_load() of `id`, again and again until that is true
  kOpenJob,        // job `id` is the one with the binding's key: take it, or bind() it
  kRenewJob,       // renew_job() with the binding's lease
  kSave,           // save_layer() of the blocks, for `layers` layers
  kFinishJob,      // finish_job() with `outcome`
};

struct KvCall {
  KvCallKind kind = KvCallKind::kEndLoad;
  uint64_t id = 0;                // of the load or job
  kvtransfer::KvLoad load;        // kStartLoad: another rank's blocks have the same numbers
  kvtransfer::KvBinding binding;  // kOpenJob: key, tokens and loads; kRenewJob: lease
  uint32_t first_layer = 0;       // kSave
  uint32_t layers = 0;
  uint32_t first_block = 0;
  std::vector<uint32_t> blocks;
  absl::Status outcome;  // kFinishJob

  void encode(std::string& out) const;  // appends
  // A reader that has failed afterwards has read no call.
  static KvCall decode(base::WireReader& reader);
};

enum class KvEventKind : uint8_t {
  kLoaded = 1,  // every layer is here
  kLoadFailed,  // it will never be, and why
  kLoadQuiet,   // after kEndLoad: no byte can arrive any more, and the number is forgotten
  kUnwanted,    // the job's loads were given up, or it cannot be sent, and why
  kSaved,       // after kFinishJob: nothing of it moves any more, and the number is forgotten
};

struct KvEvent {
  KvEventKind kind = KvEventKind::kLoaded;
  uint64_t id = 0;
  absl::Status why;
  bool operator==(const KvEvent&) const = default;
};

// What one rank says of these, each time in equally many bytes.
struct KvReport {
  static constexpr size_t kBytes = 2048;

  kvtransfer::KvConnectorStats stats;  // all but the route
  std::vector<KvEvent> events;         // each is told once
  bool more = false;                   // there are others: ask again

  // Takes from `events` what finds room.
  static std::string encode(const kvtransfer::KvConnectorStats& stats, std::deque<KvEvent>& events);
  // Internal: bytes that no rank of this version sends.
  static absl::StatusOr<KvReport> decode(std::string_view bytes);
};

}  // namespace baton::engine::shard
