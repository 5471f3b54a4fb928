// The decode side of loads that pull: reads out of the blocks that prefill has offered.
//
// Prefill holds its blocks until decode says that it reads no more, or until the lease is over. So
// a read counts only if it ended before the end of a lease that prefill has confirmed: counted from
// when decode *asked* for it, which was before prefill began to count. Reads that ended later wait
// for the next confirmation: a lease is only renewed while the blocks are still held.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "kvtransfer/internal/connector/kv_jobs.h"
#include "kvtransfer/internal/connector/kv_mailbox.h"
#include "kvtransfer/internal/connector/kv_messages.h"
#include "kvtransfer/internal/connector/kv_route.h"
#include "kvtransfer/internal/connector/kv_sends.h"
#include "transport/timeline.h"
#include "transport/worker.h"

namespace baton::kvtransfer {

// What a load reads from one prefill worker.
struct KvPull : KvFlow {
  struct Read {
    KvMove move;
    uint32_t layer = 0;  // prefill's number
    Time end{};
  };
  static constexpr size_t kMaxAsked = 64;

  uint64_t number = 0;  // of the load, for this peer
  KvShare share;
  std::shared_ptr<const KvLoadRequest>
      request;                               // of the load: its share is not that of each source
  std::vector<uint64_t>* arrived = nullptr;  // the load's: bytes of each of decode's layers

  bool offered = false;
  std::vector<KvRemoteBuffer> buffers;  // prefill's
  std::vector<KvReady> early;           // that overtook the offer
  size_t early_blocks = 0;
  std::vector<Read> unconfirmed;  // ended after the lease that is known of
  absl::Status failure;           // of a read: nothing more can be had from here

  Time confirmed{};  // the blocks are held until then, if not for longer
  Time lease{};      // as granted, as far as is known
  Time renew_at = kNever;
  uint64_t renewals = 0;
  std::deque<std::pair<uint64_t, Time>> asked;  // renewals not confirmed, and when each was asked

  bool stopped = false;  // no read begins any more
  bool told = false;     // prefill knows that none is open and none begins; or it is gone

  bool complete() const { return offered && route.landed == route.bytes; }
  bool quiet() const { return open.empty() && (stopped || complete()); }
};

// All calls from one thread.
class KvPulls : private KvSends::Owner {
 public:
  // `timeline` may be null.
  KvPulls(Worker& worker, KvMailbox& mailbox, Timeline* timeline)
      : worker_(worker), mailbox_(mailbox), timeline_(timeline), sends_(worker, Op::kRead, *this) {}

  void set_cache(const KvCacheMemory* cache) { cache_ = cache; }

  // The request is about to be sent.
  void begin(KvPull& pull);
  // From prefill. An error says why nothing can be had from it.
  absl::Status on_offer(KvPull& pull, std::string_view body);
  absl::Status on_ready(KvPull& pull, std::string_view body);
  absl::Status on_lease_renewed(KvPull& pull, std::string_view body);
  void on_peer_down(PeerId peer);

  // Ends its reads; prefill is told when the last has ended. It stays until quiet() is true.
  void stop(KvPull& pull);
  // Prefill hears that all is read, or that the reads have ended. Nothing, if it is too early.
  void settle(KvPull& pull);
  // Renews the lease if it is time to.
  bool renew(KvPull& pull, Time now);

  // Hears of ended reads, begins those that waited for a slot. True if anything happened.
  bool progress() { return sends_.progress(); }
  // Loads with a failed read since the last call, by peer and number.
  std::vector<std::pair<PeerId, uint64_t>> take_failed() { return std::exchange(failed_, {}); }
  size_t open_reads() const { return sends_.open(); }

 private:
  absl::Status read(KvPull& pull, const KvReady& ready);
  void fill(const KvSend& send, TransferRequest& request) override;
  void on_refused(KvFlow& flow, const absl::Status& why) override;
  void on_ended(const KvSend& send) override;
  void count(KvPull& pull, const KvPull::Read& read);
  void confirm(KvPull& pull, Time asked, Time lease);

  Worker& worker_;
  KvMailbox& mailbox_;
  Timeline* const timeline_;
  const KvCacheMemory* cache_ = nullptr;
  KvSends sends_;
  absl::flat_hash_map<uint64_t, KvAgreement> agreements_;  // by peer_key()
  std::vector<std::pair<PeerId, uint64_t>> failed_;
  KvOffer offer_;  // scratch, as is ready_
  KvReady ready_;
};

}  // namespace baton::kvtransfer
