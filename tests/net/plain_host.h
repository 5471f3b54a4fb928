// The acceptor of a worker and nothing else: it keeps whom it has met.
#pragma once

#include "tests/net/raw_handshake.h"
#include "tests/std.h"
#include "tests/transport/provider_node.h"
#include "transport/net/acceptor.h"

namespace baton::net {

// A provider that does nothing but meet: it keeps whom it has met.
class PlainProvider final : public Provider {
 public:
  static constexpr Time kPatience = std::chrono::seconds(2);

  explicit PlainProvider(const ProviderContext& context)
      : real_time(&context.clock == &Clock::steady()),
        acceptor(context, "plain",
                 [this](const Link& link, HelloInfo peer, std::unique_ptr<Acceptor::Dial> dial,
                        EventSink&) {
                   if (refuses > 0) {
                     --refuses;
                     ::close(link.fd);
                     acceptor.try_next(std::move(dial), absl::UnavailableError("not good enough"));
                     return;
                   }
                   met.push_back({link.fd, std::move(peer), dial != nullptr});
                   last_dial = std::move(dial);
                 }) {
    poller = *Poller::create();
    open(Acceptor::LargePackets::kNotLookedAt);
  }
  void open(Acceptor::LargePackets large_packets) {
    // By a clock of the test's nobody is slow.
    acceptor.open(*poller, {.patience = real_time ? patient(kPatience) : kPatience,
                            .patience_setting = "plain.patience",
                            .extra = [this] { return "extra " + std::to_string(asked++); },
                            .large_packets = large_packets});
  }
  ~PlainProvider() override {
    for (const auto& one : met) ::close(one.fd);
  }

  const Capabilities& capabilities() const override { return can; }
  absl::StatusOr<std::string> listen() override { return acceptor.listen(); }
  void set_worker_address(const std::string& encoded) override {
    acceptor.set_worker_address(encoded);
  }
  absl::Status reachable(const std::string&, std::string_view) const override { return {}; }
  void connect(const ConnectRequest& request) override { acceptor.connect(request, rails); }
  absl::Status query(uint64_t session, const std::string& host_port) override {
    return acceptor.query(session, host_port);
  }
  absl::Status add_region(const RegionEntry&) override { return {}; }
  absl::Status remove_region(const RegionEntry&, EventSink&) override { return absl::OkStatus(); }
  bool progress(EventSink& sink) override {
    const bool any = poller->poll();
    return acceptor.progress(sink) || any;
  }
  int wait_fd() const override { return poller->fd(); }
  bool arm() override { return acceptor.arm(); }
  Time next_timer() const override { return acceptor.next_timer(); }

  struct Connection {
    int fd;
    HelloInfo peer;
    bool dialled;
  };
  Capabilities can{.name = "plain", .available = true};
  const bool real_time;
  std::unique_ptr<Poller> poller;
  Acceptor acceptor;
  std::vector<Connection> met;
  std::unique_ptr<Acceptor::Dial> last_dial;
  uint16_t rails = 1;
  int refuses = 0;  // of those to be met
  int asked = 0;
};

inline const ProviderRegistration kPlain("plain", [](const ProviderContext& context) {
  return std::unique_ptr<Provider>(new PlainProvider(context));
});

struct Host : ProviderNode {
  explicit Host(const std::string& name, const Clock& clock = Clock::steady(),
                const std::string& secret = "0123456789abcdef")
      : ProviderNode("plain", name, {}, secret, 0, clock),
        it(static_cast<PlainProvider&>(*provider)) {}
  // Rounds until one finds nothing to do.
  void settle() {
    while (progress()) {
    }
  }
  PlainProvider& it;
};

inline bool hung_up(int fd) {
  char byte;
  return ::recv(fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK) == 0 || errno == ECONNRESET;
}

}  // namespace baton::net
