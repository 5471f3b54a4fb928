// The tcp provider: listens, dials, authenticates, and runs the rails of one worker.
//
// Settings: tcp.sockets (per session), tcp.io (auto, epoll, uring), tcp.congestion (auto, system,
// or a name), tcp.slice_kib, tcp.buffer_kib (0: kernel), tcp.stall_ms, tcp.handshake_ms.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/provider.h"
#include "transport/tcp/greeting.h"
#include "transport/tcp/rail.h"

namespace baton::tcp {

class TcpProvider final : public Provider {
 public:
  static constexpr size_t kMaxHalfOpen = 64;  // connections that have not proved themselves yet

  explicit TcpProvider(const ProviderContext& context);
  ~TcpProvider() override;

  const Capabilities& capabilities() const override { return capabilities_; }
  absl::StatusOr<std::string> listen() override;
  void set_worker_address(const std::string& encoded) override { worker_address_ = encoded; }
  absl::Status reachable(const std::string& address, std::string_view host_id) const override;
  // Addresses that listen() gave out are literal; for a name the resolver is asked, which may
  // block.
  void connect(const ConnectRequest& request) override;
  absl::Status query(uint64_t session, const std::string& host_port) override;
  absl::Status add_region(const RegionEntry&) override { return absl::OkStatus(); }
  void remove_region(const RegionEntry& region, EventSink& sink) override;
  bool progress(EventSink& sink) override;
  int wait_fd() const override;
  bool arm() override;
  Time next_timer() const override;

 private:
  // An attempt to reach a peer: one socket of a session, or a query.
  struct Dial {
    uint64_t session = 0;
    HelloInfo expected;
    Handshake::Purpose purpose = Handshake::Purpose::kRail;
    uint16_t rail = 0;
    uint16_t rails = 1;
    std::string address;  // as asked for
    std::vector<Endpoint> endpoints;
    size_t next = 0;  // endpoint to try
    std::string errors;
    // What somebody who answered said no with; kUnavailable while nobody has.
    absl::StatusCode refusal = absl::StatusCode::kUnavailable;
  };
  struct Call {
    std::unique_ptr<Greeting> greeting;
    std::unique_ptr<Dial> dial;  // null: they called us
  };

  absl::Status configure();
  absl::StatusOr<uint64_t> number(std::string_view key, uint64_t fallback, uint64_t least,
                                  uint64_t most) const;
  void choose_engine(std::string_view wish);
  void start(std::unique_ptr<Dial> dial);
  void give_up(std::unique_ptr<Dial> dial, EventSink& sink);
  void accept_some(EventSink& sink);
  bool advance_calls(EventSink& sink);
  void call_failed(Call call, absl::Status why);
  void call_done(Call call, EventSink& sink);
  void dialled(std::unique_ptr<Dial> dial, Greeting& greeting, EventSink& sink);

  std::shared_ptr<TcpShared> shared_;
  Capabilities capabilities_;
  uint16_t sockets_ = 2;
  Time handshake_time_ = std::chrono::seconds(5);
  std::string worker_address_;
  std::string own_address_;
  int listener_ = -1;
  Watched listener_watch_;
  bool look_ = true;            // at the descriptors, in the next round
  uint32_t rounds_ = 0;         // since the last look
  Time accept_again_ = kNever;  // after running out of descriptors
  std::vector<Call> calls_;
  std::vector<std::unique_ptr<Dial>> failed_;
};

}  // namespace baton::tcp
