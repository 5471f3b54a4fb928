// What a load says to prefill, and what it hears of it.
#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kvtransfer/session/loads.h"

namespace baton::kvtransfer::session {
namespace {

using nlohmann::json;

// For a peer that has not answered, where the load allows any silence.
constexpr Time kAskAgain = std::chrono::seconds(1);
constexpr Time kMargin = std::chrono::seconds(2);
constexpr Time kLongestLeft = std::chrono::hours(24);
// Bytes of messages that name ready blocks before prefill has described its cache: at least so
// many, and so many for each token.
constexpr size_t kMostUnknown = 16 << 20, kMostOfToken = 64;

}  // namespace

void Loads::heard(const std::string& sender, const json& message, size_t bytes) {
  const auto known = peers_.find(sender);
  if (known == peers_.end()) return;
  const Time now = core_.clock->now();
  known->second->heard = now;
  if (message.at("kind") == "layout") {
    known->second->said = message;
    return;
  }
  known->second->silent = false;
  const auto it = by_key_.find({sender, message.at("transfer").get<std::string>()});
  if (it == by_key_.end()) return;
  Load& load = *it->second;
  if (message.value("load", load.serial) != load.serial) return;  // of a load before this one
  Asked& asked = *std::find_if(load.sources.begin(), load.sources.end(),
                               [&sender](const Asked& each) { return each.agent == sender; });
  if (message.contains("parts")) asked.unknown_bytes += bytes;
  answered(load, asked, message, now);
}

void Loads::answered(Load& load, Asked& asked, const json& message, Time now) {
  const std::string kind = message.at("kind").get<std::string>();
  asked.heard = now;
  asked.answered = true;
  // Prefill's last word is on its way behind an answer that it is over.
  const bool bare = kind == "gone" && !message.contains("code");
  if (load.hears && asked.known && bare && load.why.ok()) return;
  asked.known = true;
  if (kind == "over" || kind == "gone") {
    const auto code = message.value("code", kind == "gone" ? int(absl::StatusCode::kNotFound) : 0);
    if (code != 0 && (load.incoming == nullptr || !load.incoming->complete())) {
      fail(load, absl::Status(static_cast<absl::StatusCode>(code),
                              message.value("why", std::string("prefill no longer has it"))));
    }
    if (std::exchange(asked.told, true)) return;  // it may take that word back: its lease is over
    asked.writes = message.value("writes", size_t{0});
    const std::lock_guard lock(mutex_);
    View* const view = view_of(load);
    if (view == nullptr || &asked != &load.sources.front()) return;
    view->told = true;
    if (code == 0) view->payload = absl::HexStringToBytes(message.value("payload", std::string()));
    core_.wake_engine();
    return;
  }
  if (!load.why.ok() || load.incoming == nullptr) return;
  if (kind == "alive") {
    asked.reading = std::max(asked.reading, message.value("reading", uint64_t{0}));
    const double lease = message.value("lease", 0.0);  // less what two clocks may differ by
    const double most = std::clamp(lease * 511 / 512, 0.0, 86400.0);
    const Time held(static_cast<int64_t>(most * 1e9));
    const Time at(message.value("at", int64_t{0}));  // when this was asked
    asked.confirmed = std::max(asked.confirmed, std::min(at, asked.asked.value_or(now)) + held);
    if (held > Time{}) asked.often = held / 4;
    if (asked.source == nullptr) return;
    const uint32_t before = load.incoming->layers();
    load.incoming->held(static_cast<size_t>(&asked - load.sources.data()), asked.confirmed, now);
    return note_layers(load, before);
  }
  if (kind != "ready" && kind != "wrote") return;
  size_t whole = 0;
  for (const KvRun& run : load.order.runs) whole = std::max<size_t>(whole, run.tokens.end);
  if (asked.unknown_bytes > std::max(kMostUnknown, kMostOfToken * core_.mover->layers() * whole)) {
    return fail(load, absl::InvalidArgumentError(
                          "prefill keeps reporting blocks without describing its cache"));
  }
  asked.wrote += kind == "wrote" ? 1 : 0;
  if (!message.contains("of")) return asked.unknown.push_back(message);
  const auto reading = message["of"].at(0).get<uint64_t>();
  const auto number = message["of"].at(1).get<uint64_t>();
  if (reading < asked.saying) return;
  if (reading > std::exchange(asked.saying, reading)) {
    asked.ahead.clear();
    asked.next = 0;
  }
  if (number >= asked.next) asked.ahead.emplace(number, message);
  for (; !asked.ahead.empty() && asked.ahead.begin()->first == asked.next; ++asked.next) {
    asked.unknown.push_back(std::move(asked.ahead.begin()->second));
    asked.ahead.erase(asked.ahead.begin());
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
    if (!core_.agent->has_remote(asked.agent, (*found)->spans, (*found)->kind)) {
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

// Finds the agent's name where only an address is known. False: it is not reached yet.
bool Loads::find_name(Load& load, Asked& asked) {
  const absl::StatusOr<std::string> found = core_.agent->name_at(asked.address);
  const std::string name = found.value_or("");
  if (name.empty()) {
    if (asked.called && !found.ok()) fail(load, not_reached(asked, found.status()));
    return false;
  }
  asked.agent = name;
  if (!by_key_.try_emplace({name, load.order.from.transfer}, &load).second) {
    fail(load, absl::AlreadyExistsError(absl::StrCat(name, " is named twice")));
  }
  return true;
}

absl::Status Loads::not_reached(const Asked& asked, const absl::Status& why) {
  return absl::Status(why.code(), absl::StrCat("prefill ", asked.agent, " at \"", asked.address,
                                               "\": ", why.message()));
}

int64_t Loads::life_at(Time now) const {  // of no other agent of this name
  return static_cast<int64_t>(turn_of(core_.agent->address()) ^ static_cast<uint64_t>(now.count()));
}

// Whether prefill is there; asks it, or first how to reach it.
absl::Status Loads::look(Load& load, Asked& asked, Time now) {
  if (!peers_.contains(asked.agent)) forget_who_went();
  std::shared_ptr<Peer>& peer = peers_[asked.agent];
  if (peer == nullptr) peer = std::make_shared<Peer>(Peer{.life = life_at(now)});
  const auto gone = [&] {
    return absl::UnavailableError(absl::StrCat("prefill ", asked.agent, " is gone"));
  };
  if (asked.asked.has_value() && asked.met != peer) return gone();  // another load has noticed
  if (is_there(asked.agent, *peer)) {
    ask(load, asked, *peer, now);
    if (asked.asked.has_value()) asked.met = peer;
    return absl::OkStatus();
  }
  peer->silent = false;
  if (peer->told) {  // it went, and may have come back
    core_.agent->remove_remote(asked.agent);
    peer = std::make_shared<Peer>(Peer{.life = life_at(now)});
    if (asked.asked.has_value()) return gone();
  }
  absl::Status status = fetch(asked, *peer, now);
  // A load that asks for a prompt does not wait until a prefill is started.
  if (status.ok() && load.hears && asked.called) {
    status = core_.agent->name_at(asked.address).status();
  }
  asked.called = true;
  return status.ok() ? status : not_reached(asked, status);
}

absl::Status Loads::fetch(const Asked& asked, Peer& peer, Time now) {
  const auto last = peer.fetched.find(asked.address);
  if (last != peer.fetched.end() && now - last->second < kAsk) return absl::OkStatus();
  peer.fetched[asked.address] = now;
  return core_.agent->ask_metadata(asked.agent, asked.address);
}

// False: the engine has ended it. From here on something of it may come.
bool Loads::may_ask(const Load& load) {
  const std::lock_guard lock(mutex_);
  View* const view = view_of(load);
  if (view != nullptr) view->asked = true;
  return view != nullptr;
}

// A question is a sign of life too. One at a time: those of ten thousand loads are many.
void Loads::ask(const Load& load, Asked& asked, Peer& peer, Time now) {
  if (load.incoming == nullptr) {
    asked.asked = now;
    return;
  }
  const Time patience = load.hears && asked.known     ? std::min(kAsk, asked.often)
                        : load.order.silence > Time{} ? load.order.silence
                                                      : kAskAgain;
  if (!asked.answered && now - *asked.asked < patience) {
    asked.looked = now;
    return;
  }
  if (peer.full == steps_ || !may_ask(load)) return;
  const absl::Status told = say(peer, asked.agent, want_of(load, asked, peer, now));
  if (absl::IsResourceExhausted(told)) return;
  asked.asked = asked.looked = now;  // silence ends what waits for an answer
  asked.answered = false;
  peer.told = true;
  const std::lock_guard lock(mutex_);
  last_ = asked.agent;
}

json Loads::want_of(const Load& load, const Asked& asked, const Peer& peer, Time now) const {
  const KvOrder& order = load.order;
  const bool whole = !asked.known || !load.hears;  // what is wanted, too
  json want = whole ? core_.mover->about() : json::object();
  want["kind"] = "want";
  want["transfer"] = order.from.transfer;
  want["load"] = load.serial;
  want["first"] = !peer.told;
  want["life"] = peer.life;
  if (whole && load.hears && asked.asked.has_value()) want["again"] = true;
  if (!whole) want["reading"] = asked.reading;
  want["sure"] = order.from.finished || (load.hears && asked.known);
  if (whole) {
    const auto metadata =
        order.push ? core_.agent->metadata() : core_.agent->partial_metadata({}, true);
    if (metadata.ok()) want["metadata"] = absl::BytesToHexString(*metadata);
  }
  want["at"] = now.count();
  if (!load.hears) return want;
  const Time left = order.timeout - (now - load.started);
  want["hears"] = true;
  want["session"] = kSessionVersion;
  // Prefill ends what it writes somewhat later than decode, which says why.
  want["lease"] = seconds(order.push ? std::min(left, kLongestLeft) + kMargin : order.lease);
  if (order.lease <= Time{} && !order.push) want.erase("lease");  // prefill's own
  if (!whole) return want;
  want.update(core_.mover->about_blocks());
  want["push"] = order.push;
  want["loads"] = order.loads;
  want["request"] = order.id;
  if (asked.share) want["share"] = {asked.share->ranks, asked.share->rank, asked.share->turn};
  want["runs"] = json::array();
  for (const KvRun& run : order.runs) {
    want["runs"].push_back({run.first_block, order.push ? json(run.blocks) : json::array(),
                            run.tokens.begin, run.tokens.end});
  }
  if (order.tokens.empty()) return want;
  const std::string_view tokens(reinterpret_cast<const char*>(order.tokens.data()),
                                order.tokens.size() * sizeof(int32_t));
  want["ask"] = {{"tokens", absl::BytesToHexString({tokens.data(), tokens.size()})},
                 {"first_token", order.first_token},
                 {"request", order.id},
                 {"timeout", seconds(left)},
                 {"decode", order.decode.empty() ? core_.agent->name() : order.decode}};
  return want;
}

absl::Status Loads::say(Peer& peer, const std::string& agent, const json& message) {
  absl::Status told = core_.tell(agent, message);
  if (absl::IsResourceExhausted(told)) peer.full = steps_;
  return told;
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

// True: it was said, or the agent is gone.
bool Loads::say_done(const Key& whom, const json& done) {
  const std::string& agent = whom.first;
  const auto known = peers_.find(agent);
  if (known == peers_.end()) return true;
  Peer& peer = *known->second;
  if (peer.full == steps_) return false;
  return !absl::IsResourceExhausted(say(peer, agent, done));
}

// Prefill hears that nothing of a load that hears is wanted or read any more: when it has answered,
// so that this does not overtake the question. One that writes is asked until it has said that it
// writes no more, or is gone.
void Loads::let_go(Load& load, Time now) {
  for (Asked& asked : load.sources) {
    const auto known = peers_.find(asked.agent);
    if (!asked.asked.has_value() || known == peers_.end()) {
      asked.told = asked.said_done = true;  // it was asked nothing
      continue;
    }
    Peer& peer = *known->second;
    if (now - asked.looked >= kAsk && !(asked.told && asked.said_done)) {
      asked.looked = now;
      if (!is_there(asked.agent, peer)) {
        core_.agent->remove_remote(asked.agent);  // nothing of it lands here any more
        asked.told = asked.said_done = true;
        const std::lock_guard lock(mutex_);
        if (View* const view = view_of(load); view != nullptr) view->told = view->over;
        continue;
      }
      if (!asked.told) asked.said_done = false;  // once more
    }
    const bool whole = load.why.ok();
    if (asked.said_done || peer.full == steps_ || (!asked.known && !asked.told)) continue;
    if (whole && load.order.push && !asked.told) continue;  // its last word is on its way
    const json done = {{"kind", "done"},
                       {"transfer", load.order.from.transfer},
                       {"load", load.serial},
                       {"ranks", core_.shard.ranks},
                       {"loads", load.order.loads},
                       {"hears", true},
                       {"reading", asked.reading},
                       {"read", whole}};
    asked.said_done = !absl::IsResourceExhausted(say(peer, asked.agent, done));
  }
}

// Other readers of the transfer must not wait for a load that was given up before it asked.
void Loads::decline(const Load& load, Time now) {
  const Time left = load.order.timeout - (now - load.started);
  if (load.why.ok() || load.order.loads < 2 || left <= Time{}) return;
  KvOrder order;
  order.from.transfer = load.order.from.transfer;
  order.loads = load.order.loads;
  order.timeout = left;
  for (const Asked& asked : load.sources) {
    const bool heard = asked.asked.has_value();
    order.from.workers.push_back({asked.agent, heard ? "" : asked.address});
  }
  const std::lock_guard lock(mutex_);
  orders_.emplace_back(std::move(order), 0);
}

}  // namespace baton::kvtransfer::session
