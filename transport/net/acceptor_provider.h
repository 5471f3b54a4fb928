// What providers have in common that meet their peers by an Acceptor: tcp, ucx and verbs.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "transport/net/acceptor.h"
#include "transport/net/endpoint.h"
#include "transport/provider.h"
#include "transport/settings.h"

namespace baton::net {

// `Shared`: what such a provider shares with its rails. It has the context, and the poller where
// the provider got so far.
template <typename Shared>
class AcceptorProvider : public Provider {
 public:
  const Capabilities& capabilities() const override { return capabilities_; }
  absl::StatusOr<std::string> listen() override { return acceptor_.listen(); }
  uint16_t port() const override { return acceptor_.port(); }
  void set_worker_address(const std::string& encoded) override {
    acceptor_.set_worker_address(encoded);
  }
  absl::Status reachable(const std::string& address, std::string_view host_id) const override {
    return net::reachable(address, host_id, shared_->context.host_id);
  }
  void connect(const ConnectRequest& request) override {
    if (!capabilities_.available) {
      return acceptor_.refuse(request, absl::UnavailableError(capabilities_.detail));
    }
    acceptor_.connect(request, connections_);
  }
  absl::StatusOr<std::string> look_up(const std::string& host_port) const override {
    return net::look_up(host_port);
  }
  absl::Status query(uint64_t session, const std::string& addresses) override {
    if (!capabilities_.available) return absl::FailedPreconditionError(capabilities_.detail);
    return acceptor_.query(session, addresses);
  }
  int wait_fd() const override { return shared_->poller ? shared_->poller->fd() : -1; }

 protected:
  AcceptorProvider(const ProviderContext& context, const char* name, int rank, Acceptor::Met met)
      : shared_(std::make_shared<Shared>(context)),
        capabilities_{.name = name, .rank = rank},
        acceptor_(shared_->context, name, std::move(met)) {}

  absl::Status make_poller() {
    auto poller = Poller::create();
    if (!poller.ok()) return poller.status();
    shared_->poller = *std::move(poller);
    return absl::OkStatus();
  }
  // Whether the provider can be used, and if not, why.
  void set_available(const absl::Status& status) {
    capabilities_.available = status.ok();
    if (!status.ok()) capabilities_.detail = std::string(status.message());
  }
  // The protections that two settings ask for.
  static Protections protections(SettingsReader& read, std::string_view integrity,
                                 std::string_view encrypt) {
    bool tags = false;
    bool hidden = false;
    read.on_off(integrity, tags);
    read.on_off(encrypt, hidden);
    return static_cast<Protections>(kHeadsOnly | (tags ? bit(Protection::kIntegrity) : 0) |
                                    (hidden ? bit(Protection::kEncrypt) : 0));
  }

  const std::shared_ptr<Shared> shared_;
  Capabilities capabilities_;
  uint16_t connections_ = 1;  // that a session will have
  Acceptor acceptor_;
};

}  // namespace baton::net
