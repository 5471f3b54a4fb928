// The tcp provider: reads its settings, makes rails of connections, and runs them.
#include "transport/tcp/provider.h"

#include <algorithm>
#include <array>
#include <thread>

#include "absl/strings/str_cat.h"
#include "transport/settings.h"

namespace baton::tcp {
namespace {

constexpr int kRounds = 4;  // of moving bytes in one progress()

constexpr std::array kSettings = {
    Setting::number("tcp.sockets", "", "", 1, 64,
                    "sockets per peer, spread over the NICs that lead to it; default: one per "
                    "core, at least 2, at most 4"),
    Setting::text("tcp.congestion", "auto",
                  "congestion control: auto (chosen by the network), system (the kernel's "
                  "default), or a name that the kernel knows"),
    Setting::number("tcp.slice_kib", "KiB", "1024", 4, 1 << 20,
                    "size of a slice, the share of a transfer that one socket carries"),
    Setting::number("tcp.buffer_kib", "KiB", "4096", 0, 1 << 20,
                    "send and receive buffer of a socket; 0: the kernel decides"),
    Setting::number(
        "tcp.ack_us", "us", "50", 0, 1'000'000,
        "delay before the ACK of a small write is sent alone, where data usually follows; "
        "values above the default say that no caller waits for ACKs (communicators set 2000)"),
    Setting::number("tcp.stall_ms", "ms", "10000", 10, 3'600'000,
                    "a socket with work that makes no progress for this long is lost", true),
    Setting::number("tcp.handshake_ms", "ms", "5000", 10, 3'600'000,
                    "time limit for connecting to a peer and its handshake", true),
    Setting::choice(
        "tcp.integrity", "off", "off on",
        "authenticate payload, as frame headers always are; on: refuse peers that cannot"),
    Setting::choice(
        "tcp.encrypt", "off", "off on",
        "encrypt frame headers and payload (AES-256-GCM); on: refuse peers that cannot"),
};

}  // namespace

// Named for the linker: see baton_provider() in cmake/BatonTargets.cmake.
extern "C" const ProviderRegistration baton_provider_tcp(
    "tcp",
    [](const ProviderContext& context) {
      return std::unique_ptr<Provider>(new TcpProvider(context));
    },
    kSettings);

TcpProvider::TcpProvider(const ProviderContext& context)
    : AcceptorProvider(context, "tcp", 10,
                       [this](const net::Link& link, const HelloInfo& peer,
                              std::unique_ptr<net::Acceptor::Dial> dial,
                              EventSink& sink) { met(link, peer, std::move(dial), sink); }) {
  set_available(configure());
}

absl::Status TcpProvider::configure() {
  if (absl::Status status = make_poller(); !status.ok()) return status;
  shared_->buffers = std::make_unique<FileBuffers>(RxStream::kBufferBytes);

  const ProviderContext& context = shared_->context;
  net::SocketOptions& sockets = shared_->socket_options;
  net::Acceptor::Options acceptor{.port = context.listen_port,
                                  .advertised_ports = true,
                                  .patience_setting = "tcp.handshake_ms"};
  connections_ = static_cast<uint16_t>(std::clamp(std::thread::hardware_concurrency(), 2u, 4u));
  SettingsReader read(context, kSettings);
  read.number("tcp.sockets", connections_);
  read.kib("tcp.slice_kib", shared_->slice_bytes);
  read.kib("tcp.buffer_kib", sockets.buffer_bytes);
  int64_t ack_us = AckHold::kLongest / std::chrono::microseconds(1);
  read.number("tcp.ack_us", ack_us);
  shared_->ack_hold = std::chrono::microseconds(ack_us);
  read.ms("tcp.stall_ms", shared_->stall);
  read.ms("tcp.handshake_ms", acceptor.patience);
  read.text("tcp.congestion", sockets.congestion);
  acceptor.offers = net::kAllProtections;
  acceptor.needs = protections(read, "tcp.integrity", "tcp.encrypt");
  if (absl::Status status = read.finish(); !status.ok()) return status;
  sockets.user_timeout_ms = static_cast<int>(shared_->stall / std::chrono::milliseconds(1));
  acceptor.sockets = sockets;
  acceptor.another_failed = [this](const net::Acceptor::Dial& dial) {
    auto owner = std::static_pointer_cast<CalledSockets>(dial.owner);
    if (owner->places[dial.rail].rail != nullptr) return;  // it was to be moved, and stays
    shared_->redials.lost(std::move(owner), dial.rail, shared_->now);
  };
  acceptor.large_packets = net::Acceptor::LargePackets::kOrSmallSegments;
  acceptor_.open(*shared_->poller, std::move(acceptor));
  capabilities_.detail = absl::StrCat(connections_, " sockets per peer, congestion control ",
                                      shared_->socket_options.congestion);
  return absl::OkStatus();
}

void TcpProvider::met(const net::Link& link, const HelloInfo& peer,
                      std::unique_ptr<net::Acceptor::Dial> dial, EventSink& sink) {
  const bool narrow = dial != nullptr && dial->segment() != 0;
  const auto words = [&](size_t ways) {
    return absl::StrCat(ways > 1 ? "some of " : "", peer.rails,
                        peer.rails == 1 ? " socket" : " sockets",
                        narrow ? ", large packets get lost" : "");
  };
  if (dial == nullptr) {
    auto rail = TcpRail::create(shared_, link, peer, words(1));
    if (rail.ok()) sink.accepted(peer, *std::move(rail));
    return;
  }
  auto sockets = std::static_pointer_cast<CalledSockets>(dial->owner);
  const bool first = sockets == nullptr;
  if (first) sockets = std::make_shared<CalledSockets>(*dial, peer);
  const Paths paths = sockets->paths();
  sockets->most_ways = std::max(sockets->most_ways, paths.ways.size());
  auto rail = TcpRail::create(shared_, link, peer, words(paths.ways.size()));
  if (!rail.ok()) return acceptor_.try_next(std::move(dial), rail.status());
  if (first) {  // it stands: the others are called at once, by all ways
    for (uint16_t i = 1; i < dial->rails; ++i) call(sockets, i, paths);
    // Later calls belong to a session that exists.
    if (!sockets->resumed) sockets->first.resume = Resume::kOurs;
  }
  const uint16_t number = dial->rail;
  const net::Endpoint where = dial->endpoints[dial->next - 1];
  TcpRail* const added = rail->get();
  TcpRail* const before = sockets->places[number].rail;
  (*rail)->called(sockets, number, where, narrow);
  sink.connected(peer.session, peer, *std::move(rail));
  const bool stands = sockets->places[number].rail == added;
  // Only now: a session without a rail is lost.
  if (before != nullptr && stands) before->give_way(sink);
  if (narrow || !where.same_host(CalledSockets::way_of(paths, number)) || sockets->lacks(paths)) {
    shared_->redials.look_later(std::move(sockets), shared_->now);
  }
}

void TcpProvider::call(const std::shared_ptr<CalledSockets>& sockets, uint16_t number,
                       const Paths& paths) {
  acceptor_.connect_another(sockets->first, sockets->peer, number, sockets,
                            sockets->ways_of(paths, number, shared_->now));
}

// Sockets that do not go by their own way are called there; the answer moves them.
void TcpProvider::look_at(const std::shared_ptr<CalledSockets>& sockets) {
  const Paths paths = sockets->paths();
  sockets->most_ways = std::max(sockets->most_ways, paths.ways.size());
  bool settled = !sockets->lacks(paths);
  const auto count = static_cast<uint16_t>(sockets->places.size());
  for (uint16_t i = 0; i < count; ++i) {
    const CalledSockets::Place& place = sockets->places[i];
    const net::Endpoint& own = CalledSockets::way_of(paths, i);
    if (place.rail != nullptr && place.at.same_host(own) && !place.narrow) continue;
    settled = false;
    if (place.rail == nullptr) continue;  // it is being called anyway
    acceptor_.connect_another(sockets->first, sockets->peer, i, sockets, {own}, true);
  }
  if (!settled) shared_->redials.look_later(sockets, shared_->now);
  // One that loses its sockets as soon as they are back is not to be looked at as soon again.
  const bool all_good =
      std::none_of(paths.ways.begin(), paths.ways.end(),
                   [&](const net::Endpoint& way) { return sockets->bad(way, shared_->now); });
  if (settled && all_good) sockets->look_pause = Time::zero();
}

absl::Status TcpProvider::remove_region(const RegionEntry& region, EventSink&) {
  for (TcpRail* rail : shared_->active) {  // what lands, or is answered, is under way
    if (rail != nullptr) rail->remove_region(region);
  }
  return absl::OkStatus();
}

// Whether the poller need not be asked: small messages come one after the other over a socket or
// two, and those are read without asking. All others wait for a few rounds, or for the next sleep.
bool TcpProvider::read_directly() {
  constexpr uint32_t kPollEvery = 16;
  constexpr size_t kMost = 2;
  size_t hot = 0;
  if (!look_ && !acceptor_.busy() && shared_->round % kPollEvery != 0) {
    for (const TcpRail* rail : shared_->active) hot += rail != nullptr && rail->hot() ? 1 : 0;
  }
  const bool directly = hot > 0 && hot <= kMost;
  for (TcpRail* rail : shared_->active) {
    if (rail == nullptr || !rail->hot()) continue;
    if (directly) {
      rail->read_directly();
    } else {
      rail->looked_at();
    }
  }
  return directly;
}

bool TcpProvider::progress(EventSink& sink) {
  if (!capabilities_.available) return acceptor_.progress(sink);
  // While there is no peer to talk to, system calls now and then are enough: a worker whose peers
  // come by other ways should not pay for this one in every round.
  constexpr uint32_t kLookEvery = 32;
  const bool alone = !acceptor_.busy() && shared_->rails.empty();
  if (alone && !look_ && ++rounds_ < kLookEvery) return false;
  rounds_ = 0;
  ++shared_->round;
  const Time now = shared_->now = shared_->context.clock.now();
  bool any = false;
  if (!read_directly()) {
    any = shared_->poller->poll();
    for (void* owner : shared_->poller->noticed()) static_cast<TcpRail*>(owner)->activate();
  }
  look_ = false;
  std::vector<TcpRail*>& rails = shared_->active;
  for (int round = 0; round < kRounds; ++round) {
    bool moved = false;
    for (size_t i = 0; i < rails.size(); ++i) {
      if (rails[i] != nullptr) moved |= rails[i]->advance(sink);
    }
    if (!moved) break;
    any = true;
  }
  any |= acceptor_.progress(sink);
  while (const auto due = shared_->redials.take(now)) {
    any = true;
    if (due.is_look()) {
      look_at(due.sockets);
    } else if (due.sockets->places[due.rail].rail == nullptr) {
      call(due.sockets, due.rail, due.sockets->paths());
    }
  }
  for (size_t i = 0; i < rails.size(); ++i) {
    if (rails[i] != nullptr) rails[i]->check_timers(now, sink);
    if (rails[i] == nullptr || !rails[i]->idle()) continue;
    rails[i]->deactivate();
    rails[i] = nullptr;
  }
  rails.erase(std::remove(rails.begin(), rails.end(), nullptr), rails.end());
  return any;
}

bool TcpProvider::arm() {
  if (!acceptor_.arm()) return false;
  if (!capabilities_.available) return true;
  look_ = true;
  const auto& rails = shared_->active;
  return std::none_of(rails.begin(), rails.end(),
                      [](const TcpRail* rail) { return rail != nullptr && rail->runnable(); });
}

Time TcpProvider::next_timer() const {
  Time next = std::min(acceptor_.next_timer(), shared_->redials.next());
  for (const TcpRail* rail : shared_->active) {
    if (rail != nullptr)
      next = std::min({next, rail->next_timer(), rail->ack_due(), rail->look_again()});
  }
  return next;
}

}  // namespace baton::tcp
