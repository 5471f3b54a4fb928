// The prefill side of a session.
#include "kvtransfer/session/sends.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "transport/base/log.h"

namespace baton::kvtransfer::session {
namespace {

using nlohmann::json;

constexpr size_t kTurnBytes = 16 << 20;   // copied before messages are looked at again
constexpr size_t kMostAwaited = 1 << 14;  // transfers that were asked for before their request came
constexpr size_t kSumsAtOnce = 2000;      // told in a message: a slow reader delays longer ones

json gone(const std::string& transfer) { return {{"kind", "gone"}, {"transfer", transfer}}; }

}  // namespace

// --- the engine's thread

uint64_t Sends::open(absl::string_view transfer, size_t tokens) {
  std::unique_lock lock(mutex_);
  if (closed_ || core_.mover == nullptr || !is_text(std::string(transfer))) return 0;
  Send& send = entry(std::string(transfer));
  if (send.number != 0) {
    const std::shared_ptr<Send> first = sends_[send.transfer];  // kept while the lock is open
    refuse(lock, *first);
    return 0;
  }
  --awaited_;
  send.number = next_number_++;
  send.kept = core_.mover->keep(tokens);
  numbers_[send.number] = sends_[send.transfer];
  return send.number;
}

// Decode would take the blocks of one request for those of the other: neither has them, and who
// asks hears so until neither of the two can be meant any more.
void Sends::refuse(std::unique_lock<std::mutex>& lock, Send& send) {
  base::log_event(base::LogLevel::kWarning,
                  "two requests have the transfer_id \"%s\": the KV of neither is handed over",
                  send.transfer);
  send.expires = core_.clock->now() + lease_;
  if (std::exchange(send.refused, true)) return;
  numbers_.erase(send.number);
  wait_for_converting(lock, send);
  if (send.held) release_blocks(send);
  core_.wake_thread();
}

void Sends::computed(uint64_t number, uint32_t layer, uint64_t first_block, size_t tokens,
                     absl::Span<const uint32_t> blocks) {
  std::unique_lock lock(mutex_);
  const auto it = numbers_.find(number);
  if (it == numbers_.end()) return;
  const std::shared_ptr<Send> send = it->second;
  if (!send->kept->computed(layer, first_block, tokens, blocks)) {
    if (send->held) return refuse(lock, *send);
    for (Reading& reading : send->readings) std::fill(reading.told.begin(), reading.told.end(), 0);
  }
  if (!send->readings.empty()) core_.wake_thread();
}

// What is copied already stays: computed again it is the same.
void Sends::restart(uint64_t number) {
  std::unique_lock lock(mutex_);
  const auto it = numbers_.find(number);
  if (it == numbers_.end()) return;
  const std::shared_ptr<Send> send = it->second;
  send->kept->restart();
  wait_for_converting(lock, *send);
}

void Sends::hold(uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto it = numbers_.find(number);
  if (it == numbers_.end()) {  // it is over already
    released_.push_back(number);
    core_.wake_engine();
    return;
  }
  it->second->held = true;
  it->second->expires = core_.clock->now() + lease_;
  core_.wake_thread();
}

void Sends::drop(uint64_t number) {
  std::unique_lock lock(mutex_);
  const auto it = numbers_.find(number);
  if (it == numbers_.end()) return;
  const std::shared_ptr<Send> send = it->second;
  send->dropped = true;
  wait_for_converting(lock, *send);
  core_.wake_thread();
}

std::vector<uint64_t> Sends::released() {
  const std::lock_guard lock(mutex_);
  return std::exchange(released_, {});
}

std::optional<uint64_t> Sends::next_released() {
  const std::lock_guard lock(mutex_);
  if (released_.empty()) return std::nullopt;
  const uint64_t number = released_.back();
  released_.pop_back();
  return number;
}

void Sends::wait_for_converting(std::unique_lock<std::mutex>& lock, const Send& send) {
  converted_.wait(lock, [&send] { return !send.converting; });
}

// --- the session's thread

void Sends::heard(const std::string& sender, const json& message) {
  if (message.at("kind") == "want") return wanted(sender, message);
  const size_t readers = count_readers(message.value("ranks", json(1)).get<uint32_t>());
  const std::lock_guard lock(mutex_);
  const auto it = sends_.find(message.at("transfer").get<std::string>());
  if (it == sends_.end() || readers == 0) return;
  it->second->needed = readers;
  it->second->done.insert(sender);
  std::erase_if(it->second->readings,
                [&sender](const Reading& reading) { return reading.who == sender; });
}

void Sends::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (auto& [transfer, send] : sends_) {
    if (send->held) release_blocks(*send);
  }
  sends_.clear();
  numbers_.clear();
  awaited_ = 0;
}

// Learns how to reach a reader, and how its cache is laid out.
Sends::Reader Sends::meet(const std::string& sender, const json& message) {
  const std::string metadata = message.at("metadata").get<std::string>();
  core_.agent->add_remote(absl::HexStringToBytes(metadata)).status().IgnoreError();
  std::erase_if(readers_, [&](const auto& other) {
    return other.first != sender && !core_.agent->has_remote(other.first);
  });
  {
    // What it was told before, it may not have heard, or another of its name has.
    const std::lock_guard lock(mutex_);
    for (auto& [transfer, send] : sends_) {
      std::erase_if(send->readings,
                    [&sender](const Reading& reading) { return reading.who == sender; });
    }
  }
  const absl::StatusOr<Reader> reader = core_.mover->meet(sender, message);
  if (!reader.ok()) {
    base::log_event(base::LogLevel::kWarning, "cannot hand KV over to %s: %s", sender,
                    reader.status().message());
  }
  json layout = core_.mover->layout(message, reader);
  layout["kind"] = "layout";
  core_.tell(sender, layout).IgnoreError();
  return readers_[sender] = reader.value_or(nullptr);
}

void Sends::wanted(const std::string& sender, const json& message) {
  const auto known = readers_.find(sender);
  const bool first = known == readers_.end() || message.value("first", json()) == true;
  const Reader reader = first ? meet(sender, message) : known->second;
  if (reader == nullptr) return;
  const std::string transfer = message.at("transfer").get<std::string>();
  bool here = false;
  {
    const std::lock_guard lock(mutex_);
    if (sends_.contains(transfer) ||
        (message.value("sure", json()) != true && awaited_ < kMostAwaited)) {
      Send& send = entry(transfer);  // where it is new: the request is still on its way here
      here = !send.dropped && !send.refused && is_shown(send, sender, reader);
      if (here) send.expires = core_.clock->now() + lease_;  // each want renews
    }
  }
  const absl::Status told =
      core_.tell(sender, {{"kind", here ? "alive" : "gone"}, {"transfer", transfer}});
  // It is gone: the lease ends what it has not read. One that takes nothing at present asks again.
  if (!told.ok() && !absl::IsResourceExhausted(told)) readers_.erase(sender);
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

bool Sends::is_shown(Send& send, const std::string& sender, const Reader& reader) {
  for (const Reading& reading : send.readings) {
    if (reading.who == sender) return true;
  }
  Reading reading{.who = sender, .reader = reader, .shown = nullptr, .told = {}};
  if (send.number != 0) {
    reading.shown = send.kept->show(reader, !send.released);
    if (reading.shown == nullptr) return false;
  }
  send.done.erase(sender);
  send.readings.push_back(std::move(reading));
  return true;
}

// Copies what is computed and not shown yet. The lock is open while the engine's blocks are read:
// nothing takes them away then. False: there is no room at present.
bool Sends::work(std::unique_lock<std::mutex>& lock, Send& send, KvMover::Outgoing& shown) {
  if (!shown.make_room()) return false;
  while (!send.dropped && !send.refused) {
    more_ = turn_bytes_ >= kTurnBytes;
    const size_t bytes = more_ ? 0 : shown.next();
    if (bytes == 0) return true;
    turn_bytes_ += bytes;
    send.converting = true;
    lock.unlock();
    shown.work();
    lock.lock();
    send.converting = false;
    converted_.notify_all();
  }
  return true;
}

void Sends::tell_ready(const Send& send, Reading& reading, std::vector<Message>* messages) const {
  json parts = json::array();
  size_t room = kSumsAtOnce;
  const auto say = [&] {
    if (parts.empty()) return;
    messages->emplace_back(reading.who, json{{"kind", "ready"},
                                             {"transfer", send.transfer},
                                             {"parts", std::exchange(parts, json::array())}});
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

// It met a queue that is full.
void Sends::tell_again(const Message& message) {
  const std::lock_guard lock(mutex_);
  const auto it = sends_.find(message.second.at("transfer").get<std::string>());
  if (it == sends_.end()) return;
  for (Reading& reading : it->second->readings) {
    if (reading.who != message.first) continue;
    for (const json& part : message.second.at("parts")) {
      const auto row = part[0].get<size_t>();
      if (row >= reading.told.size()) continue;
      const size_t told = part[1].get<size_t>() - reading.shown->first(row);
      reading.told[row] = std::min(reading.told[row], told);
    }
  }
}

// Shows a transfer to its readers, as far as it is computed. False: there is no room at present.
bool Sends::serve(std::unique_lock<std::mutex>& lock, Send& send, std::vector<Message>* messages) {
  bool room = true;
  for (auto it = send.readings.begin(); it != send.readings.end();) {
    if (send.number == 0 || send.dropped || send.refused) break;
    Reading& reading = *it;
    if (reading.shown == nullptr) reading.shown = send.kept->show(reading.reader, !send.released);
    const absl::Status fits = reading.shown == nullptr
                                  ? absl::NotFoundError("its blocks are released")
                                  : reading.shown->fits();
    if (!fits.ok()) {
      base::log_event(base::LogLevel::kWarning, "cannot hand KV over to %s: %s", reading.who,
                      fits.message());
      messages->emplace_back(reading.who, gone(send.transfer));
      it = send.readings.erase(it);
      continue;
    }
    room = work(lock, send, *reading.shown) && room;
    if (!send.dropped && !send.refused) tell_ready(send, reading, messages);
    ++it;
  }
  return room;
}

// How many ranks of a decode engine with `ranks` of them read from this worker.
size_t Sends::count_readers(uint32_t ranks) const {
  const KvWorker& me = core_.shard;
  size_t count = 0;
  for (uint32_t rank = 0; ranks <= kMostRanks && rank < ranks; ++rank) {
    for (const uint32_t heard : ranks_heard(me.heads, me.ranks, ranks, rank)) {
      count += heard == me.rank ? 1 : 0;
    }
  }
  return count;
}

// Whether its readers have said that they have all they wanted, and no other one is there that has
// not.
bool Sends::is_read(Send& send) const {
  if (send.needed == 0 || send.done.size() < send.needed) return false;
  std::erase_if(send.readings,
                [&](const Reading& reading) { return !core_.agent->has_remote(reading.who); });
  return send.readings.empty();
}

bool Sends::step() {
  std::vector<Message> messages = std::exchange(unsaid_, {});
  bool busy = false;
  more_ = false;
  turn_bytes_ = 0;
  {
    std::unique_lock lock(mutex_);
    const Time now = core_.clock->now();
    for (auto it = sends_.begin(); it != sends_.end();) {
      Send& send = *it->second;
      busy = !serve(lock, send, &messages) || busy;
      if (send.dropped || send.refused) {
        for (const Reading& reading : send.readings) {
          messages.emplace_back(reading.who, gone(send.transfer));
        }
        send.readings.clear();
        send.kept.reset();
      }
      const bool open = send.number != 0 && !send.held && !send.dropped && !send.refused;
      const bool whole =
          !send.readings.empty() &&
          std::all_of(send.readings.begin(), send.readings.end(), [](const auto& each) {
            return each.shown != nullptr && each.shown->whole();
          });
      const bool read = is_read(send);
      if (send.held && (whole || read)) release_blocks(send);
      const bool over = !send.refused && (send.dropped || (send.held && read));
      if (!over && (open || now < send.expires)) {
        busy = busy || !open;  // its lease is looked at
        ++it;
        continue;
      }
      if (send.held) release_blocks(send);
      if (send.number == 0) --awaited_;
      numbers_.erase(send.number);
      it = sends_.erase(it);
    }
  }
  return !deliver(messages) || busy;
}

void Sends::release_blocks(Send& send) {
  if (std::exchange(send.released, true)) return;
  released_.push_back(send.number);
  core_.wake_engine();
}

// False: a reader takes nothing at present.
bool Sends::deliver(const std::vector<Message>& messages) {
  bool all = true;
  for (const Message& message : messages) {
    const absl::Status told = core_.tell(message.first, message.second);
    if (told.ok()) continue;
    if (!absl::IsResourceExhausted(told)) {
      readers_.erase(message.first);
      continue;
    }
    all = false;
    if (message.second.at("kind") == "ready") {
      tell_again(message);
    } else {
      unsaid_.push_back(message);
    }
  }
  return all;
}

}  // namespace baton::kvtransfer::session
