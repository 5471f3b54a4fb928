// Decode's end, which wants KV: asks prefill for the blocks of a prompt, reads them as they become
// ready, and hands them to the mover, which checks them. A load that does not come in time has
// failed, and the engine computes the prompt. sends.h lists the messages.
//
// A load is over when nothing of it moves any more: then its blocks are the engine's alone. One
// that prefill writes has heard prefill's last word by then, or prefill's agent is gone. One that
// asks
// (`hears`) stays known here until the engine has ended it, for that word brings a payload.
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
#include "absl/strings/string_view.h"
#include "kvtransfer/kv_connector.h"
#include "kvtransfer/session/core.h"
#include "kvtransfer/session/kv_mover.h"
#include "transport/clock.h"

namespace baton::kvtransfer::session {

class Loads {
 public:
  // `core` must outlive this object.
  explicit Loads(const Core& core) : core_(core) {}

  // --- the engine's thread: see KvSource and KvSession
  absl::Status start(KvOrder order);
  uint32_t layers_loaded(KvRequestId id);
  absl::Status status(KvRequestId id);
  bool end(KvRequestId id);
  bool is_exact(KvRequestId id);
  std::optional<KvLoaded> next_loaded();
  absl::Status renew(KvRequestId id, Time timeout);
  absl::StatusOr<std::string> payload(KvRequestId id);
  std::vector<uint32_t> failed_blocks(KvRequestId id);
  uint64_t bytes_loaded();
  uint64_t failed();
  std::string route();  // to the prefill that was asked last

  // --- the session's
  // Takes a message of prefill's, of so many bytes. May throw what nlohmann::json throws.
  void heard(const std::string& sender, const nlohmann::json& message, size_t bytes);
  // Moves everything on. True: anything is under way.
  bool step();
  // Ends open reads, where the agent outlives the session.
  void stop();
  // Call it when the agent is closed and nothing moves any more: open loads fail.
  void close();

 private:
  static constexpr Time kAsk = std::chrono::milliseconds(250);  // between questions, at least
  using Key = std::pair<std::string, std::string>;              // agent, transfer
  // What the engine sees of a load.
  struct View {
    uint32_t layers = 0;  // that are here, from the first
    absl::Status status;
    bool over = false;
    bool asked = false;     // a prefill, of which something may come
    bool unwanted = false;  // by the engine
    bool exact = false;
    Time took{}, reading{};
    uint64_t serial = 0;  // of the load: another one may have its number
    std::vector<uint32_t> missing;
    std::optional<std::string> payload;
    bool told = false;  // or there is none any more
  };
  // A prefill's agent, as long as it is one and the same.
  struct Peer {
    std::map<std::string, Time> fetched;  // from which address, and when
    bool told = false;                    // it has our metadata
    int64_t life = 0;                     // another one begins when it went
    Time heard{};
    bool there = false;  // as of the step `looked`
    uint64_t looked = 0;
    uint64_t full = 0;                        // the step in which it took no more messages
    bool silent = false;                      // a load has failed for that
    std::optional<nlohmann::json> said;       // of its cache, not understood yet
    std::shared_ptr<KvMover::Source> source;  // its cache, once its memory is known
    std::string refused;
  };
  // A prefill's agent, in a load.
  struct Asked {
    std::string agent;  // "": not known yet, the agent at the address
    std::string address;
    std::optional<KvShare> share;  // of the heads; none: by its name
    Time heard{}, looked{};        // looked: whether prefill is there
    std::optional<Time> asked;
    std::shared_ptr<Peer> met;                 // that was asked
    bool answered = true;                      // what was asked last
    std::shared_ptr<KvMover::Source> source;   // whose blocks are read
    std::vector<nlohmann::json> unknown;       // said to be ready before that, or to be written
    size_t unknown_bytes = 0;                  // of these messages and the next
    std::map<uint64_t, nlohmann::json> ahead;  // said to be ready, of which one before is to come
    uint64_t reading = 0, saying = 0;  // its numbers for this, as it answers and as it says ready
    uint64_t next = 0;                 // of what it says
    size_t wrote = 0, writes = 0;      // messages of writes, as heard, and as it says in the end
    bool called = false;               // for this load
    bool known = false;                // it has answered: it knows what is wanted
    bool told = false;                 // it has said its last word, or is gone
    bool said_done = false;            // to it
    Time confirmed{};                  // it keeps the blocks until then, at least
    Time often = kNever;               // it has to be asked, by the lease that it grants
  };
  struct Load {
    KvOrder order;
    uint64_t serial = 0;
    bool wanted = false;  // else prefill may have its blocks back
    bool hears = false;
    bool never = false;     // it was given up before it asked
    bool reported = false;  // to the engine: nothing of it moves any more
    Time started{};
    Time reading_since{}, reading{};
    std::vector<Asked> sources;
    std::unique_ptr<KvMover::Incoming> incoming;  // of a load that is wanted
    std::vector<KvMover::Posted> reads;
    absl::Status why;  // it has failed
  };

  void begin(KvOrder order, uint64_t serial, Time now);
  void advance(std::list<Load>::iterator next, Time now,
               const std::map<KvRequestId, Time>& renewals);
  absl::Status set_up(Load& load);
  absl::Status add_sources(Load& load);
  View* view_of(const Load& load);  // null: the engine has ended it
  void fail(Load& load, const absl::Status& why);
  void note_layers(Load& load, uint32_t before);
  nlohmann::json want_of(const Load& load, const Asked& asked, const Peer& peer, Time now) const;
  void answered(Load& load, Asked& asked, const nlohmann::json& message, Time now);
  absl::Status take(Load& load, size_t number, const nlohmann::json& said);
  void learn(Asked& asked, Peer& peer, Time now);
  // Asks who is at a source's address, or says what came of asking before: OK is no more than that
  // nothing has failed yet.
  absl::Status fetch(const Asked& asked, Peer& peer, Time now);
  void move(Load& load, Time now);
  absl::Status move(Load& load, size_t number, Time now);
  int64_t life_at(Time now) const;
  absl::Status look(Load& load, Asked& asked, Time now);
  static absl::Status not_reached(const Asked& asked, const absl::Status& why);
  bool find_name(Load& load, Asked& asked);
  bool may_ask(const Load& load);
  void ask(const Load& load, Asked& asked, Peer& peer, Time now);
  void follow_reads(Load& load, Time now);
  void let_go(Load& load, Time now);
  bool is_there(const std::string& agent, Peer& peer);
  void forget_who_went();
  absl::Status say(Peer& peer, const std::string& agent, const nlohmann::json& message);
  bool say_done(const Key& whom, const nlohmann::json& done);
  void decline(const Load& load, Time now);
  bool end_if_over(Load& load, Time now);
  void report(const Load& load, const absl::Status& status);

  const Core& core_;
  std::mutex mutex_;
  bool closed_ = false;
  std::deque<std::pair<KvOrder, uint64_t>> orders_;  // with their serials
  std::map<KvRequestId, Time> renewals_;
  absl::flat_hash_map<KvRequestId, View> views_;
  uint64_t bytes_loaded_ = 0;
  uint64_t failed_ = 0;
  uint64_t next_serial_ = 1;
  std::string last_;  // the agent that was asked last
  // The session's alone:
  std::list<Load> loads_;  // the oldest first
  std::map<Key, Load*> by_key_;
  std::vector<std::pair<Key, nlohmann::json>> unsaid_;  // who is told that nothing is read any more
  std::map<std::string, std::shared_ptr<Peer>> peers_;
  uint64_t steps_ = 0;
  std::optional<Time> stepped_;
};

}  // namespace baton::kvtransfer::session
