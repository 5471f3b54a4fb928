// The poller over epoll.
#include "transport/net/poller.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <cerrno>

#include "transport/base/limits/refusals.h"

namespace baton::net {

absl::StatusOr<std::unique_ptr<Poller>> Poller::create() {
  const int fd = epoll_create1(EPOLL_CLOEXEC);
  if (fd < 0) {
    return base::refused("epoll_create1", errno);
  }
  return std::unique_ptr<Poller>(new Poller(fd));
}

Poller::~Poller() { leave_to_parent(); }

void Poller::leave_to_parent() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

absl::Status Poller::add(int fd, uint32_t events, Watched& watched) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = &watched;
  if (epoll_ctl(fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
    return base::refused("epoll_ctl", errno);
  }
  return absl::OkStatus();
}

void Poller::modify(int fd, uint32_t events, Watched& watched) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = &watched;
  epoll_ctl(fd_, EPOLL_CTL_MOD, fd, &event);
}

void Poller::remove(int fd) { epoll_ctl(fd_, EPOLL_CTL_DEL, fd, nullptr); }

bool Poller::poll() {
  constexpr int kMost = 64;
  epoll_event events[kMost];
  const int n = epoll_wait(fd_, events, kMost, 0);
  fresh_ = n < kMost;
  noticed_.clear();
  for (int i = 0; i < n; ++i) {
    auto* watched = static_cast<Watched*>(events[i].data.ptr);
    watched->ready |= events[i].events;
    if (watched->owner != nullptr) noticed_.push_back(watched->owner);
  }
  return n > 0;
}

}  // namespace baton::net
