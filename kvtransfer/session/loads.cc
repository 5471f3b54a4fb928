// The decode side of a session: orders of the engine's, and what is said to prefill and by it.
#include "kvtransfer/session/loads.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace baton::kvtransfer::session {
namespace {

using nlohmann::json;

constexpr Time kAsk = std::chrono::milliseconds(250);  // how often prefill is asked, at most
constexpr Time kAskAgain =
    std::chrono::seconds(1);  // for peers that did not answer, where any silence is allowed
constexpr Time kDeclineTimeout = std::chrono::seconds(10);
constexpr size_t kMostUnknown =
    1 << 20;  // blocks that are ready, of which prefill does not say what they are

double seconds(Time time) { return std::chrono::duration<double>(time).count(); }

absl::Status closed() { return absl::UnavailableError("the hand-off is closed"); }

}  // namespace

// --- the engine's thread

absl::Status Loads::start(KvOrder order) {
  if (!is_text(order.from.transfer) || !is_text(order.from.agent)) {
    return absl::InvalidArgumentError("the names of a transfer and of an agent must be UTF-8");
  }
  const std::lock_guard lock(mutex_);
  if (closed_) return closed();
  if (order.runs.empty()) {
    order.timeout = patient(kDeclineTimeout);
  } else if (!views_.try_emplace(order.id).second) {
    return absl::AlreadyExistsError(absl::StrCat("load ", order.id, " is already in progress"));
  }
  orders_.push_back(std::move(order));
  core_.wake_thread();
  return absl::OkStatus();
}

std::optional<KvLoaded> Loads::next_loaded() {
  const std::lock_guard lock(mutex_);
  const auto it = std::find_if(views_.begin(), views_.end(),
                               [](const auto& entry) { return entry.second.over; });
  if (it == views_.end()) return std::nullopt;
  const View& view = it->second;
  KvLoaded out{it->first, view.status, view.took, view.reading};
  views_.erase(it);
  return out;
}

uint32_t Loads::layers_loaded(KvRequestId id) {
  const std::lock_guard lock(mutex_);
  const auto it = views_.find(id);
  return it == views_.end() ? 0 : it->second.layers;
}

absl::Status Loads::status(KvRequestId id) {
  const std::lock_guard lock(mutex_);
  const auto it = views_.find(id);
  return it == views_.end() ? absl::NotFoundError("there is no such load") : it->second.status;
}

bool Loads::is_exact(KvRequestId id) {
  const std::lock_guard lock(mutex_);
  const auto it = views_.find(id);
  return it != views_.end() && it->second.exact;
}

bool Loads::end(KvRequestId id) {
  const std::lock_guard lock(mutex_);
  const auto it = views_.find(id);
  if (it == views_.end()) return true;
  if (it->second.over) {
    views_.erase(it);
    return true;
  }
  it->second.unwanted = true;
  core_.wake_thread();
  return false;
}

// --- the session's thread

void Loads::stop() {
  if (core_.own != nullptr) return;
  for (const Load& load : loads_) {
    for (const KvMover::Posted& read : load.reads) core_.agent->abort(read.transfer).IgnoreError();
  }
  for (const Load& load : loads_) {
    for (const KvMover::Posted& read : load.reads) {
      core_.agent->release(read.transfer).IgnoreError();
    }
  }
}

void Loads::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  orders_.clear();
  by_key_.clear();
  loads_.clear();
  for (auto& [id, view] : views_) {
    if (view.over) continue;
    view.status = closed();
    view.over = true;
  }
}

void Loads::heard(const std::string& sender, const json& message) {
  const auto known = peers_.find(sender);
  if (known == peers_.end()) return;
  const Time now = core_.clock->now();
  known->second->heard = now;
  if (message.at("kind") == "layout") {
    known->second->said = message;
    return;
  }
  const auto it = by_key_.find({sender, message.at("transfer").get<std::string>()});
  if (it == by_key_.end() || !it->second->why.ok()) return;
  Load& load = *it->second;
  Asked& asked = *std::find_if(load.sources.begin(), load.sources.end(),
                               [&sender](const Asked& each) { return each.agent == sender; });
  asked.heard = now;
  asked.answered = true;
  if (message.at("kind") == "gone") {
    load.why = absl::NotFoundError("prefill no longer has it");
  } else if (message.at("kind") == "ready" && load.incoming != nullptr) {
    const json& parts = message.at("parts");
    for (const json& part : parts) asked.unknown_blocks += 1 + part.at(2).size();
    size_t whole = 0;
    for (const KvRun& run : load.order.runs) whole = std::max<size_t>(whole, run.tokens.end);
    if (asked.unknown_blocks > std::max(kMostUnknown, 2 * core_.mover->layers() * whole)) {
      load.why =
          absl::InvalidArgumentError("prefill keeps reporting blocks without describing its cache");
      return;
    }
    asked.unknown.push_back(parts);
  }
}

// By what a prefill has said of its cache, once we know that memory: of who has asked us only how
// to reach it is known.
void Loads::learn(Asked& asked, Peer& peer, Time now) {
  absl::StatusOr<std::shared_ptr<KvMover::Source>> found = absl::UnknownError("");
  try {
    found = core_.mover->understand(*peer.said);
  } catch (const json::exception& error) {
    found = absl::InvalidArgumentError(error.what());
  }
  if (found.ok()) {
    if (!core_.agent->has_remote(asked.agent, (*found)->spans)) {
      fetch(asked, peer, now).IgnoreError();  // the agent that requested it has been reached
      return;
    }
    found = core_.mover->reach(asked.agent, *std::move(found), peer.source);
  }
  peer.said.reset();
  peer.refused.clear();
  if (found.ok()) {
    peer.source = *std::move(found);
  } else {
    peer.refused = absl::StrCat("prefill ", asked.agent, ": ", found.status().message());
  }
}

bool Loads::step() {
  std::deque<KvOrder> orders;
  {
    const std::lock_guard lock(mutex_);
    orders.swap(orders_);
  }
  ++steps_;
  const Time now = core_.clock->now();
  // Prefill is not silent while no thread listens: this thread had no processor, or was suspended.
  const Time deaf = now - stepped_.value_or(now) - kAsk;
  stepped_ = now;
  if (deaf > Time{}) {
    for (Load& load : loads_) {
      for (Asked& asked : load.sources) asked.heard += deaf;
    }
  }
  for (KvOrder& order : orders) begin(std::move(order), now);
  for (auto it = loads_.begin(); it != loads_.end();) {
    move(*it);
    const auto at = it++;
    if (!end_if_over(*at)) continue;
    for (const Asked& asked : at->sources) by_key_.erase({asked.agent, at->order.from.transfer});
    loads_.erase(at);
  }
  std::erase_if(unsaid_, [this](const Key& whom) { return say_done(whom); });
  return !loads_.empty() || !unsaid_.empty();
}

void Loads::begin(KvOrder order, Time now) {
  Load& load = loads_.emplace_back();
  load.started = now;
  load.wanted = !order.runs.empty();
  load.order = std::move(order);
  if (const absl::Status good = set_up(load); !good.ok()) {
    if (load.wanted) report(load, good);
    return loads_.pop_back();
  }
  for (const Asked& asked : load.sources) by_key_[{asked.agent, load.order.from.transfer}] = &load;
}

absl::Status Loads::set_up(Load& load) {
  const KvTransfer& from = load.order.from;
  const KvWorker& me = core_.shard;
  if (from.ranks == 0 || from.ranks > kMostRanks) {
    return absl::InvalidArgumentError(absl::StrCat("a prefill cannot have ", from.ranks, " ranks"));
  }
  for (const uint32_t rank : ranks_heard(me.heads, from.ranks, me.ranks, me.rank)) {
    const uint32_t number = rank + me.stage * from.ranks;
    Asked& asked = load.sources.emplace_back();
    asked.agent = absl::StrCat(from.agent, "/", number);
    asked.address = from.address;
    if (number > 0) {
      const size_t colon = from.address.rfind(':') + 1;  // 0: there is none
      uint32_t port = 0;
      if (!absl::SimpleAtoi(absl::string_view(from.address).substr(colon), &port)) {
        return absl::InvalidArgumentError(
            absl::StrCat("prefill's address is \"", from.address, "\", and not HOST:PORT"));
      }
      asked.address = absl::StrCat(from.address.substr(0, colon), port + number);
    }
    asked.heard = load.started;
    asked.looked = load.started - kAsk;
    if (by_key_.contains({asked.agent, from.transfer})) {
      // Which is wanted, where this one is declined.
      return absl::AlreadyExistsError(
          absl::StrCat("another request loads transfer \"", from.transfer, "\" of ", asked.agent));
    }
  }
  if (!load.wanted) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<KvMover::Incoming>> incoming =
      core_.mover->begin(load.order.runs, load.sources.size());
  if (incoming.ok()) load.incoming = *std::move(incoming);
  return incoming.status();
}

void Loads::move(Load& load) {
  const Time now = core_.clock->now();
  if (load.wanted && load.why.ok()) {
    const std::lock_guard lock(mutex_);
    if (views_[load.order.id].unwanted) load.why = absl::CancelledError("it is not wanted");
  }
  if (load.why.ok() && now - load.started >= load.order.timeout) {
    load.why = absl::DeadlineExceededError(
        absl::StrCat("not complete after ", seconds(load.order.timeout), " s"));
  }
  for (size_t i = 0; i < load.sources.size() && load.why.ok(); ++i) load.why = move(load, i, now);
  if (load.reads.empty()) load.reading_since = now;
  if (load.why.ok() && load.incoming != nullptr) load.why = load.incoming->read(&load.reads);
  follow_reads(load);
}

absl::Status Loads::move(Load& load, size_t number, Time now) {
  Asked& asked = load.sources[number];
  const auto met = peers_.find(asked.agent);
  const Time heard = met == peers_.end() ? asked.heard : std::max(asked.heard, met->second->heard);
  const Time silence = load.order.silence;
  if (silence > Time{} && now - heard >= silence) {
    return absl::UnavailableError(
        absl::StrCat("prefill ", asked.agent, " is silent for ", seconds(silence), " s"));
  }
  if (now - asked.looked >= kAsk) {
    if (absl::Status status = look(load, asked, now); !status.ok()) return status;
  }
  const auto known = peers_.find(asked.agent);
  const std::shared_ptr<Peer> peer = known == peers_.end() ? nullptr : known->second;
  if (peer != nullptr && peer->said.has_value()) learn(asked, *peer, now);
  if (peer != nullptr && !peer->refused.empty()) {
    return absl::FailedPreconditionError(peer->refused);
  }
  if (asked.source != nullptr && (peer == nullptr || asked.source != peer->source)) {
    return absl::UnavailableError(absl::StrCat("prefill ", asked.agent, " is gone"));
  }
  if (load.incoming == nullptr || peer == nullptr || peer->source == nullptr ||
      peer->said.has_value()) {
    return absl::OkStatus();
  }
  if (peer->source->ranks != load.order.from.ranks) {
    return absl::FailedPreconditionError(
        absl::StrCat("prefill has ", peer->source->ranks, " ranks, but was expected to have ",
                     load.order.from.ranks, ": pass tp_size in kv_transfer_params"));
  }
  if (asked.source == nullptr) load.incoming->join(number, asked.source = peer->source);
  asked.unknown_blocks = 0;
  for (const json& parts : std::exchange(asked.unknown, {})) {
    try {
      if (absl::Status status = load.incoming->ready(number, parts); !status.ok()) return status;
    } catch (const json::exception& error) {
      return absl::InvalidArgumentError(
          absl::StrCat("cannot parse prefill's message: ", error.what()));
    }
  }
  return absl::OkStatus();
}

// Whether prefill is there; asks it, or first how to reach it.
absl::Status Loads::look(Load& load, Asked& asked, Time now) {
  if (!peers_.contains(asked.agent)) forget_who_went();
  std::shared_ptr<Peer>& peer = peers_[asked.agent];
  if (peer == nullptr) peer = std::make_shared<Peer>();
  if (is_there(asked.agent, *peer)) {
    ask(load, asked, *peer, now);
    return absl::OkStatus();
  }
  if (peer->told) {  // it went, and may have come back
    core_.agent->remove_remote(asked.agent);
    peer = std::make_shared<Peer>();
    if (asked.asked.has_value()) {
      return absl::UnavailableError(absl::StrCat("prefill ", asked.agent, " is gone"));
    }
  }
  const absl::Status status = fetch(asked, *peer, now);
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("prefill ", asked.agent, " at \"", asked.address,
                                                  "\": ", status.message()));
}

absl::Status Loads::fetch(const Asked& asked, Peer& peer, Time now) {
  const auto last = peer.fetched.find(asked.address);
  if (last != peer.fetched.end() && now - last->second < kAsk) return absl::OkStatus();
  peer.fetched[asked.address] = now;
  return core_.agent->ask_metadata(asked.agent, asked.address);
}

// A question is a sign of life too. One at a time: those of ten thousand loads are many.
void Loads::ask(const Load& load, Asked& asked, Peer& peer, Time now) {
  if (load.incoming == nullptr) {
    asked.asked = now;
    return;
  }
  const Time patience = load.order.silence > Time{} ? load.order.silence : kAskAgain;
  if (!asked.answered && now - *asked.asked < patience) {
    asked.looked = now;
    return;
  }
  if (peer.full == steps_) return;
  const absl::StatusOr<std::string> metadata = core_.agent->partial_metadata({}, true);
  if (!metadata.ok()) return;
  json want = core_.mover->about();
  want["kind"] = "want";
  want["transfer"] = load.order.from.transfer;
  want["first"] = !peer.told;
  want["sure"] = load.order.from.finished;
  want["metadata"] = absl::BytesToHexString(*metadata);
  const absl::Status told = core_.tell(asked.agent, want);
  if (absl::IsResourceExhausted(told)) {
    peer.full = steps_;
    return;
  }
  asked.asked = asked.looked = now;  // silence ends what waits for an answer
  asked.answered = false;
  peer.told = true;
}

bool Loads::is_there(const std::string& agent, Peer& peer) {
  if (std::exchange(peer.looked, steps_) != steps_) peer.there = core_.agent->has_remote(agent);
  return peer.there;
}

// Or were never met: names that requests say are not kept for ever.
void Loads::forget_who_went() {
  std::erase_if(peers_, [this](const auto& entry) {
    const auto& [agent, peer] = entry;
    const auto load = by_key_.lower_bound({agent, ""});
    if (load != by_key_.end() && load->first.first == agent) return false;
    if (is_there(agent, *peer)) return false;
    core_.agent->remove_remote(agent);
    return true;
  });
}

void Loads::follow_reads(Load& load) {
  if (load.reads.empty()) return;
  std::erase_if(load.reads, [&](const KvMover::Posted& read) {
    if (!load.why.ok()) core_.agent->abort(read.transfer).IgnoreError();
    const absl::StatusOr<AgentTransferState> state = core_.agent->state(read.transfer);
    if (state.ok() && *state == AgentTransferState::kRunning) return false;
    const bool done = state.ok() && *state == AgentTransferState::kDone;
    if (!done && load.why.ok()) {
      load.why = state.ok() ? core_.agent->status(read.transfer) : state.status();
    }
    core_.agent->release(read.transfer).IgnoreError();
    if (load.why.ok()) load.sources[read.from].heard = core_.clock->now();
    const uint32_t before = load.incoming->layers();
    load.why.Update(load.incoming->landed(read.transfer, load.why.ok()));
    if (load.incoming->layers() == before) return true;
    const std::lock_guard lock(mutex_);
    View& view = views_[load.order.id];
    view.layers = load.incoming->layers();
    view.exact = load.incoming->exact();
    core_.wake_engine();
    return true;
  });
  if (load.reads.empty()) load.reading += core_.clock->now() - load.reading_since;
}

// Whether it was said, or no agent is there to hear it.
bool Loads::say_done(const Key& whom) {
  const auto& [agent, transfer] = whom;
  const auto known = peers_.find(agent);
  if (known == peers_.end()) return true;
  Peer& peer = *known->second;
  if (peer.full == steps_) return false;
  const absl::Status told =
      core_.tell(agent, {{"kind", "done"}, {"transfer", transfer}, {"ranks", core_.shard.ranks}});
  if (!absl::IsResourceExhausted(told)) return true;
  peer.full = steps_;
  return false;
}

bool Loads::end_if_over(Load& load) {
  const bool complete =
      load.incoming != nullptr
          ? load.incoming->complete()
          : std::all_of(load.sources.begin(), load.sources.end(),
                        [](const Asked& asked) { return asked.asked.has_value(); });
  if (!load.reads.empty() || (load.why.ok() && !complete)) return false;
  for (const Asked& asked : load.sources) {
    unsaid_.emplace_back(asked.agent, load.order.from.transfer);
  }
  if (load.wanted) report(load, load.why);
  return true;
}

void Loads::report(const Load& load, const absl::Status& status) {
  const std::lock_guard lock(mutex_);
  View& view = views_[load.order.id];
  view.took = core_.clock->now() - load.started;
  view.reading = load.reading;
  view.status = status;
  view.over = true;
  core_.wake_engine();
}

}  // namespace baton::kvtransfer::session
