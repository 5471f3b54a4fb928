// The prefill side of a session: the engine's requests, and each reading from its start to its end.
#include "kvtransfer/session/sends.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "transport/base/log.h"

namespace baton::kvtransfer::session {
namespace {

using nlohmann::json;

constexpr size_t kTurnBytes = 16 << 20;  // copied before messages are looked at again
constexpr size_t kLookAhead = 8;         // writes of a reading that are looked at

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
  send.tokens = tokens;
  send.asked.reset();
  send.kept = core_.mover->keep(tokens);
  numbers_[send.number] = sends_[send.transfer];
  core_.wake_thread();
  return send.number;
}

// Decode would mix up the blocks of two requests with one name: it gets neither's, and readers hear
// so for a lease, until neither request can be meant any more.
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

void Sends::fail(uint64_t number, const absl::Status& why) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto it = numbers_.find(number); it != numbers_.end()) it->second->outcome = why;
  }
  hold(number);
}

std::optional<KvAsked> Sends::next_asked() {
  const std::lock_guard lock(mutex_);
  while (!asked_.empty()) {
    const auto it = sends_.find(asked_.front());
    asked_.pop_front();
    if (it == sends_.end() || !it->second->asked.has_value()) continue;
    return std::exchange(it->second->asked, std::nullopt);
  }
  return std::nullopt;
}

void Sends::refuse(absl::string_view transfer, const absl::Status& why) {
  const std::lock_guard lock(mutex_);
  const auto it = sends_.find(std::string(transfer));
  if (it == sends_.end() || it->second->number != 0) return;
  it->second->outcome = why;
  it->second->dropped = true;
  core_.wake_thread();
}

void Sends::expect(uint64_t number, uint32_t loads, Time lease) {
  const std::lock_guard lock(mutex_);
  const auto it = numbers_.find(number);
  if (it == numbers_.end()) return;
  const Time now = core_.clock->now();
  if (loads > 0) it->second->needed = loads;
  it->second->until = lease < kNever - now ? now + lease : kNever;
  core_.wake_thread();
}

void Sends::give(uint64_t number, std::string payload) {
  const std::lock_guard lock(mutex_);
  const auto it = numbers_.find(number);
  if (it != numbers_.end()) it->second->payload = std::move(payload);
}

// One rank of a load is not served to the end, or is gone: what the others read is of no use.
bool Sends::is_given_up(const Send& send) {
  return send.shared_out &&
         std::any_of(send.readings.begin(), send.readings.end(),
                     [](const Reading& reading) { return !reading.why.ok() || reading.gone; });
}

bool Sends::may_still_come(const Send& send) const {
  if (is_given_up(send)) return false;
  return send.readings.size() < send.needed && core_.clock->now() < send.until && send.outcome.ok();
}

// Where no reader has come yet, one may still come.
bool Sends::wants_more(const Send& send) const {
  if (send.dropped || send.refused || is_given_up(send)) return false;
  if (may_still_come(send)) return true;
  if (send.readings.empty()) return send.until == Time{};
  return std::any_of(send.readings.begin(), send.readings.end(),
                     [](const Reading& reading) { return reading.wants() || reading.finished(); });
}

bool Sends::is_wanted(uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto it = numbers_.find(number);
  return it != numbers_.end() && wants_more(*it->second);
}

uint64_t Sends::bytes_written() {
  const std::lock_guard lock(mutex_);
  return bytes_written_;
}
uint64_t Sends::failed() {
  const std::lock_guard lock(mutex_);
  return failed_;
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

void Sends::stop() {
  if (core_.own != nullptr || core_.agent == nullptr) return;
  const std::lock_guard lock(mutex_);
  const auto each = [this](auto what) {
    for (auto& [transfer, send] : sends_) {
      for (Reading& reading : send->readings) {
        for (const auto& write : reading.writes) what(write.transfer);
      }
    }
  };
  each([this](AgentTransferId write) { core_.agent->abort(write).IgnoreError(); });
  each([this](AgentTransferId write) { core_.agent->release(write).IgnoreError(); });
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

// Copies what is computed and not shown yet. The lock is open while the engine's blocks are read:
// nothing takes them away then. False: there is no room at present.
bool Sends::work(std::unique_lock<std::mutex>& lock, Send& send, KvMover::Outgoing& shown) {
  if (!shown.make_room()) return false;
  while (!send.dropped && !send.refused && send.outcome.ok()) {
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

// Shows a transfer to its readers, as far as it is computed. False: there is no room at present.
bool Sends::serve(std::unique_lock<std::mutex>& lock, Send& send, std::vector<Message>* messages) {
  bool room = true;
  for (size_t i = 0; i < send.readings.size(); ++i) {
    if (send.number == 0 || send.dropped || send.refused || !send.outcome.ok()) break;
    if (!send.readings[i].wants()) continue;
    absl::Status fits = absl::NotFoundError("its blocks are released");
    try {
      Reading& reading = send.readings[i];
      if (reading.shown == nullptr) {
        reading.shown = send.kept->show(reading.reader, !send.released, *reading.want);
      }
      if (reading.shown != nullptr) fits = reading.shown->fits();
    } catch (const json::exception& error) {
      fits = absl::InvalidArgumentError(error.what());
    }
    if (fits.ok()) {
      // Readers come and go by this thread alone: the reading stays, the lock may open.
      const std::shared_ptr<KvMover::Outgoing> shown = send.readings[i].shown;
      room = work(lock, send, *shown) && room;
      Reading& reading = send.readings[i];
      if (reading.push) {
        auto begun = shown->begun();
        fits = begun.status();
        if (begun.ok()) {
          reading.writes.insert(reading.writes.end(), begun->begin(), begun->end());
          reading.written += begun->size();
        }
      } else if (!send.dropped && !send.refused && !unsaid_.contains(reading.who)) {
        tell_ready(send, reading, messages);
      }
    }
    if (fits.ok()) continue;
    Reading& reading = send.readings[i];
    base::log_event(base::LogLevel::kWarning, "cannot hand KV over to %s: %s", reading.who,
                    fits.message());
    reading.why = fits;
    if (reading.hears) continue;
    messages->emplace_back(reading.who, gone(send.transfer, reading.load));
    send.readings.erase(send.readings.begin() + static_cast<ptrdiff_t>(i--));
  }
  return room;
}

// Whether its readers have said that they have all they wanted, or are gone, and no other one is
// there that has not.
bool Sends::is_read(const Send& send) const {
  size_t ended = 0;
  for (const Reading& reading : send.readings) {
    if (reading.ended || reading.gone) {
      ++ended;
    } else if (reading.hears || core_.agent->has_remote(reading.who)) {
      return false;
    }
  }
  return send.needed > 0 &&
         (ended >= send.needed || (send.until != Time{} && !may_still_come(send)));
}

// Writes that have ended; all others are ended where nothing more is wanted.
void Sends::follow_writes(const Send& send, Reading& reading) {
  Agent& agent = *core_.agent;
  const bool ends = !reading.wants() || !send.outcome.ok() || send.dropped;
  size_t running = 0;
  std::erase_if(reading.writes, [&](const KvMover::Outgoing::Write& write) {
    if (ends) agent.abort(write.transfer).IgnoreError();
    if (!ends && running == kLookAhead) return false;  // most end in their order
    const absl::StatusOr<AgentTransferState> state = agent.state(write.transfer);
    if (state.ok() && *state == AgentTransferState::kRunning) {
      ++running;
      return false;
    }
    if (state.ok() && *state == AgentTransferState::kDone) {
      const auto seen = agent.telemetry(write.transfer);
      if (seen.ok()) bytes_written_ += seen->bytes;
      if (seen.ok() && core_.timeline != nullptr) {
        core_.timeline->add({"transfer", absl::StrCat("tx layer ", write.layer), seen->start,
                             seen->start + seen->transfer_duration, reading.request, seen->bytes});
      }
    } else if (reading.wants()) {
      reading.why = state.ok() ? agent.status(write.transfer) : state.status();
    }
    agent.release(write.transfer).IgnoreError();
    return true;
  });
}

// Its lease, its writes and its last word.
void Sends::end_reading(const Send& send, Reading& reading, Time now,
                        std::vector<Message>* messages) {
  const bool was_wanted = reading.wants();
  if (!reading.hears) return;
  const bool late = now >= reading.expires && !reading.ended;
  if (late && reading.wants()) {
    reading.why = absl::DeadlineExceededError(
        reading.push ? "the KV was not computed and written within the time that the load allows"
                     : "decode did not renew its lease, so prefill may reuse the blocks; ask "
                       "again, with a longer lease if decode's engine stands still for longer");
  }
  if (late && !reading.push) reading.ended = true;
  if (late && !reading.push && reading.told_end && !reading.gone) {
    messages->emplace_back(reading.who,
                           gone(send.transfer, reading.load, reading.why));  // after that word
  }
  follow_writes(send, reading);
  if (was_wanted && !reading.wants() && !reading.finished()) ++failed_;
  if (!reading.writes.empty() || (reading.push && more_ && reading.wants())) return;
  const bool whole = send.held && send.outcome.ok() && reading.shown != nullptr;
  if (whole && reading.wants() && reading.shown->missing() > 0) {
    reading.why = absl::InternalError(
        absl::StrCat("prefill finished with ", reading.shown->missing(), " blocks missing"));
  }
  absl::Status why = reading.why;
  if (why.ok() && !send.outcome.ok()) why = send.outcome;
  if (why.ok() && (send.dropped || send.refused)) why = absl::CancelledError("prefill gave it up");
  if (!reading.told_end && (whole || !why.ok()) && !reading.gone) {
    json over = word("over", send.transfer, reading.load);
    if (why.ok()) {
      over["payload"] = absl::BytesToHexString(send.payload);
      over["writes"] = reading.written;
    } else {
      over.update({{"code", why.code()}, {"why", std::string(why.message())}});
    }
    messages->emplace_back(reading.who, std::move(over));
    reading.told_end = true;
  }
  reading.told_end |= reading.gone;
  if (reading.push && reading.told_end) reading.ended = true;
  if (reading.told_end && !why.ok() && reading.shown != nullptr && reading.push) {
    reading.shown.reset();
  }
}

bool Sends::step() {
  std::vector<Message> messages;
  bool busy = !deliver();
  more_ = false;
  turn_bytes_ = 0;
  {
    std::unique_lock lock(mutex_);
    const Time now = core_.clock->now();
    look_who_went(now);
    for (auto it = sends_.begin(); it != sends_.end();) {
      const std::shared_ptr<Send> kept = it->second;
      Send& send = *kept;
      // While one reader's blocks are copied the engine may compute more: once more for all of
      // them, until the lock was not open, so that what ends below has nothing left to write.
      size_t before = 0;
      do {
        before = turn_bytes_;
        busy = !serve(lock, send, &messages) || busy;
      } while (turn_bytes_ != before && !more_);
      if (send.dropped || send.refused) {
        std::erase_if(send.readings, [&](const Reading& reading) {
          if (!reading.hears) {
            messages.emplace_back(reading.who, gone(send.transfer, reading.load));
          }
          return !reading.hears;
        });
      }
      for (Reading& reading : send.readings) end_reading(send, reading, now, &messages);
      const bool moving =
          std::any_of(send.readings.begin(), send.readings.end(),
                      [](const Reading& reading) { return !reading.writes.empty(); });
      const bool held_by_lease =
          std::any_of(send.readings.begin(), send.readings.end(),
                      [](const Reading& reading) { return reading.hears && !reading.ended; });
      if (send.wanted && !wants_more(send)) {
        send.wanted = false;
        core_.wake_engine();
      }
      if (send.dropped || send.refused) {
        for (Reading& reading : send.readings) reading.shown.reset();  // it looks at what is kept
        send.kept.reset();
      }
      const bool open = send.number != 0 && !send.held && !send.dropped && !send.refused;
      const bool whole =
          std::any_of(send.readings.begin(), send.readings.end(),
                      [](const Reading& reading) { return !reading.ended; }) &&
          std::all_of(send.readings.begin(), send.readings.end(), [](const auto& each) {
            return each.ended || (each.shown != nullptr && each.shown->whole());
          });
      const bool read = is_read(send);
      if (send.held && !moving && (whole || read)) release_blocks(send);
      const bool over = !send.refused && !moving &&
                        (send.dropped || (send.held && read) ||
                         (send.held && !send.wanted && send.until != Time{} && !held_by_lease));
      const bool late = now >= send.expires && !held_by_lease && !may_still_come(send);
      if (!over && (open || moving || !late)) {
        busy = busy || !open || send.until != Time{} || held_by_lease;  // leases are looked at
        ++it;
        continue;
      }
      if (send.held) release_blocks(send);
      if (send.number == 0) --awaited_;
      for (const Reading& reading : send.readings) {
        if (reading.hears && !reading.told_end) {
          messages.emplace_back(
              reading.who,
              gone(send.transfer, reading.load,
                   send.outcome.ok() ? absl::CancelledError("prefill gave it up") : send.outcome));
        }
      }
      numbers_.erase(send.number);
      it = sends_.erase(it);
    }
    // Those that are over, for an engine that does not look at them.
    if (asked_.size() > awaited_) {
      std::erase_if(asked_, [this](const std::string& transfer) {
        const auto it = sends_.find(transfer);
        return it == sends_.end() || !it->second->asked.has_value();
      });
    }
  }
  for (Message& message : messages) say(message.first, std::move(message.second));
  return busy || !unsaid_.empty();
}

void Sends::release_blocks(Send& send) {
  if (std::exchange(send.released, true)) return;
  released_.push_back(send.number);
  core_.wake_engine();
}

}  // namespace baton::kvtransfer::session
