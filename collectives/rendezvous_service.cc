// Accepting, waiting and answering.
#include "collectives/rendezvous_service.h"

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "collectives/rendezvous_guest.h"
#include "transport/clock.h"

namespace baton::collectives {
namespace {

constexpr size_t kStrangers = 64;  // connections at a time beyond the ranks' own
constexpr Time kDeafTime = std::chrono::milliseconds(100);

int milliseconds_until(Time until, Time now) {
  if (until == kNever) return -1;
  if (until <= now) return 0;
  const auto ms = std::chrono::ceil<std::chrono::milliseconds>(until - now).count();
  return static_cast<int>(std::min<int64_t>(ms, 1 << 30));
}

}  // namespace

absl::StatusOr<std::unique_ptr<RendezvousService>> RendezvousService::listen(
    const ClusterKey& key, const std::string& host, uint16_t port, uint32_t ranks) {
  if (ranks > kMostRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("a rendezvous of ", ranks, " ranks: there can be ", kMostRanks, " at most"));
  }
  auto listener = listen_at(host, port);
  if (!listener.ok()) return listener.status();
  return std::unique_ptr<RendezvousService>(
      new RendezvousService(key, *std::move(listener), ranks));
}

RendezvousService::RendezvousService(const ClusterKey& key, Descriptor listener, uint32_t ranks)
    : key_(key),
      listener_(std::move(listener)),
      address_(reachable_address(listener_.get())),
      // Twice: those of one generation may still be leaving while the next one comes.
      most_guests_(2 * size_t{ranks == 0 ? kMostRanks : ranks} + kStrangers),
      gathering_(ranks) {}

RendezvousService::~RendezvousService() = default;

void RendezvousService::run_once(absl::Span<pollfd> others, Time until) {
  Time now = Clock::steady().now();
  until = std::min(until, gathering_.deadline());
  for (const auto& [id, guest] : guests_) until = std::min(until, guest->deadline());
  const bool deaf = deaf_until_ > now;
  if (deaf) until = std::min(until, deaf_until_);

  polled_.assign(others.begin(), others.end());
  polled_.push_back({.fd = deaf ? -1 : listener_.get(), .events = POLLIN, .revents = 0});
  std::vector<uint64_t> ids;
  for (const auto& [id, guest] : guests_) {
    ids.push_back(id);
    polled_.push_back({.fd = guest->fd(), .events = guest->events(), .revents = 0});
  }
  const int ready = ::poll(polled_.data(), polled_.size(), milliseconds_until(until, now));
  now = Clock::steady().now();
  for (size_t i = 0; i < others.size(); ++i) others[i].revents = ready > 0 ? polled_[i].revents : 0;

  for (size_t i = 0; i < ids.size(); ++i) {
    const short revents = ready > 0 ? polled_[others.size() + 1 + i].revents : 0;
    const auto found = guests_.find(ids[i]);  // may have been dropped on behalf of another
    if (found == guests_.end()) continue;
    Guest& guest = *found->second;
    if (revents == 0 && guest.deadline() > now) continue;
    const bool waited = guest.stage() == Guest::Stage::kWaiting;
    if (!guest.advance(now)) {
      drop(ids[i]);
    } else if (!waited && guest.stage() == Guest::Stage::kWaiting) {
      on_join(ids[i], guest);
    }
  }
  std::vector<Gathering::Answer> answers;
  gathering_.expire(now, answers);
  deliver(answers);
  if (ready > 0 && polled_[others.size()].revents != 0) accept_guests();
}

bool RendezvousService::answering() const {
  return std::any_of(guests_.begin(), guests_.end(), [](const auto& entry) {
    return entry.second->stage() == Guest::Stage::kAnswering;
  });
}

void RendezvousService::accept_guests() {
  while (true) {
    Descriptor fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    const Time now = Clock::steady().now();
    if (fd.get() < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      const bool exhausted = errno != EAGAIN && errno != EWOULDBLOCK;
      if (exhausted && !drop_a_stranger()) deaf_until_ = now + kDeafTime;
      return;
    }
    if (guests_.size() >= most_guests_ && !drop_a_stranger()) continue;  // which closes it
    guests_.emplace(next_guest_++, std::make_unique<Guest>(std::move(fd), key_, now));
  }
}

bool RendezvousService::drop_a_stranger() {
  for (const auto& [id, guest] : guests_) {
    if (guest->stage() == Guest::Stage::kWaiting || guest->stage() == Guest::Stage::kAnswering) {
      continue;
    }
    drop(id);
    return true;
  }
  return false;
}

void RendezvousService::on_join(uint64_t id, Guest& guest) {
  // A rank that died and was started anew may be here before we have read the end of its old self.
  if (const auto* twin = gathering_.waiting_as(guest.join().card);
      twin != nullptr && guests_.at(*twin)->hung_up()) {
    drop(*twin);
  }
  std::vector<Gathering::Answer> answers;
  gathering_.join(id, guest.join(), Clock::steady().now(), answers);
  deliver(answers);
}

void RendezvousService::deliver(std::vector<Gathering::Answer>& answers) {
  const Time now = Clock::steady().now();
  for (auto& answer : answers) {
    Guest& guest = *guests_.at(answer.guest);
    guest.answer(std::move(answer.frames), now);
    if (!guest.advance(now)) drop(answer.guest);
  }
}

void RendezvousService::drop(uint64_t id) {
  gathering_.leave(id);
  guests_.erase(id);
}

}  // namespace baton::collectives
