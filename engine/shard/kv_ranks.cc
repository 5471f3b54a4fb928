// One session of many: calls go to all ranks, answers are what all of them say.
#include "engine/shard/kv_ranks.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/shard/kv_address.h"

namespace baton::engine::shard {
namespace {

constexpr Time kAskEvery = std::chrono::microseconds(500);
constexpr Time kTick = std::chrono::milliseconds(1);

}  // namespace

KvRanks::KvRanks(kvtransfer::KvSession& own, Leader* leader, uint32_t layers)
    : own_(own), leader_(leader), layers_(layers) {
  if (leader_ == nullptr) return;
  loads_.emplace(*leader_, own_);
  leader_->join(this);
}

KvRanks::~KvRanks() {
  if (leader_ != nullptr) leader_->leave(this);
}

absl::StatusOr<std::string> KvRanks::address() const {
  std::vector<std::string> all = {own_.agent()->address()};
  if (leader_ != nullptr) {
    all.insert(all.end(), leader_->about_followers().begin(), leader_->about_followers().end());
  }
  for (size_t i = 1; i < all.size(); ++i) {
    if (!all[i].empty()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", i,
                     " has no KV session, and rank 0 has one: give each rank one "
                     "(FollowerOptions::session)"));
  }
  return join_kv_addresses(all);
}

void KvRanks::progress() {
  own_.progress();
  if (leader_ != nullptr) leader_->progress();
}

void KvRanks::wait(Time timeout, int fd) {
  const bool busy = leader_ != nullptr && (patience() != kNever || leader_->has_calls());
  own_.wait(busy ? std::min(timeout, kTick) : timeout, fd);
  progress();
}

Time KvRanks::patience() const { return loads_->empty() && sends_.empty() ? kNever : kAskEvery; }

void KvRanks::hear(size_t follower, const Report& report) {
  for (const Event& event : report.kv_events) {
    loads_->hear(follower, event);
    const auto send = sends_.find(event.id);
    if (send != sends_.end() && event.kind == EventKind::kReleased) ++send->second.released;
  }
}

// --- decode --------------------------------------------------------------------------------------

absl::Status KvRanks::start_load(kvtransfer::KvLoad load) {
  if (leader_ == nullptr) return own_.start_load(std::move(load));
  if (absl::Status status = leader_->status(); !status.ok()) return status;
  KvCall call{.kind = KvCallKind::kStartLoad, .id = load.id};
  if (load.transfer.has_value()) call.transfer = *load.transfer;
  for (const auto& [agent, address] : call.transfer.workers) {
    call.workers.push_back({agent, address});
  }
  call.tokens = load.tokens.size();
  call.first_token = load.first_token;
  call.blocks = load.blocks;
  call.timeout = load.timeout;
  call.silence = load.silence;
  call.push = load.push;
  if (absl::Status status = own_.start_load(std::move(load)); !status.ok()) return status;
  loads_->start(call.id, call.id);
  leader_->call(std::move(call));
  return absl::OkStatus();
}

// The call that a rank gets for a load in which it takes no part: it has no blocks.
void KvRanks::decline(const kvtransfer::KvTransfer& from) {
  own_.decline(from);
  if (leader_ != nullptr) leader_->call(KvCall{.kind = KvCallKind::kStartLoad, .transfer = from});
}

uint32_t KvRanks::layers_loaded(kvtransfer::KvRequestId id) {
  return leader_ == nullptr ? own_.layers_loaded(id) : loads_->layers_loaded(id, layers_);
}

absl::Status KvRanks::load_status(kvtransfer::KvRequestId id) {
  return leader_ == nullptr ? own_.load_status(id) : loads_->status(id);
}

bool KvRanks::end_load(kvtransfer::KvRequestId id) {
  if (leader_ == nullptr) return own_.end_load(id);
  return loads_->end(id, [&] { leader_->call(KvCall{.kind = KvCallKind::kEndLoad, .id = id}); });
}

// --- prefill -------------------------------------------------------------------------------------

uint64_t KvRanks::open(absl::string_view transfer, size_t tokens) {
  const uint64_t send = own_.open(transfer, tokens);
  if (leader_ == nullptr || send == 0) return send;
  KvCall call{.kind = KvCallKind::kOpen, .id = send};
  call.transfer.transfer = std::string(transfer);
  call.tokens = tokens;
  leader_->call(std::move(call));
  sends_[send];
  return send;
}

void KvRanks::restart(uint64_t send) {
  own_.restart(send);
  if (leader_ != nullptr) leader_->call(KvCall{.kind = KvCallKind::kRestart, .id = send});
}

void KvRanks::hold(uint64_t send) {
  own_.hold(send);
  if (leader_ != nullptr) leader_->call(KvCall{.kind = KvCallKind::kHold, .id = send});
}

void KvRanks::drop(uint64_t send) {
  own_.drop(send);
  if (leader_ == nullptr) return;
  leader_->call(KvCall{.kind = KvCallKind::kDrop, .id = send});
  sends_.erase(send);
}

void KvRanks::fail(uint64_t send, const absl::Status& why) {
  own_.fail(send, why);
  if (leader_ != nullptr) leader_->call(KvCall{.kind = KvCallKind::kFail, .id = send, .why = why});
}

std::vector<uint64_t> KvRanks::released() {
  std::vector<uint64_t> own = own_.released();
  if (leader_ == nullptr) return own;
  for (const uint64_t send : own) sends_[send].own = true;
  std::vector<uint64_t> out;
  absl::erase_if(sends_, [&](const auto& entry) {
    const Held& held = entry.second;
    if (!held.own || !leader_->everywhere(held.released)) return false;
    out.push_back(entry.first);
    return true;
  });
  return out;
}

}  // namespace baton::engine::shard
