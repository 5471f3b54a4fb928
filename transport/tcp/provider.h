// The tcp provider: makes rails of the connections that its Acceptor brings, and runs them.
#pragma once

#include <memory>
#include <string>

#include "transport/net/acceptor_provider.h"
#include "transport/tcp/rail.h"

namespace baton::tcp {

class TcpProvider final : public net::AcceptorProvider<TcpShared> {
 public:
  explicit TcpProvider(const ProviderContext& context);

  absl::Status add_region(const RegionEntry&) override { return absl::OkStatus(); }
  absl::Status remove_region(const RegionEntry& region, EventSink& sink) override;
  bool progress(EventSink& sink) override;
  bool arm() override;
  Time next_timer() const override;

 private:
  absl::Status configure();
  bool read_directly();
  void met(const net::Link& link, const HelloInfo& peer, std::unique_ptr<net::Acceptor::Dial> dial,
           EventSink& sink);
  void call(const std::shared_ptr<CalledSockets>& sockets, uint16_t number, const Paths& paths);
  void look_at(const std::shared_ptr<CalledSockets>& sockets);

  bool look_ = true;     // at the descriptors, in the next round
  uint32_t rounds_ = 0;  // since the last look
};

}  // namespace baton::tcp
