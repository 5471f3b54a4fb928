// The KV session of a model's ranks, at rank 0: one session to the engine, and each call of it is
// one at every rank. A whole model has one rank, whose session this is.
//
// Each rank moves the KV of its own heads, to and from ranks of the other server, whatever number
// of those there is. A load is here when it is here at every rank, and has failed when it has at
// one; blocks are free again when they are at every rank. The other ranks hear of calls with the
// next step, or when this is asked what there is: they are asked in turn, at most every half a
// millisecond, while a load or send is under way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "engine/shard/leader.h"
#include "engine/shard/loads.h"
#include "kvtransfer/kv_session.h"
#include "transport/clock.h"

namespace baton::engine::shard {

// When the group fails, loads fail with it, and what is under way counts as ended at other ranks:
// nothing reads their memory any more.
class KvRanks final : public kvtransfer::KvSource, private Leader::Part {
 public:
  // `own` is this rank's. Both outlive it; `leader`: null where there is one rank.
  KvRanks(kvtransfer::KvSession& own, Leader* leader, uint32_t layers);
  ~KvRanks() override;

  // Where all ranks can be asked (kv_address.h). InvalidArgument: a rank has no session.
  absl::StatusOr<std::string> address() const;

  // --- prefill: the calls of KvSession
  uint64_t open(absl::string_view transfer, size_t tokens);
  // In a step: what Leader::begin_step() has told the others that it completes.
  void computed(uint64_t send, uint32_t layer, size_t tokens, absl::Span<const uint32_t> blocks) {
    own_.computed(send, layer, tokens, blocks);
  }
  void restart(uint64_t send);
  void hold(uint64_t send);
  void drop(uint64_t send);
  void fail(uint64_t send, const absl::Status& why);
  std::vector<uint64_t> released();
  std::optional<kvtransfer::KvAsked> next_asked() { return own_.next_asked(); }
  void refuse(absl::string_view transfer, const absl::Status& why) { own_.refuse(transfer, why); }
  bool is_wanted(uint64_t send) { return own_.is_wanted(send); }
  kvtransfer::KvTransfer params_of(absl::string_view transfer) const {
    return own_.params_of(transfer);
  }
  void decline(const kvtransfer::KvTransfer& from);

  // --- decode. With several ranks all layers, or none: no step waits for one.
  void progress() override;
  void wait(Time timeout, int fd) override;
  absl::Status start_load(kvtransfer::KvLoad load) override;
  uint32_t layers_loaded(kvtransfer::KvRequestId id) override;
  absl::Status load_status(kvtransfer::KvRequestId id) override;
  bool is_exact(kvtransfer::KvRequestId id) override { return own_.is_exact(id); }
  bool end_load(kvtransfer::KvRequestId id) override;

 private:
  struct Held {
    size_t released = 0;  // followers
    bool own = false;
  };
  Time patience() const override;
  void hear(size_t follower, const Report& report) override;

  kvtransfer::KvSession& own_;
  Leader* const leader_;
  const uint32_t layers_;
  std::optional<RanksLoads<kvtransfer::KvSession>> loads_;
  absl::flat_hash_map<uint64_t, Held> sends_;  // open or held
};

}  // namespace baton::engine::shard
