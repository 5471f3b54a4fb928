// Connections between hubs, what they tell each other, and what is left behind by comms.
#include "plugins/nccl/hub.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace baton::nccl {
namespace {

constexpr size_t kSlabBytes = 1 << 20;
// News need not be looked for in each of NCCL's polls, of which there are millions in a second.
constexpr uint32_t kPollsBetweenNews = 256;
constexpr std::chrono::milliseconds kWatch{20};

}  // namespace

absl::StatusOr<std::unique_ptr<Hub>> Hub::create(std::unique_ptr<Worker> worker, bool threads) {
  std::unique_ptr<Hub> hub(new Hub(std::move(worker)));
  auto pool = MemoryPool::create(*hub->worker_, {.slab_bytes = kSlabBytes, .huge_pages = false});
  if (!pool.ok()) return pool.status();
  hub->pool_ = *std::move(pool);
  if (threads) {
    hub->thread_ = std::make_unique<ProgressThread>(*hub->worker_);
    hub->watcher_ = std::thread([of = hub.get()] { of->watch(); });
  }
  return hub;
}

Hub::~Hub() {
  if (watcher_.joinable()) {
    {
      const std::lock_guard lock(stop_mutex_);
      stop_ = true;
    }
    stopped_.notify_one();
    watcher_.join();
  }
  thread_.reset();
  for (const auto& peer : peers_) {
    if (!peer->down) worker_->disconnect(peer->id, Time::zero()).IgnoreError();
  }
  // Nothing moves any more: every transfer has ended, and said so.
  for (int i = 0; i < 1000 && worker_->stats().open_transfers != 0; ++i) worker_->progress();
  remains_.clear();
  pool_.reset();
}

absl::StatusOr<HubPeer*> Hub::call(const Handle& handle) {
  const std::lock_guard lock(mutex_);
  HubPeer*& known = called_[handle.uid().bytes];
  if (known != nullptr && !known->down) return known;
  const std::string address = handle.address();
  if (address.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("no provider reaches ", handle.label(),
                     " from here: both need tcp, or, on one machine, shm"));
  }
  const absl::StatusOr<PeerId> id = worker_->connect(address);
  if (!id.ok()) return id.status();
  auto peer = std::make_unique<HubPeer>();
  peer->id = *id;
  peer->uid = handle.uid();
  known = peer.get();
  by_id_[{id->index, id->generation}] = known;
  peers_.push_back(std::move(peer));
  return known;
}

absl::Status Hub::status(const HubPeer& peer) const {
  if (!peer.down) return absl::OkStatus();
  const absl::Status why = worker_->peer_status(peer.id);
  return absl::UnavailableError("the peer is gone: " +
                                (why.ok() ? "it was closed" : std::string(why.message())));
}

absl::Status Hub::tell(const HubPeer& peer, Door door, std::string_view message) {
  std::string text(1, static_cast<char>(door));
  text += message;
  return worker_->notify_detached(peer.id, text);
}

HubPeer* Hub::peer_of(PeerId id, const WorkerUid* uid) {
  const std::lock_guard lock(mutex_);
  HubPeer*& peer = by_id_[{id.index, id.generation}];
  if (peer == nullptr) {
    peers_.push_back(std::make_unique<HubPeer>());
    peer = peers_.back().get();
    peer->id = id;
  }
  if (uid == nullptr) return peer;
  if (!(peer->uid == WorkerUid{}) && !(peer->uid == *uid)) {  // another lives at that address
    worker_->begin_disconnect(id, Time::zero());
    peer->down = true;
  }
  peer->uid = *uid;
  return peer;
}

bool Hub::poll() {
  const bool any = worker_->help();
  if (polls_.fetch_add(1, std::memory_order_relaxed) % kPollsBetweenNews == 0) drain();
  return any;
}

void Hub::listen() {
  worker_->help();
  drain();
}

// Peers that call are answered, and closed comms forgotten, though NCCL has no comm to poll.
void Hub::watch() {
  std::unique_lock lock(stop_mutex_);
  while (!stopped_.wait_for(lock, kWatch, [this] { return stop_; })) {
    lock.unlock();
    drain();
    lock.lock();
  }
}

void Hub::drain() {
  const std::unique_lock lock(draining_, std::try_to_lock);
  if (!lock.owns_lock()) return;  // another thread is at it, or this one, from a message's call
  while (std::optional<PeerEvent> event = worker_->next_peer_event()) {
    if (event->kind == PeerEvent::Kind::kUp) {
      peer_of(event->peer, &event->uid)->up.store(true);
    } else if (event->kind == PeerEvent::Kind::kDown) {
      HubPeer* const peer = peer_of(event->peer, nullptr);
      peer->down.store(true);
    }
  }
  while (worker_->next_notification(notification_)) {
    const std::string& text = notification_.payload;
    const auto door = text.empty() ? doors_.end() : doors_.find(static_cast<Door>(text[0]));
    if (door == doors_.end()) continue;  // of a later version
    door->second(*peer_of(notification_.peer, nullptr), std::string_view(text).substr(1));
  }
  std::vector<std::unique_ptr<Remains>> over;
  const std::lock_guard guard(mutex_);
  const auto left = std::partition(remains_.begin(), remains_.end(),
                                   [](const auto& remains) { return !remains->over(); });
  std::move(left, remains_.end(), std::back_inserter(over));
  remains_.erase(left, remains_.end());
}

absl::StatusOr<Block> Hub::allocate(size_t bytes) {
  const std::lock_guard lock(mutex_);
  return pool_->allocate(bytes);
}

void Hub::free(const Block& block) {
  const std::lock_guard lock(mutex_);
  pool_->free(block);
}

absl::StatusOr<MemoryRegion> Hub::register_again(const Block& block) {
  const std::lock_guard lock(mutex_);
  return pool_->register_again(block.region);
}

void Hub::leave(std::unique_ptr<Remains> remains) {
  const std::lock_guard lock(mutex_);
  remains_.push_back(std::move(remains));
}

bool Hub::settle(const std::function<bool()>& over, std::chrono::milliseconds longest) {
  const auto end = std::chrono::steady_clock::now() + longest;
  while (!over()) {
    worker_->help();
    if (std::chrono::steady_clock::now() > end) return over();
    std::this_thread::yield();
  }
  return true;
}

}  // namespace baton::nccl
