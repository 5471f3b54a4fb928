// The KvConnector over Baton's transport: hands messages and events to its two halves, and sleeps.
#include "kvtransfer/baton_connector.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvtransfer/internal/connector/kv_answer_thread.h"
#include "kvtransfer/internal/connector/kv_jobs.h"
#include "kvtransfer/internal/connector/kv_loads.h"
#include "kvtransfer/internal/connector/kv_mailbox.h"
#include "transport/base/durations.h"
#include "transport/base/threads/forks.h"
#include "transport/pool.h"
#include "transport/progress_thread.h"

namespace baton::kvtransfer {
namespace {

constexpr uint64_t kPage = 4096;
// Events come in quick succession while pages arrive: look this long before sleeping.
constexpr Time kSpin = std::chrono::microseconds(20);

class BatonConnector final : public KvConnector {
 public:
  BatonConnector(std::unique_ptr<Worker> worker, const BatonConnectorOptions& options)
      : huge_pages_(options.huge_pages),
        // Peers write into it where it is decode's; they read it where prefill lets them.
        access_(options.allow_pull ? Access::kRemoteReadWrite : Access::kRemoteWrite),
        worker_(std::move(worker)),
        mailbox_(*worker_),
        jobs_(*worker_, mailbox_, options.worker.timeline,
              {options.mode == KvSendMode::kSerialized, options.allow_pull, options.max_lease}),
        loads_(*worker_, mailbox_, options.worker.timeline, options.worker.name) {
    if (options.progress_thread.value_or(options.worker.shape.has_value())) {
      ProgressThread::Options how;
      how.cpu = options.progress_cpu;
      thread_ = std::make_unique<ProgressThread>(*worker_, how);
    }
    if (options.answer_thread) answers_ = std::make_unique<KvAnswerThread>(*worker_, mailbox_);
  }

  ~BatonConnector() override {
    if (made_here_.elsewhere()) {  // the parent's, whose thread is not here
      (void)answers_.release();
      return;
    }
    answers_ = nullptr;
    thread_ = nullptr;
    // Transfers under way use the cache: end them before it goes.
    jobs_.abandon();
    loads_.abandon();
    const auto open = [&] { return jobs_.open_transfers() + loads_.open_transfers() > 0; };
    for (int round = 0; open() && round < 1000; ++round) {
      bool moved = worker_->progress();
      moved = jobs_.progress() || moved;
      moved = loads_.progress() || moved;
      if (!moved) poll(nullptr, 0, 1);
    }
    pool_ = nullptr;
    worker_ = nullptr;  // before jobs_, which its last callbacks use
  }

  absl::Status register_cache(const KvLayout& layout, absl::Span<void* const> buffers) override {
    if (absl::Status status = check_new_cache(layout); !status.ok()) return status;
    if (buffers.size() != layout.buffers.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          buffers.size(), " addresses for the ", layout.buffers.size(), " buffers of the layout"));
    }
    std::vector<KvCacheMemory::Buffer> registered;
    absl::Status status;
    for (size_t i = 0; i < buffers.size() && status.ok(); ++i) {
      absl::StatusOr<MemoryRegion> region =
          worker_->register_memory(buffers[i], layout.buffers[i].bytes, access_);
      status = region.status();
      if (!status.ok()) break;
      const bool on_device = region->place.kind == baton::MemoryKind::kDevice;
      if (on_device != (layout.buffers[i].device == KvDevice::kCuda)) {
        worker_->deregister_memory(*region).IgnoreError();
        status = absl::InvalidArgumentError(
            absl::StrCat("buffer ", i, " of the KV cache is memory of ", region->place.name(),
                         ", but its layout says otherwise"));
        break;
      }
      absl::StatusOr<RemoteRegion> remote = worker_->remote_region(*region);
      status = remote.status();
      registered.push_back({*region, {remote.ok() ? *remote : RemoteRegion(), 0}});
    }
    if (!status.ok()) {
      for (const auto& buffer : registered) worker_->deregister_memory(buffer.region).IgnoreError();
      return status;
    }
    use_cache(layout, std::move(registered));
    return absl::OkStatus();
  }

  absl::StatusOr<void*> allocate_cache(const KvLayout& layout) override {
    if (absl::Status status = check_new_cache(layout); !status.ok()) return status;
    for (const KvBuffer& buffer : layout.buffers) {
      if (buffer.device == KvDevice::kHost) continue;
      return absl::UnimplementedError(
          "a connector allocates host memory only: allocate device memory yourself and register "
          "it");
    }
    PoolOptions options;
    options.huge_pages = huge_pages_;
    options.slab_bytes = 4096;  // the cache gets a slab of its own
    options.access = access_;
    auto pool = MemoryPool::create(*worker_, options);
    if (!pool.ok()) return pool.status();
    std::vector<uint64_t> begins;
    uint64_t bytes = 0;
    for (const KvBuffer& buffer : layout.buffers) {
      begins.push_back(bytes);
      bytes += (buffer.bytes + kPage - 1) / kPage * kPage;
    }
    absl::StatusOr<Block> block = (*pool)->allocate(std::max<uint64_t>(bytes, kPage));
    if (!block.ok()) return block.status();
    absl::StatusOr<RemoteRegion> remote = worker_->remote_region(block->region);
    if (!remote.ok()) return remote.status();
    std::vector<KvCacheMemory::Buffer> buffers;
    for (uint64_t begin : begins) {
      buffers.push_back({block->region, {*remote, block->offset + begin}});
    }
    pool_ = *std::move(pool);
    use_cache(layout, std::move(buffers));
    return block->data;
  }

  std::string address() const override { return worker_->address(); }

  void progress() override { pump(); }

  void wait(Time timeout, int fd) override {
    // From here on no other thread takes a message that would have to end the sleep.
    if (answers_ != nullptr) answers_->engine_waits(true);
    if (!pump()) {
      sleep(timeout, fd);
      pump();
    }
    if (answers_ != nullptr) answers_->engine_waits(false);
  }

  KvConnectorStats stats() const override {
    KvConnectorStats stats;
    stats.bytes_sent = jobs_.bytes_sent();
    stats.bytes_loaded = loads_.bytes_loaded();
    stats.loads_failed = loads_.loads_failed();
    stats.jobs_failed = jobs_.jobs_failed();
    const PeerId peer = loads_.last_peer().generation != 0 ? loads_.last_peer() : newest_peer_;
    if (peer.generation != 0) stats.route = worker_->explain(peer);
    return stats;
  }

  WorkerStats worker_stats() const { return worker_->stats(); }

  int event_fd() const override { return thread_ == nullptr ? -1 : worker_->event_fd(); }
  Time until_deadline() const override {
    const Time at = std::min(loads_.next_deadline(), jobs_.next_deadline());
    return at == kNever ? kNever : std::max(at - worker_->clock().now(), Time::zero());
  }

  absl::Status start_load(KvLoad load) override {
    pump();
    return loads_.start(std::move(load));
  }
  uint32_t layers_loaded(KvRequestId id) override { return loads_.layers_loaded(id); }
  absl::Status load_status(KvRequestId id) override { return loads_.status(id); }

  absl::Status wait_for_layer(KvRequestId id, uint32_t layer) override {
    if (layer >= cache_.layers.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("layer ", layer, " of ", cache_.layers.size()));
    }
    Time busy = worker_->clock().now();
    while (true) {
      if (loads_.layers_loaded(id) > layer) return absl::OkStatus();
      if (absl::Status status = loads_.status(id); !status.ok()) return status;
      const bool moved = pump();
      const Time now = worker_->clock().now();
      if (moved) busy = now;
      if (now - busy < kSpin) continue;
      sleep(kNever, -1);  // a load's own deadline ends it
    }
  }

  bool end_load(KvRequestId id) override {
    pump();
    return loads_.end(id);
  }

  absl::Status renew_load(KvRequestId id, Time timeout) override {
    pump();
    return loads_.renew(id, timeout);
  }
  absl::StatusOr<std::string> load_payload(KvRequestId id) override { return loads_.payload(id); }
  std::vector<uint32_t> failed_blocks(KvRequestId id) override { return loads_.failed_blocks(id); }

  absl::StatusOr<uint64_t> bind(const KvBinding& binding) override { return jobs_.bind(binding); }
  absl::Status renew_job(uint64_t job, Time lease) override { return jobs_.renew_job(job, lease); }
  absl::Status give_payload(uint64_t job, const std::string& payload) override {
    return jobs_.give_payload(job, payload);
  }
  std::optional<KvJob> next_job() override { return jobs_.next_job(); }
  bool is_wanted(uint64_t job) override { return jobs_.is_wanted(job); }
  absl::Status save_layer(uint64_t job, uint32_t layer, uint32_t first_block,
                          absl::Span<const uint32_t> blocks) override {
    absl::Status status = jobs_.save_layer(job, layer, first_block, blocks);
    pump();
    return status;
  }
  void finish_job(uint64_t job, const absl::Status& outcome) override {
    jobs_.finish_job(job, outcome);
    pump();
  }
  bool is_saved(uint64_t job) override { return jobs_.is_saved(job); }

 private:
  absl::Status check_new_cache(const KvLayout& layout) const {
    if (!cache_.buffers.empty()) {
      return absl::FailedPreconditionError("this worker has a KV cache already");
    }
    if (absl::Status status = layout.check(); !status.ok()) return status;
    return absl::OkStatus();
  }

  void use_cache(const KvLayout& layout, std::vector<KvCacheMemory::Buffer> buffers) {
    cache_.layout = layout;
    cache_.layers = layers_of(layout);
    cache_.buffers = std::move(buffers);
    jobs_.set_cache(&cache_);
    loads_.set_cache(&cache_);
  }

  bool pump() {
    if (answers_ != nullptr) answers_->looked();
    bool any = thread_ == nullptr && worker_->progress();
    any |= jobs_.progress();
    while (mailbox_.receive(message_)) {
      dispatch(message_);
      any = true;
    }
    while (std::optional<PeerEvent> event = worker_->next_peer_event()) {
      if (event->kind == PeerEvent::Kind::kUp) {
        newest_peer_ = event->peer;
      } else if (event->kind == PeerEvent::Kind::kDown) {
        mailbox_.forget(event->peer);
        jobs_.on_peer_down(event->peer, event->why);
        loads_.on_peer_down(event->peer, event->why);
      }
      any = true;
    }
    any |= jobs_.end_leases();
    any |= loads_.progress();
    any |= mailbox_.flush();
    return any;
  }

  void dispatch(const KvMessage& message) {
    loads_.on_word(message.peer, message.status.ok() && message.kind == KvMessageKind::kAlive);
    if (!message.status.ok()) {
      // Only a request has a peer that waits for an answer; the rest is not worth one. Who answers
      // in another version will never be understood.
      if (message.load == 0) return;
      if (message.kind == KvMessageKind::kRequest) {
        jobs_.on_bad_request(message.peer, message.load, message.status);
      } else if (absl::IsFailedPrecondition(message.status)) {
        loads_.on_bad_answer(message.peer, message.load, message.status);
      }
      return;
    }
    switch (message.kind) {
      case KvMessageKind::kRequest:
        return jobs_.on_request(message.peer, message.load, message.body, message.version);
      case KvMessageKind::kCancel:
        return jobs_.on_cancel(message.peer, message.load);
      case KvMessageKind::kDone:
        return loads_.on_done(message.peer, message.load, message.body);
      case KvMessageKind::kFailed:
        return loads_.on_failed(message.peer, message.load, message.body);
      case KvMessageKind::kCancelled:
        return loads_.on_cancelled(message.peer, message.load);
      case KvMessageKind::kRenew:
        return jobs_.on_renew(message.peer, message.load, message.body);
      case KvMessageKind::kOffer:
        return loads_.on_offer(message.peer, message.load, message.body);
      case KvMessageKind::kReady:
        return loads_.on_ready(message.peer, message.load, message.body);
      case KvMessageKind::kPulled:
        return jobs_.on_pulled(message.peer, message.load);
      case KvMessageKind::kRenewLease:
        return jobs_.on_renew_lease(message.peer, message.load, message.body);
      case KvMessageKind::kLeaseRenewed:
        return loads_.on_lease_renewed(message.peer, message.load, message.body);
      case KvMessageKind::kAlive:
      case KvMessageKind::kProbe:
        return;
    }
  }

  // Until something may have happened, `fd` is readable, or a deadline of ours.
  void sleep(Time timeout, int fd) {
    const Time now = worker_->clock().now();
    Time until = timeout < kNever - now ? now + timeout : kNever;
    until = std::min({until, loads_.next_deadline(), jobs_.next_deadline()});
    int own = -1;
    if (thread_ != nullptr) {
      own = worker_->event_fd();
    } else {
      if (!worker_->arm()) return;
      own = worker_->wait_fd();
      until = std::min(until, worker_->next_timer());
    }
    const Time left = std::clamp<Time>(until - now, Time::zero(), std::chrono::hours(1));
    const timespec time = base::to_timespec(left);
    std::array<pollfd, 2> fds = {pollfd{own, POLLIN, 0}, pollfd{fd, POLLIN, 0}};
    ppoll(fds.data(), fds.size(), &time, nullptr);
    if (thread_ != nullptr && (fds[0].revents & POLLIN) != 0) {
      uint64_t events = 0;
      [[maybe_unused]] const ssize_t got = read(own, &events, sizeof events);
    }
  }

  const base::MadeHere made_here_;
  const bool huge_pages_;
  const Access access_;
  std::unique_ptr<Worker> worker_;
  KvMailbox mailbox_;
  KvJobs jobs_;
  KvLoads loads_;
  std::unique_ptr<MemoryPool> pool_;
  KvCacheMemory cache_;
  KvMessage message_;
  PeerId newest_peer_;
  std::unique_ptr<ProgressThread> thread_;
  std::unique_ptr<KvAnswerThread> answers_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<KvConnector>> make_baton_connector(
    const BatonConnectorOptions& options) {
  absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::create(options.worker);
  if (!worker.ok()) return worker.status();
  try {
    return make_baton_connector(*std::move(worker), options);
  } catch (const std::system_error& no_thread) {
    return absl::ResourceExhaustedError(absl::StrCat("no thread to move KV: ", no_thread.what(),
                                                     "; raise `ulimit -u` or `ulimit -v`"));
  }
}

std::unique_ptr<KvConnector> make_baton_connector(std::unique_ptr<Worker> worker,
                                                  const BatonConnectorOptions& options) {
  return std::make_unique<BatonConnector>(std::move(worker), options);
}

WorkerStats worker_stats(const KvConnector& connector) {
  const auto* baton = dynamic_cast<const BatonConnector*>(&connector);
  return baton == nullptr ? WorkerStats{} : baton->worker_stats();
}

}  // namespace baton::kvtransfer
