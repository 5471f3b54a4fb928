// Connects two nodes of the simulation, and brings lost rails back.
#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "tests/sim/fabric/network.h"
#include "tests/sim/fabric/provider.h"
#include "transport/net/handshake.h"

namespace baton::sim {

void SimProvider::later(Time delay, std::function<void(SimProvider&)> call) {
  network_.at_quietly(network_.now() + delay, [&network = network_, node = node_,
                                               incarnation = incarnation_, call = std::move(call)] {
    SimProvider* self = network.provider(node);
    if (self == nullptr || self->incarnation_ != incarnation || !network.alive(node)) return;
    if (network.frozen(node)) return self->later(network.options().redial_interval, call);
    call(*self);
  });
}

size_t SimProvider::live_rails(uint64_t session, const WorkerUid* peer, bool dialled) const {
  return static_cast<size_t>(std::count_if(rails_.begin(), rails_.end(), [&](const SimRail* rail) {
    return rail->up() && rail->session() == session && rail->dialled() == dialled &&
           (peer == nullptr || rail->peer_uid() == *peer);
  }));
}

void SimProvider::connect(const ConnectRequest& request) {
  Session& session = sessions_[request.session];
  session.request = request;
  session.rails = static_cast<uint16_t>(network_.options().rails);
  uint64_t node = 0;
  if (absl::Status status = reachable(request.address, ""); !status.ok()) {
    give_up(request.session, status);
    return;
  }
  (void)absl::SimpleAtoi(request.address, &node);
  session.node = node;
  for (uint16_t rail = 0; rail < session.rails; ++rail) dial(request.session, rail, 0);
}

void SimProvider::give_up(uint64_t session, const absl::Status& why) {
  Entry& entry = add_entry(Entry::Kind::kConnectFailed, nullptr);
  entry.session = session;
  entry.status = why;
  sessions_.erase(session);
}

void SimProvider::dial(uint64_t session, uint16_t rail, uint32_t attempt) {
  const auto it = sessions_.find(session);
  if (it == sessions_.end()) return;
  const SimLinkState& link = network_.link(node_, it->second.node, rail);
  later(link.spec.latency, [=](SimProvider& self) { self.dial_arrived(session, rail, attempt); });
}

// Without an answer: try again, and say so when every rail of a new connection has tried enough.
void SimProvider::redial(uint64_t session, uint16_t rail, uint32_t attempt) {
  const auto it = sessions_.find(session);
  if (it == sessions_.end()) return;
  const uint32_t limit = network_.options().retry_count;
  if (!it->second.established && attempt == limit && ++it->second.failed == it->second.rails) {
    give_up(session, absl::UnavailableError(absl::StrFormat("node %u did not answer %u calls",
                                                            it->second.node, limit + 1)));
    return;
  }
  later(network_.options().redial_interval,
        [=](SimProvider& self) { self.dial(session, rail, attempt + 1); });
}

void SimProvider::dial_arrived(uint64_t session, uint16_t rail, uint32_t attempt) {
  const auto it = sessions_.find(session);
  if (it == sessions_.end()) return;
  const size_t node = it->second.node;
  const SimLinkState& link = network_.link(node_, node, rail);
  if (!link.up() || !network_.alive(node) || network_.frozen(node)) {
    redial(session, rail, attempt);
    return;
  }
  SimProvider* server = network_.provider(node);
  if (it->second.established &&
      (server == nullptr || server->live_rails(session, &self_.uid, false) == 0)) {
    sessions_.erase(it);  // the other side has given the connection up
    return;
  }
  if (server == nullptr || !server->listening_) {
    give_up(session,
            absl::NotFoundError(absl::StrFormat("connection refused: no worker on node %u", node)));
    return;
  }
  HelloInfo introduction = self_;
  introduction.session = session;
  introduction.resume = it->second.request.resume;
  introduction.link = link_number();
  introduction.rail = rail;
  introduction.rails = it->second.rails;
  HelloInfo server_info;
  HelloInfo client_info;
  absl::Status status = shake_hands(*server, introduction, server_info, client_info);
  const WorkerUid& expected = it->second.request.expected.uid;
  if (status.ok() && expected != WorkerUid{} && expected != server_info.uid) {
    status = absl::FailedPreconditionError(
        absl::StrFormat("another worker (\"%s\") lives on node %u now: fetch its address again",
                        server_info.name, node));
  }
  if (!status.ok()) {
    give_up(session, status);
    return;
  }
  server_info.session = session;
  server_info.link = introduction.link;
  server_info.rail = rail;
  server_info.rails = it->second.rails;
  // Its hello, our proof, its verdict: three more journeys.
  later(3 * link.spec.latency,
        [session, server_info, client_info, incarnation = server->incarnation_](SimProvider& self) {
          self.complete(session, incarnation, server_info, client_info);
        });
}

absl::Status SimProvider::shake_hands(const SimProvider& server, const HelloInfo& introduction,
                                      HelloInfo& server_info, HelloInfo& client_info) const {
  const net::Handshake::Options here{.one_process = true};
  net::Handshake client(net::Handshake::Role::kClient, key_, introduction, here);
  net::Handshake host(net::Handshake::Role::kServer, server.key_, server.self_, here);
  std::string buffers[2];  // to the client, to the server
  net::Handshake* ends[2] = {&client, &host};
  while (!client.done() || !host.done()) {
    bool moved = false;
    for (int i = 0; i < 2; ++i) {
      std::string& sent = buffers[1 - i];
      sent.append(ends[i]->to_send());
      ends[i]->sent(ends[i]->to_send().size());
      net::Handshake& to = *ends[1 - i];
      while (to.wanted() > 0 && sent.size() >= to.wanted()) {
        moved = true;
        const std::string bytes = sent.substr(0, to.wanted());
        sent.erase(0, bytes.size());
        // The server's verdict tells the client why; it is the client that reports.
        const absl::Status status = to.receive(bytes);
        if (!status.ok() && &to == &client) return status;
      }
    }
    if (!moved) return absl::InternalError("the handshake stopped half way");
  }
  server_info = client.peer();
  client_info = host.peer();
  return absl::OkStatus();
}

void SimProvider::complete(uint64_t session, uint64_t server_incarnation, const HelloInfo& server,
                           const HelloInfo& client) {
  const auto it = sessions_.find(session);
  if (it == sessions_.end()) return;
  const size_t node = it->second.node;
  SimProvider* host = network_.provider(node);
  if (host == nullptr || host->incarnation_ != server_incarnation || !network_.alive(node) ||
      network_.frozen(node) || !network_.link(node_, node, server.rail).up()) {
    redial(session, server.rail, 0);
    return;
  }
  if (it->second.established && host->live_rails(session, &client.uid, false) == 0) {
    sessions_.erase(it);  // given up since it answered
    return;
  }
  it->second.established = true;
  network_.stats().rails_made += 1;
  auto ours = std::make_unique<SimRail>(*this, node, server, true);
  auto theirs = std::make_unique<SimRail>(*host, node_, client, false);
  QueuePair::join(ours->queue_pair(), theirs->queue_pair());

  // The other side may not have noticed yet that the rail was lost: there is one at a time.
  SimRail* replaced = nullptr;
  for (SimRail* rail : host->rails_) {
    if (rail != theirs.get() && rail->up() && !rail->dialled() && rail->session() == session &&
        rail->index() == client.rail && rail->peer_uid() == client.uid) {
      replaced = rail;
    }
  }
  Entry& connected = add_entry(Entry::Kind::kConnected, ours.get());
  connected.session = session;
  connected.peer = server;
  connected.rail = std::move(ours);
  Entry& accepted = host->add_entry(Entry::Kind::kAccepted, theirs.get());
  accepted.peer = client;
  accepted.rail = std::move(theirs);
  // After the new one is there: the peer must not seem to have lost its last rail.
  if (replaced != nullptr) {
    replaced->lose(absl::UnavailableError("the peer reconnected this rail"));
  }
}

}  // namespace baton::sim
