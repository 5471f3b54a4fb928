// Connections by address; threads that look names up.
#include "kvtransfer/internal/connector/kv_calls.h"

#include <system_error>

#include "kvtransfer/agent.h"

namespace baton::kvtransfer {
namespace {

// Names that are looked up at a time: one whose DNS is slow keeps few others waiting.
constexpr size_t kMostThreads = 8;

}  // namespace

absl::StatusOr<PeerId> KvCalls::call(const std::string& address) {
  if (const auto it = connected_.find(address); it != connected_.end()) {
    if (worker_.peer_state(it->second) != PeerState::kDown) return it->second;
  }
  if (!asks_dns(address)) {
    absl::StatusOr<PeerId> peer = worker_.connect(address);
    if (peer.ok()) connected_[address] = *peer;
    return peer;
  }
  if (looked_up_.contains(address)) return PeerId();
  const std::lock_guard lock(mutex_);
  if (idle_ <= queue_.size() && threads_.size() < kMostThreads) {
    try {
      threads_.emplace_back([this] { look_up(); });
    } catch (const std::system_error&) {
      // One that is there does it later.
      if (threads_.empty()) {
        return absl::ResourceExhaustedError("no thread to look a name up: raise `ulimit -u`");
      }
    }
  }
  queue_.push_back(address);
  looked_up_.insert(address);
  wanted_.notify_one();
  return PeerId();
}

void KvCalls::look_up() {
  std::unique_lock lock(mutex_);
  while (true) {
    ++idle_;
    wanted_.wait(lock, [this] { return closed_ || !queue_.empty(); });
    --idle_;
    if (closed_) return;
    std::string address = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    absl::StatusOr<PeerId> peer = worker_.connect(address);
    lock.lock();
    ended_.emplace_back(std::move(address), std::move(peer));
    worker_.wake();
  }
}

KvCalls::Ended KvCalls::take_ended() {
  if (looked_up_.empty()) return {};
  Ended ended;
  {
    const std::lock_guard lock(mutex_);
    ended.swap(ended_);
  }
  for (const auto& [address, peer] : ended) {
    looked_up_.erase(address);
    if (peer.ok()) connected_[address] = *peer;
  }
  return ended;
}

void KvCalls::on_peer_down(PeerId peer) {
  absl::erase_if(connected_, [&](const auto& entry) { return entry.second == peer; });
}

void KvCalls::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  wanted_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

}  // namespace baton::kvtransfer
