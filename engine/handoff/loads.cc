// The decode side of a hand-off: orders of the engine's, and what is said to prefill and by it.
#include "engine/handoff/loads.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"
#include "engine/handoff/block_converter.h"
#include "transport/base/log.h"

namespace baton::engine::handoff {
namespace {

using kvtransfer::KvLoad;
using kvtransfer::KvRequestId;
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

absl::Status Loads::check(const KvLoad& load) const {
  if (!core_.cache.has_value()) {
    return absl::FailedPreconditionError("use_cache() comes before the first load");
  }
  if (!load.transfer.has_value()) {
    return absl::InvalidArgumentError("a load by hand-off needs the name of its transfer");
  }
  if (load.first_token >= load.tokens.size() || load.first_token % kBlockTokens != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a load of tokens ", load.first_token, " to ", load.tokens.size(),
                     ": it is empty, or does not start at a block's first token"));
  }
  const size_t wanted = (load.tokens.size() - load.first_token - 1) / kBlockTokens + 1;
  if (load.blocks.size() != wanted) {
    return absl::InvalidArgumentError(
        absl::StrCat(load.blocks.size(), " blocks for KV that fills ", wanted));
  }
  for (const uint32_t block : load.blocks) {
    if (block < core_.cache->num_blocks()) continue;
    return absl::InvalidArgumentError(absl::StrCat("block ", block, " of a cache that has ",
                                                   core_.cache->num_blocks(), " blocks"));
  }
  return absl::OkStatus();
}

absl::Status Loads::start(KvLoad load) {
  if (absl::Status status = check(load); !status.ok()) return status;
  kvtransfer::KvTransfer from = *std::move(load.transfer);
  if (!is_text(from.transfer) || !is_text(from.agent)) {
    return absl::InvalidArgumentError("the names of a transfer and of an agent must be UTF-8");
  }
  const std::lock_guard lock(mutex_);
  if (closed_) return closed();
  if (!views_.try_emplace(load.id).second) {
    return absl::AlreadyExistsError(absl::StrCat("load ", load.id, " is already in progress"));
  }
  orders_.push_back({std::move(from), std::move(load)});
  core_.wake_thread();
  return absl::OkStatus();
}

void Loads::decline(const kvtransfer::KvTransfer& from) {
  const std::lock_guard lock(mutex_);
  if (closed_ || !is_text(from.transfer) || !is_text(from.agent)) return;
  orders_.push_back({from, std::nullopt});
  core_.wake_thread();
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

// --- the service's thread

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
  load.heard = now;
  load.answered = true;
  if (message.at("kind") == "gone") {
    load.why = absl::NotFoundError("prefill no longer has it");
  } else if (message.at("kind") == "ready" && load.wanted.has_value()) {
    const json& parts = message.at("parts");
    for (const json& part : parts) load.unknown_blocks += 1 + part.at(2).size();
    const size_t whole = core_.own.layers.size() * load.wanted->tokens.size();
    if (load.unknown_blocks > std::max(kMostUnknown, 2 * whole)) {
      load.why =
          absl::InvalidArgumentError("prefill keeps reporting blocks without describing its cache");
      return;
    }
    load.unknown.push_back(parts);
  }
}

// What a prefill says of its cache. What is not ours is the status.
absl::StatusOr<std::shared_ptr<Loads::Peer>> Loads::understand(
    const json& message, std::vector<kvtransfer::StridedDescriptor>& rows) const {
  if (const json& refused = member(message, "refused"); refused.is_string()) {
    return absl::FailedPreconditionError(refused.get<std::string>());
  }
  absl::StatusOr<ForeignLayout> layout = core_.layout_in(message);
  if (!layout.ok()) return layout.status();
  if (core_.staging->pieces(layout->bytes) == 0) {
    return absl::ResourceExhaustedError(absl::StrCat("a block of its cache has ", layout->bytes,
                                                     " bytes: use more --kv-staging-mib"));
  }
  auto peer = std::make_shared<Peer>();
  uint64_t start = 0;
  for (const json& row : message.at("rows")) {
    rows.push_back({.address = row.at(0).get<uint64_t>(),
                    .bytes = row.at(1).get<uint64_t>(),
                    .device = row.at(2).get<uint64_t>(),
                    .stride = row.at(3).get<uint64_t>(),
                    .count = row.at(4).get<uint64_t>()});
    if (rows.back().bytes != layout->bytes || !rows.back().span().has_value()) {
      return absl::FailedPreconditionError("its rows do not match the layout that it reports");
    }
    peer->starts.push_back(start);
    peer->counts.push_back(rows.back().count);
    start += rows.back().count;
  }
  if (rows.size() != layout->layers.size()) {
    return absl::FailedPreconditionError("its number of rows differs from its number of layers");
  }
  // Values are rounded where the types differ, so only one's own type is exact.
  peer->exact = member(message, "fingerprint") == core_.fingerprint &&
                layout->dtype == kvtransfer::KvDtype::kBfloat16;
  peer->layout = *std::move(layout);
  return peer;
}

// By what a prefill has said of its cache, once we know that memory: of who has asked us only how
// to reach it is known. `peer` is another one if the cache is.
void Loads::learn(const Load& load, std::shared_ptr<Peer>& peer, Time now) {
  const auto refuse = [&](absl::string_view why) {
    peer->refused = absl::StrCat("prefill ", load.agent, ": ", why);
    peer->said.reset();
  };
  absl::StatusOr<std::shared_ptr<Peer>> found = absl::UnknownError("");
  std::vector<kvtransfer::StridedDescriptor> rows;
  try {
    found = understand(*peer->said, rows);
  } catch (const json::exception& error) {
    return refuse(error.what());
  }
  if (!found.ok()) return refuse(found.status().message());
  std::vector<kvtransfer::Descriptor> spans;
  for (const kvtransfer::StridedDescriptor& row : rows) spans.push_back(*row.span());
  if (!core_.agent->has_remote(load.agent, spans)) {
    fetch(load, *peer, now).IgnoreError();  // the agent that requested it has been reached
    return;
  }
  const auto list =
      core_.agent->prepare_remote(load.agent, absl::MakeConstSpan(std::as_const(rows)));
  if (!list.ok()) return refuse(list.status().message());
  if (peer->layout.has_value()) core_.agent->release_list(peer->blocks).IgnoreError();
  if (peer->layout == (*found)->layout && peer->counts == (*found)->counts) {
    peer->blocks = *list;  // loads that are under way go on
    peer->said.reset();
    peer->refused.clear();
    return;
  }
  (*found)->blocks = *list;
  (*found)->told = true;
  (*found)->heard = peer->heard;
  (*found)->fetched = std::move(peer->fetched);
  peer = *std::move(found);
}

bool Loads::step() {
  std::deque<Order> orders;
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
    for (Load& load : loads_) load.heard += deaf;
  }
  for (Order& order : orders) begin(std::move(order), now);
  for (auto it = loads_.begin(); it != loads_.end();) {
    move(*it);
    const auto at = it++;
    if (!end_if_over(*at)) continue;
    by_key_.erase({at->agent, at->from.transfer});
    loads_.erase(at);
  }
  std::erase_if(unsaid_, [this](const Key& whom) { return say_done(whom); });
  return !loads_.empty() || !unsaid_.empty();
}

void Loads::begin(Order order, Time now) {
  std::string agent = absl::StrCat(order.from.agent, "/0");  // as workers of an engine are numbered
  const Key key(agent, order.from.transfer);
  if (by_key_.contains(key)) {  // what is declined meanwhile is still wanted
    if (!order.load.has_value()) return;
    return report(order.load->id,
                  absl::AlreadyExistsError(absl::StrCat("another request loads transfer \"",
                                                        order.from.transfer, "\" of ", agent)));
  }
  Load& load = loads_.emplace_back();
  by_key_[key] = &load;
  load.agent = std::move(agent);
  load.from = std::move(order.from);
  load.wanted = std::move(order.load);
  load.started = load.heard = now;
  load.looked = now - kAsk;
}

void Loads::move(Load& load) {
  const Time now = core_.clock->now();
  if (load.wanted.has_value() && load.why.ok()) {
    const std::lock_guard lock(mutex_);
    if (views_[load.wanted->id].unwanted) load.why = absl::CancelledError("it is not wanted");
  }
  const Time timeout = load.wanted.has_value() ? load.wanted->timeout : patient(kDeclineTimeout);
  const Time silence = load.wanted.has_value() ? load.wanted->silence : Time{};
  if (load.why.ok()) {
    const auto met = peers_.find(load.agent);
    const Time heard = met == peers_.end() ? load.heard : std::max(load.heard, met->second->heard);
    if (now - load.started >= timeout) {
      load.why =
          absl::DeadlineExceededError(absl::StrCat("not complete after ", seconds(timeout), " s"));
    } else if (silence > Time{} && now - heard >= silence) {
      load.why = absl::UnavailableError(
          absl::StrCat("prefill ", load.agent, " is silent for ", seconds(silence), " s"));
    } else if (now - load.looked >= kAsk) {
      look(load, now);
    }
  }
  const auto known = peers_.find(load.agent);
  if (load.why.ok() && known != peers_.end() && known->second->said.has_value()) {
    learn(load, known->second, now);
  }
  const std::shared_ptr<const Peer> peer = known == peers_.end() ? nullptr : known->second;
  if (load.why.ok() && peer != nullptr && !peer->refused.empty()) {
    load.why = absl::FailedPreconditionError(peer->refused);
  }
  if (load.why.ok() && load.peer != nullptr && load.peer != peer) {
    load.why = absl::UnavailableError(absl::StrCat("prefill ", load.agent, " is gone"));
  }
  const bool known_memory = peer != nullptr && peer->layout.has_value() && !peer->said.has_value();
  if (load.why.ok() && load.wanted.has_value() && known_memory) {
    if (load.peer == nullptr) begin_parts(load, peer);
    for (const json& parts : std::exchange(load.unknown, {})) {
      try {
        load.why.Update(take_ready(load, parts));
      } catch (const json::exception& error) {
        load.why = absl::InvalidArgumentError(
            absl::StrCat("cannot parse prefill's message: ", error.what()));
      }
    }
    load.unknown_blocks = 0;
    if (load.why.ok()) load.why = read(load);
  }
  follow_reads(load);
}

// Whether prefill is there; asks it, or first how to reach it.
void Loads::look(Load& load, Time now) {
  if (!peers_.contains(load.agent)) forget_who_went();
  std::shared_ptr<Peer>& peer = peers_[load.agent];
  if (peer == nullptr) peer = std::make_shared<Peer>();
  if (is_there(load.agent, *peer)) return ask(load, *peer, now);
  if (peer->told) {  // it went, and may have come back
    core_.agent->remove_remote(load.agent);
    peer = std::make_shared<Peer>();
    if (load.asked.has_value()) {
      load.why = absl::UnavailableError(absl::StrCat("prefill ", load.agent, " is gone"));
      return;
    }
  }
  if (absl::Status status = fetch(load, *peer, now); !status.ok()) {
    load.why =
        absl::Status(status.code(), absl::StrCat("prefill ", load.agent, " at \"",
                                                 load.from.address, "\": ", status.message()));
  }
}

absl::Status Loads::fetch(const Load& load, Peer& peer, Time now) {
  const auto last = peer.fetched.find(load.from.address);
  if (last != peer.fetched.end() && now - last->second < kAsk) return absl::OkStatus();
  peer.fetched[load.from.address] = now;
  return core_.agent->ask_metadata(load.agent, load.from.address);
}

// A question is a sign of life too. One at a time: those of ten thousand loads are many.
void Loads::ask(Load& load, Peer& peer, Time now) {
  if (!load.wanted.has_value()) {
    load.asked = now;
    return;
  }
  const Time patience = load.wanted->silence > Time{} ? load.wanted->silence : kAskAgain;
  if (!load.answered && now - *load.asked < patience) {
    load.looked = now;
    return;
  }
  if (peer.full == steps_) return;
  const absl::StatusOr<std::string> metadata = core_.agent->partial_metadata({}, true);
  if (!metadata.ok()) return;
  const absl::Status told = core_.tell(load.agent, {{"kind", "want"},
                                                    {"transfer", load.from.transfer},
                                                    {"first", !peer.told},
                                                    {"sure", load.from.finished},
                                                    {"metadata", absl::BytesToHexString(*metadata)},
                                                    {"identity", core_.model},
                                                    {"model", core_.model},
                                                    {"fingerprint", core_.fingerprint},
                                                    {"kv", core_.own.say()}});
  if (absl::IsResourceExhausted(told)) {
    peer.full = steps_;
    return;
  }
  load.asked = load.looked = now;  // silence ends what waits for an answer
  load.answered = false;
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

// Whether it was said, or no agent is there to hear it.
bool Loads::say_done(const Key& whom) {
  const auto& [agent, transfer] = whom;
  const auto known = peers_.find(agent);
  if (known == peers_.end()) return true;
  Peer& peer = *known->second;
  if (peer.full == steps_) return false;
  const absl::Status told = core_.tell(agent, {{"kind", "done"}, {"transfer", transfer}});
  if (!absl::IsResourceExhausted(told)) return true;
  peer.full = steps_;
  return false;
}

bool Loads::complete(const Load& load) const {
  if (!load.wanted.has_value()) return load.asked.has_value();
  return load.peer != nullptr && std::all_of(load.missing.begin(), load.missing.end(),
                                             [](size_t missing) { return missing == 0; });
}

bool Loads::end_if_over(Load& load) {
  if (!load.reads.empty() || (load.why.ok() && !complete(load))) return false;
  unsaid_.emplace_back(load.agent, load.from.transfer);
  if (load.wanted.has_value()) report(load.wanted->id, load.why);
  return true;
}

void Loads::report(KvRequestId id, const absl::Status& status) {
  const std::lock_guard lock(mutex_);
  View& view = views_[id];
  view.status = status;
  view.over = true;
  core_.wake_engine();
}

}  // namespace baton::engine::handoff
