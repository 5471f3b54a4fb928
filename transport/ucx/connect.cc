// From an authenticated peer to a rail. After the handshake, on the same connection:
//
//   client  -> server   introduction: where its rail is found in UCX
//   server  -> client   introduction; from here on the client may send through UCX
//   client  -> server   ready (an empty message); from here on the server may
#include "transport/ucx/provider.h"

namespace baton::ucx {

void UcxProvider::connect(const ConnectRequest& request) {
  const absl::Status status = capabilities_.available ? start_engine() : absl::OkStatus();
  if (!status.ok()) return acceptor_.refuse(request, status);
  AcceptorProvider::connect(request);
}

// Introduces the two rails to each other.
void UcxProvider::met(const net::Link& link, HelloInfo peer, std::unique_ptr<Dial> dial) {
  auto channel = std::make_unique<net::MessageStream>(link, *shared_->poller, UcxRail::kChannel);
  absl::Status status = start_engine();
  status.Update(channel->why());
  if (!status.ok()) {
    if (dial != nullptr) acceptor_.try_next(std::move(dial), status);
    return;
  }
  Joining joining;
  joining.rail = std::make_unique<UcxRail>(shared_, std::move(channel), link.keys, std::move(peer));
  joining.dial = std::move(dial);
  joining.deadline = shared_->context.clock.now() + patience_;
  if (joining.dial != nullptr) joining.rail->channel().send(joining.rail->introduction());
  joining_.push_back(std::move(joining));
}

bool UcxProvider::advance_joining(EventSink& sink) {
  bool any = false;
  for (size_t i = 0; i < joining_.size();) {
    const absl::StatusOr<bool> joined = advance(joining_[i]);
    if (joined.ok() && !*joined) {
      ++i;
      continue;
    }
    any = true;
    Joining joining = std::move(joining_[i]);
    joining_.erase(joining_.begin() + static_cast<ptrdiff_t>(i));
    if (joined.ok()) {
      announce(std::move(joining), sink);
    } else if (joining.dial != nullptr) {
      joining.rail.reset();
      acceptor_.try_next(std::move(joining.dial), joined.status());
    }
  }
  return any;
}

// True once the rail can be used.
absl::StatusOr<bool> UcxProvider::advance(Joining& joining) {
  net::MessageStream& channel = joining.rail->channel();
  const auto words = channel.next();
  if (!words.has_value()) {
    if (!channel.open()) return channel.why();
    if (shared_->context.clock.now() < joining.deadline) return false;
    return absl::UnavailableError("it did not introduce itself in time (ucx.handshake_ms)");
  }
  if (joining.introduced) {
    if (words->empty()) return true;
    return absl::UnavailableError("it introduced itself twice");
  }
  if (absl::Status status = joining.rail->introduced(*words); !status.ok()) return status;
  joining.introduced = true;
  const bool client = joining.dial != nullptr;
  channel.send(client ? std::string() : joining.rail->introduction());
  return client;
}

void UcxProvider::announce(Joining joining, EventSink& sink) {
  UcxRail& rail = *joining.rail;
  rail.announced = true;
  rail.activate();
  if (joining.dial != nullptr) {
    sink.connected(joining.dial->session, rail.peer(), std::move(joining.rail));
  } else {
    sink.accepted(rail.peer(), std::move(joining.rail));
  }
}

}  // namespace baton::ucx
