// The rendezvous on a thread of its own.
#include "collectives/rendezvous.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "absl/strings/str_split.h"
#include "collectives/launch/rendezvous_service.h"
#include "transport/base/limits/event_fd.h"
#include "transport/net/endpoint.h"

namespace baton::collectives {

using launch::RendezvousService;

struct RendezvousServer::Impl {
  explicit Impl(std::unique_ptr<RendezvousService> served) : service(std::move(served)) {}
  void begin() {
    thread = std::thread([this] {
      pollfd stop{.fd = wake.fd(), .events = POLLIN, .revents = 0};
      while (!stopped.load(std::memory_order_acquire)) service->run_once({&stop, 1}, kNever);
      // A rank may end its server as soon as it has its own answer.
      while (service->answering()) service->run_once({}, kNever);
    });
  }
  ~Impl() {
    if (!thread.joinable()) return;
    stopped.store(true, std::memory_order_release);
    wake.ring();
    thread.join();
  }

  std::unique_ptr<RendezvousService> service;
  base::EventFd wake;
  std::atomic<bool> stopped = false;
  std::thread thread;
};

RendezvousServer::RendezvousServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RendezvousServer::~RendezvousServer() = default;

absl::StatusOr<std::unique_ptr<RendezvousServer>> RendezvousServer::start(const ClusterKey& key,
                                                                          const std::string& host,
                                                                          uint16_t port,
                                                                          uint32_t ranks) {
  auto service = RendezvousService::listen(key, host, port, ranks);
  if (!service.ok()) return service.status();
  auto impl = std::make_unique<Impl>(*std::move(service));
  if (!impl->wake.status().ok()) return impl->wake.status();
  impl->begin();
  return std::unique_ptr<RendezvousServer>(new RendezvousServer(std::move(impl)));
}

absl::StatusOr<std::unique_ptr<RendezvousServer>> RendezvousServer::start_at(
    const ClusterKey& key, const std::string& rendezvous, uint32_t ranks) {
  auto parts = net::split_host_port(rendezvous.substr(0, rendezvous.find(',')));
  if (!parts.ok()) return parts.status();
  return start(key, only_this_machine(rendezvous) ? parts->first : "*", parts->second, ranks);
}

bool only_this_machine(const std::string& rendezvous) {
  const std::vector<std::string> places = absl::StrSplit(rendezvous, ',');
  return std::all_of(places.begin(), places.end(), [](const std::string& place) {
    const auto parts = net::split_host_port(place);
    return parts.ok() && net::loopback_host(parts->first);
  });
}

std::string listen_host_for(const std::string& rendezvous) {
  return only_this_machine(rendezvous) ? "" : "*";
}

std::string RendezvousServer::address() const { return impl_->service->address(); }

}  // namespace baton::collectives
