// The provider for workers on one machine: shared memory where a pool is behind a region, CMA
// elsewhere. The initiator copies; the target's CPU has no part in it.
#include <sched.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "transport/base/copies/copy_kernel.h"
#include "transport/base/limits/refusals.h"
#include "transport/base/log.h"
#include "transport/settings.h"
#include "transport/shm/connection.h"

namespace baton::shm {
namespace {

constexpr int kRank = 300;
constexpr std::string_view kPrefix = "baton-";
constexpr size_t kMaxUnfinished = 128;  // connections that have not authenticated themselves yet
constexpr int kAcceptsAtOnce = 16;      // in one round of progress: others wait for the next
// The pause before the listener is polled again after accept() ran out of descriptors.
constexpr Time kLookAway = std::chrono::milliseconds(100);
constexpr Time kPartingPatience = std::chrono::seconds(1);
constexpr Time kBellPause = std::chrono::milliseconds(1);  // before a doorbell is tried again
// Rounds of progress between two looks at the sockets: in which nothing moves, and one in which
// something does counts as so many. Where nothing moves a look costs three of them.
constexpr int kPollEvery = 64;
constexpr int kBusyRound = 4;
constexpr size_t kBudget = 1 << 20;  // bytes copied in one round, shared by the connections
constexpr size_t kAlwaysHot = 16;    // so few connections are looked at in every round

constexpr std::array kSettings = {
    Setting::choice("shm.memfd", "on", "on off", "off: the provider is not used"),
    Setting::number("shm.fence_ms", "ms", "5000", 1, 3'600'000,
                    "how long deregistering memory waits for a peer that is copying; a copy "
                    "takes well under 1 ms, so a peer that takes longer is stopped",
                    true),
    Setting::choice("shm.cma", "on", "on off",
                    "off: peers reach pool memory only, since process_vm_readv is not used"),
    Setting::choice("shm.populate", "on", "on off",
                    "on: map the pages of all that a peer shares while nothing else moves, so "
                    "that the first transfers to them take no page faults; off (the default of "
                    "communicators): as they are touched, for programs with many peers"),
    Setting::choice(
        "shm.ptracer", "on", "on off",
        "on: where kernel.yama.ptrace_scope is 1, let peers copy this process's memory "
        "(PR_SET_PTRACER): a single peer by its pid; with several, all processes of this user"),
};

class ShmProvider final : public Provider {
 public:
  explicit ShmProvider(const ProviderContext& context) : context_(context) {
    capabilities_.name = "shm";
    capabilities_.rank = kRank;
    const absl::Status status = open();
    capabilities_.available = status.ok();
    capabilities_.detail =
        status.ok() ? absl::StrFormat("memfd, %s copies, CMA %s", base::stream_kernel(),
                                      shared_->cma_allowed ? "where the kernel allows it" : "off")
                    : std::string(status.message());
    if (!status.ok()) shared_.reset();
  }

  ~ShmProvider() override {
    for (auto& connection : connections_) connection->abandon();
    if (shared_ == nullptr) return;
    // The application may free memory of devices next.
    wait_for_parted(*shared_, 0, Clock::steady().now() + kPartingPatience).IgnoreError();
  }

  const Capabilities& capabilities() const override { return capabilities_; }

  absl::StatusOr<std::string> listen() override {
    if (shared_ == nullptr) return absl::FailedPreconditionError(capabilities_.detail);
    const std::string name = std::string(kPrefix) + WorkerUid::random().hex();
    auto socket = PacketSocket::listen(name);
    if (!socket.ok()) return socket.status();
    listener_ = *std::move(socket);
    if (!watch_listener()) {
      return absl::UnavailableError(
          absl::StrFormat("the socket of shm cannot be watched: %s", strerror(errno)));
    }
    return name;
  }

  absl::Status reachable(const std::string& address, std::string_view host_id) const override {
    if (shared_ == nullptr) return absl::FailedPreconditionError(capabilities_.detail);
    if (host_id != context_.host_id) {
      return absl::FailedPreconditionError(
          "shm needs both workers on one machine, as the same user and in the same network and "
          "process (pid) namespaces; the peer is not");
    }
    if (address.rfind(kPrefix, 0) != 0) {
      return absl::InvalidArgumentError("not a shm address");
    }
    return absl::OkStatus();
  }

  void connect(const ConnectRequest& request) override {
    if (shared_ == nullptr) {
      refused_.push_back(request.session);
      return;
    }
    connections_.push_back(std::make_shared<Connection>(*shared_, request));
  }

  absl::Status takes(const RegionEntry& region) const override {
    if (!shares(region)) return Provider::takes(region);
    return absl::FailedPreconditionError(
        "shm reaches device memory only by copies between devices, over CUDA IPC");
  }
  bool shares(const RegionEntry& region) const override {
    return shared_ != nullptr && region.place.kind != MemoryKind::kHost && region.shared.bytes != 0;
  }
  absl::Status add_region(const RegionEntry& region) override {
    if (shared_ == nullptr) return absl::OkStatus();
    auto file = shared_->exports.publish(region);
    if (!file.ok()) return file.status();
    if (*file == 0) return absl::OkStatus();
    for (auto& connection : connections_) connection->announce_file(*file);
    return absl::OkStatus();
  }

  absl::Status remove_region(const RegionEntry& region, EventSink& sink) override {
    if (shared_ == nullptr) return absl::OkStatus();
    absl::Status fenced;
    while (!revoke_region(region)) sched_yield();
    revoked_.erase(region.index);
    const auto idle = [&](const auto& each) { return each->fenced(region.index); };
    for (const auto& peer : late(idle, Time::zero())) {
      fenced.Update(peer->cut_off(region.index, sink));
    }
    fenced.Update(tell_copying(*shared_, region.index));
    const uint64_t file = shared_->exports.forget_file(region.index);
    if (file == 0) return fenced;
    for (auto& connection : connections_) {
      connection->announce_drop(file);
      connection->ask_back(file);
    }
    ask_parted(*shared_, file);
    const Time until = Clock::steady().now() + shared_->fence_patience;
    const auto closed = [&](const auto& each) { return each->given_back(file); };
    for (const auto& peer : late(closed, until)) {
      fenced.Update(peer->cut_off(std::nullopt, sink));
    }
    fenced.Update(wait_for_parted(*shared_, file, until));
    return fenced;
  }

  bool revoke_region(const RegionEntry& region) override {
    if (shared_ == nullptr) return true;
    const auto [until, first] =
        revoked_.try_emplace(region.index, Clock::steady().now() + shared_->fence_patience);
    if (first) shared_->exports.revoke(region.index);
    const auto idle = [&](const auto& each) { return each->fenced(region.index); };
    if (std::all_of(connections_.begin(), connections_.end(), idle) &&
        copying_still(*shared_, region.index) == nullptr) {
      return true;
    }
    serve_hot(*shared_);
    return Clock::steady().now() > until->second;
  }

  bool progress(EventSink& sink) override {
    if (shared_ == nullptr) return refuse(sink);
    bool any = false;
    if (look_again_ != kNever && context_.clock.now() >= look_again_) {
      look_again_ = watch_listener() ? kNever : context_.clock.now() + kLookAway;
    }
    const bool woken = std::exchange(armed_, false);
    std::vector<Connection*>& hot = shared_->hot;
    if (woken) {
      for (Connection* connection : hot) connection->disarm();
    }
    if (woken || unfinished_ != 0 || rounds_ >= kPollEvery) {
      rounds_ = 0;
      any |= poll(sink);
    }
    const size_t share = std::max(SliceRunner::kChunkBytes, kBudget / (hot.size() + 1));
    const size_t budget = hot.size() <= 1 ? kBudget : share;
    const bool may_cool = hot.size() > kAlwaysHot;
    bool cooled = false;
    unfinished_ = 0;
    shared_->bell_owed = false;
    Time now = kNever;
    // By index: a sink may connect or post, which makes the list longer, while we walk it.
    for (size_t i = 0; i < hot.size(); ++i) {
      Connection& connection = *hot[i];
      const bool moved = connection.run(sink, budget);
      any |= moved;
      if (connection.state() == Connection::State::kUp) {
        if (!may_cool || !connection.cool(moved)) continue;
        hot[i] = nullptr;
        cooled = true;
        continue;
      }
      if (now == kNever) now = context_.clock.now();
      any |= connection.on_time(now, sink);
      if (connection.state() != Connection::State::kUp) ++unfinished_;
    }
    if (cooled) std::erase(hot, nullptr);
    if (unfinished_ != 0) {
      std::erase_if(hot, [](const Connection* connection) { return connection->finished(); });
      std::erase_if(connections_, [](const auto& connection) { return connection->finished(); });
    }
    rounds_ += any ? kBusyRound : 1;
    return any;
  }

  bool polls() const override {
    return shared_ != nullptr &&
           std::any_of(shared_->hot.begin(), shared_->hot.end(),
                       [](const Connection* connection) { return connection->polls(); });
  }
  int wait_fd() const override { return shared_ == nullptr ? -1 : shared_->epoll.get(); }

  bool arm() override {
    if (shared_ == nullptr) return refused_.empty();
    armed_ = true;
    bool sleep = true;
    for (Connection* connection : shared_->hot) sleep = connection->arm() && sleep;
    return sleep;
  }

  Time next_timer() const override {
    Time next = look_again_;
    if (shared_ == nullptr) return next;
    if (shared_->bell_owed) next = std::min(next, context_.clock.now() + kBellPause);
    if (unfinished_ == 0) return next;
    for (const Connection* connection : shared_->hot) {
      next = std::min(next, connection->next_timer());
    }
    return next;
  }

 private:
  absl::Status open() {
    bool memfd = true, cma = true, ask_yama = true, populate = true;
    Time fence_patience = std::chrono::seconds(5);
    SettingsReader read(context_, kSettings);
    read.on_off("shm.memfd", memfd);
    read.on_off("shm.cma", cma);
    read.on_off("shm.ptracer", ask_yama);
    read.on_off("shm.populate", populate);
    read.ms("shm.fence_ms", fence_patience);
    if (absl::Status status = read.finish(); !status.ok()) return status;
    bool device_kernels = true;  // the worker's, which has looked whether it is right
    SettingsReader(context_, peer_settings()).on_off("staging.kernels", device_kernels);
    if (!memfd) {
      return absl::FailedPreconditionError("memfd is switched off (shm.memfd=off)");
    }
    auto exports = Exports::create();
    if (!exports.ok()) return exports.status();
    if (context_.counters.fd() < 0) {
      return absl::FailedPreconditionError(
          "the counters are not in a memfd, so peers could not increment them");
    }
    base::UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC));
    if (!epoll.valid()) {
      return base::refused("epoll_create1", errno);
    }
    shared_ = std::make_unique<Shared>(Shared{context_,
                                              *std::move(exports),
                                              CmaBatch(),
                                              cma,
                                              cma && ask_yama,
                                              populate,
                                              fence_patience,
                                              device_kernels,
                                              std::move(epoll),
                                              {}});
    return absl::OkStatus();
  }

  bool refuse(EventSink& sink) {
    if (refused_.empty()) return false;
    const uint64_t session = refused_.back();
    refused_.pop_back();
    sink.connect_failed(session, absl::FailedPreconditionError(capabilities_.detail));
    return true;
  }

  bool poll(EventSink& sink) {
    std::array<epoll_event, 64> events;
    const int count = epoll_wait(shared_->epoll.get(), events.data(), events.size(), 0);
    bool any = false;
    for (int i = 0; i < count; ++i) {
      const uint64_t tag = events[i].data.u64;
      if (tag == 0) {
        any |= accept();
        continue;
      }
      auto* connection = reinterpret_cast<Connection*>(tag & ~uint64_t{1});
      if ((tag & 1) != 0) {
        connection->on_peer_exit(sink);
        any = true;
      } else {
        any |= connection->on_socket(sink);
      }
    }
    return any;
  }

  // The connections whose peers are not `done` by then.
  template <typename Done>
  std::vector<std::shared_ptr<Connection>> late(const Done& done, Time until) const {
    std::vector<std::shared_ptr<Connection>> left;
    for (const auto& connection : connections_) {
      if (!done(connection)) left.push_back(connection);
    }
    while (!left.empty() && Clock::steady().now() <= until) {
      serve_hot(*shared_);
      sched_yield();
      std::erase_if(left, done);
    }
    return left;
  }

  bool watch_listener() {
    epoll_event event{.events = EPOLLIN, .data = {.u64 = 0}};
    return epoll_ctl(shared_->epoll.get(), EPOLL_CTL_ADD, listener_.fd(), &event) == 0;
  }

  // The listener stays readable, so a thread that polls it could not sleep.
  void look_away(const absl::Status& why) {
    epoll_ctl(shared_->epoll.get(), EPOLL_CTL_DEL, listener_.fd(), nullptr);
    look_again_ = context_.clock.now() + kLookAway;
    if (std::exchange(short_of_descriptors_, true)) return;
    base::log_event(base::LogLevel::kWarning,
                    "%s: shm: %s; incoming connections wait until it succeeds", context_.self.name,
                    why.message());
  }

  // Bounded, since any process on this machine may dial as fast as it can. Callers of other users,
  // which may not have our memory anyway, take no place. When places run out, the caller that was
  // silent for longest is dropped, because a real peer sends at once; if all have sent, the oldest
  // is dropped.
  bool accept() {
    for (int i = 0; i < kAcceptsAtOnce; ++i) {
      auto socket = listener_.accept();
      if (!socket.ok()) {
        if (absl::IsResourceExhausted(socket.status())) look_away(socket.status());
        return i > 0;
      }
      if (std::exchange(short_of_descriptors_, false)) {
        base::log_event(base::LogLevel::kWarning, "%s: shm: accepts connections again",
                        context_.self.name);
      }
      if (!socket->peer_is_this_user()) continue;  // closes it
      const auto stranger = [](const auto& connection) { return connection->stranger(); };
      const auto waiting = std::count_if(connections_.begin(), connections_.end(), stranger);
      if (static_cast<size_t>(waiting) >= kMaxUnfinished) {
        auto going = std::find_if(connections_.begin(), connections_.end(),
                                  [](const auto& connection) { return connection->silent(); });
        if (going == connections_.end()) {
          going = std::find_if(connections_.begin(), connections_.end(), stranger);
        }
        (*going)->abandon();
      }
      connections_.push_back(std::make_shared<Connection>(*shared_, *std::move(socket)));
      ++unfinished_;
    }
    return true;
  }

  const ProviderContext& context_;
  Capabilities capabilities_;
  std::unique_ptr<Shared> shared_;  // null: not available
  PacketSocket listener_;
  // After shared_: connections use it to the last.
  std::vector<std::shared_ptr<Connection>> connections_;
  absl::flat_hash_map<uint32_t, Time> revoked_;  // regions, and how long peers have for copies
  std::vector<uint64_t> refused_;  // connects of an unavailable provider, to be reported
  size_t unfinished_ = 0;          // connections that are not up, when last counted
  int rounds_ = 0;
  bool armed_ = false;
  Time look_again_ = kNever;           // at the listener
  bool short_of_descriptors_ = false;  // the log knows
};

}  // namespace
}  // namespace baton::shm

extern "C" const baton::ProviderRegistration baton_provider_shm(
    "shm",
    [](const baton::ProviderContext& context) {
      return std::make_unique<baton::shm::ShmProvider>(context);
    },
    baton::shm::kSettings);
