// Puts a numbered stream in order, with the help of replays.
#include "engine/kv_events/event_order.h"

#include "absl/strings/str_cat.h"

namespace baton::engine::kv_events {
namespace {

constexpr int kMaxFruitless = 3;
constexpr int kMaxLateBegins = 2;
constexpr int kMaxFailures = 3;
constexpr int kMaxRounds = 100;  // a buffer that is given again in pieces of a hundredth

}  // namespace

bool EventOrder::fits(uint64_t sequence) const {
  if (last_.has_value()) return sequence == next();
  return sequence == 0 || anywhere_ || !has_replay_;
}

// Whether what waits follows from what was applied, without a hole.
bool EventOrder::held_fits() const {
  uint64_t want = next();
  for (const Batch& batch : held_) {
    if (batch.sequence < want) continue;
    if (batch.sequence != want++) return false;
  }
  return true;
}

void EventOrder::ask() {
  replaying_ = first_ = true;
  whole_ = useless_ = progress_ = false;
  calls_.ask(last_.has_value() ? last_->sequence : 0);
}

void EventOrder::forget(const std::string& why) {
  if (last_.has_value()) ++stats_.forgotten;
  last_.reset();
  calls_.forget(why);
}

// What came live while a replay was awaited may be the one's or the other's.
void EventOrder::restarted(const std::string& why) {
  ++stats_.restarts;
  drop_held();
  newest_.reset();
  anywhere_ = false;
  failures_ = 0;
  forget(why);
}

void EventOrder::apply(uint64_t sequence, std::string payload) {
  ++stats_.batches;
  if (const absl::Status status = calls_.apply(payload); !status.ok()) {
    forget(absl::StrCat("batch ", sequence, " cannot be read: ", std::string(status.message())));
  }
  last_ = Batch{sequence, std::move(payload)};
}

void EventOrder::hold(uint64_t sequence, std::string payload) {
  held_bytes_ += payload.size();
  held_.push_back({sequence, std::move(payload)});
  // What is dropped here is asked for like anything else that is missing.
  while (held_bytes_ > kMaxHeldBytes) {
    held_bytes_ -= held_.front().payload.size();
    held_.pop_front();
  }
}

void EventOrder::drop_held() {
  held_.clear();
  held_bytes_ = 0;
}

void EventOrder::take_held() {
  while (!held_.empty() && !replaying_) {
    if (last_.has_value() && held_.front().sequence < next()) {
      // A replay had it.
    } else if (fits(held_.front().sequence)) {
      apply(held_.front().sequence, held_.front().payload);
    } else {
      ask_again();
      continue;
    }
    held_bytes_ -= held_.front().payload.size();
    held_.pop_front();
  }
}

void EventOrder::connected() {
  disconnected();
  connected_ = true;
  anywhere_ = false;
  fruitless_ = rounds_ = failures_ = 0;
  if (has_replay_) ask();
}

void EventOrder::disconnected() {
  if (!connected_) return;
  connected_ = replaying_ = false;
  drop_held();
  newest_.reset();
  forget("the connection ended");
}

void EventOrder::live(uint64_t sequence, std::string payload) {
  if (!connected_) return;
  if (newest_.has_value() && sequence <= *newest_) {
    restarted(absl::StrCat("its sequence numbers went back from ", *newest_, " to ", sequence));
    newest_ = sequence;
    if (!has_replay_) return apply(sequence, std::move(payload));
    fruitless_ = rounds_ = 0;
    hold(sequence, std::move(payload));
    return ask();
  }
  newest_ = sequence;
  if (replaying_) return hold(sequence, std::move(payload));
  if (fits(sequence)) return apply(sequence, std::move(payload));
  if (last_.has_value() && sequence < next()) return;  // a replay had it
  ++stats_.gaps;
  if (has_replay_) {
    hold(sequence, std::move(payload));
    return ask();
  }
  forget(
      absl::StrCat("batches ", next(), " to ", sequence - 1, " were lost, and none are replayed"));
  apply(sequence, std::move(payload));
}

void EventOrder::replayed(uint64_t sequence, std::string payload) {
  if (!replaying_ || useless_) return;
  if (std::exchange(whole_, false)) {
    last_.reset();
    calls_.forget("its replay arrived; the index is rebuilt from it");
  }
  if (std::exchange(first_, false) && last_.has_value()) {
    if (sequence == last_->sequence && payload == last_->payload) {
      late_begins_ = 0;
      return;
    }
    // The beginning of the answer may have been lost: it is believed when it is the same again.
    if (sequence > last_->sequence && ++late_begins_ < kMaxLateBegins) {
      useless_ = true;
      return;
    }
    progress_ = true;
    if (sequence <= last_->sequence) {
      useless_ = true;
      return restarted(
          absl::StrCat("its batch ", sequence, " differs from the one received before"));
    }
    late_begins_ = 0;
    forget(absl::StrCat("its buffer begins with batch ", sequence, ", and batch ", last_->sequence,
                        " was the last that came"));
  }
  if (last_.has_value() && sequence < next()) return;
  if (last_.has_value() && sequence > next()) {
    useless_ = true;  // a part of the answer was lost
    return;
  }
  if (!last_.has_value()) anywhere_ = false;
  progress_ = true;
  ++stats_.replayed;
  apply(sequence, std::move(payload));
}

// Goes on where the last answer ended, unless that leads to nothing.
void EventOrder::ask_again() {
  fruitless_ = progress_ ? 0 : fruitless_ + 1;
  if (fruitless_ < kMaxFruitless && ++rounds_ < kMaxRounds) return ask();
  give_up("its replays do not contain the lost batches either");
}

void EventOrder::replay_ended() {
  if (!replaying_) return;
  replaying_ = false;
  if (first_ && last_.has_value()) {
    progress_ = useless_ = true;
    restarted(absl::StrCat("it knows nothing of batch ", last_->sequence));
  }
  if (useless_) return ask_again();
  if (!last_.has_value()) anywhere_ = false;  // nothing has been published so far
  failures_ = 0;
  take_held();
  if (!replaying_) fruitless_ = rounds_ = 0;
}

void EventOrder::replay_failed(const std::string& why) {
  if (!replaying_) return;
  replaying_ = false;
  ++stats_.unanswered;
  // Nothing is missing as far as anyone knows: a subscriber only wanted to be sure.
  if (failures_ == 0 && last_.has_value() && !progress_ && !useless_ && held_fits()) {
    return take_held();
  }
  if (++failures_ == kMaxFailures) return give_up(why);
  calls_.doubt(why);
  ask();
}

void EventOrder::give_up(const std::string& why) {
  replaying_ = false;
  fruitless_ = rounds_ = failures_ = 0;
  forget(why);
  anywhere_ = true;
  // Keep the part of the held batches that has no gap up to its end.
  size_t begin = held_.empty() ? 0 : held_.size() - 1;
  while (begin > 0 && held_[begin - 1].sequence + 1 == held_[begin].sequence) --begin;
  std::deque<Batch> rest;
  rest.swap(held_);
  held_bytes_ = 0;
  for (; begin < rest.size(); ++begin) apply(rest[begin].sequence, std::move(rest[begin].payload));
}

void EventOrder::check() {
  if (!connected_ || !has_replay_ || replaying_) return;
  if (!anywhere_ || !last_.has_value()) return ask();
  replaying_ = first_ = whole_ = true;
  useless_ = progress_ = false;
  calls_.ask(0);
}

}  // namespace baton::engine::kv_events
