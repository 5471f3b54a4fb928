// The end that wants KV: asks prefill for the blocks of a prompt, reads them in prefill's layout as
// they become ready, checks them, and converts them into the engine's cache. What does not come in
// time has failed, and the engine computes it. The messages are those of sends.h.
//
// A load is over when nothing of it moves any more and nothing is converted: then its blocks are
// the engine's alone.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/handoff/core.h"
#include "kvtransfer/kv_connector.h"
#include "transport/clock.h"

namespace baton::engine::handoff {

class Loads {
 public:
  // `core` must outlive this object.
  explicit Loads(const Core& core) : core_(core) {}

  // --- the engine's thread: see KvSource and HandOff
  // InvalidArgument: an order that makes no sense. AlreadyExists: this load is under way. What two
  // loads want at a time, the second does not get.
  absl::Status start(kvtransfer::KvLoad load);
  uint32_t layers_loaded(kvtransfer::KvRequestId id);
  absl::Status status(kvtransfer::KvRequestId id);
  bool end(kvtransfer::KvRequestId id);
  bool is_exact(kvtransfer::KvRequestId id);
  void decline(const kvtransfer::KvTransfer& from);

  // --- the service's
  // A layout, ready, alive or gone of `sender`'s. May throw what nlohmann::json throws.
  void heard(const std::string& sender, const nlohmann::json& message);
  // Moves everything on. Whether anything is under way.
  bool step();
  // When the agent is closed and nothing moves any more: what was under way has failed.
  void close();

 private:
  using Key = std::pair<std::string, std::string>;  // agent, transfer
  struct Order {
    kvtransfer::KvTransfer from;
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
  // A prefill's agent, as long as it is one and the same.
  struct Peer {
    std::map<std::string, Time> fetched;  // from which address, and when
    bool told = false;                    // it has our metadata
    Time heard{};
    bool there = false;  // as of the step `looked`
    uint64_t looked = 0;
    uint64_t full = 0;                   // the step in which it took no more messages
    std::optional<nlohmann::json> said;  // of its cache, not understood yet
    std::optional<ForeignLayout> layout;
    kvtransfer::AgentListId blocks;
    std::vector<uint64_t> starts;  // of its rows in that list
    std::vector<uint64_t> counts;
    bool exact = false;
    std::string refused;
  };
  struct Load {
    kvtransfer::KvTransfer from;
    std::string agent;  // the name of prefill's
    std::optional<kvtransfer::KvLoad> wanted;
    Time started{}, heard{}, looked{};  // looked: whether prefill is there
    std::optional<Time> asked;
    bool answered = true;                      // what was asked last
    std::shared_ptr<const Peer> peer;          // whose blocks are read, once its layout is known
    std::vector<nlohmann::json> unknown;       // said to be ready before that
    size_t unknown_blocks = 0;                 // in these, and their parts
    std::vector<Part> waiting;                 // ready, not yet read
    std::vector<std::vector<bool>> asked_for;  // of each row, of each block: in the two below
    std::vector<size_t> missing;               // of each layer of the model
    std::vector<Read> reads;
    absl::Status why;  // it has failed
  };

  // loads.cc
  absl::Status check(const kvtransfer::KvLoad& load) const;
  void begin(Order order, Time now);
  void learn(const Load& load, std::shared_ptr<Peer>& peer, Time now);
  absl::StatusOr<std::shared_ptr<Peer>> understand(
      const nlohmann::json& message, std::vector<kvtransfer::StridedDescriptor>& rows) const;
  // Asks who is at the load's address, or says what came of asking before: OK is no more than that
  // nothing has failed yet.
  absl::Status fetch(const Load& load, Peer& peer, Time now);
  void move(Load& load);
  void look(Load& load, Time now);
  void ask(Load& load, Peer& peer, Time now);
  bool is_there(const std::string& agent, Peer& peer);
  void forget_who_went();
  bool say_done(const Key& whom);
  bool end_if_over(Load& load);
  void report(kvtransfer::KvRequestId id, const absl::Status& status);
  bool complete(const Load& load) const;
  // load_blocks.cc
  void begin_parts(Load& load, std::shared_ptr<const Peer> peer);
  absl::Status take_ready(Load& load, const nlohmann::json& parts);
  absl::Status read(Load& load);
  void follow_reads(Load& load);
  absl::Status take(Load& load, const Part& part);
  void release(const Read& read);

  const Core& core_;
  std::mutex mutex_;
  bool closed_ = false;
  std::deque<Order> orders_;
  absl::flat_hash_map<kvtransfer::KvRequestId, View> views_;
  // The service's alone:
  std::list<Load> loads_;  // the oldest first
  std::map<Key, Load*> by_key_;
  std::vector<Key> unsaid_;  // whom to tell that all of which transfer is read
  std::map<std::string, std::shared_ptr<Peer>> peers_;
  uint64_t steps_ = 0;
  std::optional<Time> stepped_;
  std::map<size_t, kvtransfer::AgentListId> local_;  // by bytes of a piece
};

}  // namespace baton::engine::handoff
