// A rail's socket: non-blocking, watched edge-triggered, and mute once its connection was reset.
#pragma once

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "transport/clock.h"
#include "transport/net/poller.h"

namespace baton::tcp {

class Socket {
 public:
  // Takes over `fd`, which must be non-blocking. `poller` must outlive the socket.
  Socket(int fd, net::Poller& poller) : fd_(fd), poller_(poller) {}
  ~Socket() { close(); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  // `owner` is noticed by the poller when something can be done.
  absl::Status watch(void* owner);
  // What was sent still reaches the peer after end() and close(), whatever it sends meanwhile.
  // After reset_on_close() and close() what is unsent and unread is lost at once.
  void end();
  void close();
  void reset_on_close();
  int fd() const { return fd_; }

  // Whether a call may move bytes; it stays so until the kernel has said otherwise.
  bool can_receive() const { return watched_.ready & (EPOLLIN | EPOLLRDHUP | kGone); }
  bool can_send() const { return watched_.ready & (EPOLLOUT | kGone); }

  // Bytes moved; receive() 0: the peer closed its side; otherwise -errno, where -EAGAIN says that
  // the poller will tell when to go on. Once the peer has reset the connection, receive() fails:
  // what lies unread in the buffer belongs to transfers that the peer has given up, and none of it
  // may land any more. After the peer's end() it is read to the end, and send() says -EAGAIN.
  // A short count says that the buffer is empty (full), so the poller will tell. But where the
  // message has memory that may be gone it may also say that the kernel moved what is before the
  // hole: the next call, which says -EFAULT, is made by `look_again` though the poller has told
  // nothing (kNever: the memory stays).
  ssize_t receive(msghdr& message, Time look_again);
  // The next receive() goes without the poller. Only where the socket stood a moment ago.
  void read_directly() {
    watched_.ready |= EPOLLIN;
    direct_ = true;
  }
  bool direct() const { return direct_; }
  ssize_t send(const msghdr& message, Time look_again);
  // When a call is due that the poller need not tell of, and that it is.
  Time look_again() const { return std::min(in_.look_again, out_.look_again); }
  void look_again(Time now) {
    if (now < look_again()) return;
    for (Direction* direction : {&in_, &out_}) {
      if (now < direction->look_again) continue;
      direction->look_again = kNever;
      watched_.ready |= direction->bit;
    }
  }

 private:
  struct Direction {
    uint32_t bit;
    Time look_again = kNever;
  };
  static constexpr uint32_t kGone = EPOLLERR | EPOLLHUP;
  int error();
  ssize_t account(ssize_t moved, const msghdr& message, Time look_again, Direction& direction);

  int fd_;
  net::Poller& poller_;
  net::Watched watched_;
  Direction in_{EPOLLIN};
  Direction out_{EPOLLOUT};
  bool direct_ = false;
  bool ended_ = false;  // the peer's end() came before its reset
};

}  // namespace baton::tcp
