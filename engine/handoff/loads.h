// The end that wants KV: asks prefill for the blocks of a prompt, reads them in prefill's layout as
// they become ready, checks them, and converts them into the engine's cache. What does not come in
// time has failed, and the engine computes it. The messages are those of sends.h.
//
// A load is over when nothing of it moves any more and nothing is converted: then its blocks are
// the engine's alone.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "engine/handoff/core.h"
#include "engine/serve/requests/request.h"
#include "kvtransfer/kv_connector.h"
#include "transport/clock.h"

namespace baton::engine::handoff {

class Loads {
 public:
  // `core` must outlive this object.
  explicit Loads(const Core& core) : core_(core) {}

  // --- the engine's thread: see KvSource and HandOff
  absl::Status start(const serve::RemotePrefill& from, kvtransfer::KvLoad load);
  uint32_t layers_loaded(kvtransfer::KvRequestId id);
  absl::Status status(kvtransfer::KvRequestId id);
  bool end(kvtransfer::KvRequestId id);
  bool is_exact(kvtransfer::KvRequestId id);
  void decline(const serve::RemotePrefill& from);

  // --- the service's
  // A layout, ready, alive or gone of `sender`'s. May throw what nlohmann::json throws.
  void heard(const std::string& sender, const nlohmann::json& message);
  // Moves everything on. Whether anything is under way.
  bool step();

 private:
  struct Order {
    serve::RemotePrefill from;
    std::optional<kvtransfer::KvLoad> load;  // none: nothing is wanted
  };
  // What the engine sees of a load.
  struct View {
    uint32_t layers = 0;  // that are here, from the first
    absl::Status status;
    bool over = false;
    bool unwanted = false;  // by the engine
    bool exact = false;
  };
  struct Part {
    size_t row = 0;
    size_t number = 0;   // of the block in the sequence
    uint32_t block = 0;  // prefill's
    uint32_t checksum = 0;
    uint32_t piece = 0;  // of the staging memory
  };
  struct Read {
    kvtransfer::AgentTransferId transfer;
    size_t piece_bytes = 0;
    std::vector<Part> parts;
  };
  // A prefill's agent, from when it is found until it goes.
  struct Peer {
    std::optional<Time> fetched;
    bool told = false;  // it has our metadata
    std::optional<ForeignLayout> layout;
    kvtransfer::AgentListId blocks;
    std::vector<uint64_t> starts;  // of its rows in that list
    std::vector<uint64_t> counts;
    bool exact = false;
    std::string refused;
  };
  struct Load {
    serve::RemotePrefill from;
    std::string agent;  // the name of prefill's
    std::optional<kvtransfer::KvLoad> wanted;
    Time started{}, heard{};
    std::optional<Time> asked;
    std::shared_ptr<const Peer> peer;          // whose blocks are read, once its layout is known
    std::vector<nlohmann::json> unknown;       // said to be ready before that
    std::vector<Part> waiting;                 // ready, not yet read
    std::vector<std::vector<bool>> asked_for;  // of each row, of each block: in the two below
    std::vector<size_t> missing;               // of each layer of the model
    std::vector<Read> reads;
    absl::Status why;  // it has failed
  };

  absl::Status learn(const std::string& sender, Peer& peer, const nlohmann::json& message);
  void move(Load& load);
  void ask(Load& load, Time now);
  void tell(const Load& load, nlohmann::json message);
  void begin_parts(Load& load, std::shared_ptr<const Peer> peer);
  absl::Status take_ready(Load& load, const nlohmann::json& parts);
  absl::Status read(Load& load);
  void follow_reads(Load& load);
  absl::Status take(Load& load, const Part& part);
  void release(const Read& read);
  bool end_if_over(Load& load);
  bool complete(const Load& load) const;

  const Core& core_;
  std::mutex mutex_;
  std::deque<Order> orders_;
  absl::flat_hash_map<kvtransfer::KvRequestId, View> views_;
  // The service's alone:
  std::vector<Load> loads_;
  std::map<std::string, std::shared_ptr<Peer>> peers_;
  std::map<size_t, kvtransfer::AgentListId> local_;  // by bytes of a piece
};

}  // namespace baton::engine::handoff
