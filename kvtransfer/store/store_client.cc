// What the store is known to have: lookups, answers, silence, and calling it again.
#include "kvtransfer/store/store_client.h"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvtransfer/store/store_client_impl.h"
#include "transport/base/log.h"

namespace baton::kvtransfer::store {
namespace {

constexpr int kClientTickMs = 20;  // while a deadline may pass
constexpr Time kCallAgain = std::chrono::milliseconds(500);
constexpr Time kMissIsNews = std::chrono::milliseconds(100);  // then it is asked for again
constexpr Time kSeenIsThere = std::chrono::seconds(30);       // then it is offered again
constexpr Time kOfferTimeout = std::chrono::seconds(5);
constexpr size_t kMostKnown = 1 << 17;
constexpr size_t kSlots = 8;

// Twice a load's time is told to the store in milliseconds, and the others are added to the time.
StoreClientOptions within_reason(StoreClientOptions options) {
  constexpr Time kLongest = std::chrono::hours(24);
  options.lookup_timeout = std::min(options.lookup_timeout, kLongest);
  options.load_timeout = std::min(options.load_timeout, kLongest);
  return options;
}

}  // namespace

StoreClient::StoreClient(StoreClientOptions options, const tiers::TierShape& shape,
                         std::function<void()> changed)
    : options_(within_reason(std::move(options))),
      shape_(shape),
      changed_(std::move(changed)),
      clock_(options_.clock != nullptr ? *options_.clock : Clock::steady()) {}

absl::Status StoreClient::open() {
  if (!wake_.status().ok()) return wake_.status();
  absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::create({.name = options_.name,
                                                                   .providers = options_.providers,
                                                                   .key = options_.key,
                                                                   .settings = options_.settings});
  if (!worker.ok()) return worker.status();
  worker_ = *std::move(worker);
  absl::StatusOr<std::unique_ptr<MemoryPool>> pool =
      MemoryPool::create(*worker_, {.access = Access::kRemoteRead});
  if (!pool.ok()) return pool.status();
  pool_ = *std::move(pool);
  // Two buffers, each for one part of at least one record; slots for whole records.
  const size_t least = tiers::read_bytes(shape_, 0);
  buffer_bytes_ = std::max(least, options_.staging_bytes / 4);
  const size_t slots =
      std::clamp<size_t>(options_.staging_bytes / 2 / shape_.record_bytes(), 1, kSlots);
  for (auto [block, bytes] : {std::pair{&reading_, 2 * buffer_bytes_},
                              std::pair{&offering_, slots * shape_.record_bytes()}}) {
    absl::StatusOr<Block> memory = pool_->allocate(bytes);
    if (!memory.ok()) return memory.status();
    *block = *memory;
  }
  absl::StatusOr<RemoteRegion> offered = worker_->remote_region(offering_.region);
  if (!offered.ok()) return offered.status();
  offered_ = *offered;
  slots_.resize(slots);
  for (size_t i = 0; i < 2; ++i) {
    buffers_[i].data = reading_.data + i * buffer_bytes_;
    buffers_[i].offset = reading_.offset + i * buffer_bytes_;
  }
  absl::StatusOr<PeerId> peer = worker_->connect(options_.store);
  if (!peer.ok()) return peer.status();
  peer_ = *peer;
  calling_ = true;
  progress_ = std::make_unique<ProgressThread>(*worker_);
  thread_ = std::thread([this] { loop(); });
  return absl::OkStatus();
}

StoreClient::~StoreClient() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  slot_freed_.notify_all();
  wake_.ring();
  if (thread_.joinable()) thread_.join();
  progress_.reset();
  // The worker ends all transfers; the pool's memory is unmapped after that. No fence is asked of
  // the store: all that moves is read, here by us and there by it, so that nothing of ours lands in
  // its memory, and what lands here or is read here ends with the connection. A store that stands
  // still in the middle of reading an offer finds that the sums are not right.
  if (worker_ != nullptr && calling_) worker_->disconnect(peer_, Time::zero()).IgnoreError();
  pool_.reset();
}

void StoreClient::loop() {
  for (;;) {
    pollfd entries[2] = {{worker_->event_fd(), POLLIN, 0}, {wake_.fd(), POLLIN, 0}};
    poll(entries, 2, kClientTickMs);
    base::EventFd::silence(worker_->event_fd());
    const std::lock_guard lock(mutex_);
    if (stop_) return;
    take_events();
    take_messages();
    look_at_time();
  }
}

// --- the store comes and goes --------------------------------------------------------------------

void StoreClient::take_events() {
  while (std::optional<PeerEvent> event = worker_->next_peer_event()) {
    if (!calling_ || event->peer != peer_) continue;
    switch (event->kind) {
      case PeerEvent::Kind::kUp:
      case PeerEvent::Kind::kResumed:
        state_ = State::kAsking;
        first_silence_ = clock_.now() + options_.load_timeout;
        worker_->notify_detached(peer_, encode(Lookup{.id = next_id_++, .shape = shape_}))
            .IgnoreError();
        break;
      case PeerEvent::Kind::kLost:
        went_down(event->why);
        break;
      case PeerEvent::Kind::kDown:
        went_down(event->why);
        calling_ = false;
        call_again_ = Clock::steady().now() + kCallAgain;
        break;
    }
  }
}

// All that was known is about another life of the store, or may be.
void StoreClient::went_down(const absl::Status& why) {
  state_ = State::kDown;
  asked_.clear();
  chains_.clear();
  known_.clear();
  for (Slot& slot : slots_) slot.offer = 0;
  slot_freed_.notify_all();
  changed_();
  if (std::exchange(told_down_, true)) return;
  base::log_event(base::LogLevel::kWarning, "the KV store %s is unreachable; reconnecting: %s",
                  options_.store, why.message());
}

void StoreClient::connect_again() {
  absl::StatusOr<PeerId> peer = worker_->connect(options_.store);
  call_again_ = Clock::steady().now() + kCallAgain;
  if (!peer.ok()) return;
  peer_ = *peer;
  calling_ = true;
}

void StoreClient::be_silent(const char* what) {
  if (state_ != State::kUp) return;
  state_ = State::kSilent;
  ++silences_;
  // Answers that come after all are taken; no caller waits for them.
  for (auto& [key, chain] : chains_) {
    if (chain.asked != 0) chain = {};
  }
  slot_freed_.notify_all();
  changed_();
  // Its answer is a sign of life, where nothing else is owed.
  worker_->notify_detached(peer_, encode(Lookup{.id = next_id_++, .shape = shape_})).IgnoreError();
  base::log_event(base::LogLevel::kWarning,
                  "the KV store %s does not answer (%s): prompts are computed instead",
                  options_.store, what);
}

void StoreClient::spoke() {
  if (state_ == State::kUp || state_ == State::kDown) return;
  if (state_ == State::kSilent || told_down_) {
    base::log_event(base::LogLevel::kWarning, "the KV store %s answers again", options_.store);
  }
  told_down_ = false;
  state_ = State::kUp;
}

void StoreClient::look_at_time() {
  if (!calling_ && Clock::steady().now() >= call_again_) connect_again();
  const Time now = clock_.now();
  if (state_ == State::kUp) {
    for (const auto& [key, chain] : chains_) {
      if (chain.asked != 0 && now >= chain.until) {
        be_silent("a lookup");
        break;
      }
    }
  }
  for (Slot& slot : slots_) {
    if (slot.offer == 0 || now < slot.until) continue;
    // If the store reads it after all, it finds that the sums are not right.
    slot.offer = 0;
    slot_freed_.notify_all();
    be_silent("an offer");
  }
  if (state_ == State::kAsking && now >= first_silence_ && !std::exchange(told_down_, true)) {
    base::log_event(base::LogLevel::kWarning,
                    "%s does not answer like a KV store: is that the port of `baton kv_store`?",
                    options_.store);
  }
}

// --- lookups -------------------------------------------------------------------------------------

bool StoreClient::lookup(std::span<const tiers::TierKey> keys) {
  const std::lock_guard lock(mutex_);
  if (state_ != State::kUp || keys.empty()) return true;
  keys = keys.first(std::min(keys.size(), kMostKeys));
  const Time now = clock_.now();
  Chain& chain = chains_[keys.back()];
  if (chain.asked != 0) {
    if (now < chain.until) return false;
    be_silent("a lookup");
    return true;
  }
  if (now < chain.until) return true;
  ask(keys, &chain, now);
  return chain.asked == 0;
}

void StoreClient::ask(std::span<const tiers::TierKey> keys, Chain* chain, Time now) {
  const uint64_t id = next_id_++;
  const auto lease = std::chrono::ceil<std::chrono::milliseconds>(2 * options_.load_timeout);
  Lookup lookup{.id = id, .shape = shape_, .lease_ms = static_cast<uint32_t>(lease.count())};
  lookup.keys.assign(keys.begin(), keys.end());
  if (!worker_->notify_detached(peer_, encode(lookup)).ok()) return;  // it is going down
  chain->asked = id;
  chain->until = now + options_.lookup_timeout;
  asked_[id] = {std::move(lookup.keys), now};
  forget_old(now);
}

// Answers to what was asked long ago are not waited for, and knowledge does not grow for ever.
void StoreClient::forget_old(Time now) {
  if (chains_.size() > kMostKnown / 16) {
    absl::erase_if(chains_, [&](const auto& entry) {
      return entry.second.asked == 0 && entry.second.until <= now;
    });
  }
  if (asked_.size() > kMostKnown / 16) {
    absl::erase_if(asked_, [&](const auto& entry) {
      return entry.second.sent + 2 * options_.load_timeout < now;
    });
  }
  if (known_.size() > kMostKnown) {
    absl::erase_if(known_, [&](const auto& entry) { return entry.second.usable <= now; });
  }
}

void StoreClient::take_messages() {
  Notification note;
  while (worker_->next_notification(note)) {
    if (!calling_ || note.peer != peer_) continue;
    const absl::StatusOr<StoreMessage> message = decode_store_message(note.payload);
    if (!message.ok()) continue;
    if (const auto* found = std::get_if<Found>(&*message)) hear(*found);
    if (const auto* taken = std::get_if<Taken>(&*message)) hear(*taken);
  }
}

void StoreClient::hear(const Found& found) {
  region_ = found.region;
  base_ = found.base;
  spoke();
  const auto it = asked_.find(found.id);
  if (it == asked_.end()) return changed_();
  const Asked asked = std::move(it->second);
  asked_.erase(it);
  const size_t count = std::min(asked.keys.size(), found.pages.size());
  const Time now = clock_.now();
  bool all = count == asked.keys.size();
  for (size_t i = 0; i < count; ++i) {
    Known& known = known_[asked.keys[i]];
    known.page = found.pages[i];
    known.usable = asked.sent + options_.load_timeout;
    known.seen = found.pages[i] == kNotThere ? Time{} : now;
    all &= found.pages[i] != kNotThere;
  }
  if (const auto chain = chains_.find(asked.keys.back());
      chain != chains_.end() && chain->second.asked == found.id) {
    chain->second = {.asked = 0,
                     .until = all ? asked.sent + options_.load_timeout : now + kMissIsNews};
  }
  changed_();
}

bool StoreClient::contains(const tiers::TierKey& key) {
  const std::lock_guard lock(mutex_);
  if (state_ != State::kUp) return false;
  const auto it = known_.find(key);
  return it != known_.end() && it->second.page != kNotThere && clock_.now() < it->second.usable;
}

bool StoreClient::wants(const tiers::TierKey& key) {
  const std::lock_guard lock(mutex_);
  if (state_ != State::kUp) return false;
  const auto it = known_.find(key);
  return it == known_.end() || it->second.seen == Time{} ||
         clock_.now() >= it->second.seen + kSeenIsThere;
}

void StoreClient::hear(const Taken& taken) {
  spoke();
  for (Slot& slot : slots_) {
    if (slot.offer != taken.id) continue;
    if (taken.fate == Fate::kTaken || taken.fate == Fate::kHad) {
      known_[slot.key].seen = clock_.now();
    }
    slot.offer = 0;
    slot_freed_.notify_all();
  }
}

// --- offers --------------------------------------------------------------------------------------

bool StoreClient::put(const tiers::TierRecord& record) {
  std::unique_lock lock(mutex_);
  const auto free_slot = [this] {
    return std::ranges::find(slots_, uint64_t{0}, [](const Slot& slot) { return slot.offer; });
  };
  slot_freed_.wait_for(lock, std::chrono::seconds(1), [&] {
    return stop_ || state_ != State::kUp || free_slot() != slots_.end();
  });
  const auto slot = free_slot();
  if (stop_ || state_ != State::kUp || slot == slots_.end()) return false;
  const uint64_t id = next_id_++;
  *slot = {.offer = id, .key = record.header().key, .until = clock_.now() + patient(kOfferTimeout)};
  const size_t bytes = shape_.record_bytes();
  const auto number = static_cast<size_t>(slot - slots_.begin());
  const PeerId peer = peer_;
  lock.unlock();  // the slot is this offer's
  std::memcpy(offering_.data + number * bytes, record.bytes().data(), bytes);
  const Offer offer{.id = id,
                    .shape = shape_,
                    .key = record.header().key,
                    .region = offered_,
                    .offset = offering_.offset + number * bytes};
  if (worker_->notify_detached(peer, encode(offer)).ok()) return true;
  lock.lock();
  slots_[number].offer = 0;
  return false;
}

void StoreClient::flush() {
  std::unique_lock lock(mutex_);
  slot_freed_.wait(lock, [this] {
    return stop_ || state_ != State::kUp ||
           std::ranges::all_of(slots_, [](const Slot& slot) { return slot.offer == 0; });
  });
}

std::string StoreClient::explain() const {
  const std::lock_guard lock(mutex_);
  const char* states[] = {"away", "in the handshake", "up", "silent"};
  return absl::StrCat("the KV store ", options_.store, " (", states[static_cast<int>(state_)], ")");
}

tiers::PeerTierFactory store_client(StoreClientOptions options) {
  return [options = std::move(options)](
             const tiers::TierShape& shape,
             std::function<void()> changed) -> absl::StatusOr<std::unique_ptr<tiers::PeerTier>> {
    if (shape.record_bytes() > kLargestRecord) {
      return absl::InvalidArgumentError(
          absl::StrCat("a KV block of ", shape.record_bytes(), " bytes is too large for a store"));
    }
    auto client = std::make_unique<StoreClient>(options, shape, std::move(changed));
    if (absl::Status status = client->open(); !status.ok()) return status;
    return client;
  };
}

}  // namespace baton::kvtransfer::store
