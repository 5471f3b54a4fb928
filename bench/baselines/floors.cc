// The floor for tcp: plain blocking sockets over loopback.
#include "bench/baselines/floors.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "bench/report/child_process.h"
#include "collectives/reduce/reduce.h"
#include "hwy/base.h"
#include "hwy/cache_control.h"
#include "transport/base/child.h"
#include "transport/clock.h"

namespace baton::bench {
namespace {

constexpr size_t kChunk = 1 << 20;  // of one send() or recv(), taken from the sockets in turn

struct Descriptors {
  std::vector<int> fds;
  ~Descriptors() {
    for (int fd : fds) ::close(fd);
  }
};

absl::Status problem(const char* what) {
  return absl::UnavailableError(absl::StrCat("plain sockets: ", what, ": ", strerror(errno)));
}

void set_options(int fd, const PlainSocketsOptions& options) {
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  const int bytes = static_cast<int>(options.buffer_bytes);
  setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
  setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes));
  if (!options.congestion.empty()) {
    setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, options.congestion.data(),
               static_cast<socklen_t>(options.congestion.size()));
  }
}

absl::Status connect_pairs(const PlainSocketsOptions& options, Descriptors& senders,
                           Descriptors& receivers) {
  Descriptors listener;
  listener.fds.push_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int fd = listener.fds[0];
  if (fd < 0) return problem("socket");
  set_options(fd, options);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(at);
  if (bind(fd, reinterpret_cast<sockaddr*>(&at), size) != 0 || listen(fd, options.sockets) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size) != 0) {
    return problem("listening");
  }
  for (int i = 0; i < options.sockets; ++i) {
    const int sender = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (sender < 0) return problem("socket");
    senders.fds.push_back(sender);
    set_options(sender, options);
    if (connect(sender, reinterpret_cast<sockaddr*>(&at), size) != 0) return problem("connect");
    const int receiver = accept(fd, nullptr, nullptr);
    if (receiver < 0) return problem("accept");
    receivers.fds.push_back(receiver);
    set_options(receiver, options);
  }
  return absl::OkStatus();
}

// Moves `bytes` in chunks, from one socket after the other. `data` advances.
template <typename Call>
bool move(const std::vector<int>& fds, char* data, const PlainSocketsOptions& options, Call call) {
  size_t at = 0;
  for (size_t turn = 0; at < options.bytes; ++turn) {
    const int fd = fds[turn % fds.size()];
    const size_t end = std::min(options.bytes, at + kChunk);
    while (at < end) {
      const ssize_t n = call(fd, data + at, end - at);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      at += static_cast<size_t>(n);
    }
  }
  return true;
}

void send_rounds(const std::vector<int>& fds, const PlainSocketsOptions& options) {
  std::vector<char> data(options.bytes, 1);
  for (int round = 0; round <= options.rounds; ++round) {
    char byte = 0;
    if (recv(fds[0], &byte, 1, 0) != 1) return;  // the receiver is ready
    if (!move(fds, data.data(), options,
              [](int fd, char* at, size_t n) { return send(fd, at, n, MSG_NOSIGNAL); })) {
      return;
    }
  }
}

}  // namespace

absl::StatusOr<double> plain_sockets(const PlainSocketsOptions& options) {
  if (options.sockets < 1 || options.bytes == 0 || options.rounds < 1) {
    return absl::InvalidArgumentError("plain sockets: counts and sizes must be positive");
  }
  Descriptors senders, receivers;
  absl::Status status = connect_pairs(options, senders, receivers);
  if (!status.ok()) return status;

  const pid_t child = base::fork_child();
  if (child < 0) return problem("fork");
  if (child == 0) {
    for (int fd : receivers.fds) ::close(fd);
    pin_to(options.sender_cpu);
    send_rounds(senders.fds, options);
    _exit(0);
  }

  std::vector<char> data(options.bytes);  // made after the fork, which would share its pages
  std::vector<double> seconds;
  for (int round = 0; round <= options.rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    const char go = 1;
    bool good = send(receivers.fds[0], &go, 1, MSG_NOSIGNAL) == 1;
    good = good && move(receivers.fds, data.data(), options,
                        [](int fd, char* at, size_t n) { return recv(fd, at, n, 0); });
    if (!good) {
      status = problem("moving bytes");
      break;
    }
    const auto end = std::chrono::steady_clock::now();
    if (round > 0) seconds.push_back(std::chrono::duration<double>(end - start).count());
  }

  for (int fd : receivers.fds) ::shutdown(fd, SHUT_RDWR);  // a sender that still waits gives up
  waitpid(child, nullptr, 0);
  if (!status.ok()) return status;
  std::sort(seconds.begin(), seconds.end());
  return static_cast<double>(options.bytes) * 1e-9 / seconds[seconds.size() / 2];
}

namespace {

// How far a side has come. On a cache line of its own.
struct alignas(128) Flag {
  std::atomic<uint64_t> steps{0};
};

struct Side {
  std::vector<float> in;
  std::vector<float> out;
  std::vector<double> us;
  Flag flag;
};

void run(Side& own, Side& peer, bool first, int iterations, int warmup) {
  const size_t count = own.in.size();
  const size_t half = count / 2;
  // The first side owns the first half.
  const size_t begin = first ? 0 : half, length = first ? half : count - half;
  const size_t other = first ? half : 0, other_length = count - length;
  uint64_t step = 0;
  const auto meet = [&] {
    own.flag.steps.store(++step, std::memory_order_release);
    while (peer.flag.steps.load(std::memory_order_acquire) < step) hwy::Pause();
  };
  const auto now = [] {
    return std::chrono::duration<double, std::micro>(Clock::steady().now()).count();
  };
  meet();
  double from = now();
  for (int i = -warmup; i < iterations; ++i) {
    collectives::reduce::reduce(DataType::kF32, ReduceOp::kSum, own.out.data() + begin,
                                own.in.data() + begin, peer.in.data() + begin, length);
    meet();
    std::memcpy(own.out.data() + other, peer.out.data() + other, other_length * sizeof(float));
    meet();  // before either side writes again what the other may still read
    const double to = now();
    if (i >= 0) own.us[static_cast<size_t>(i)] = to - from;
    from = to;
  }
}

}  // namespace

absl::StatusOr<std::vector<double>> one_copy_loop(size_t bytes, int iterations, int warmup) {
  const std::vector<int>& cpus = allowed_cpus();
  if (cpus.size() < 2) return absl::UnavailableError("the one-copy loop needs two cores");
  std::array<Side, 2> sides;
  for (Side& side : sides) {
    side.in.assign(bytes / sizeof(float), 1);
    side.out.assign(bytes / sizeof(float), 0);
    side.us.resize(static_cast<size_t>(iterations));
  }
  // Threads take a while to get to their cores.
  warmup = std::max(warmup, 20);
  const auto body = [&](size_t i) {
    pin_to(cpus[i]);
    run(sides[i], sides[1 - i], i == 0, iterations, warmup);
  };
  std::thread first(body, 0), second(body, 1);
  first.join();
  second.join();
  std::vector<double> us(static_cast<size_t>(iterations));
  for (size_t i = 0; i < us.size(); ++i) us[i] = (sides[0].us[i] + sides[1].us[i]) / 2;
  return us;
}

}  // namespace baton::bench
