// The poller, and the engine that moves bytes with non-blocking sendmsg and recvmsg.
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "transport/tcp/io_engine.h"

namespace baton::tcp {
namespace {

size_t bytes_of(const msghdr& message) {
  size_t bytes = 0;
  for (size_t i = 0; i < message.msg_iovlen; ++i) bytes += message.msg_iov[i].iov_len;
  return bytes;
}

// Edge-triggered: a direction counts as ready until the kernel says otherwise.
class EpollEngine : public IoEngine {
 public:
  explicit EpollEngine(Poller& poller) : poller_(poller) {}
  const char* name() const override { return "epoll"; }

  absl::Status attach(IoSocket& socket) override {
    socket.ready = EPOLLIN | EPOLLOUT;
    absl::Status status = poller_.add(socket.fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, socket);
    if (status.ok()) sockets_.push_back(&socket);
    return status;
  }
  void detach(IoSocket& socket) override {
    poller_.remove(socket.fd);
    sockets_.erase(std::remove(sockets_.begin(), sockets_.end(), &socket), sockets_.end());
    socket.tx.busy = socket.rx.busy = false;
  }
  void send(IoSocket& socket) override { socket.tx.busy = true; }
  void receive(IoSocket& socket) override { socket.rx.busy = true; }
  void stop_send(IoSocket& socket) override { socket.tx.busy = false; }
  void stop_receive(IoSocket& socket) override { socket.rx.busy = false; }

  bool run() override {
    bool any = false;
    for (IoSocket* socket : sockets_) {
      if (can_receive(*socket)) any |= move(*socket, socket->rx, EPOLLIN);
      if (can_send(*socket)) any |= move(*socket, socket->tx, EPOLLOUT);
    }
    return any;
  }
  bool runnable() const override {
    return std::any_of(sockets_.begin(), sockets_.end(), [](const IoSocket* socket) {
      return can_receive(*socket) || can_send(*socket);
    });
  }

 private:
  static constexpr uint32_t kGone = EPOLLERR | EPOLLHUP;
  static bool can_receive(const IoSocket& s) {
    return s.rx.busy && (s.ready & (EPOLLIN | EPOLLRDHUP | kGone));
  }
  static bool can_send(const IoSocket& s) { return s.tx.busy && (s.ready & (EPOLLOUT | kGone)); }

  static bool move(IoSocket& socket, IoDirection& direction, uint32_t bit) {
    ssize_t n;
    if (socket.ready & kGone) {
      // The connection was reset: what still lies in the receive buffer belongs to a peer that has
      // given it up, so none of it may land any more.
      int error = 0;
      socklen_t size = sizeof(error);
      getsockopt(socket.fd, SOL_SOCKET, SO_ERROR, &error, &size);
      n = error != 0 ? -error : -ECONNRESET;
    } else {
      n = bit == EPOLLIN ? recvmsg(socket.fd, &direction.message, MSG_DONTWAIT)
                         : sendmsg(socket.fd, &direction.message, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n < 0) n = -errno;
    }
    if (n == -EINTR) return true;
    if (n == -EAGAIN || n == -EWOULDBLOCK) {
      socket.ready &= ~bit;
      return false;
    }
    // A short count means that the buffer is empty (full): the next edge will say otherwise.
    if (n > 0 && static_cast<size_t>(n) < bytes_of(direction.message)) socket.ready &= ~bit;
    direction.busy = false;
    direction.done = true;
    direction.result = n;
    return true;
  }

  Poller& poller_;
  std::vector<IoSocket*> sockets_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Poller>> Poller::create() {
  const int fd = epoll_create1(EPOLL_CLOEXEC);
  if (fd < 0) {
    return absl::UnavailableError(absl::StrCat("epoll_create1: ", strerror(errno),
                                               "; raise the limit on open files (ulimit -n)"));
  }
  return std::unique_ptr<Poller>(new Poller(fd));
}

Poller::~Poller() { ::close(fd_); }

absl::Status Poller::add(int fd, uint32_t events, Watched& watched) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = &watched;
  if (epoll_ctl(fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
    return absl::UnavailableError(absl::StrCat("epoll_ctl: ", strerror(errno)));
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
  epoll_event events[64];
  const int n = epoll_wait(fd_, events, 64, 0);
  for (int i = 0; i < n; ++i) static_cast<Watched*>(events[i].data.ptr)->ready |= events[i].events;
  return n > 0;
}

std::unique_ptr<IoEngine> make_epoll_engine(Poller& poller) {
  return std::make_unique<EpollEngine>(poller);
}

}  // namespace baton::tcp
