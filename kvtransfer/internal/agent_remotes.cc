// Other agents: their metadata, how they are reached, what becomes of them when they go.
#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kvtransfer/internal/agent_impl.h"
#include "transport/base/log.h"

namespace baton::kvtransfer {
namespace {

using RemoteRanges = AgentRanges<RemoteRegion>;

// What partial metadata makes of what was known: it replaces the newest range of the same place.
RemoteRanges extended(const RemoteRanges& known, std::vector<RemoteRanges::Range> by) {
  std::stable_sort(by.begin(), by.end(), RemoteRanges::before);
  // Where it names a range more than once, the last entry counts.
  std::vector<RemoteRanges::Range> added;
  std::vector<size_t> replaced;
  for (const RemoteRanges::Range& range : by) {
    if (!added.empty() && added.back().where == range.where) {
      added.back() = range;
      continue;
    }
    if (const std::optional<size_t> old = known.find(range.where)) replaced.push_back(*old);
    added.push_back(range);
  }
  return known.without(std::move(replaced)).with(std::move(added));
}

// How long a listener that is not there is called, and how often.
constexpr std::chrono::seconds kCallingTime{60};
constexpr std::chrono::milliseconds kPause{50};
constexpr size_t kMostLookedUp = 64;
// Not at once: of two that are started together, one is first.
constexpr std::chrono::seconds kQuiet{3};

absl::Status not_known(std::string_view agent) {
  return absl::NotFoundError(
      absl::StrFormat("no agent called \"%s\" is known here: load its metadata first", agent));
}

}  // namespace

bool asks_dns(std::string_view host_port) {
  if (host_port.starts_with("baton1:")) return false;  // as Agent::address() has it
  const size_t colon = host_port.rfind(':');
  if (colon == std::string_view::npos || host_port.starts_with('[')) return false;
  return colon + 1 < host_port.size() &&
         host_port.find_first_not_of("0123456789", colon + 1) == std::string_view::npos &&
         host_port.find_first_not_of("0123456789.:") != std::string_view::npos;
}

AgentMetadata Agent::Impl::whole_metadata() const {
  AgentMetadata out;
  out.name = options.name;
  out.uid = uid;
  out.address = worker->address();
  for (const MemoryKind kind : kMemoryKinds) {
    for (const auto& range : *remotes.at(options.name).ranges.of(kind)) {
      out.ranges.emplace_back(range.where, range.region);
    }
  }
  return out;
}

absl::StatusOr<std::string> Agent::Impl::partial_metadata(absl::Span<const Descriptor> list,
                                                          bool with_address,
                                                          MemoryKind kind) const {
  std::lock_guard lock(mutex);
  AgentMetadata out;
  out.partial = true;
  out.name = options.name;
  out.uid = uid;
  if (with_address) out.address = worker->address();
  const RemoteRanges& mine = *remotes.at(options.name).ranges.of(kind);
  for (const Descriptor& where : list) {
    const std::optional<size_t> at = mine.find(where);
    if (!at) return no_such_range(where, kind);
    out.ranges.emplace_back(where, mine[*at].region);
  }
  return out.encode(key);
}

absl::StatusOr<std::string> Agent::Impl::add_remote(std::string_view bytes, const Sender* from) {
  absl::StatusOr<AgentMetadata> metadata = AgentMetadata::decode(bytes, key);
  if (!metadata.ok()) return metadata.status();
  if (from != nullptr && (metadata->uid != from->uid || metadata->name != from->name)) {
    return absl::PermissionDeniedError(
        absl::StrFormat("it is the metadata of another agent, \"%s\"", metadata->name));
  }
  if (metadata->uid == uid) {
    return absl::InvalidArgumentError(
        "this is the agent's own metadata: exchange it with the other agent's");
  }
  if (metadata->name == options.name) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "another agent is called \"%s\" too: connected agents need different names", options.name));
  }
  std::lock_guard lock(mutex);
  const auto known = remotes.find(metadata->name);
  const bool same = known != remotes.end() && known->second.uid == metadata->uid;
  if (!same && metadata->address.empty()) {
    return absl::NotFoundError(absl::StrFormat(
        "partial metadata of \"%s\" does not say how to reach it: load its whole metadata first",
        metadata->name));
  }
  AgentMemoryTables<RemoteRegion> theirs;
  if (same && metadata->partial) theirs = known->second.ranges;
  for (const MemoryKind kind : kMemoryKinds) {
    std::vector<RemoteRanges::Range> told;
    for (const auto& [where, region] : metadata->ranges) {
      if (kind_of(region) == kind) told.push_back({where, region});
    }
    if (told.empty()) continue;
    theirs.replace(kind, metadata->partial ? extended(*theirs.of(kind), std::move(told))
                                           : theirs.of(kind)->with(std::move(told)));
  }
  size_t count = 0;
  for (const MemoryKind kind : kMemoryKinds) count += theirs.of(kind)->size();
  if (metadata->partial && count > kMostRemoteRanges) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("\"%s\" would have %u ranges in parts, more than the limit of %u: load its "
                        "whole metadata, which replaces the parts",
                        metadata->name, count, kMostRemoteRanges));
  }
  RemoteAgent& remote = remotes[metadata->name];
  if (from == nullptr) forget_told(remote);  // the application wants it
  if (!same) {
    part_from(remote);
    remote.peer = {};
    remote.epoch = next_agent_id();
    remote.uid = metadata->uid;
  } else if (worker->peer_state(remote.peer) == PeerState::kDown) {
    remote.peer = {};
  }
  remote.lost = absl::OkStatus();  // this metadata is newer
  if (!metadata->address.empty()) remote.address = metadata->address;
  remote.ranges = std::move(theirs);
  return metadata->name;
}

// Agents that come under ever new names are not kept for ever: of those that gave their metadata
// unasked and have gone, the first are forgotten.
void Agent::Impl::remember_told(const std::string& agent, uint64_t by) {
  constexpr int kLooks = 8;  // more than come at a time
  std::lock_guard lock(mutex);
  const auto newest = remotes.find(agent);
  if (newest == remotes.end()) return;  // the application has removed it meanwhile
  const auto remember = [this](const auto& one) {
    one->second.told = next_agent_id();
    unasked.emplace(one->second.told, one->first);
  };
  newest->second.told_by = by;
  if (newest->second.told == 0) remember(newest);
  for (int i = 0; i < kLooks && unasked.size() > kMostGoneRemotes; ++i) {
    const auto oldest = remotes.find(unasked.begin()->second);
    RemoteAgent& remote = oldest->second;
    const bool here =
        senders.contains(remote.told_by) ||
        (remote.peer.generation != 0 && worker->peer_state(remote.peer) != PeerState::kDown);
    unasked.erase(remote.told);
    if (here) {
      remember(oldest);
    } else {
      part_from(remote);
      remotes.erase(oldest);
    }
  }
}

void Agent::Impl::forget_told(RemoteAgent& remote) {
  unasked.erase(std::exchange(remote.told, 0));
  remote.told_by = 0;
}

void Agent::Impl::remove_remote(std::string_view agent, const WorkerUid* only) {
  std::lock_guard lock(mutex);
  const auto known = remotes.find(agent);
  if (known == remotes.end() || agent == options.name) return;
  if (only != nullptr && known->second.uid != *only) return;
  part_from(known->second);
  forget_told(known->second);
  remotes.erase(known);
}

// Does not wait: the other agent may be driven by the thread that called us. A transfer of ours
// that runs must not be called ended before its bytes have stopped there too, since release() says
// so of whatever has ended. Without one, there is nothing of ours to stop there, and the connection
// can be closed without asking.
void Agent::Impl::part_from(const RemoteAgent& remote) {
  if (remote.peer.generation == 0) return;
  const bool moving = std::any_of(transfers.begin(), transfers.end(), [&](const auto& entry) {
    const AgentTransfer& transfer = *entry.second;
    return transfer.epoch() == remote.epoch && !transfer.quiet();
  });
  worker->begin_disconnect(remote.peer, moving ? kNever : Time::zero());
}

bool Agent::Impl::has_remote(std::string_view agent, absl::Span<const Descriptor> list,
                             MemoryKind kind) {
  pump();
  std::lock_guard lock(mutex);
  const auto known = remotes.find(agent);
  if (known == remotes.end()) return false;
  RemoteAgent& remote = known->second;
  look_at(remote);
  if (!remote.lost.ok()) return false;
  for (const Descriptor& where : list) {
    if (remote.ranges.of(kind)->cover(where.address, where.bytes, where.device, nullptr) ==
        nullptr) {
      return false;
    }
  }
  return true;
}

absl::StatusOr<RemoteAgent*> Agent::Impl::find_remote(std::string_view agent) {
  const auto known = remotes.find(agent);
  if (known == remotes.end()) return not_known(agent);
  return &known->second;
}

std::string Agent::Impl::why_missing(std::string_view agent) {
  {
    std::lock_guard lock(mutex);
    if (const auto known = remotes.find(agent); known != remotes.end()) {
      return known->second.lost.ok() ? "its metadata lacks this memory: load the metadata again "
                                       "after the other agent has registered it"
                                     : absl::StrCat("it was lost: ", known->second.lost.message());
    }
    for (const Said& one : said) {
      if (one.kind != AgentFrameKind::kFetch || one.payload != agent) continue;
      const absl::Status why = worker->peer_status(one.peer);
      return absl::StrCat("no agent answers at ", one.host_port, why.ok() ? "" : ": ",
                          why.message());
    }
    if (refused.first == agent) return refused.second;
  }
  if (keeper != nullptr) {
    if (const absl::Status state = keeper->state(agent); !state.ok()) {
      return std::string(state.message());
    }
  }
  return "its metadata was not loaded here";
}

void Agent::Impl::look_at(RemoteAgent& remote) {
  if (remote.peer.generation == 0) return;
  const PeerState state = worker->peer_state(remote.peer);
  if (state == PeerState::kUp) remote.lost = absl::OkStatus();
  if (state != PeerState::kDown || !remote.lost.ok()) return;  // the first reason is what happened
  const absl::Status why = worker->peer_status(remote.peer);
  remote.lost = absl::UnavailableError(why.ok() ? "its connection is down" : why.message());
}

// Calls it, also again after it went down: it may have come back, or only its network.
absl::StatusOr<PeerId> Agent::Impl::peer_of(RemoteAgent& remote) {
  look_at(remote);
  if (remote.peer.generation == 0 || worker->peer_state(remote.peer) == PeerState::kDown) {
    absl::StatusOr<PeerId> peer = worker->connect(remote.address);
    if (!peer.ok()) return peer.status();
    remote.peer = *peer;
  }
  return remote.peer;
}

bool Agent::Impl::is_up(PeerId peer) const {
  return peer.generation != 0 && worker->peer_state(peer) != PeerState::kDown;
}

// A name is looked up without the lock: no other call waits for DNS.
absl::StatusOr<PeerId> Agent::Impl::caller(std::string_view host_port) {
  const std::string where(host_port);
  {
    std::lock_guard lock(mutex);
    if (const auto known = callers.find(where); known != callers.end() && is_up(known->second)) {
      return known->second;
    }
  }
  const absl::StatusOr<PeerId> made = worker->connect(host_port);
  if (!made.ok()) return made.status();
  std::lock_guard lock(mutex);
  PeerId& peer = callers[where];
  if (is_up(peer)) {  // another thread was first
    worker->begin_disconnect(*made, Time::zero());
  } else {
    peer = *made;
  }
  return peer;
}

// Whoever pumps must not wait for DNS: a thread of its own does.
void Agent::Impl::call_again(const std::string& host_port) {
  if (!asks_dns(host_port)) {
    const absl::StatusOr<PeerId> made = worker->connect(host_port);
    if (made.ok()) callers[host_port] = *made;
  } else if (!calls.contains(host_port)) {  // where no thread can be had: later
    (void)calls.begin(host_port, [this, host_port] { return worker->connect(host_port); });
  }
}

void Agent::Impl::take_called() {
  for (const auto& [host_port, made] : calls.take_ended()) {
    if (made.ok() && !is_up(callers[host_port])) callers[host_port] = *made;
    if (const auto asked = looked_up.find(host_port); asked != looked_up.end()) {
      asked->second = made;
    }
  }
}

absl::StatusOr<PeerId> Agent::Impl::look_up(const std::string& host_port) {
  std::lock_guard lock(mutex);
  take_called();
  if (const auto known = callers.find(host_port); known != callers.end() && is_up(known->second)) {
    return known->second;
  }
  if (looked_up.size() >= kMostLookedUp) looked_up.clear();  // of callers that ask no more
  const auto asked = looked_up.try_emplace(host_port, PeerId()).first;
  if (!asked->second.ok() || asked->second->generation != 0) {
    return looked_up.extract(asked).mapped();
  }
  call_again(host_port);
  return PeerId();
}

absl::Status Agent::Impl::send(PeerId peer, AgentFrameKind kind, std::string_view payload) {
  if (absl::Status status = check_message(payload); !status.ok()) return status;
  return outbox->send(peer, kind, payload);
}

absl::Status Agent::Impl::say(std::string_view host_port, AgentFrameKind kind,
                              std::string_view payload, const absl::StatusOr<PeerId>& peer) {
  {
    std::lock_guard lock(mutex);
    // A caller that asks for whoever is there hears from name_at() what came of it.
    const bool once = kind == AgentFrameKind::kFetch && payload.empty();
    if (!once && peer.ok() && worker->peer_state(*peer) != PeerState::kUp) {
      std::erase_if(said, [&](const Said& old) {
        return old.host_port == host_port && old.kind == kind && old.payload == payload;
      });
      const Time now = worker->clock().now();
      said.push_back({std::string(host_port), kind, std::string(payload), *peer, now + kCallingTime,
                      now + kPause, now + kQuiet});
    }
  }
  return peer.ok() ? send(*peer, kind, payload) : peer.status();
}

// Whoever is started first must not matter: a listener that refused is called again for a while.
void Agent::Impl::say_again() {
  std::vector<Said> now_said;
  {
    std::lock_guard lock(mutex);
    if (said.empty()) return;
    take_called();
    const Time now = worker->clock().now();
    std::erase_if(said, [&](Said& one) {
      PeerId& peer = callers[one.host_port];
      const PeerState state = worker->peer_state(peer);
      if (state == PeerState::kUp && one.peer == peer) return true;
      if (state != PeerState::kDown && one.peer == peer) return false;  // it is being met
      const bool over = now >= one.until;
      const std::string why(worker->peer_status(one.peer).message());
      if (over || now >= one.warn) {
        base::log_event(base::LogLevel::kWarning, "%s: no agent answers at %s%s: %s", options.name,
                        one.host_port,
                        over ? ", which is no longer tried" : ", which is retried for a minute",
                        why);
        one.warn = kNever;
      }
      if (over && one.kind == AgentFrameKind::kFetch) {
        refused = {one.payload,
                   absl::StrFormat("no agent answered at %s in %d s: %s", one.host_port,
                                   static_cast<int>(kCallingTime / std::chrono::seconds(1)), why)};
      }
      if (over) return true;
      if (now < one.next) return false;
      one.next = now + kPause;
      if (state == PeerState::kDown) call_again(one.host_port);
      if (!is_up(peer)) return false;
      one.peer = peer;
      now_said.push_back(one);
      return false;
    });
  }
  for (const Said& one : now_said) send(one.peer, one.kind, one.payload).IgnoreError();
}

}  // namespace baton::kvtransfer
