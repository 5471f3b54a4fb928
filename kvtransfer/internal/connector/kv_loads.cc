// The decode side: starts loads, follows their counters, and finds out when prefill has died.
#include "kvtransfer/internal/connector/kv_loads.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/address.h"

namespace baton::kvtransfer {
namespace {

// What people call the worker at `address`.
std::string name_of(const std::string& address) {
  absl::StatusOr<Address> decoded = Address::decode(address);
  return decoded.ok() && !decoded->name.empty() ? decoded->name : address;
}

// Of a name: picks among workers that hold the same heads, always the same for one decode worker,
// so that plans are reused.
uint64_t turn_of(const std::string& name) {
  uint64_t turn = 0;
  for (char c : name) turn = turn * 31 + static_cast<unsigned char>(c);
  return turn;
}

}  // namespace

absl::Status KvLoads::start(KvLoad load) {
  if (cache_ == nullptr) {
    return absl::FailedPreconditionError(
        "call allocate_cache() or register_cache() before start_load()");
  }
  if (loads_.contains(load.id)) {
    return absl::AlreadyExistsError(absl::StrCat("load ", load.id, " is under way already"));
  }
  if (load.shards.empty()) load.shards = {std::move(load.prefill)};
  auto record = std::make_unique<Load>();
  record->id = load.id;
  request_.request = load.id;
  request_.decode = name_.substr(0, KvLoadRequest::kMaxName);
  request_.key = std::move(load.key);
  request_.loads_of_key = load.loads_of_key;
  request_.timeout = std::min(load.timeout, KvLoadRequest::kMaxTimeout);
  request_.tokens = std::move(load.tokens);
  request_.first_token = load.first_token;
  request_.blocks = std::move(load.blocks);
  request_.layout = cache_->layout;
  request_.share = {static_cast<uint32_t>(load.shards.size()), 0, turn_of(name_)};
  request_.buffers.clear();
  for (const KvCacheMemory::Buffer& buffer : cache_->buffers) {
    request_.buffers.push_back(buffer.remote);
  }

  if (absl::Status status = allocate_counters(record->counters); !status.ok()) return status;
  request_.counters.clear();
  for (CounterId id : record->counters) request_.counters.push_back(worker_.remote_counter(id));
  absl::Status status = check_kv_request(request_);
  for (const std::string& address : load.shards) {
    if (!status.ok()) break;
    status = ask(*record, address);
    ++request_.share.rank;
  }
  if (!status.ok()) {
    free_counters(record->counters);
    return status;
  }

  record->blocks = request_.blocks;
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
  // Nothing can fail any more: ask them all.
  for (Source& source : record->sources) {
    PeerRecord& peer = peers_[peer_key(source.peer)];
    source.number = ++peer.last_number;
    peer.probe_at = std::min(peer.probe_at, worker_.clock().now() + kProbeInterval);
    mailbox_.send(source.peer, KvMessageKind::kRequest, source.number, source.arrived);
    source.arrived.clear();
    by_number_[Key(peer_key(source.peer), source.number)] = record.get();
    last_peer_ = source.peer;
  }
  loads_[record->id] = std::move(record);
  return absl::OkStatus();
}

// Connects to the worker that has the share which request_ names, unless that is nothing. Its
// request waits in Source::arrived until all are known to be reachable.
absl::Status KvLoads::ask(Load& load, const std::string& address) {
  const bool needed = std::any_of(
      cache_->layout.groups.begin(), cache_->layout.groups.end(), [&](const KvGroup& group) {
        const KvHeads all{group.first_head, group.first_head + group.heads};
        return !request_.share.heads(group.total_heads, all).empty();
      });
  if (!needed) return absl::OkStatus();
  Source source;
  if (absl::Status status = encode_kv_request(request_, source.arrived); !status.ok())
    return status;
  absl::StatusOr<PeerId> peer = peer_at(address);
  if (!peer.ok()) return peer.status();
  source.peer = *peer;
  source.name = name_of(address);
  load.sources.push_back(std::move(source));
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

KvLoads::Load* KvLoads::find(PeerId peer, uint64_t number, Source** source) {
  auto it = by_number_.find(Key(peer_key(peer), number));
  if (it == by_number_.end()) return nullptr;
  for (Source& each : it->second->sources) {
    if (each.peer == peer && each.number == number) *source = &each;
  }
  return it->second;
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

// `source`: whose fault it is; "": nobody's in particular.
void KvLoads::fail(Load& load, const std::string& source, const absl::Status& why) {
  refresh(load);
  if (load.complete() || !load.failure.ok()) return;
  ++loads_failed_;
  load.failure =
      absl::Status(why.code(), absl::StrCat("the KV of request ", load.id, " will not come from ",
                                            source.empty() ? load.sources.front().name : source,
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
    fail(*load, "",
         absl::DeadlineExceededError(absl::StrCat(
             "it took longer than ", std::chrono::duration<double>(load->timeout).count(),
             " s; ask another worker, compute it here, or allow more time")));
  }
  return load->failure;
}

bool KvLoads::end(KvRequestId id) {
  Load* load = find(id);
  if (load == nullptr) return true;
  if (!load->quiet()) {
    refresh(*load);
    // Where every layer is here, `done` is on its way.
    if (load->complete()) return false;
    for (Source& source : load->sources) {
      if (source.quiet || std::exchange(source.cancel_sent, true)) continue;
      mailbox_.send(source.peer, KvMessageKind::kCancel, source.number);
    }
    if (load->failure.ok()) load->failure = absl::CancelledError("end_load() was called");
    return false;
  }
  free_counters(load->counters);
  for (const Source& source : load->sources) {
    by_number_.erase(Key(peer_key(source.peer), source.number));
  }
  loads_.erase(id);
  return true;
}

absl::Status KvLoads::renew(KvRequestId id, Time timeout) {
  Load* load = find(id);
  if (load == nullptr) return absl::NotFoundError(absl::StrCat("there is no load ", id));
  if (timeout <= Time::zero()) {
    return absl::InvalidArgumentError("a load cannot be renewed for no time");
  }
  if (!load->failure.ok()) return load->failure;
  load->timeout = std::min(timeout, KvLoadRequest::kMaxTimeout);
  load->deadline = worker_.clock().now() + load->timeout;
  for (const Source& source : load->sources) {
    if (source.quiet) continue;
    mailbox_.send(source.peer, KvMessageKind::kRenew, source.number,
                  encode_kv_renewal(load->timeout));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> KvLoads::payload(KvRequestId id) {
  Load* load = find(id);
  if (load == nullptr) return absl::NotFoundError(absl::StrCat("there is no load ", id));
  if (!load->failure.ok()) return load->failure;
  if (!load->sources.front().done) {
    if (!load->sources.front().quiet) {
      return absl::UnavailableError("prefill has not finished yet: ask again");
    }
    return absl::FailedPreconditionError("prefill ended without giving it: compute it here");
  }
  return load->payload;
}

std::vector<uint32_t> KvLoads::failed_blocks(KvRequestId id) {
  Load* load = find(id);
  if (load == nullptr) return {};
  refresh(*load);
  std::vector<uint32_t> failed;
  if (load->complete()) return failed;
  for (size_t i = 0; i < load->blocks.size(); ++i) {
    const bool here =
        std::all_of(load->sources.begin(), load->sources.end(), [&](const Source& source) {
          return source.done ||
                 (i / 8 < source.arrived.size() && (source.arrived[i / 8] >> i % 8 & 1) != 0);
        });
    if (!here) failed.push_back(load->blocks[i]);
  }
  return failed;
}

void KvLoads::on_done(PeerId peer, uint64_t number, std::string_view body) {
  Source* source = nullptr;
  Load* load = find(peer, number, &source);
  if (load == nullptr || source->quiet) return;
  source->quiet = source->done = true;
  if (source == &load->sources.front()) load->payload = body;
  // Every write ended before this was sent, so the counters are full when all have said so; where
  // one is not, a peer lied.
  const bool all = std::all_of(load->sources.begin(), load->sources.end(),
                               [](const Source& each) { return each.done; });
  if (all) {
    refresh(*load);
    if (load->complete()) return;
    for (Source& each : load->sources) each.done = false;
    fail(*load, source->name,
         absl::DataLossError("prefill says that all is sent, but it has not arrived"));
  }
}

void KvLoads::on_failed(PeerId peer, uint64_t number, std::string_view body) {
  Source* source = nullptr;
  Load* load = find(peer, number, &source);
  if (load == nullptr || source->quiet) return;
  source->quiet = true;
  const absl::Status why = decode_kv_failure(body, &source->arrived);
  fail(*load, source->name, why);
}

void KvLoads::on_cancelled(PeerId peer, uint64_t number) {
  Source* source = nullptr;
  Load* load = find(peer, number, &source);
  if (load == nullptr || source->quiet) return;
  source->quiet = true;
  fail(*load, source->name, absl::CancelledError("cancelled"));
}

void KvLoads::on_peer_down(PeerId peer, const absl::Status& why) {
  absl::erase_if(connected_, [&](const auto& entry) { return entry.second == peer; });
  peers_.erase(peer_key(peer));
  for (auto& [id, load] : loads_) {
    for (Source& source : load->sources) {
      if (source.peer != peer || source.quiet) continue;
      source.quiet = true;  // a closed connection is fenced: nothing more comes through it
      fail(*load, source.name,
           absl::UnavailableError(absl::StrCat("the connection is lost: ", why.message(),
                                               "; ask another worker or compute it here")));
    }
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
      for (const Source& source : load->sources) {
        if (source.quiet || peer_key(source.peer) != key || peer.probe_at != kNever) continue;
        mailbox_.send(source.peer, KvMessageKind::kProbe, source.number);
        peer.probe_at = now + kProbeInterval;
        any = true;
      }
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
