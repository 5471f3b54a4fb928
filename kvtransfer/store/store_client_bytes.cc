// Reading records from the store's memory: one transfer for many of them, the next one under way
// while this one is checked.
#include <algorithm>
#include <chrono>

#include "kvtransfer/store/store_client_impl.h"
#include "transport/base/durations.h"

namespace baton::kvtransfer::store {

std::optional<tiers::PeerTier::Pin> StoreClient::pin(const tiers::TierKey& key) {
  const std::lock_guard lock(mutex_);
  if (state_ != State::kUp) return std::nullopt;
  const auto it = known_.find(key);
  if (it == known_.end() || it->second.page == kNotThere || clock_.now() >= it->second.usable) {
    return std::nullopt;
  }
  Pin pin{.page = it->second.page, .header = {}};
  pin.header.key = key;
  return pin;
}

// A transfer that did not end in time holds its buffer until it has.
bool StoreClient::is_free(Buffer& buffer) {
  if (!buffer.busy) return true;
  const absl::StatusOr<TransferState> state = worker_->state(buffer.transfer);
  if (state.ok() && !ended(*state)) return false;
  worker_->release(buffer.transfer).IgnoreError();
  buffer.busy = false;
  return true;
}

// Asks for as many as there is room for, from pins[first] on.
bool StoreClient::post(Buffer& buffer, std::span<Pin* const> pins, uint32_t part, size_t first,
                       Time timeout) {
  const size_t each = tiers::read_bytes(shape_, part);
  buffer.first = first;
  buffer.count = std::min(pins.size() - first, buffer_bytes_ / each);
  if (!is_free(buffer)) return false;
  buffer.pages.clear();
  for (const Pin* pin : pins.subspan(first, buffer.count)) buffer.pages.push_back(pin->page);
  PeerId peer;
  RemoteRegion region;
  uint64_t base = 0;
  {
    const std::lock_guard lock(mutex_);
    if (state_ != State::kUp) return false;
    peer = peer_;
    region = region_;
    base = base_;
  }
  const absl::StatusOr<TransferId> transfer =
      worker_->submit({.op = Op::kRead,
                       .peer = peer,
                       .local = reading_.region,
                       .local_layout = Layout::contiguous(buffer.offset, buffer.count * each),
                       .remote = region,
                       .remote_layout = Layout::paged(base + tiers::read_offset(shape_, part),
                                                      buffer.pages, tiers::kPage, each),
                       .timeout = timeout});
  if (!transfer.ok()) return false;
  buffer.transfer = *transfer;
  buffer.busy = true;
  return true;
}

absl::Status StoreClient::await(Buffer& buffer, Time timeout) {
  const absl::Status status = worker_->wait(buffer.transfer, timeout);
  if (status.code() == absl::StatusCode::kDeadlineExceeded) {
    worker_->cancel(buffer.transfer).IgnoreError();
    static_cast<void>(is_free(buffer));
    const std::lock_guard lock(mutex_);
    be_silent("a read");
  } else {
    buffer.busy = false;
  }
  return status;
}

void StoreClient::check(const Buffer& buffer, std::span<Pin* const> pins, uint32_t part,
                        const Done& done) {
  const size_t each = tiers::read_bytes(shape_, part);
  for (size_t i = 0; i < buffer.count; ++i) {
    Pin& pin = *pins[buffer.first + i];
    const auto meant =
        tiers::checked_part({buffer.data + i * each, each}, shape_, part, &pin.header);
    if (meant.empty()) {
      ++corrupt_;
      const std::lock_guard lock(mutex_);
      known_.erase(pin.header.key);
      // What else was said then is asked again.
      absl::erase_if(chains_, [](const auto& entry) { return entry.second.asked == 0; });
    }
    done(buffer.first + i, meant);
  }
}

void StoreClient::read(std::span<Pin* const> pins, uint32_t part, Time timeout, const Done& done) {
  const Time end = base::deadline_after(Clock::steady().now(), timeout);
  const auto left = [&] { return std::max<Time>(end - Clock::steady().now(), Time{1}); };
  size_t next = 0;  // the first that has not been asked for
  bool failed = timeout <= Time{};
  const auto ask = [&](Buffer& buffer) {
    buffer.count = 0;
    if (failed || next == pins.size()) return;
    failed = !post(buffer, pins, part, next, left());
    if (failed) buffer.count = 0;
    next += buffer.count;
  };
  ask(buffers_[0]);
  for (size_t turn = 0; buffers_[turn % 2].count > 0; ++turn) {
    Buffer& now = buffers_[turn % 2];
    ask(buffers_[(turn + 1) % 2]);
    if (await(now, left()).ok()) {
      check(now, pins, part, done);
    } else {
      failed = true;
      for (size_t i = 0; i < now.count; ++i) done(now.first + i, {});
    }
  }
  for (; next < pins.size(); ++next) done(next, {});
}

}  // namespace baton::kvtransfer::store
