// How bytes get in and out of sockets: one small interface, two engines (epoll, io_uring).
//
// A rail fills in one direction's message and starts it; the engine moves what the wire takes, at
// most once per start, and leaves the result in the socket. There are no callbacks, so nothing is
// called from within an engine.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace baton::tcp {

// Something with a descriptor that the poller watches.
struct Watched {
  uint32_t ready = 0;  // EPOLL* bits seen since the owner cleared them
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
  int fd() const { return fd_; }

 private:
  explicit Poller(int fd) : fd_(fd) {}
  int fd_;
};

// One direction of a socket.
struct IoDirection {
  msghdr message{};    // iovecs to move; stays in place while busy
  bool busy = false;   // started, not finished
  bool done = false;   // finished; the owner clears it
  ssize_t result = 0;  // bytes moved, 0: end of stream (receive), or -errno
};

struct IoSocket : Watched {
  int fd = -1;
  IoDirection tx;
  IoDirection rx;
};

class IoEngine {
 public:
  virtual ~IoEngine() = default;
  virtual const char* name() const = 0;

  virtual absl::Status attach(IoSocket& socket) = 0;
  // Fences: afterwards the kernel touches neither the socket nor any buffer given with it.
  virtual void detach(IoSocket& socket) = 0;

  // Start moving direction.message. A short count is a normal result.
  virtual void send(IoSocket& socket) = 0;
  virtual void receive(IoSocket& socket) = 0;

  // Take a started message back. Afterwards it is not busy and no buffer of it is touched; it may
  // have become done, with bytes moved.
  virtual void stop_send(IoSocket& socket) = 0;
  virtual void stop_receive(IoSocket& socket) = 0;

  // Moves bytes without waiting; true if any message became done.
  virtual bool run() = 0;
  // Whether run() would do something right now, so that nobody should sleep.
  virtual bool runnable() const = 0;
};

std::unique_ptr<IoEngine> make_epoll_engine(Poller& poller);
// Unavailable, with the reason and the remedy, where the kernel or a limit refuses.
absl::StatusOr<std::unique_ptr<IoEngine>> make_uring_engine(Poller& poller);

}  // namespace baton::tcp
