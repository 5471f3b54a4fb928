// The decode side: starts loads, follows how far they are, probes who is silent, ends them.
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
  record->silence = load.silence;
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
  request_.pull = load.pull;
  request_.lease = std::min(load.lease, KvLoadRequest::kMaxTimeout);
  request_.buffers.clear();
  for (const KvCacheMemory::Buffer& buffer : cache_->buffers) {
    if (!load.pull) request_.buffers.push_back(buffer.remote);
  }

  if (load.pull) {
    record->arrived.resize(cache_->layers.size());
  } else if (absl::Status status = allocate_counters(record->counters); !status.ok()) {
    return status;
  }
  request_.counters.clear();
  for (CounterId id : record->counters) request_.counters.push_back(worker_.remote_counter(id));
  absl::Status status = check_kv_request(request_);
  if (status.ok()) status = claim(*record);
  for (const std::string& address : load.shards) {
    if (!status.ok()) break;
    status = ask(*record, address);
    ++request_.share.rank;
  }
  if (!status.ok()) {
    free_counters(record->counters);
    unclaim(*record, record->blocks.size());
    return status;
  }

  for (const KvLayerPlace& layer : cache_->layers) {
    const KvGroup& group = cache_->layout.groups[layer.group];
    const KvTokens kept = kept_tokens(group, request_.first_token, request_.tokens.size());
    const uint64_t tokens = kept.end - kept.begin;
    uint64_t count = 0;
    uint64_t bytes = 0;
    for (const KvField& field : group.fields) {
      const uint64_t row = uint64_t{group.heads} * field.token_bytes();
      count += tokens * row;
      bytes += (field.per_block ? blocks_of(group, kept).count : tokens) * row;
    }
    record->counts.push_back(count);
    record->bytes.push_back(bytes);
  }
  record->timeout = request_.timeout;
  record->deadline = worker_.clock().now() + request_.timeout;
  if (load.pull) record->request = std::make_shared<KvLoadRequest>(request_);
  // Nothing can fail any more: ask them all.
  for (Source& source : record->sources) {
    PeerRecord& peer = peers_[peer_key(source.peer)];
    source.number = ++peer.last_number;
    // Where silence has a limit, the first probe goes out with the request: who answers it is of a
    // release that does.
    const Time now = worker_.clock().now();
    peer.probe_at = std::min(peer.probe_at, load.silence > Time{} ? now : now + kProbeInterval);
    if (source.pull != nullptr) {
      source.pull->number = source.number;
      source.pull->request = record->request;
      source.pull->arrived = &record->arrived;
      pulls_.begin(*source.pull);
    }
    mailbox_.send(source.peer, KvMessageKind::kRequest, source.number, source.arrived,
                  request_.version());
    source.arrived.clear();
    by_number_[Key(peer_key(source.peer), source.number)] = record.get();
    last_peer_ = source.peer;
  }
  loads_[record->id] = std::move(record);
  return absl::OkStatus();
}

absl::Status KvLoads::claim(Load& load) {
  const std::vector<KvGroup>& groups = cache_->layout.groups;
  claimed_.resize(groups.size());
  size_t at = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    claimed_[g].resize(groups[g].blocks);
    load.group_ends.push_back(at + request_.pages(g).pages.size());
    for (; at < load.group_ends.back(); ++at) {
      const uint32_t block = request_.blocks[at];
      if (claimed_[g][block]) {
        unclaim(load, at);
        load.blocks.clear();
        return absl::InvalidArgumentError(
            absl::StrCat("block ", block,
                         " is in use: it is named twice, or by a load that "
                         "end_load() has not ended"));
      }
      claimed_[g][block] = true;
      load.blocks.push_back(block);
    }
  }
  return absl::OkStatus();
}

// The first `blocks` of them.
void KvLoads::unclaim(const Load& load, size_t blocks) {
  size_t at = 0;
  for (size_t g = 0; g < load.group_ends.size(); ++g) {
    for (; at < std::min(blocks, load.group_ends[g]); ++at) claimed_[g][load.blocks[at]] = false;
  }
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
  absl::Status heard = check_silence(*peer, source.name, load.silence);
  if (!heard.ok()) return heard;
  if (request_.pull) {
    source.pull = std::make_unique<KvPull>();
    source.pull->peer = *peer;
    source.pull->share = request_.share;
  }
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
  while (!load.complete() && bytes_here(load, load.loaded) >= load.counts[load.loaded]) {
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

uint64_t KvLoads::bytes_here(const Load& load, uint32_t layer) const {
  return load.counters.empty() ? load.arrived[layer] : worker_.counter_value(load.counters[layer]);
}

// `source`: whose fault it is; "": nobody's in particular.
void KvLoads::fail(Load& load, const std::string& source, const absl::Status& why) {
  refresh(load);
  if (load.complete() || !load.failure.ok()) return;
  ++loads_failed_;
  load.failure =
      absl::Status(why.code(), absl::StrCat("the KV of request ", load.id, " will not come from ",
                                            source.empty() ? load.sources.front().name : source,
                                            " (", load.loaded, " of ", load.counts.size(),
                                            " layers are here): ", why.message()));
  stop_pulls(load);
}

void KvLoads::stop_pulls(Load& load) {
  for (Source& source : load.sources) {
    if (source.pull != nullptr) pulls_.stop(*source.pull);
  }
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
         absl::DeadlineExceededError(
             absl::StrCat("it took longer than ", seconds_of(load->timeout),
                          " s; ask another worker, compute it here, or allow more time")));
  }
  return load->failure;
}

bool KvLoads::end(KvRequestId id) {
  Load* load = find(id);
  if (load == nullptr) return true;
  stop_pulls(*load);
  if (!load->quiet()) {
    refresh(*load);
    // Where every layer is here, `done` is on its way.
    if (load->complete()) return false;
    for (Source& source : load->sources) {
      if (source.pull != nullptr || source.told || std::exchange(source.cancel_sent, true))
        continue;
      mailbox_.send(source.peer, KvMessageKind::kCancel, source.number);
    }
    if (load->failure.ok()) load->failure = absl::CancelledError("end_load() was called");
    return false;
  }
  free_counters(load->counters);
  unclaim(*load, load->blocks.size());
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
    if (source.told || source.pull != nullptr) continue;
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
    if (!load->sources.front().told) {
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
  for (Source& source : load->sources) {
    if (source.pull == nullptr) continue;
    source.arrived = source.pull->offered ? source.pull->route.arrived(*load->request) : "";
  }
  for (size_t i = 0; i < load->blocks.size(); ++i) {
    const bool here =
        std::all_of(load->sources.begin(), load->sources.end(), [&](const Source& source) {
          return (source.done && source.pull == nullptr) ||
                 (i / 8 < source.arrived.size() && (source.arrived[i / 8] >> i % 8 & 1) != 0);
        });
    if (!here) failed.push_back(load->blocks[i]);
  }
  return failed;
}

bool KvLoads::progress() {
  bool any = pulls_.progress();
  const Time now = worker_.clock().now();
  for (auto& [id, load] : loads_) {
    for (Source& source : load->sources) {
      if (source.pull == nullptr) continue;
      const absl::Status why = source.pull->failure;
      if (!why.ok() && !source.pull->stopped) fail(*load, source.name, why);
      any |= pulls_.renew(*source.pull, now);
    }
    any |= refresh(*load);
    if (load->failure.ok() && !load->complete()) any |= !status(id).ok();
  }
  any |= note_silence(now);
  return probe(now) || any;
}

Time KvLoads::next_deadline() const {
  Time first = kNever;
  for (const auto& [key, peer] : peers_) first = std::min(first, peer.probe_at);
  for (const auto& [id, load] : loads_) {
    if (load->failure.ok() && !load->complete()) first = std::min(first, load->deadline);
    for (const Source& source : load->sources) {
      const KvPull* pull = source.pull.get();
      if (pull != nullptr && !pull->stopped && !pull->told) first = std::min(first, pull->renew_at);
    }
  }
  return first;
}

void KvLoads::abandon() {
  for (auto& [id, load] : loads_) {
    for (const Source& source : load->sources) {
      if (source.pull == nullptr || source.pull->reads.empty()) continue;
      worker_.disconnect(source.peer, Time::zero()).IgnoreError();
    }
  }
}

}  // namespace baton::kvtransfer
