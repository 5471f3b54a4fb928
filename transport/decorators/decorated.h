// The base of all decorators: a provider that wraps a provider, with rails that wrap its rails.
// Internal to transport/.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "transport/internal/tables/rail_extras.h"
#include "transport/provider.h"

namespace baton::decorators {

// Passes everything on. The inner rail's worker_tag leads back to the rail around it.
class DecoratedRail : public Rail, public internal::CountingRail {
 public:
  explicit DecoratedRail(std::unique_ptr<Rail> inner)
      : inner_(std::move(inner)), properties_(inner_->properties()) {
    inner_->worker_tag = reinterpret_cast<uint64_t>(this);
  }
  static DecoratedRail& around(Rail& inner) {
    return *reinterpret_cast<DecoratedRail*>(inner.worker_tag);
  }

  const Properties& properties() const override { return properties_; }
  double share(uint32_t region) const override {
    return std::min(properties_.bytes_per_second, inner_->share(region));
  }
  absl::Status moves(const RegionEntry& region) const override { return inner_->moves(region); }
  absl::Status maps(const RegionEntry& local, const RemoteRegion& remote) const override {
    return inner_->maps(local, remote);
  }
  std::string about_devices() const override { return inner_->about_devices(); }
  bool reaches_devices() const override { return inner_->reaches_devices(); }
  absl::Status reaches(const RemoteRegion& remote) const override {
    return inner_->reaches(remote);
  }
  std::optional<internal::Ordinal> counted() const override {
    const auto* counting = dynamic_cast<const internal::CountingRail*>(inner_.get());
    return counting != nullptr ? counting->counted() : std::nullopt;
  }
  bool let_go(TransferId transfer) const override { return inner_->let_go(transfer); }

 protected:
  std::unique_ptr<Rail> inner_;
  Properties properties_;
};

class DecoratedProvider : public Provider {
 public:
  explicit DecoratedProvider(std::unique_ptr<Provider> inner) : inner_(std::move(inner)) {}

  const Capabilities& capabilities() const override { return inner_->capabilities(); }
  absl::StatusOr<std::string> listen() override { return inner_->listen(); }
  uint16_t port() const override { return inner_->port(); }
  void set_worker_address(const std::string& encoded) override {
    inner_->set_worker_address(encoded);
  }
  absl::Status reachable(const std::string& address, std::string_view host_id) const override {
    return inner_->reachable(address, host_id);
  }
  void connect(const ConnectRequest& request) override { inner_->connect(request); }
  absl::StatusOr<std::string> look_up(const std::string& host_port) const override {
    return inner_->look_up(host_port);
  }
  absl::Status query(uint64_t session, const std::string& host_port) override {
    return inner_->query(session, host_port);
  }
  absl::Status takes(const RegionEntry& region) const override { return inner_->takes(region); }
  bool shares(const RegionEntry& region) const override { return inner_->shares(region); }
  absl::Status add_region(const RegionEntry& region) override { return inner_->add_region(region); }
  absl::Status remove_region(const RegionEntry& region, EventSink& sink) override {
    Sink inside(*this, sink);
    return inner_->remove_region(region, inside);
  }
  bool revoke_region(const RegionEntry& region) override { return inner_->revoke_region(region); }
  bool progress(EventSink& sink) override {
    Sink inside(*this, sink);
    return inner_->progress(inside);
  }
  int wait_fd() const override { return inner_->wait_fd(); }
  bool arm() override { return inner_->arm(); }
  Time next_timer() const override { return inner_->next_timer(); }

  // The sink of the inner provider: reports the wrapping rails to the worker in place of the inner
  // ones.
  class Sink final : public EventSink {
   public:
    Sink(DecoratedProvider& provider, EventSink& outer) : provider_(provider), outer_(outer) {}
    void slice_done(Rail& rail, TransferId transfer, uint32_t slice, absl::Status why) override {
      provider_.on_slice_done(DecoratedRail::around(rail), transfer, slice, std::move(why), outer_);
    }
    void arrived(Rail& rail, const Arrival& arrival) override {
      outer_.arrived(DecoratedRail::around(rail), arrival);
    }
    void counters_moved(Rail& rail) override { outer_.counters_moved(DecoratedRail::around(rail)); }
    void connected(uint64_t session, const HelloInfo& peer, std::unique_ptr<Rail> rail) override {
      outer_.connected(session, peer, provider_.decorate(std::move(rail)));
    }
    void connect_failed(uint64_t session, absl::Status why) override {
      outer_.connect_failed(session, std::move(why));
    }
    void accepted(const HelloInfo& peer, std::unique_ptr<Rail> rail) override {
      outer_.accepted(peer, provider_.decorate(std::move(rail)));
    }
    void handshake_refused(std::string_view who, const absl::Status& why) override {
      outer_.handshake_refused(who, why);
    }
    void rail_down(Rail& rail, absl::Status why) override {
      provider_.on_rail_down(DecoratedRail::around(rail), std::move(why), outer_);
    }
    void resolved(uint64_t session, absl::StatusOr<std::string> address,
                  std::string_view at) override {
      outer_.resolved(session, std::move(address), at);
    }

   private:
    DecoratedProvider& provider_;
    EventSink& outer_;
  };

 protected:
  virtual std::unique_ptr<Rail> decorate(std::unique_ptr<Rail> inner) = 0;
  virtual void on_slice_done(DecoratedRail& rail, TransferId transfer, uint32_t slice,
                             absl::Status status, EventSink& sink) {
    sink.slice_done(rail, transfer, slice, std::move(status));
  }
  virtual void on_rail_down(DecoratedRail& rail, absl::Status why, EventSink& sink) {
    sink.rail_down(rail, std::move(why));
  }

  std::unique_ptr<Provider> inner_;
};

}  // namespace baton::decorators
