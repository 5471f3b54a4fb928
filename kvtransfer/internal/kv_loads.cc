// The decode side: starts loads, follows their counters, and finds out when prefill has died.
#include "kvtransfer/internal/kv_loads.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "transport/address.h"

namespace baton::kvtransfer {
namespace {

// What people call the worker at `address`.
std::string name_of(const std::string& address) {
  absl::StatusOr<Address> decoded = Address::decode(address);
  return decoded.ok() && !decoded->name.empty() ? decoded->name : address;
}

}  // namespace

absl::Status KvLoads::start(KvLoad load) {
  if (cache_ == nullptr) {
    return absl::FailedPreconditionError("call allocate_cache() before start_load()");
  }
  if (loads_.contains(load.id)) {
    return absl::AlreadyExistsError(absl::StrCat("load ", load.id, " is under way already"));
  }
  auto record = std::make_unique<Load>();
  record->id = load.id;
  request_.request = load.id;
  request_.decode = name_.substr(0, KvLoadRequest::kMaxName);
  request_.timeout = std::min(load.timeout, KvLoadRequest::kMaxTimeout);
  request_.tokens = std::move(load.tokens);
  request_.first_token = load.first_token;
  request_.blocks = std::move(load.blocks);
  request_.layout = cache_->layout;
  request_.buffers.clear();
  for (const KvCacheMemory::Buffer& buffer : cache_->buffers) {
    request_.buffers.push_back(buffer.remote);
  }

  if (absl::Status status = allocate_counters(record->counters); !status.ok()) return status;
  request_.counters.clear();
  for (CounterId id : record->counters) request_.counters.push_back(worker_.remote_counter(id));
  absl::Status status = encode_kv_request(request_, body_);
  absl::StatusOr<PeerId> peer = PeerId();
  if (status.ok()) {
    peer = peer_at(load.prefill);
    status = peer.status();
  }
  if (!status.ok()) {
    free_counters(record->counters);
    return status;
  }

  record->peer = last_peer_ = *peer;
  PeerRecord& peer_record = peers_[peer_key(*peer)];
  record->number = ++peer_record.last_number;
  record->prefill = name_of(load.prefill);
  for (const KvCacheMemory::Layer& layer : cache_->layers) {
    const KvGroup& group = cache_->layout.groups[layer.group];
    const KvTokens kept = kept_tokens(group, request_.first_token, request_.tokens.size());
    const uint64_t tokens = kept.end - kept.begin;
    uint64_t count = 0;
    uint64_t bytes = 0;
    for (const KvField& field : group.fields) {
      const uint64_t row = uint64_t{group.heads} * field.row_bytes();
      count += tokens * row;
      bytes += (field.per_block ? blocks_of(group, kept).count : tokens) * row;
    }
    record->counts.push_back(count);
    record->bytes.push_back(bytes);
  }
  record->timeout = request_.timeout;
  record->deadline = worker_.clock().now() + request_.timeout;
  peer_record.probe_at = std::min(peer_record.probe_at, worker_.clock().now() + kProbeInterval);
  mailbox_.send(record->peer, KvMessageKind::kRequest, record->number, body_);
  by_number_[Key(peer_key(record->peer), record->number)] = record.get();
  loads_[record->id] = std::move(record);
  return absl::OkStatus();
}

// The connection to a prefill worker, made when there is none or the last one went down.
absl::StatusOr<PeerId> KvLoads::peer_at(const std::string& address) {
  if (auto it = connected_.find(address); it != connected_.end()) {
    if (worker_.peer_state(it->second) != PeerState::kDown) return it->second;
  }
  absl::StatusOr<PeerId> peer = worker_.connect(address);
  if (peer.ok()) connected_[address] = *peer;
  return peer;
}

absl::Status KvLoads::allocate_counters(std::vector<CounterId>& counters) {
  for (uint32_t layer = 0; layer < cache_->layers.size(); ++layer) {
    absl::StatusOr<CounterId> id = worker_.allocate_counter();
    if (!id.ok()) {
      free_counters(counters);
      return absl::Status(id.status().code(),
                          absl::StrCat(id.status().message(), " (", loads_.size(),
                                       " loads are open: end some of them first)"));
    }
    counters.push_back(*id);
  }
  return absl::OkStatus();
}

void KvLoads::free_counters(const std::vector<CounterId>& counters) {
  for (CounterId id : counters) worker_.free_counter(id).IgnoreError();
}

KvLoads::Load* KvLoads::find(KvRequestId id) {
  auto it = loads_.find(id);
  return it == loads_.end() ? nullptr : it->second.get();
}

KvLoads::Load* KvLoads::find(PeerId peer, uint64_t number) {
  auto it = by_number_.find(Key(peer_key(peer), number));
  return it == by_number_.end() ? nullptr : it->second;
}

// Counts the layers that are here; true if there are more than before.
bool KvLoads::refresh(Load& load) {
  const uint32_t before = load.loaded;
  while (!load.complete() &&
         worker_.counter_value(load.counters[load.loaded]) >= load.counts[load.loaded]) {
    if (timeline_ != nullptr) {
      const Time now = worker_.clock().now();
      timeline_->add({"arrival", absl::StrCat("layer ", load.loaded, " is here"), now, now, load.id,
                      load.bytes[load.loaded]});
    }
    bytes_loaded_ += load.bytes[load.loaded];
    ++load.loaded;
  }
  return load.loaded != before;
}

void KvLoads::fail(Load& load, const absl::Status& why) {
  refresh(load);
  if (load.complete() || !load.failure.ok()) return;
  ++loads_failed_;
  load.failure = absl::Status(
      why.code(), absl::StrCat("the KV of request ", load.id, " will not come from ", load.prefill,
                               " (", load.loaded, " of ", load.counters.size(),
                               " layers are here): ", why.message()));
}

uint32_t KvLoads::layers_loaded(KvRequestId id) {
  Load* load = find(id);
  if (load == nullptr) return 0;
  refresh(*load);
  return load->loaded;
}

absl::Status KvLoads::status(KvRequestId id) {
  Load* load = find(id);
  if (load == nullptr) return absl::NotFoundError(absl::StrCat("there is no load ", id));
  if (load->deadline <= worker_.clock().now()) {
    fail(*load, absl::DeadlineExceededError(absl::StrCat(
                    "it took longer than ", std::chrono::duration<double>(load->timeout).count(),
                    " s; ask another worker, compute it here, or allow more time")));
  }
  return load->failure;
}

bool KvLoads::end(KvRequestId id) {
  Load* load = find(id);
  if (load == nullptr) return true;
  if (!load->quiet) {
    refresh(*load);
    // Where every layer is here, `done` is on its way.
    if (!load->complete() && !load->cancel_sent) {
      mailbox_.send(load->peer, KvMessageKind::kCancel, load->number);
      load->cancel_sent = true;
      if (load->failure.ok()) load->failure = absl::CancelledError("end_load() was called");
    }
    return false;
  }
  free_counters(load->counters);
  by_number_.erase(Key(peer_key(load->peer), load->number));
  loads_.erase(id);
  return true;
}

void KvLoads::on_done(PeerId peer, uint64_t number) {
  Load* load = find(peer, number);
  if (load == nullptr) return;
  load->quiet = true;
  // Every write ended before this was sent, so every counter is full; where one is not, a peer
  // lied.
  fail(*load, absl::DataLossError("prefill says that all is sent, but it has not arrived"));
}

void KvLoads::on_failed(PeerId peer, uint64_t number, std::string_view body) {
  Load* load = find(peer, number);
  if (load == nullptr) return;
  load->quiet = true;
  fail(*load, decode_kv_failure(body));
}

void KvLoads::on_cancelled(PeerId peer, uint64_t number) {
  Load* load = find(peer, number);
  if (load == nullptr) return;
  load->quiet = true;
  fail(*load, absl::CancelledError("cancelled"));
}

void KvLoads::on_peer_down(PeerId peer, const absl::Status& why) {
  absl::erase_if(connected_, [&](const auto& entry) { return entry.second == peer; });
  peers_.erase(peer_key(peer));
  for (auto& [id, load] : loads_) {
    if (load->peer != peer || load->quiet) continue;
    load->quiet = true;  // a closed connection is fenced: nothing more comes through it
    fail(*load, absl::UnavailableError(absl::StrCat("the connection is lost: ", why.message(),
                                                    "; ask another worker or compute it here")));
  }
}

bool KvLoads::progress() {
  bool any = false;
  for (auto& [id, load] : loads_) {
    any |= refresh(*load);
    if (load->failure.ok() && !load->complete()) any |= !status(id).ok();
  }
  return probe(worker_.clock().now()) || any;
}

bool KvLoads::probe(Time now) {
  bool any = false;
  for (auto& [key, peer] : peers_) {
    if (now < peer.probe_at) continue;
    peer.probe_at = kNever;
    for (const auto& [id, load] : loads_) {
      if (load->quiet || peer_key(load->peer) != key || peer.probe_at != kNever) continue;
      mailbox_.send(load->peer, KvMessageKind::kProbe, load->number);
      peer.probe_at = now + kProbeInterval;
      any = true;
    }
  }
  return any;
}

Time KvLoads::next_deadline() const {
  Time first = kNever;
  for (const auto& [key, peer] : peers_) first = std::min(first, peer.probe_at);
  for (const auto& [id, load] : loads_) {
    if (load->failure.ok() && !load->complete()) first = std::min(first, load->deadline);
  }
  return first;
}

}  // namespace baton::kvtransfer
