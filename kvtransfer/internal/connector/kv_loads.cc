// The decode side: starts loads, follows their progress, probes silent workers, ends them.
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

// Picks among workers that hold the same heads by a name: always the same one for one decode
// worker, so that plans are reused.
uint64_t turn_of(const std::string& name) {
  uint64_t turn = 0;
  for (char c : name) turn = turn * 31 + static_cast<unsigned char>(c);
  return turn;
}

}  // namespace

absl::Status KvLoads::start(KvLoad load) {
  if (load.transfer.has_value()) {
    return absl::InvalidArgumentError(
        "a connector does not take part in hand-offs: name `prefill` or `shards`, not `transfer`");
  }
  if (cache_ == nullptr) {
    return absl::FailedPreconditionError(
        "the connector has no cache yet: register_cache() comes before the first load");
  }
  if (loads_.contains(load.id)) {
    return absl::AlreadyExistsError(absl::StrCat("load ", load.id, " is already in progress"));
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
  absl::Status status = request_.check();
  if (status.ok()) status = claim(*record);
  for (const std::string& address : load.shards) {
    if (!status.ok()) break;
    status = add_source(*record, address);
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
  Load& made = *(loads_[record->id] = std::move(record));
  for (Source& source : made.sources) {
    if (source.peer.generation != 0) {
      ask(made, source);
    } else {
      by_address_[source.address].push_back(made.id);
    }
  }
  schedule(made);
  return absl::OkStatus();
}

// Its request goes out.
void KvLoads::ask(Load& load, Source& source) {
  PeerRecord& peer = peers_[peer_key(source.peer)];
  source.number = ++peer.last_number;
  peer.loads[source.number] = &load;
  // Where silence has a limit, the first probe goes out with the request: who answers it is of a
  // release that does.
  const Time now = worker_.clock().now();
  peer.probe_at = std::min(peer.probe_at, load.silence > Time{} ? now : now + kProbeInterval);
  if (source.pull != nullptr) {
    source.pull->peer = source.peer;
    source.pull->number = source.number;
    source.pull->request = load.request;
    source.pull->arrived = &load.arrived;
    pulls_.begin(*source.pull);
  }
  mailbox_.send(source.peer, KvMessageKind::kRequest, source.number, source.request,
                source.version);
  source.request = {};
  last_peer_ = source.peer;
}

// Those whose look-ups have ended.
bool KvLoads::ask_whose_names_are_known() {
  const KvCalls::Names::Ended ended = calls_.take_ended();
  for (const auto& [address, peer] : ended) {
    const auto waiting = by_address_.extract(address);
    if (waiting.empty()) continue;
    for (const KvRequestId id : waiting.mapped()) {
      Load& load = *find(id);
      for (Source& source : load.sources) {
        if (source.address != address || source.peer.generation != 0 || source.told) continue;
        absl::Status status = peer.status();
        // It may have gone before this side knew whose it was.
        if (status.ok() && worker_.peer_state(*peer) == PeerState::kDown) {
          status = lost(worker_.peer_status(*peer));
        }
        if (status.ok()) status = check_silence(*peer, source.name, load.silence);
        if (status.ok() && load.failure.ok()) {
          source.peer = *peer;
          ask(load, source);
          if (load.renewed && source.pull == nullptr) {
            mailbox_.send(source.peer, KvMessageKind::kRenew, source.number,
                          kv_bytes(KvRenewal{load.deadline - worker_.clock().now()}));
          }
          schedule(load);
        } else {
          source.told = true;
          if (!status.ok()) fail(load, source.name, status);
        }
      }
    }
  }
  return !ended.empty();
}

void KvLoads::give_up_calls(Load& load) {
  for (Source& source : load.sources) {
    if (source.peer.generation != 0 || std::exchange(source.told, true)) continue;
    const auto waiting = by_address_.find(source.address);
    if (waiting == by_address_.end()) continue;  // two of its sources had this address
    std::erase(waiting->second, load.id);
    if (waiting->second.empty()) by_address_.erase(waiting);
  }
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
                         " is in use: it is named twice, or by a load that has not been ended"));
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

// Calls the worker that has the share which request_ names, unless that is nothing. Its request
// waits until all are known to be reachable, but for names that are looked up.
absl::Status KvLoads::add_source(Load& load, const std::string& address) {
  const bool needed = std::any_of(
      cache_->layout.groups.begin(), cache_->layout.groups.end(), [&](const KvGroup& group) {
        const KvHeads all{group.first_head, group.first_head + group.heads};
        return !request_.share.heads(group.total_heads, all).empty();
      });
  if (!needed) return absl::OkStatus();
  Source source;
  if (absl::Status status = encode_kv(request_, source.request); !status.ok()) return status;
  source.version = request_.version();
  absl::StatusOr<PeerId> peer = calls_.call(address);
  if (!peer.ok()) return peer.status();
  source.peer = *peer;
  source.address = address;
  source.name = name_of(address);
  if (peer->generation != 0) {
    absl::Status heard = check_silence(*peer, source.name, load.silence);
    if (!heard.ok()) return heard;
  }
  if (request_.pull) {
    source.pull = std::make_unique<KvPull>();
    source.pull->share = request_.share;
  }
  load.sources.push_back(std::move(source));
  return absl::OkStatus();
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
  const auto record = peers_.find(peer_key(peer));
  if (record == peers_.end()) return nullptr;
  const auto it = record->second.loads.find(number);
  if (it == record->second.loads.end()) return nullptr;
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
  if (load.loaded != before && load.complete()) schedule(load);
  return load.loaded != before;
}

uint64_t KvLoads::bytes_here(const Load& load, uint32_t layer) const {
  return load.counters.empty() ? load.arrived[layer] : worker_.counter_value(load.counters[layer]);
}

// `source`: whose fault it is; "": no source's in particular.
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
  schedule(load);
}

void KvLoads::stop_pulls(Load& load) {
  for (Source& source : load.sources) {
    if (source.pull == nullptr) continue;
    source.pull->told |= source.peer.generation == 0;  // it was asked nothing
    pulls_.stop(*source.pull);
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
  give_up_calls(*load);
  refresh(*load);
  if (!load->quiet()) {
    // Where every layer is here, `done` is on its way.
    if (load->complete()) return false;
    for (Source& source : load->sources) {
      if (source.pull != nullptr || source.told || std::exchange(source.cancel_sent, true))
        continue;
      mailbox_.send(source.peer, KvMessageKind::kCancel, source.number);
    }
    if (load->failure.ok())
      load->failure = absl::CancelledError("the load was ended before its KV was here");
    schedule(*load);
    return false;
  }
  free_counters(load->counters);
  unclaim(*load, load->blocks.size());
  for (const Source& source : load->sources) {
    const auto peer = peers_.find(peer_key(source.peer));
    if (peer != peers_.end()) peer->second.loads.erase(source.number);
  }
  due_.erase(id);
  loads_.erase(id);
  return true;
}

absl::Status KvLoads::renew(KvRequestId id, Time timeout) {
  Load* load = find(id);
  if (load == nullptr) return absl::NotFoundError(absl::StrCat("there is no load ", id));
  if (timeout <= Time::zero()) {
    return absl::InvalidArgumentError("a load must be renewed for more than 0 s");
  }
  if (!load->failure.ok()) return load->failure;
  load->timeout = std::min(timeout, KvLoadRequest::kMaxTimeout);
  load->deadline = worker_.clock().now() + load->timeout;
  load->renewed = true;
  schedule(*load);
  for (const Source& source : load->sources) {
    if (source.told || source.pull != nullptr || source.peer.generation == 0) continue;
    mailbox_.send(source.peer, KvMessageKind::kRenew, source.number,
                  kv_bytes(KvRenewal{load->timeout}));
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
    return absl::FailedPreconditionError("prefill ended without delivering it: compute it here");
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
  any |= ask_whose_names_are_known();
  for (const auto& [peer, number] : pulls_.take_failed()) {
    Source* source = nullptr;
    Load* load = find(peer, number, &source);
    if (load == nullptr || source->pull->stopped) continue;
    ++looked_at_;
    fail(*load, source->name, source->pull->failure);
  }
  const Time now = worker_.clock().now();
  for (const KvRequestId id : due_.take(now)) any |= look(*find(id), now);
  if (timeline_ != nullptr) {  // which shows when each layer came
    for (auto& [id, load] : loads_) any |= refresh(*load);
  }
  any |= note_silence(now);
  return probe(now) || any;
}

// Its time has come.
bool KvLoads::look(Load& load, Time now) {
  ++looked_at_;
  bool any = false;
  for (Source& source : load.sources) {
    if (source.pull != nullptr) any |= pulls_.renew(*source.pull, now);
  }
  any |= refresh(load);
  if (load.failure.ok() && !load.complete()) any |= !status(load.id).ok();
  schedule(load);
  return any;
}

// When a call has to look at it again.
void KvLoads::schedule(const Load& load) {
  Time due = load.failure.ok() && !load.complete() ? load.deadline : kNever;
  for (const Source& source : load.sources) {
    const KvPull* pull = source.pull.get();
    if (pull != nullptr && !pull->stopped && !pull->told) due = std::min(due, pull->renew_at);
  }
  due_.set(load.id, due);
}

Time KvLoads::next_deadline() const {
  Time first = due_.first();
  for (const auto& [key, peer] : peers_) first = std::min(first, peer.probe_at);
  return first;
}

void KvLoads::abandon() {
  calls_.close();
  for (auto& [id, load] : loads_) {
    for (const Source& source : load->sources) {
      if (source.pull == nullptr || source.pull->open.empty()) continue;
      worker_.disconnect(source.peer, Time::zero()).IgnoreError();
    }
  }
}

}  // namespace baton::kvtransfer
