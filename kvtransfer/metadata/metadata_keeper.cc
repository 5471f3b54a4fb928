// What the keeper's thread does, round by round. The lock is never held while a store is asked, or
// the agent is told.
#include "kvtransfer/metadata/metadata_keeper.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"

namespace baton::kvtransfer {
namespace {

// How soon it looks again where no watch says what changes: for what is not there, at first; and at
// most, unless a third of the lease is less.
constexpr std::chrono::milliseconds kFirstPause{50};
constexpr std::chrono::seconds kLongestPause{1};

}  // namespace

MetadataKeeper::MetadataKeeper(std::unique_ptr<MetadataStore> store,
                               std::chrono::milliseconds lease, Events events)
    : store_(std::move(store)),
      third_(lease / 3),
      events_(std::move(events)),
      renew_at_(Clock::now() + third_) {
  store_->watch([this](std::string_view key) { changed(key); });
  thread_ = std::thread([this] { run(); });
}

MetadataKeeper::~MetadataKeeper() {
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    wake_.notify_all();
    ended_.wait_for(lock, std::chrono::seconds(3), [this] { return over_; });
  }
  store_->stop();
  thread_.join();
}

void MetadataKeeper::publish(std::string_view agent, std::string_view label, std::string bytes) {
  std::lock_guard lock(mutex_);
  Ours& ours = ours_[metadata_key(agent, label)];
  ours.agent = agent;
  ours.bytes = std::move(bytes);
  ours.put = true;
  ours.remove = false;
  ours.status = absl::UnavailableError("it has not reached the store yet");
  wake_.notify_all();
}

void MetadataKeeper::withdraw(std::string_view agent, const std::string& farewell) {
  std::lock_guard lock(mutex_);
  const bool has_whole = ours_.count(metadata_key(agent)) > 0;
  for (auto& [key, ours] : ours_) {
    if (ours.agent != agent) continue;
    // A farewell beside a whole that is published again would be read as being of that.
    ours.remove = has_whole && key != metadata_key(agent);
    ours.put = !ours.remove;
    if (ours.put) ours.bytes = farewell;
  }
  wake_.notify_all();
}

void MetadataKeeper::follow(std::string_view agent, std::string_view label) {
  std::lock_guard lock(mutex_);
  Theirs& theirs = theirs_[metadata_key(agent, label)];
  theirs.agent = agent;
  theirs.part = !label.empty();
  theirs.asked = ++last_asked_;
  theirs.due = {};
  theirs.pause = kFirstPause;
  theirs.seen.clear();  // to be loaded again: the agent may have been removed meanwhile
  wake_.notify_all();
}

void MetadataKeeper::forget(std::string_view agent) {
  std::lock_guard lock(mutex_);
  std::erase_if(theirs_, [&](const auto& one) { return one.second.agent == agent; });
}

absl::Status MetadataKeeper::state(std::string_view agent) const {
  std::lock_guard lock(mutex_);
  bool any = false;
  const auto worst = [&](const auto& all) -> absl::Status {
    for (const auto& [key, one] : all) {
      if (one.agent != agent) continue;
      any = true;
      // With text of its own: what a status shares with its copies is freed by whoever is last.
      if (!one.status.ok()) return absl::Status(one.status.code(), one.status.message());
    }
    return absl::OkStatus();
  };
  if (absl::Status status = worst(ours_); !status.ok()) return status;
  if (absl::Status status = worst(theirs_); !status.ok()) return status;
  if (any) return absl::OkStatus();
  return absl::NotFoundError(
      absl::StrFormat("the metadata of \"%s\" was neither published nor followed here", agent));
}

void MetadataKeeper::changed(std::string_view key) {
  std::lock_guard lock(mutex_);
  for (auto& [name, theirs] : theirs_) {
    if (key.empty() || name == key) theirs.due = {};
  }
  // Ours is to be there still; putting it where it is changes nothing that others see.
  for (auto& [name, ours] : ours_) {
    if (name == key && !ours.status.ok()) ours.put = true;
  }
  wake_.notify_all();
}

MetadataKeeper::Clock::time_point MetadataKeeper::next_due() const {
  Clock::time_point next = ours_.empty() ? Clock::time_point::max() : renew_at_;
  for (const auto& [key, theirs] : theirs_) next = std::min(next, theirs.due);
  return next;
}

void MetadataKeeper::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    put_ours(lock);
    if (!ours_.empty() && Clock::now() >= renew_at_) renew(lock);
    look(lock);
    const bool more = std::any_of(ours_.begin(), ours_.end(), [](const auto& one) {
      return one.second.put || one.second.remove;
    });
    const Clock::time_point next = next_due();
    if (stopping_ || more) continue;
    if (next == Clock::time_point::max()) {
      wake_.wait(lock);
    } else {
      wake_.wait_until(lock, next);
    }
  }
  std::vector<std::string> keys;
  for (const auto& [key, ours] : ours_) keys.push_back(key);
  lock.unlock();
  for (const std::string& key : keys) {
    if (absl::IsUnavailable(store_->remove(key))) break;
  }
  lock.lock();
  over_ = true;
  ended_.notify_all();
}

void MetadataKeeper::put_ours(std::unique_lock<std::mutex>& lock) {
  std::vector<std::pair<std::string, std::string>> todo;
  std::vector<std::string> leaving;
  for (const auto& [key, ours] : ours_) {
    if (ours.remove) leaving.push_back(key);
  }
  for (const std::string& key : leaving) {
    ours_.erase(key);
    lock.unlock();
    store_->remove(key).IgnoreError();  // else it goes with the lease
    lock.lock();
  }
  for (auto& [key, ours] : ours_) {
    if (std::exchange(ours.put, false)) todo.emplace_back(key, ours.bytes);
  }
  for (const auto& [key, bytes] : todo) {
    lock.unlock();
    const absl::Status status = store_->put(key, bytes);
    lock.lock();
    ours_[key].status = status;  // if not OK: again with the next renewal
    if (stopping_) return;
  }
}

void MetadataKeeper::renew(std::unique_lock<std::mutex>& lock) {
  renew_at_ = Clock::now() + third_;
  lock.unlock();
  const absl::Status renewed = store_->renew();
  lock.lock();
  // What is not there any more is put there again; so is what could not be put before.
  for (auto& [key, ours] : ours_) {
    if (!renewed.ok() || !ours.status.ok()) ours.put = true;
    if (absl::IsUnavailable(renewed) && ours.status.ok()) ours.status = renewed;
  }
}

void MetadataKeeper::look(std::unique_lock<std::mutex>& lock) {
  std::vector<std::pair<std::string, uint64_t>> due;
  const Clock::time_point now = Clock::now();
  for (auto& [key, theirs] : theirs_) {
    if (theirs.due > now) continue;
    due.emplace_back(key, theirs.asked);
    theirs.pause = std::clamp<Clock::duration>(theirs.pause * 2, kFirstPause,
                                               std::min<Clock::duration>(third_, kLongestPause));
    theirs.due = now + theirs.pause;
  }
  for (const auto& [key, asked] : due) {
    if (stopping_) return;
    lock.unlock();
    absl::StatusOr<std::string> answer = store_->get(key);
    lock.lock();
    take(key, asked, std::move(answer), lock);
  }
}

MetadataKeeper::Theirs* MetadataKeeper::find(const std::string& key, uint64_t asked) {
  const auto at = theirs_.find(key);
  return at == theirs_.end() || at->second.asked != asked ? nullptr : &at->second;
}

void MetadataKeeper::take(const std::string& key, uint64_t asked,
                          absl::StatusOr<std::string> answer, std::unique_lock<std::mutex>& lock) {
  Theirs* theirs = find(key, asked);
  if (theirs == nullptr) return;
  if (answer.ok() && *answer == theirs->seen) return;  // looked at again with the next pause
  const std::string agent = theirs->agent;
  const bool had = !theirs->seen.empty();
  absl::Status status = answer.status();
  const bool absent = absl::IsNotFound(status);
  if (answer.ok()) {
    lock.unlock();
    status = events_.found(agent, *answer);
    lock.lock();
  } else if (absent && had && !(theirs->part && theirs_.count(metadata_key(agent)) > 0)) {
    lock.unlock();
    events_.gone(agent);
    lock.lock();
  }
  theirs = find(key, asked);
  if (theirs == nullptr) {  // forgotten meanwhile, and so is what was loaded
    if (status.ok() && theirs_.count(key) == 0) {
      lock.unlock();
      events_.gone(agent);
      lock.lock();
    }
    return;
  }
  theirs->status = status;
  if (answer.ok()) theirs->seen = *std::move(answer);
  // A part that came before the whole is looked at again.
  const bool too_early = !absent && absl::IsNotFound(status);
  if (absent || too_early) theirs->seen.clear();
  // Until the watch says something, unless it did meanwhile.
  if (!absl::IsUnavailable(status) && !too_early && store_->watching() &&
      theirs->due != Clock::time_point{}) {
    theirs->due = Clock::time_point::max();
  }
}

}  // namespace baton::kvtransfer
