// A provider around another whose connections a test pulls out and plugs in again, and whose
// reports of what is done it holds back: those are lost with the connection.
#pragma once

#include "tests/std.h"
#include "transport/provider.h"

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

}  // namespace baton
