// What prefill hears of its readers, and what it tells them.
#include <algorithm>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kvtransfer/session/sends.h"
#include "transport/base/log.h"

namespace baton::kvtransfer::session {
namespace {

using nlohmann::json;

constexpr size_t kMostAwaited = 1 << 14;  // transfers that were asked for before their request came
constexpr size_t kMostReadings = 4096;    // of a transfer, also of those that began anew
constexpr size_t kMostUnsaid = 1 << 16;   // messages to a reader that takes none
constexpr size_t kSumsAtOnce = 2000;      // in a message: a slow reader delays longer ones
constexpr Time kLookForReaders = std::chrono::milliseconds(10);

// Decode's number of the load; 0: an older release, which says none.
uint64_t load_in(const json& message) { return message.value("load", uint64_t{0}); }

}  // namespace

json Sends::word(const char* kind, const std::string& transfer, uint64_t load) {
  json out = {{"kind", kind}, {"transfer", transfer}};
  if (load != 0) out["load"] = load;
  return out;
}

json Sends::gone(const std::string& transfer, uint64_t load, const absl::Status& why) {
  json out = word("gone", transfer, load);
  if (!why.ok()) out.update({{"code", why.code()}, {"why", std::string(why.message())}});
  return out;
}

// --- the session's thread

void Sends::heard(const std::string& sender, const json& message) {
  if (message.at("kind") == "want") return wanted(sender, message);
  const size_t readers = count_readers(message);
  const bool hears = message.value("hears", json()) == true;
  const std::string transfer = message.at("transfer").get<std::string>();
  const std::lock_guard lock(mutex_);
  auto it = sends_.find(transfer);
  Reading* reading = it == sends_.end() ? nullptr : find(*it->second, sender, load_in(message));
  if (reading == nullptr && hears) return say(sender, lost(sender, message));
  // One of several gave up before it asked: those that ask do not wait for it.
  if (it == sends_.end() && message.value("never", json()) == true && readers > 1 &&
      awaited_ < kMostAwaited) {
    entry(transfer);
    it = sends_.find(transfer);
  }
  if (it == sends_.end() || readers == 0) return;
  Send& send = *it->second;
  if (reading == nullptr && send.readings.size() >= kMostReadings) return;
  send.needed = std::max(send.needed, readers);
  if (reading == nullptr) reading = &send.readings.emplace_back(Reading{.who = sender});
  if (reading->hears && reading->why.ok() && message.value("read", json()) != true) {
    reading->why = absl::CancelledError("cancelled");
  }
  if (!reading->push) reading->ended = true;
  if (!reading->hears) reading->shown.reset();
}

// To a reader that this has no reading of: its last word is on its way, or was lost with the
// connection to it.
json Sends::lost(const std::string& reader, const json& message) const {
  const std::string transfer = message.at("transfer").get<std::string>();
  const auto known = readers_.find(reader);
  if (known != readers_.end() && message.value("reading", UINT64_MAX) >= known->second.since) {
    return gone(transfer, load_in(message));
  }
  return gone(transfer, load_in(message),
              absl::UnavailableError("prefill had lost its connection to decode"));
}

// Learns how to reach a reader, and how its cache is laid out.
absl::StatusOr<Sends::Reader> Sends::meet(const std::string& sender, const json& message) {
  const std::string metadata = message.at("metadata").get<std::string>();
  core_.agent->add_remote(absl::HexStringToBytes(metadata)).status().IgnoreError();
  {
    const std::lock_guard lock(mutex_);
    forget(sender);
  }
  const absl::StatusOr<Reader> reader = core_.mover->meet(sender, message);
  if (!reader.ok()) {
    base::log_event(base::LogLevel::kWarning, "cannot hand KV over to %s: %s", sender,
                    reader.status().message());
  }
  json layout = core_.mover->layout(message, reader);
  layout["kind"] = "layout";
  say(sender, std::move(layout));
  readers_.insert_or_assign(sender, Met{reader, message.value("life", int64_t{0}), next_reading_});
  return reader;
}

void Sends::wanted(const std::string& sender, const json& message) {
  const auto known = readers_.find(sender);
  const bool hears = message.value("hears", json()) == true;
  const bool whole = !hears || message.contains("runs");
  const std::string transfer = message.at("transfer").get<std::string>();
  const uint64_t load = load_in(message);
  // One that was met is met again where it takes us for another: of its first wants the second may
  // have come first.
  const bool first = known == readers_.end() ||
                     (message.contains("life") ? whole && message["life"] != known->second.life
                                               : message.value("first", json()) == true);
  if (first && (!whole || message.value("again", json()) == true)) {
    return say(sender, lost(sender, message));
  }
  const absl::StatusOr<Reader> reader = first ? meet(sender, message) : known->second.reader;
  if (!first && message.value("push", json()) == true && message.contains("metadata")) {
    // It may have been met as one that reads, whose memory is not known.
    core_.agent->add_remote(absl::HexStringToBytes(message["metadata"].get<std::string>()))
        .status()
        .IgnoreError();
  }
  const bool sure = message.value("sure", json()) == true;
  const std::lock_guard lock(mutex_);
  if (!reader.ok()) {
    // Its done counts, even before the request comes.
    if (!sure && awaited_ < kMostAwaited) entry(transfer);
    if (!hears) return;
    return say(sender, gone(transfer, load,
                            absl::FailedPreconditionError(
                                absl::StrCat("prefill cannot read what decode says of its cache: ",
                                             reader.status().message()))));
  }
  const auto it = sends_.find(transfer);
  if (hears && (it == sends_.end() || find(*it->second, sender, load) == nullptr)) {
    if (!whole) return say(sender, lost(sender, message));
    if (message.value("again", json()) == true) return;  // its first is on its way
  }
  if (it == sends_.end() && (sure || awaited_ >= kMostAwaited)) {
    return say(sender, gone(transfer, load));
  }
  Send& send = entry(transfer);  // where it is new: the request is still on its way here
  const bool here = !send.dropped && !send.refused && is_shown(send, sender, *reader, message);
  if (!here) return say(sender, gone(transfer, load, send.outcome));
  json answer = word("alive", transfer, load);
  if (message.contains("at")) answer["at"] = message["at"];
  const Time now = core_.clock->now();
  send.expires = now + lease_;  // each want renews
  Reading& reading = *find(send, sender, load);
  if (reading.hears) {
    const double asked = message.value("lease", seconds(lease_));
    const Time most = reading.push ? Time(std::chrono::hours(24)) : max_lease_;
    const Time lease =
        asked < seconds(most) ? Time(static_cast<int64_t>(std::max(asked, 0.0) * 1e9)) : most;
    // Where it has ended the engine may have its blocks back.
    if (reading.ended && !reading.finished()) {
      return say(sender, gone(transfer, load, reading.why));
    }
    reading.expires = now + lease;
    answer["lease"] = seconds(lease);
    answer["reading"] = reading.number;
  }
  say(sender, std::move(answer));
}

// Its agent is gone, or it has begun anew. Locked.
void Sends::forget(const std::string& reader) {
  readers_.erase(reader);
  unsaid_.erase(reader);
  for (auto& [transfer, send] : sends_) {
    std::erase_if(send->readings, [&](Reading& reading) {
      if (reading.who != reader) return false;
      if (reading.hears && reading.wants()) ++failed_;
      reading.gone = true;
      reading.want.reset();
      return !reading.hears && !reading.ended;
    });
  }
}

Sends::Send& Sends::entry(const std::string& transfer) {
  std::shared_ptr<Send>& send = sends_[transfer];
  if (send == nullptr) {
    send = std::make_shared<Send>();
    send->transfer = transfer;
    send->expires = core_.clock->now() + lease_;
    ++awaited_;
  }
  return *send;
}

// A reader that hears may load one transfer again: each of its loads is a reading of its own.
Sends::Reading* Sends::find(Send& send, const std::string& sender, uint64_t load) {
  for (Reading& reading : send.readings) {
    const bool same = !reading.hears || reading.load == load;
    if (reading.who == sender && !reading.gone && same) return &reading;
  }
  return nullptr;
}

bool Sends::is_shown(Send& send, const std::string& sender, const Reader& reader,
                     const json& message) {
  if (const Reading* known = find(send, sender, load_in(message)); known != nullptr) {
    if (known->hears || !known->ended) {
      return known->shown == nullptr || known->shown->fits().ok();  // else it hears why
    }
    std::erase_if(send.readings, [&](const Reading& each) { return &each == known; });
  }
  if (send.readings.size() >= kMostReadings) return false;
  Reading reading{.who = sender,
                  .number = next_reading_++,
                  .load = load_in(message),
                  .reader = reader,
                  .want = std::make_shared<json>(message)};
  reading.hears = message.value("hears", json()) == true;
  reading.push = message.value("push", json()) == true;
  reading.request = message.value("request", uint64_t{0});
  if (reading.hears) reading.why = core_.mover->serves(reader, message);
  if (reading.hears && reading.why.ok()) reading.why = join(send, sender, message);
  if (send.number != 0 && reading.why.ok()) {
    reading.shown = send.kept->show(reader, !send.released, message);
    if (reading.shown == nullptr) return false;
  }
  if (message.contains("ranks")) send.needed = std::max(send.needed, count_readers(message));
  send.readings.push_back(std::move(reading));
  core_.wake_thread();
  return true;
}

// One that hears how it ends comes to a transfer, which it may ask for. An error: why it will not
// be served.
absl::Status Sends::join(Send& send, const std::string& sender, const json& message) {
  if (message.value("push", json()) != true && !core_.may_be_read) {
    return absl::FailedPreconditionError(
        "this prefill worker does not let its cache be read: set BatonConnectorOptions::allow_pull "
        "there, or load without pull");
  }
  const bool opened = send.number != 0 || !send.prompt.empty();
  if (opened && send.until != Time{} && send.needed > 0 && !may_still_come(send)) {
    return absl::FailedPreconditionError(
        absl::StrCat("job \"", send.transfer,
                     "\" has had all its loads, or its lease is over: ask without the key, or "
                     "have prefill bind it for more loads or for longer"));
  }
  const json& ask = message.value("ask", json());
  std::vector<int32_t> tokens;
  if (ask.is_object()) {
    const std::string bytes = absl::HexStringToBytes(ask.at("tokens").get<std::string>());
    tokens.resize(bytes.size() / sizeof(int32_t));
    if (!tokens.empty()) std::memcpy(tokens.data(), bytes.data(), tokens.size() * sizeof(int32_t));
  }
  const size_t both = std::min(tokens.size(), send.prompt.size());
  if (!std::equal(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(both),
                  send.prompt.begin())) {
    return absl::InvalidArgumentError(
        absl::StrCat("job \"", send.transfer, "\" has different tokens: a key names one request"));
  }
  const size_t most = std::max(send.tokens, send.prompt.size());
  if (opened && most > 0 && tokens.size() > most) {
    return absl::InvalidArgumentError(absl::StrCat("the load asks for ", tokens.size(),
                                                   " tokens, but job \"", send.transfer, "\" has ",
                                                   most));
  }
  if (send.prompt.empty()) send.prompt = tokens;
  const auto loads = message.value("loads", 0U);
  if (!opened && !tokens.empty()) {
    send.asked = {.transfer = send.transfer,
                  .tokens = std::move(tokens),
                  .first_token = ask.value("first_token", 0U),
                  .loads = loads,
                  .request = ask.value("request", uint64_t{0}),
                  .decode = ask.value("decode", sender)};
    send.needed = std::max<size_t>(send.needed, loads);
    send.shared_out = loads == 0;
    const Time now = core_.clock->now();
    const double timeout = ask.value("timeout", 0.0);
    send.until = now + (timeout > 0 && timeout < 86400 ? Time(static_cast<int64_t>(timeout * 1e9))
                                                       : Time(std::chrono::hours(24)));
    asked_.push_back(send.transfer);
    core_.wake_engine();
  }
  return absl::OkStatus();
}

void Sends::tell_ready(const Send& send, Reading& reading, std::vector<Message>* messages) const {
  json parts = json::array();
  size_t room = kSumsAtOnce;
  const auto say = [&] {
    if (parts.empty()) return;
    json ready = word("ready", send.transfer, reading.load);
    ready["of"] = {reading.number, reading.said++};
    ready["parts"] = std::exchange(parts, json::array());
    messages->emplace_back(reading.who, std::move(ready));
    room = kSumsAtOnce;
  };
  reading.told.resize(reading.shown->rows());
  for (size_t row = 0; row < reading.told.size(); ++row) {
    const size_t ready = reading.shown->ready(row);
    const size_t each = reading.shown->checksums(row);
    for (size_t& told = reading.told[row]; told < ready;) {
      const size_t first = reading.shown->first(row) + told;
      json blocks = json::array();
      for (; told < ready && room > 0; room -= std::min(room, each)) {
        blocks.push_back(reading.shown->block(row, told++));
      }
      parts.push_back({row, first, std::move(blocks)});
      if (room == 0) say();
    }
  }
  say();
}

// How many readers of this worker there are, as one of them says: loads, or ranks of a decode
// engine.
size_t Sends::count_readers(const json& message) const {
  if (const auto loads = message.value("loads", 0U); loads > 0) return loads;
  const auto ranks = message.value("ranks", json(1)).get<uint32_t>();
  const KvWorker& me = core_.shard;
  size_t count = 0;
  for (uint32_t rank = 0; ranks <= kMostRanks && rank < ranks; ++rank) {
    for (const uint32_t heard : ranks_heard(me.heads, me.ranks, ranks, rank)) {
      count += heard == me.rank ? 1 : 0;
    }
  }
  return count;
}

void Sends::look_who_went(Time now) {
  if (now - looked_ < kLookForReaders) return;
  looked_ = now;
  std::vector<std::string> went;
  for (const auto& [agent, reader] : readers_) {
    if (!core_.agent->has_remote(agent)) went.push_back(agent);
  }
  for (const std::string& agent : went) forget(agent);
}

// In order; what a reader does not take now, it is told later.
void Sends::say(const std::string& reader, json message) {
  if (!unsaid_.contains(reader)) {
    const absl::Status told = core_.tell(reader, message);
    // One that is gone is found so by who looks for it.
    if (told.ok() || absl::IsInvalidArgument(told) || !core_.agent->has_remote(reader)) return;
  }
  std::deque<json>& unsaid = unsaid_[reader];
  if (unsaid.size() < kMostUnsaid) unsaid.push_back(std::move(message));
}

// False: a reader takes nothing at present.
bool Sends::deliver() {
  for (auto next = unsaid_.begin(); next != unsaid_.end();) {
    const auto it = next++;
    auto& [reader, messages] = *it;
    while (!messages.empty()) {
      const absl::Status told = core_.tell(reader, messages.front());
      if (!told.ok() && !absl::IsInvalidArgument(told)) break;
      messages.pop_front();
    }
    if (messages.empty() || !core_.agent->has_remote(reader)) unsaid_.erase(it);
  }
  return unsaid_.empty();
}

}  // namespace baton::kvtransfer::session
