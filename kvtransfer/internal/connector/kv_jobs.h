// The prefill side: the loads that decode workers asked for, and the blocks sent for them.
//
// A job is what the engine computes: one sequence. It has a *push* for each load that wants it:
// one, or several with the same key. A job lives until the engine has finished it, nothing of it
// moves any more and no load of it is still to come. One message ends a push for decode - done,
// failed or cancelled - and is sent only when no transfer of it is open: when decode has it, its
// blocks are quiet.
//
// Where decode pulls, nothing is written: the blocks are offered and said to be ready
// (kv_offers.cc). They are held until decode has said that it reads no more, or its lease is over,
// whichever way the push ended: a dead reader's adapter may be reading until then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvtransfer/internal/connector/kv_mailbox.h"
#include "kvtransfer/internal/connector/kv_messages.h"
#include "kvtransfer/internal/connector/kv_route.h"
#include "kvtransfer/internal/connector/kv_sends.h"
#include "kvtransfer/internal/connector/kv_waiting.h"
#include "kvtransfer/kv_connector.h"
#include "kvtransfer/kv_layout.h"
#include "transport/timeline.h"
#include "transport/worker.h"

namespace baton::kvtransfer {

// Where this worker's cache lies.
struct KvCacheMemory {
  struct Buffer {
    MemoryRegion region;
    KvRemoteBuffer remote;  // the same, for peers
    KvLocalBuffer local() const { return {region, remote.offset}; }
  };
  KvLayout layout;
  std::vector<Buffer> buffers;       // of the layout
  std::vector<KvLayerPlace> layers;  // of it
};

struct KvSendJob;

// A job's way to one load.
struct KvPush : KvFlow {
  KvSendJob* job = nullptr;
  uint64_t load = 0;  // the peer's number
  KvLoadRequest request;
  Time deadline = kNever;
  bool wanted = true;
  bool told = false;       // decode knows how it ended
  bool cancelled = false;  // by decode
  absl::Status why;        // it is not wanted, unless cancelled
  // For a job that decode pulls.
  Time lease{};  // granted
  Time hold_until = kNever;
  bool released = false;  // decode reads no more, or its lease is over

  bool held() const { return request.pull && !released && route.saved > 0; }
  bool leased() const { return held() || (request.pull && !released && !told); }
  bool over() const { return told && open.empty() && !held(); }
};

struct KvSendJob {
  uint64_t number = 0;
  std::string key;
  uint64_t tokens = 0;  // of the sequence
  std::vector<std::unique_ptr<KvPush>> pushes;
  uint32_t loads_to_come = 0;
  Time lease = kNever;  // until when they may come
  // With a key, for loads that are still to come: our pages, by layer and block, or
  // KvRoute::kNotSaved.
  std::vector<std::vector<uint32_t>> pages;
  std::string payload;
  bool taken = false;     // by next_job(), or bound by the engine
  bool finished = false;  // by finish_job()
  absl::Status outcome;
};

class KvJobs : private KvSends::Owner {
 public:
  static constexpr size_t kMaxJobs = 4096;

  struct Options {
    bool serialized = false;  // blocks are sent only when the job is finished
    bool allow_pull = false;
    Time max_lease = kNever;  // granted to a load that pulls
  };
  // `timeline` may be null.
  KvJobs(Worker& worker, KvMailbox& mailbox, Timeline* timeline, const Options& options)
      : worker_(worker),
        mailbox_(mailbox),
        timeline_(timeline),
        options_(options),
        sends_(worker, Op::kWrite, *this) {}

  void set_cache(const KvCacheMemory* cache) { cache_ = cache; }

  // From peers.
  void on_request(PeerId peer, uint64_t load, std::string_view body, uint16_t version);
  // What was to be a request cannot be read.
  void on_bad_request(PeerId peer, uint64_t load, const absl::Status& why);
  void on_cancel(PeerId peer, uint64_t load);
  void on_renew(PeerId peer, uint64_t load, std::string_view body);
  void on_pulled(PeerId peer, uint64_t load);
  void on_renew_lease(PeerId peer, uint64_t load, std::string_view body);
  void on_peer_down(PeerId peer, const absl::Status& why);

  // From the engine, as KvConnector says.
  std::optional<KvJob> next_job();
  absl::StatusOr<uint64_t> bind(const KvBinding& binding);
  absl::Status renew_job(uint64_t job, Time lease);
  absl::Status give_payload(uint64_t job, std::string payload);
  bool is_wanted(uint64_t job) const;
  absl::Status save_layer(uint64_t job, uint32_t layer, uint32_t first_block,
                          absl::Span<const uint32_t> blocks);
  void finish_job(uint64_t job, const absl::Status& outcome);
  bool is_saved(uint64_t job);

  // Hears of ended transfers, retries, looks at deadlines. True if anything happened.
  bool progress();
  // Frees what was held under leases that are over. To be called when all messages that have come
  // were taken: they may renew them.
  bool end_leases();
  Time next_deadline() const;  // kNever: none
  // Disconnects every peer with open transfers, so that they end.
  void abandon();
  size_t open_transfers() const { return sends_.open(); }

  uint64_t bytes_sent() const { return bytes_sent_; }
  uint64_t jobs_failed() const { return jobs_failed_; }
  // How often a round has looked at a load, for tests of what one costs.
  uint64_t looked_at() const { return looked_at_; }

 private:
  struct PeerRecord {
    KvSeenLoads seen;
    KvAgreement agreement;
    bool misfit_logged = false;  // that there can be none
  };
  using Key = std::pair<uint64_t, uint64_t>;  // peer_key(), load
  static Key key_of(const KvPush& push) { return {peer_key(push.peer), push.load}; }

  absl::Status accept(PeerId peer, uint64_t load, PeerRecord& state);
  absl::StatusOr<std::shared_ptr<const KvPlan>> plan_for(PeerRecord& state,
                                                         const KvLoadRequest& request);
  absl::StatusOr<KvSendJob*> job_for(const KvLoadRequest& request);
  KvSendJob& open_job(const std::string& key, uint64_t tokens);
  KvSendJob* find(uint64_t job) const;
  KvPush* find(PeerId peer, uint64_t load) const;
  absl::Status check_blocks(const KvSendJob& job, uint32_t layer, uint32_t first_block,
                            absl::Span<const uint32_t> blocks) const;
  void save(KvPush& push, uint32_t layer, uint64_t first_block, absl::Span<const uint32_t> blocks);
  void catch_up(KvPush& push);  // with what its job saved before it came
  void finish(KvPush& push);
  bool may_still_come(const KvSendJob& job) const;

  absl::Status prepare_offer(const KvLoadRequest& request);  // into offer_ and offer_body_
  void announce(const KvPush& push, uint32_t layer, KvBlockRange blocks);
  void send_blocks(KvPush& push, uint32_t layer, KvBlockRange blocks);
  void fill(const KvSend& send, TransferRequest& request) override;
  void on_refused(KvFlow& flow, const absl::Status& why) override;
  void on_ended(const KvSend& send) override;
  void fail(KvPush& push, const absl::Status& why);
  void stop(KvPush& push);
  void settle(KvPush& push);
  void forget(KvSendJob& job);

  Worker& worker_;
  KvMailbox& mailbox_;
  Timeline* const timeline_;
  const Options options_;
  const KvCacheMemory* cache_ = nullptr;
  KvSends sends_;
  uint64_t next_number_ = 1;
  absl::flat_hash_map<uint64_t, std::unique_ptr<KvSendJob>> jobs_;
  absl::flat_hash_map<std::string, KvSendJob*> by_key_;
  absl::flat_hash_map<Key, KvPush*> by_load_;
  KvDue<Key> deadlines_;                             // of pushes
  KvDue<Key> holds_;                                 // likewise: the ends of leases that decode has
  KvDue<uint64_t> openings_;                         // of jobs: until when their loads may come
  absl::flat_hash_map<uint64_t, PeerRecord> peers_;  // by peer_key()
  std::deque<uint64_t> fresh_;                       // not taken yet
  std::vector<std::unique_ptr<KvPush>> spare_;       // their vectors keep their memory
  KvLoadRequest incoming_;                           // scratch, as are offer_ and offer_body_
  KvOffer offer_;
  std::string offer_body_;
  uint64_t bytes_sent_ = 0;
  uint64_t jobs_failed_ = 0;
  uint64_t looked_at_ = 0;
};

}  // namespace baton::kvtransfer
