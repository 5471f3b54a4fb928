// A provider around another whose connections a test pulls out and plugs in again, and whose
// reports of what is done it holds back: those are lost with the connection. And two workers with
// such a provider and one that takes over.
#pragma once

#include "tests/test.h"
#include "tests/until.h"
#include "transport/pool.h"
#include "transport/provider.h"
#include "transport/worker.h"

namespace baton {

class Pluggable final : public Provider, EventSink {
 public:
  // They outlive it, and count for all that are made with them.
  struct Cable {
    bool in = true;
    bool deaf = false;  // reports are held back, from now on
  };
  Pluggable(std::unique_ptr<Provider> inner, const Cable& cable)
      : inner_(std::move(inner)), cable_(cable) {}

  static ProviderFactory factory(ProviderFactory inner, const Cable& cable) {
    return [inner = std::move(inner), &cable](const ProviderContext& context) {
      return std::make_unique<Pluggable>(inner(context), cable);
    };
  }

  const Capabilities& capabilities() const override { return inner_->capabilities(); }
  absl::StatusOr<std::string> listen() override { return inner_->listen(); }
  void set_worker_address(const std::string& encoded) override {
    inner_->set_worker_address(encoded);
  }
  absl::Status reachable(const std::string& address, std::string_view host) const override {
    return inner_->reachable(address, host);
  }
  void connect(const ConnectRequest& request) override {
    if (cable_.in) return inner_->connect(request);
    unheard_.push_back(request.session);
  }
  absl::Status add_region(const RegionEntry& region) override { return inner_->add_region(region); }
  absl::Status remove_region(const RegionEntry& region, EventSink& sink) override {
    return inner_->remove_region(region, sink);
  }
  bool progress(EventSink& sink) override {
    worker_ = &sink;
    bool any = inner_->progress(*this);
    if (cable_.in) return any;
    while (!rails_.empty()) {
      any = true;
      rails_.back()->close(absl::UnavailableError("unplugged"), *this);
    }
    for (const uint64_t session : std::exchange(unheard_, {})) {
      any = true;
      sink.connect_failed(session, absl::UnavailableError("unplugged"));
    }
    return any;
  }
  int wait_fd() const override { return inner_->wait_fd(); }
  bool arm() override { return inner_->arm() && unheard_.empty(); }
  Time next_timer() const override { return inner_->next_timer(); }

 private:
  struct Report {
    Rail* rail;
    TransferId transfer;
    uint32_t slice;
  };
  void slice_done(Rail& rail, TransferId transfer, uint32_t slice, absl::Status status) override {
    if (cable_.deaf && status.ok()) return held_.push_back({&rail, transfer, slice});
    worker_->slice_done(rail, transfer, slice, std::move(status));
  }
  void arrived(Rail& rail, const Arrival& arrival) override { worker_->arrived(rail, arrival); }
  void counters_moved(Rail& rail) override { worker_->counters_moved(rail); }
  void connected(uint64_t session, const HelloInfo& peer, std::unique_ptr<Rail> rail) override {
    rails_.push_back(rail.get());
    worker_->connected(session, peer, std::move(rail));
  }
  void connect_failed(uint64_t session, absl::Status why) override {
    worker_->connect_failed(session, std::move(why));
  }
  void accepted(const HelloInfo& peer, std::unique_ptr<Rail> rail) override {
    rails_.push_back(rail.get());
    worker_->accepted(peer, std::move(rail));
  }
  void rail_down(Rail& rail, absl::Status why) override {
    std::erase(rails_, &rail);
    // As the provider itself reports what it has not heard of.
    for (const Report& report : std::exchange(held_, {})) {
      if (report.rail != &rail) {
        held_.push_back(report);
        continue;
      }
      worker_->slice_done(rail, report.transfer, report.slice, absl::UnknownError("unplugged"));
    }
    worker_->rail_down(rail, std::move(why));
  }
  void resolved(uint64_t session, absl::StatusOr<std::string> address,
                std::string_view at) override {
    worker_->resolved(session, std::move(address), at);
  }

  std::unique_ptr<Provider> inner_;
  const Cable& cable_;
  EventSink* worker_ = nullptr;
  std::vector<Rail*> rails_;
  std::vector<Report> held_;
  std::vector<uint64_t> unheard_;  // calls while it was out
};

class PluggedPair : public testing::Test {
 protected:
  struct Side {
    std::unique_ptr<Worker> worker;
    std::unique_ptr<MemoryPool> pool;
    Block block;
    void end() {
      pool.reset();
      worker.reset();
    }
  };
  static ProviderFactory registered(const std::string& name) {
    for (const auto& [provider, factory] : registered_providers()) {
      if (provider == name) return factory;
    }
    return nullptr;
  }
  // `other` takes over from `better`; empty: none does.
  void start(Side& side, const std::string& name, const ProviderFactory& better,
             const std::string& other, size_t bytes) {
    WorkerOptions options;
    options.name = name;
    options.key = *ClusterKey::from_bytes("a secret of the tests");
    if (!other.empty()) options.providers = {other};
    options.extra_providers = {better};
    options.settings = settings_;
    side.worker = Worker::create(std::move(options)).value();
    side.pool = *MemoryPool::create(*side.worker, {.slab_bytes = 4 << 20, .huge_pages = false});
    side.block = *side.pool->allocate(bytes);
  }
  void meet() {
    peer_ = *a_.worker->connect(b_.worker->address());
    counter_ = *b_.worker->allocate_counter();
    until([&] { return a_.worker->peer_state(peer_) == PeerState::kUp; });
  }
  template <typename Fact>
  void until(Fact fact, bool with_a = true, CallSite from = CallSite::here()) {
    const auto turn = [&] {
      if (with_a) a_.worker->progress();
      b_.worker->progress();
      hear();
    };
    const auto state = [&] {
      return state_of(*a_.worker, peer_, "a") + state_of(b_.worker->stats(), "b");
    };
    baton::until(fact, turn, state, from);
  }
  virtual void hear() {}  // what b is told
  // A write of a's first bytes [at, +bytes) to the same of b's, which raises the counter.
  TransferRequest write(size_t at, size_t bytes) const {
    return {.peer = peer_,
            .local = a_.block.region,
            .local_layout = Layout::contiguous(a_.block.offset + at, bytes),
            .remote = *b_.worker->remote_region(b_.block.region),
            .remote_layout = Layout::contiguous(b_.block.offset + at, bytes),
            .counter = b_.worker->remote_counter(counter_)};
  }

  SettingValues settings_;
  Side a_, b_;
  PeerId peer_;
  CounterId counter_;
};

}  // namespace baton
