// The decode side: loads under way, the counters that tell which layers are here, and the
// quarantine of their blocks.
//
// A load is quiet when no byte of it can arrive any more: prefill has said so (done, failed or
// cancelled), or it is gone. Full counters alone are not enough: after a rail has failed, a slice
// may be on its way a second time although its first copy was counted.
//
// Decode only listens while a load is under way, and a listener does not notice that a machine fell
// silent. So it sends a small probe now and then: the transport fails on that, and the peer is
// down. A process that is stopped still takes what comes, for a while; so probes are answered, and
// who neither answers nor sends anything for as long as its loads allow has failed them
// (kv_silence.cc).
//
// A load that pulls reads instead (kv_pulls.h): it is quiet when its own reads have ended.
//
// Many loads may be open. A round looks at those that something happened to or whose time has come;
// how many layers of a load are here is counted when a caller asks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvtransfer/internal/connector/kv_calls.h"
#include "kvtransfer/internal/connector/kv_jobs.h"
#include "kvtransfer/internal/connector/kv_mailbox.h"
#include "kvtransfer/internal/connector/kv_messages.h"
#include "kvtransfer/internal/connector/kv_pulls.h"
#include "kvtransfer/internal/connector/kv_waiting.h"
#include "kvtransfer/kv_connector.h"
#include "transport/timeline.h"
#include "transport/worker.h"

namespace baton::kvtransfer {

class KvLoads {
 public:
  static constexpr Time kProbeInterval = std::chrono::milliseconds(500);

  // `name` is this worker's, told to prefill workers. `timeline` may be null.
  KvLoads(Worker& worker, KvMailbox& mailbox, Timeline* timeline, std::string name)
      : worker_(worker),
        mailbox_(mailbox),
        timeline_(timeline),
        name_(std::move(name)),
        calls_(worker),
        pulls_(worker, mailbox, timeline) {}

  void set_cache(const KvCacheMemory* cache) {
    cache_ = cache;
    pulls_.set_cache(cache);
  }

  // From the engine, as KvConnector says.
  absl::Status start(KvLoad load);
  uint32_t layers_loaded(KvRequestId id);
  absl::Status status(KvRequestId id);
  bool end(KvRequestId id);

  absl::Status renew(KvRequestId id, Time timeout);
  absl::StatusOr<std::string> payload(KvRequestId id);
  std::vector<uint32_t> failed_blocks(KvRequestId id);

  // From peers.
  void on_done(PeerId peer, uint64_t number, std::string_view body);
  void on_failed(PeerId peer, uint64_t number, std::string_view body);
  void on_cancelled(PeerId peer, uint64_t number);
  void on_offer(PeerId peer, uint64_t number, std::string_view body);
  void on_ready(PeerId peer, uint64_t number, std::string_view body);
  void on_lease_renewed(PeerId peer, uint64_t number, std::string_view body);
  // It has said something; `alive`: that it is.
  void on_word(PeerId peer, bool alive);
  // An answer about a load that cannot be read.
  void on_bad_answer(PeerId peer, uint64_t number, const absl::Status& why);
  void on_peer_down(PeerId peer, const absl::Status& why);

  // Looks at reads that ended and deadlines that passed; true if anything happened.
  bool progress();
  Time next_deadline() const;  // kNever: none
  // Disconnects every peer with open reads, so that they end; waits for names that are looked up.
  void abandon();
  size_t open_transfers() const { return pulls_.open_reads(); }

  // The peer of the newest load; generation 0: none yet.
  PeerId last_peer() const { return last_peer_; }
  uint64_t bytes_loaded() const { return bytes_loaded_; }
  uint64_t loads_failed() const { return loads_failed_; }
  // How often progress() has looked at a load, for tests of what a round costs.
  uint64_t looked_at() const { return looked_at_; }

 private:
  // One of the workers that a load comes from.
  struct Source {
    PeerId peer;          // generation 0: its name is being looked up
    uint64_t number = 0;  // of the load, for this peer
    std::string address, name;
    std::string request;  // not sent yet
    uint16_t version = 0;
    bool told = false;  // it has said its last word, or is gone: what it writes moves no more
    bool done = false;  // that word was: all that it owes is sent, or ready
    bool cancel_sent = false;
    std::string arrived;  // a bit for each block, where it failed
    std::unique_ptr<KvPull> pull;
    bool quiet() const { return pull != nullptr ? pull->quiet() : told; }
    // Neither has anything to tell the other any more.
    bool over() const { return told && (pull == nullptr || pull->told); }
  };
  struct Load {
    KvRequestId id = 0;
    std::vector<Source> sources;
    std::vector<uint32_t> blocks;
    std::vector<size_t> group_ends;  // where those of each group end
    std::string payload;
    std::vector<CounterId> counters;  // of each layer, where prefill writes
    std::vector<uint64_t> arrived;    // bytes of each layer, where they are read
    std::shared_ptr<KvLoadRequest> request;
    uint32_t loaded = 0;           // layers, from 0
    std::vector<uint64_t> counts;  // of each layer's counter when all of it is here
    std::vector<uint64_t> bytes;   // of each layer: less, where rows are counted for each token
    Time timeout{};
    Time deadline = kNever;
    bool renewed = false;
    Time silence{};      // that its sources may keep; 0: any
    uint64_t count = 0;  // of all layers that are not here, when a call last looked
    absl::Status failure;
    bool quiet() const {
      return std::all_of(sources.begin(), sources.end(), [](const Source& s) { return s.quiet(); });
    }
    bool complete() const { return loaded == counts.size(); }
  };
  struct PeerRecord {
    uint64_t last_number = 0;
    absl::flat_hash_map<uint64_t, Load*> loads;  // that are open, by their numbers
    Time probe_at = kNever;                      // kNever: no load of it is under way
    // For loads that have a limit:
    Time silence = kNever;  // the shortest; kNever: there was none yet
    Time looked{};
    Time silent{};         // how long nothing has come, of the time in which a call looked
    bool answers = false;  // probes: it is no older release
    bool is_silent() const { return silent >= silence; }
  };

  // Its blocks are the load's alone until end(). InvalidArgument: they are another's, or its own
  // already.
  absl::Status claim(Load& load);
  void unclaim(const Load& load, size_t blocks);
  absl::Status allocate_counters(std::vector<CounterId>& counters);
  void free_counters(const std::vector<CounterId>& counters);
  bool probe(Time now);
  // Before a load is started: an error where the peer is known to be silent.
  absl::Status check_silence(PeerId peer, const std::string& name, Time silence);
  bool note_silence(Time now);
  void note_bytes(const PeerRecord& peer);
  uint64_t bytes_here(const Load& load, uint32_t layer) const;
  Load* find(KvRequestId id);
  // The load that a message is about, and its source; null: there is none.
  Load* find(PeerId peer, uint64_t number, Source** source);
  absl::Status add_source(Load& load, const std::string& address);
  void ask(Load& load, Source& source);
  bool ask_whose_names_are_known();
  // Whose name is still being looked up was asked nothing, and has nothing to say.
  void give_up_calls(Load& load);
  bool look(Load& load, Time now);
  void schedule(const Load& load);
  bool refresh(Load& load);
  void fail(Load& load, const std::string& source, const absl::Status& why);
  static absl::Status lost(const absl::Status& why);  // the connection is
  void stop_pulls(Load& load);

  Worker& worker_;
  KvMailbox& mailbox_;
  Timeline* const timeline_;
  const std::string name_;
  const KvCacheMemory* cache_ = nullptr;
  KvCalls calls_;
  KvPulls pulls_;
  absl::flat_hash_map<KvRequestId, std::unique_ptr<Load>> loads_;
  std::vector<std::vector<bool>> claimed_;           // blocks of each group
  KvDue<KvRequestId> due_;                           // deadlines, and leases to renew
  absl::flat_hash_map<uint64_t, PeerRecord> peers_;  // by peer_key()
  absl::flat_hash_map<std::string, std::vector<KvRequestId>> by_address_;  // that is looked up
  KvLoadRequest request_;                                                  // scratch
  PeerId last_peer_;
  uint64_t bytes_loaded_ = 0;
  uint64_t loads_failed_ = 0;
  uint64_t looked_at_ = 0;
};

}  // namespace baton::kvtransfer
