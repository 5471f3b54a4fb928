// Whom the provider has met: what is told to peers, and the session that begins.
#include "verbs/provider.h"

namespace baton::verbs {

absl::Status VerbsProvider::reachable(const std::string& address, std::string_view host_id) const {
  return tcp::reachable(address, host_id, shared_.context.host_id);
}

std::string VerbsProvider::offers() const {
  std::vector<PortOffer> offers;
  for (const auto& port : shared_.hardware.ports) {
    PortOffer offer;
    offer.families = families_of(port->gids);
    auto gid = choose_gid(port->gids, shared_.tuning.gid_index, 0xff);
    if (gid.ok()) {
      offer.gid = gid->gid;
      if (shared_.tuning.gid_index >= 0) offer.families = static_cast<uint8_t>(gid->family);
    }
    offers.push_back(offer);
  }
  return encode_offers(offers);
}

void VerbsProvider::connect(const ConnectRequest& request) {
  if (!capabilities_.available) {
    return meeting_.refuse(request, absl::UnavailableError(capabilities_.detail));
  }
  meeting_.connect(request);
}

absl::Status VerbsProvider::query(uint64_t session, const std::string& host_port) {
  if (!capabilities_.available) return absl::FailedPreconditionError(capabilities_.detail);
  return meeting_.query(session, host_port);
}

void VerbsProvider::met(int fd, HelloInfo peer, std::unique_ptr<tcp::Meeting::Dial> dial) {
  // The rails are quicker to find out that the network fails; while one is up, the connection may
  // take its time.
  auto control = std::make_unique<tcp::MessageStream>(
      fd, *shared_.poller,
      tcp::MessageStream::Options{.max_message = kMessageBytes,
                                  .silence = std::chrono::seconds(100)});
  auto offers = decode_offers(peer.extra);
  if (!offers.ok()) {
    if (dial != nullptr) meeting_.try_next(std::move(dial), offers.status());
    return;
  }
  sessions_.push_back(std::make_unique<Session>(shared_, std::move(control), std::move(peer),
                                                *std::move(offers), dial != nullptr));
}

}  // namespace baton::verbs
