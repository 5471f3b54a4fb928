// Settings, and running the rails.
#include "transport/tcp/provider.h"

#include <algorithm>
#include <thread>

#include "absl/strings/str_cat.h"
#include "transport/settings.h"

namespace baton::tcp {
namespace {

constexpr int kRounds = 4;  // of moving bytes in one progress()

}  // namespace

// Named for the linker: see baton_provider() in cmake/BatonTargets.cmake.
extern "C" const ProviderRegistration baton_provider_tcp("tcp", [](const ProviderContext& context) {
  return std::unique_ptr<Provider>(new TcpProvider(context));
});

TcpProvider::TcpProvider(const ProviderContext& context)
    : shared_(std::make_shared<TcpShared>(context)),
      meeting_(shared_->context, "tcp",
               [this](int fd, const HelloInfo& peer, std::unique_ptr<Meeting::Dial> dial,
                      EventSink& sink) { met(fd, peer, std::move(dial), sink); }) {
  capabilities_.name = "tcp";
  capabilities_.rank = 10;
  absl::Status status = configure();
  capabilities_.available = status.ok();
  if (!status.ok()) capabilities_.detail = std::string(status.message());
}

absl::Status TcpProvider::configure() {
  auto poller = Poller::create();
  if (!poller.ok()) return poller.status();
  shared_->poller = *std::move(poller);

  const ProviderContext& context = shared_->context;
  SocketOptions& sockets = shared_->socket_options;
  Meeting::Options meeting{.port = context.listen_port, .patience_setting = "tcp.handshake_ms"};
  std::string io = "auto";
  sockets_ = static_cast<uint16_t>(std::clamp(std::thread::hardware_concurrency(), 2u, 4u));
  SettingsReader read(context);
  read.number("tcp.sockets", sockets_, 1, 64);
  read.kib("tcp.slice_kib", shared_->slice_bytes, 4, 1 << 20);
  read.kib("tcp.buffer_kib", sockets.buffer_bytes, 0, 1 << 20);
  read.ms("tcp.stall_ms", shared_->stall, 10);
  read.ms("tcp.handshake_ms", meeting.patience, 10);
  read.text("tcp.congestion", sockets.congestion);
  read.choice("tcp.io", io, {"auto", "epoll", "uring"});
  if (!read.status().ok()) return read.status();
  sockets.user_timeout_ms = static_cast<int>(shared_->stall / std::chrono::milliseconds(1));
  meeting.sockets = sockets;
  meeting_.open(*shared_->poller, std::move(meeting));
  choose_engine(io);
  return absl::OkStatus();
}

void TcpProvider::choose_engine(std::string_view wish) {
  std::string note;
  if (wish == "uring") {
    auto engine = make_uring_engine(*shared_->poller);
    if (engine.ok()) {
      shared_->engine = *std::move(engine);
    } else {
      note = absl::StrCat(" instead of io_uring: ", engine.status().message());
    }
  }
  if (shared_->engine == nullptr) shared_->engine = make_epoll_engine(*shared_->poller);
  capabilities_.detail =
      absl::StrCat(shared_->engine->name(), note, "; ", sockets_,
                   " sockets per peer, congestion control ", shared_->socket_options.congestion);
}

absl::Status TcpProvider::reachable(const std::string& address, std::string_view host_id) const {
  return tcp::reachable(address, host_id, shared_->context.host_id);
}

void TcpProvider::connect(const ConnectRequest& request) {
  if (!capabilities_.available) {
    return meeting_.refuse(request, absl::UnavailableError(capabilities_.detail));
  }
  meeting_.connect(request, sockets_);
}

absl::Status TcpProvider::query(uint64_t session, const std::string& host_port) {
  if (!capabilities_.available) return absl::FailedPreconditionError(capabilities_.detail);
  return meeting_.query(session, host_port);
}

void TcpProvider::met(int fd, const HelloInfo& peer, std::unique_ptr<Meeting::Dial> dial,
                      EventSink& sink) {
  auto rail = TcpRail::create(shared_, fd, peer, peer.rails);
  if (dial == nullptr) {
    if (rail.ok()) sink.accepted(peer, *std::move(rail));
    return;
  }
  if (!rail.ok()) return meeting_.try_next(std::move(dial), rail.status());
  if (dial->rail == 0) {  // the first socket stands: the others go to the same endpoint, at once
    for (uint16_t i = 1; i < dial->rails; ++i) meeting_.connect_another(*dial, peer, i);
  }
  sink.connected(peer.session, peer, *std::move(rail));
}

void TcpProvider::remove_region(const RegionEntry& region, EventSink&) {
  for (TcpRail* rail : shared_->rails) {
    if (rail != nullptr) rail->remove_region(region);
  }
}

bool TcpProvider::progress(EventSink& sink) {
  if (!capabilities_.available) return meeting_.progress(sink);
  // While there is nobody to talk to, system calls now and then are enough: a worker whose peers
  // come by other ways should not pay for this one in every round.
  constexpr uint32_t kLookEvery = 32;
  const bool alone = !meeting_.busy() && shared_->rails.empty();
  if (alone && !look_ && ++rounds_ < kLookEvery) return false;
  rounds_ = 0;
  look_ = false;
  bool any = shared_->poller->poll();
  any |= meeting_.progress(sink);
  std::vector<TcpRail*>& rails = shared_->rails;
  for (int round = 0; round < kRounds; ++round) {
    bool moved = false;
    for (size_t i = 0; i < rails.size(); ++i) {
      if (rails[i] != nullptr) moved |= rails[i]->advance(sink);
    }
    moved |= shared_->engine->run();
    if (!moved) break;
    any = true;
  }
  const Time now = shared_->context.clock.now();
  for (size_t i = 0; i < rails.size(); ++i) {
    if (rails[i] != nullptr) rails[i]->check_timers(now, sink);
  }
  rails.erase(std::remove(rails.begin(), rails.end(), nullptr), rails.end());
  return any;
}

int TcpProvider::wait_fd() const { return shared_->poller ? shared_->poller->fd() : -1; }

bool TcpProvider::arm() {
  if (!meeting_.arm()) return false;
  if (!capabilities_.available) return true;
  look_ = true;
  const auto& rails = shared_->rails;
  return !shared_->engine->runnable() &&
         std::none_of(rails.begin(), rails.end(),
                      [](const TcpRail* rail) { return rail != nullptr && rail->runnable(); });
}

Time TcpProvider::next_timer() const {
  Time next = meeting_.next_timer();
  for (const TcpRail* rail : shared_->rails) {
    if (rail != nullptr) next = std::min(next, rail->next_timer());
  }
  return next;
}

}  // namespace baton::tcp
