// The ucx provider: listens, dials and authenticates over TCP, then moves bytes through UCX.
//
// Settings: ucx.tls and ucx.net_devices (as UCX_TLS and UCX_NET_DEVICES), ucx.slice_kib,
// ucx.stall_ms, ucx.handshake_ms.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/provider.h"
#include "transport/tcp/endpoint.h"
#include "transport/tcp/greeting.h"
#include "transport/ucx/rail.h"

namespace baton::ucx {

class UcxProvider final : public Provider {
 public:
  static constexpr size_t kMaxHalfOpen = 64;  // connections that have not proved themselves yet

  explicit UcxProvider(const ProviderContext& context);
  ~UcxProvider() override;

  const Capabilities& capabilities() const override { return capabilities_; }
  absl::StatusOr<std::string> listen() override;
  void set_worker_address(const std::string& encoded) override { worker_address_ = encoded; }
  absl::Status reachable(const std::string& address, std::string_view host_id) const override;
  void connect(const ConnectRequest& request) override;
  absl::Status query(uint64_t session, const std::string& host_port) override;
  // UCX never sees regions: their bytes are copied into and out of its messages, each time after
  // a look at the table.
  absl::Status add_region(const RegionEntry&) override { return absl::OkStatus(); }
  void remove_region(const RegionEntry&, EventSink&) override {}
  bool progress(EventSink& sink) override;
  int wait_fd() const override { return shared_->poller ? shared_->poller->fd() : -1; }
  bool arm() override;
  Time next_timer() const override;

 private:
  // An attempt to reach a peer, or a query.
  struct Dial {
    uint64_t session = 0;
    HelloInfo expected;
    Handshake::Purpose purpose = Handshake::Purpose::kRail;
    std::string address;  // as asked for
    std::vector<tcp::Endpoint> endpoints;
    size_t next = 0;  // endpoint to try
    std::string errors;
    // What somebody who answered said no with; kUnavailable while nobody has.
    absl::StatusCode refusal = absl::StatusCode::kUnavailable;
  };
  // A connection that proves itself.
  struct Call {
    std::unique_ptr<tcp::Greeting> greeting;
    std::unique_ptr<Dial> dial;  // null: they called us
  };
  // A rail that the worker does not know of yet.
  struct Joining {
    std::unique_ptr<UcxRail> rail;
    std::unique_ptr<Dial> dial;  // null: they called us
    bool introduced = false;
    Time deadline = kNever;
  };

  absl::Status configure();
  absl::StatusOr<uint64_t> number(std::string_view key, uint64_t fallback, uint64_t least,
                                  uint64_t most) const;
  absl::Status start_engine();
  void start(std::unique_ptr<Dial> dial);
  void failed(std::unique_ptr<Dial> dial, const absl::Status& why);
  void give_up(std::unique_ptr<Dial> dial, EventSink& sink);
  void accept_some();
  bool advance_calls(EventSink& sink);
  void call_done(Call call, EventSink& sink);
  bool advance_joining(EventSink& sink);
  absl::StatusOr<bool> advance(Joining& joining);
  void announce(Joining joining, EventSink& sink);
  void received(std::string_view message);

  std::shared_ptr<UcxShared> shared_;
  Capabilities capabilities_;
  Engine::Options options_;
  Time handshake_time_ = std::chrono::seconds(5);
  std::string worker_address_;
  int listener_ = -1;
  tcp::Watched listener_watch_;
  tcp::Watched engine_watch_;
  std::vector<Call> calls_;
  std::vector<Joining> joining_;
  std::vector<std::unique_ptr<Dial>> failed_;
  EventSink* sink_ = nullptr;  // during progress()
  uint32_t idle_rounds_ = 0;
};

}  // namespace baton::ucx
