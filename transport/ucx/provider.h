// The ucx provider: meets peers over TCP, introduces UCX to them, and runs the rails.
//
// Settings: ucx.tls and ucx.net_devices (as UCX_TLS and UCX_NET_DEVICES), ucx.slice_kib,
// ucx.stall_ms, ucx.handshake_ms.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/net/acceptor_provider.h"
#include "transport/ucx/rail.h"

namespace baton::ucx {

class UcxProvider final : public net::AcceptorProvider<UcxShared> {
 public:
  explicit UcxProvider(const ProviderContext& context);
  ~UcxProvider() override;

  absl::Status reachable(const std::string& address, std::string_view host_id) const override;
  void connect(const ConnectRequest& request) override;
  // UCX never sees regions: their bytes are copied into and out of its messages, each time after
  // a look at the table.
  absl::Status add_region(const RegionEntry&) override { return absl::OkStatus(); }
  absl::Status remove_region(const RegionEntry&, EventSink&) override { return absl::OkStatus(); }
  bool progress(EventSink& sink) override;
  // Rails that a round looks at.
  size_t active() const { return shared_->active.size(); }
  bool arm() override;
  Time next_timer() const override;

 private:
  using Dial = net::Acceptor::Dial;
  // A rail that the worker does not know of yet.
  struct Joining {
    std::unique_ptr<UcxRail> rail;
    std::unique_ptr<Dial> dial;  // null: they called us
    bool introduced = false;
    Time deadline = kNever;
  };

  absl::Status configure();
  absl::Status start_engine();
  void met(const net::Link& link, HelloInfo peer, std::unique_ptr<Dial> dial);
  bool advance_joining(EventSink& sink);
  absl::StatusOr<bool> advance(Joining& joining);
  void announce(Joining joining, EventSink& sink);
  bool advance_rails(EventSink& sink);
  void received(std::string_view message);

  Engine::Options options_;
  Time patience_ = std::chrono::seconds(5);  // for the handshake, and for the introduction
  net::Watched engine_watch_;
  std::vector<Joining> joining_;
  EventSink* sink_ = nullptr;  // during progress()
  uint32_t idle_rounds_ = 0;
};

}  // namespace baton::ucx
