// The epoll descriptor of a worker's sockets, and what it has seen ready.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace baton::net {

// Something with a descriptor that the poller watches.
struct Watched {
  uint32_t ready = 0;     // EPOLL* bits seen since the owner cleared them
  void* owner = nullptr;  // anything: it is told by noticed()
};

// The epoll descriptor that a worker sleeps on.
class Poller {
 public:
  static absl::StatusOr<std::unique_ptr<Poller>> create();
  ~Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  absl::Status add(int fd, uint32_t events, Watched& watched);
  void modify(int fd, uint32_t events, Watched& watched);
  void remove(int fd);
  // Collects what is ready into Watched::ready, without waiting.
  bool poll();
  // The owners of what the last poll() found ready, those that have one.
  const std::vector<void*>& noticed() const { return noticed_; }
  // True once after each poll() that saw everything: what a descriptor is ready for is known as of
  // now, and errors with it.
  bool take_fresh() { return std::exchange(fresh_, false); }
  int fd() const { return fd_; }
  // In a forked child, which shares the parent's epoll descriptor: nothing that is removed from now
  // on is removed from the parent's.
  void leave_to_parent();

 private:
  explicit Poller(int fd) : fd_(fd) {}
  int fd_;
  bool fresh_ = false;
  std::vector<void*> noticed_;
};

}  // namespace baton::net
