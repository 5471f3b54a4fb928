// The store's thread: lookups answered, offers read from engines, checked, published.
#include "kvtransfer/store/kv_store.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <list>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvtransfer/store/store_messages.h"
#include "transport/base/limits/event_fd.h"
#include "transport/base/log.h"
#include "transport/pool.h"
#include "transport/progress_thread.h"

namespace baton::kvtransfer::store {
namespace {

constexpr size_t kMostReads = 64;  // from engines at a time
constexpr int kTickMs = 200;       // for what has no event: leases of the past need none

class Service final : public KvStore {
 public:
  explicit Service(KvStoreOptions options) : options_(std::move(options)) {}
  ~Service() override;
  absl::Status open();

  const std::string& address() const override { return worker_->address(); }
  uint16_t port() const override { return worker_->port(); }
  BlockArena& arena() override { return *arena_; }
  KvStoreStats stats() const override;

 private:
  // A record that is being read from an engine.
  struct Reading {
    PeerId peer;
    uint64_t offer = 0;
    tiers::TierKey key;
    tiers::TierShape shape;
    BlockArena::SpacePtr space;
    TransferId transfer;
  };

  void loop();
  void hear(const Notification& note);
  void answer(PeerId peer, const Lookup& lookup);
  void consider(PeerId peer, const Offer& offer);
  absl::StatusOr<TransferId> read(PeerId peer, const Offer& offer, const BlockArena::Space& space);
  void follow_reads();
  Fate keep(const Reading& reading);
  void say(PeerId peer, const StoreMessage& message);

  const KvStoreOptions options_;
  std::unique_ptr<Worker> worker_;
  std::unique_ptr<MemoryPool> pool_;
  Block memory_;
  RemoteRegion region_;
  std::unique_ptr<BlockArena> arena_;
  std::unique_ptr<ProgressThread> progress_;
  std::list<Reading> readings_;  // the service's thread's own
  mutable std::mutex mutex_;
  KvStoreStats stats_;
  base::EventFd stop_;
  std::thread thread_;
};

absl::Status Service::open() {
  if (!stop_.status().ok()) return stop_.status();
  absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::create(options_.worker);
  if (!worker.ok()) return worker.status();
  worker_ = *std::move(worker);
  absl::StatusOr<std::unique_ptr<MemoryPool>> pool =
      MemoryPool::create(*worker_, {.access = Access::kRemoteRead});
  if (!pool.ok()) return pool.status();
  pool_ = *std::move(pool);
  absl::StatusOr<Block> memory = pool_->allocate(options_.memory_bytes);
  if (!memory.ok()) {
    return absl::Status(memory.status().code(),
                        absl::StrCat("no memory for a KV store of ", options_.memory_bytes >> 20,
                                     " MiB; use fewer --memory-mib: ", memory.status().message()));
  }
  memory_ = *memory;
  absl::StatusOr<RemoteRegion> region = worker_->remote_region(memory_.region);
  if (!region.ok()) return region.status();
  region_ = *region;
  arena_ =
      std::make_unique<BlockArena>(std::span(memory_.data, options_.memory_bytes), tiers::kPage);
  progress_ = std::make_unique<ProgressThread>(*worker_);
  thread_ = std::thread([this] { loop(); });
  return absl::OkStatus();
}

Service::~Service() {
  if (thread_.joinable()) {
    stop_.ring();
    thread_.join();
  }
  progress_.reset();
  // The worker first: what is still being read ends with it. Then nothing touches the memory.
  if (worker_ != nullptr) {
    for (const Reading& reading : readings_) worker_->cancel(reading.transfer).IgnoreError();
    for (const Reading& reading : readings_) {
      worker_->wait(reading.transfer, std::chrono::seconds(1)).IgnoreError();
    }
  }
  readings_.clear();
  arena_.reset();
  pool_.reset();
}

KvStoreStats Service::stats() const {
  KvStoreStats stats;
  {
    const std::lock_guard lock(mutex_);
    stats = stats_;
  }
  stats.arena = arena_->stats();
  return stats;
}

void Service::loop() {
  pollfd entries[2] = {{worker_->event_fd(), POLLIN, 0}, {stop_.fd(), POLLIN, 0}};
  Notification note;
  for (;;) {
    poll(entries, 2, kTickMs);
    if (entries[1].revents != 0) return;
    base::EventFd::silence(worker_->event_fd());
    while (worker_->next_peer_event().has_value()) {
    }
    while (worker_->next_notification(note)) hear(note);
    follow_reads();
  }
}

void Service::say(PeerId peer, const StoreMessage& message) {
  const absl::Status status = worker_->notify_detached(peer, encode(message));
  if (!status.ok()) {
    base::log_event(base::LogLevel::kDebug, "%s: an answer is lost: %s", options_.worker.name,
                    status.message());
  }
}

void Service::hear(const Notification& note) {
  const absl::StatusOr<StoreMessage> message = decode_store_message(note.payload);
  if (message.ok()) {
    if (const auto* lookup = std::get_if<Lookup>(&*message)) return answer(note.peer, *lookup);
    if (const auto* offer = std::get_if<Offer>(&*message)) return consider(note.peer, *offer);
  }
  const std::lock_guard lock(mutex_);
  if (stats_.rejected++ == 0) {
    base::log_event(base::LogLevel::kWarning, "%s: a message is not a request to a KV store: %s",
                    options_.worker.name,
                    message.ok() ? "it is an answer" : message.status().message());
  }
}

void Service::answer(PeerId peer, const Lookup& lookup) {
  const Time lease =
      worker_->clock().now() +
      std::min<Time>(std::chrono::milliseconds(lookup.lease_ms), options_.longest_lease);
  Found found{.id = lookup.id, .region = region_, .base = memory_.offset, .pages = {}};
  size_t here = 0;
  for (const tiers::TierKey& key : lookup.keys) {
    const BlockArena::Found block = arena_->find(key, lease);
    // A name has a shape behind it; another one is a client's error, and no hit.
    const bool hit =
        block.space != nullptr && block.space->bytes().size() == lookup.shape.record_bytes();
    found.pages.push_back(hit ? static_cast<uint32_t>(block.space->offset() / tiers::kPage)
                              : kNotThere);
    here += hit;
  }
  {
    const std::lock_guard lock(mutex_);
    ++stats_.lookups;
    stats_.asked += lookup.keys.size();
    stats_.found += here;
  }
  say(peer, found);
}

void Service::consider(PeerId peer, const Offer& offer) {
  const auto refuse = [&](Fate fate) { say(peer, Taken{offer.id, fate}); };
  if (arena_->contains(offer.key)) return refuse(Fate::kHad);
  if (readings_.size() >= kMostReads) return refuse(Fate::kFull);
  BlockArena::SpacePtr space = arena_->take(offer.shape.record_bytes(), worker_->clock().now());
  if (space == nullptr) return refuse(Fate::kFull);
  const absl::StatusOr<TransferId> transfer = read(peer, offer, *space);
  if (!transfer.ok()) return refuse(Fate::kBroken);
  readings_.push_back({peer, offer.id, offer.key, offer.shape, std::move(space), *transfer});
}

absl::StatusOr<TransferId> Service::read(PeerId peer, const Offer& offer,
                                         const BlockArena::Space& space) {
  const size_t bytes = space.bytes().size();
  return worker_->submit(
      {.op = Op::kRead,
       .peer = peer,
       .local = memory_.region,
       .local_layout = Layout::contiguous(memory_.offset + space.offset(), bytes),
       .remote = offer.region,
       .remote_layout = Layout::contiguous(offer.offset, bytes),
       .timeout = patient(std::chrono::seconds(5))});
}

// Its key has not been published meanwhile, and its bytes are what was sealed.
Fate Service::keep(const Reading& reading) {
  if (arena_->contains(reading.key)) return Fate::kHad;
  const std::span<const std::byte> bytes = reading.space->bytes();
  if (!worker_->status(reading.transfer).ok() || !tiers::is_record(bytes, reading.shape)) {
    return Fate::kBroken;
  }
  const auto& header = *reinterpret_cast<const tiers::RecordHeader*>(bytes.data());
  if (header.key != reading.key) return Fate::kBroken;
  arena_->publish(reading.key, reading.space);
  return Fate::kTaken;
}

void Service::follow_reads() {
  for (auto it = readings_.begin(); it != readings_.end();) {
    const absl::StatusOr<TransferState> state = worker_->state(it->transfer);
    if (state.ok() && !ended(*state)) {
      ++it;
      continue;
    }
    const Fate fate = keep(*it);
    {
      const std::lock_guard lock(
          mutex_);  // counted before the reply: its receiver may look at once
      stats_.taken += fate == Fate::kTaken;
      stats_.broken += fate == Fate::kBroken;
    }
    say(it->peer, Taken{it->offer, fate});
    worker_->release(it->transfer).IgnoreError();
    it = readings_.erase(it);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<KvStore>> KvStore::start(KvStoreOptions options) {
  if (options.memory_bytes < tiers::kPage) {
    return absl::InvalidArgumentError("a KV store needs memory: give it at least 1 MiB");
  }
  auto service = std::make_unique<Service>(std::move(options));
  if (absl::Status status = service->open(); !status.ok()) return status;
  return service;
}

}  // namespace baton::kvtransfer::store
