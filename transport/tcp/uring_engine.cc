// The engine that moves bytes with io_uring: one submission for all sockets of a round.
//
// The ring is a plain one: callers of progress() change threads (always one at a time), which
// IORING_SETUP_SINGLE_ISSUER and DEFER_TASKRUN forbid. A thread that exits takes its armed requests
// with it as ECANCELED; they are simply started again.
#include <liburing.h>
#include <sys/epoll.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "transport/tcp/io_engine.h"

namespace baton::tcp {
namespace {

constexpr unsigned kEntries = 256;

class UringEngine : public IoEngine, private Watched {
 public:
  explicit UringEngine(Poller& poller) : poller_(poller) {}
  ~UringEngine() override {
    if (!open_) return;
    poller_.remove(ring_.ring_fd);
    io_uring_queue_exit(&ring_);
  }

  absl::Status open() {
    io_uring_params params{};
    params.flags = IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG;
    int error = io_uring_queue_init_params(kEntries, &ring_, &params);
    if (error == -EINVAL) {  // before Linux 5.19
      params = {};
      error = io_uring_queue_init_params(kEntries, &ring_, &params);
    }
    if (error != 0) return absl::UnavailableError(explain(-error));
    open_ = true;
    if (!(params.features & IORING_FEAT_SUBMIT_STABLE) || !supports_cancel()) {
      return absl::UnavailableError("io_uring of this kernel is too old (5.5 or later is needed)");
    }
    return poller_.add(ring_.ring_fd, EPOLLIN, *this);
  }

  const char* name() const override { return "io_uring"; }
  absl::Status attach(IoSocket&) override { return absl::OkStatus(); }
  void detach(IoSocket& socket) override {
    stop_send(socket);
    stop_receive(socket);
  }
  void send(IoSocket& socket) override { start(socket, false); }
  void receive(IoSocket& socket) override { start(socket, true); }
  void stop_send(IoSocket& socket) override { stop(socket, false); }
  void stop_receive(IoSocket& socket) override { stop(socket, true); }

  bool run() override {
    // Entering the kernel also runs what other sockets have become ready for.
    if (io_uring_sq_ready(&ring_) > 0 || needs_enter()) io_uring_submit_and_get_events(&ring_);
    ready = 0;
    return reap();
  }
  bool runnable() const override {
    return io_uring_sq_ready(&ring_) > 0 || io_uring_cq_ready(&ring_) > 0 || needs_enter();
  }

 private:
  static std::string explain(int error) {
    const char* why = "io_uring is not available";
    if (error == ENOSYS) why = "this kernel has no io_uring";
    if (error == EPERM) why = "io_uring is forbidden (sysctl kernel.io_uring_disabled or seccomp)";
    if (error == ENOMEM) why = "RLIMIT_MEMLOCK is too small for a ring; raise it with `ulimit -l`";
    return absl::StrCat(why, " (", strerror(error), ")");
  }

  bool supports_cancel() {
    io_uring_probe* probe = io_uring_get_probe_ring(&ring_);
    const bool yes = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_ASYNC_CANCEL) &&
                     io_uring_opcode_supported(probe, IORING_OP_SENDMSG);
    io_uring_free_probe(probe);
    return yes;
  }

  bool needs_enter() const {
    return IO_URING_READ_ONCE(*ring_.sq.kflags) & (IORING_SQ_TASKRUN | IORING_SQ_CQ_OVERFLOW);
  }

  io_uring_sqe* entry() {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    while (sqe == nullptr) {
      io_uring_submit(&ring_);
      reap();
      sqe = io_uring_get_sqe(&ring_);
    }
    return sqe;
  }

  static uint64_t tag(IoSocket& socket, bool receive) {
    return reinterpret_cast<uint64_t>(&socket) | (receive ? 1 : 0);
  }

  void start(IoSocket& socket, bool receive) {
    IoDirection& direction = receive ? socket.rx : socket.tx;
    direction.busy = true;
    prepare(socket, receive);
  }

  void prepare(IoSocket& socket, bool receive) {
    io_uring_sqe* sqe = entry();
    if (receive) {
      io_uring_prep_recvmsg(sqe, socket.fd, &socket.rx.message, 0);
    } else {
      io_uring_prep_sendmsg(sqe, socket.fd, &socket.tx.message, MSG_NOSIGNAL);
    }
    io_uring_sqe_set_data64(sqe, tag(socket, receive));
  }

  void stop(IoSocket& socket, bool receive) {
    IoDirection& direction = receive ? socket.rx : socket.tx;
    if (!direction.busy) return;
    stopping_ = &direction;
    io_uring_sqe* sqe = entry();
    io_uring_prep_cancel64(sqe, tag(socket, receive), 0);
    io_uring_sqe_set_data64(sqe, 0);
    while (direction.busy) {
      io_uring_submit_and_wait(&ring_, 1);
      reap();
    }
    stopping_ = nullptr;
  }

  bool reap() {
    bool any = false;
    io_uring_cqe* cqe = nullptr;
    while (io_uring_peek_cqe(&ring_, &cqe) == 0) {
      const uint64_t data = cqe->user_data;
      const int result = cqe->res;
      io_uring_cqe_seen(&ring_, cqe);
      if (data == 0) continue;  // of a cancel
      finish(*reinterpret_cast<IoSocket*>(data & ~uint64_t{1}), data & 1, result);
      any = true;
    }
    return any;
  }

  void finish(IoSocket& socket, bool receive, int result) {
    IoDirection& direction = receive ? socket.rx : socket.tx;
    if (result == -ECANCELED || result == -EINTR || result == -EAGAIN) {
      if (&direction == stopping_) {
        direction.busy = false;
      } else {
        prepare(socket, receive);
      }
      return;
    }
    direction.busy = false;
    direction.done = true;
    direction.result = result;
  }

  Poller& poller_;
  io_uring ring_{};
  bool open_ = false;
  IoDirection* stopping_ = nullptr;
};

}  // namespace

absl::StatusOr<std::unique_ptr<IoEngine>> make_uring_engine(Poller& poller) {
  auto engine = std::make_unique<UringEngine>(poller);
  absl::Status status = engine->open();
  if (!status.ok()) return status;
  return engine;
}

}  // namespace baton::tcp
