// A network between two workers that a test can break: a relay in front of a worker's listener. It
// has no thread; a test drives it, as it drives the workers, so that nothing depends on time.
#pragma once

#include "tests/held_port.h"
#include "tests/manual_clock.h"
#include "tests/test.h"
#include "tests/until.h"
#include "transport/address.h"
#include "transport/net/endpoint.h"
#include "transport/worker.h"

namespace baton::tcp {

// A worker over tcp alone, and memory that its peers may read and write.
struct TcpSide {
  void start(WorkerOptions options, std::vector<char> bytes) {
    options.providers = {"tcp"};
    options.key = *ClusterKey::from_bytes("0123456789abcdef");
    memory = std::move(bytes);
    worker = Worker::create(std::move(options)).value();
    region = worker->register_memory(memory.data(), memory.size()).value();
    remote = worker->remote_region(region).value();
  }
  std::vector<char> memory;
  std::unique_ptr<Worker> worker;
  MemoryRegion region;
  RemoteRegion remote;
  PeerId peer;
};

class FaultyNetwork {
 public:
  enum Direction : uint8_t { kThere, kBack };  // from the side that dialled, and to it

  struct Line {
    std::array<int, 2> ends{-1, -1};  // of the dialler, of the worker behind
    std::array<std::string, 2> under_way;
    std::array<bool, 2> held{};
    std::array<size_t, 2> left{SIZE_MAX, SIZE_MAX};  // bytes that still come through
    bool open() const { return ends[0] >= 0; }
  };

  // `encoded`: of the worker behind.
  explicit FaultyNetwork(const std::string& encoded)
      : address_(*Address::decode(encoded)), listener_(net::listen_on("127.0.0.1", 0, {}).value()) {
    for (auto& [provider, where] : address_.providers) {
      if (provider != "tcp") continue;
      far_ = net::resolve(where)->front();
      where = net::local_of(listener_).text();
    }
  }
  // Whoever calls there gets to `far`.
  FaultyNetwork(const std::string& host, uint16_t port, const net::Endpoint& far)
      : far_(far), listener_(net::listen_on(host, port, {}).value()) {}
  ~FaultyNetwork() {
    cut_all();
    if (listener_ >= 0) ::close(listener_);
  }
  FaultyNetwork(const FaultyNetwork&) = delete;
  FaultyNetwork& operator=(const FaultyNetwork&) = delete;

  // The worker's address, with this network in front of it.
  std::string address() const { return address_.encode(); }
  uint16_t port() const { return net::local_of(listener_).port(); }
  std::vector<Line>& lines() { return lines_; }
  size_t open_lines() const {
    size_t count = 0;
    for (const Line& line : lines_) count += line.open() ? 1 : 0;
    return count;
  }

  void hold(Direction way, bool held) {
    for (Line& line : lines_) line.held[way] = held;
    hold_new_[way] = held;
  }
  // Bytes that came through, over all lines.
  size_t passed(Direction way) const { return passed_[way]; }

  // Of the next line, `bytes` come through that way; then it is cut, or (`silent`) nothing more is.
  void limit_next(Direction way, size_t bytes, bool silent) {
    limit_new_[way] = bytes;
    silent_ = silent;
  }
  // Both ends are reset; what is under way is lost.
  void cut(Line& line) {
    for (int& end : line.ends) {
      if (end >= 0) reset(end);
    }
    for (std::string& bytes : line.under_way) bytes.clear();
  }
  // Only the dialler's end is reset; what is under way to the other one still comes.
  void cut_near(Line& line) { reset(line.ends[0]); }
  void cut_all() {
    for (Line& line : lines_) cut(line);
  }
  // Nobody listens any more.
  void refuse() {
    const auto [host, port] = *net::split_host_port(net::local_of(listener_).text());
    ::close(std::exchange(listener_, -1));
    nobody_.emplace(port);
  }

  // Moves what can be moved; true if anything did.
  bool step() {
    bool any = accept();
    for (Line& line : lines_) {
      for (const Direction way : {kThere, kBack}) any |= line.ends[1] >= 0 && relay(line, way);
    }
    return any;
  }

 private:
  static constexpr size_t kMostUnderWay = 1 << 20;

  static void reset(int& end) {
    const linger at_once{.l_onoff = 1, .l_linger = 0};
    setsockopt(end, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    ::close(std::exchange(end, -1));
  }

  bool accept() {
    const int near = listener_ < 0 ? -1 : accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK);
    if (near < 0) return false;
    auto far = net::start_connect(far_, {});
    Line line;
    line.ends = {near, far.ok() ? *far : -1};
    line.held = hold_new_;
    line.left = std::exchange(limit_new_, {SIZE_MAX, SIZE_MAX});
    if (far.ok()) {
      pollfd connected{.fd = *far, .events = POLLOUT, .revents = 0};
      poll(&connected, 1, 1000);  // on this machine: at once
      lines_.push_back(std::move(line));
    } else {
      cut(line);
    }
    return true;
  }

  bool relay(Line& line, Direction way) {
    const int from = line.ends[way == kThere ? 0 : 1];
    const int to = line.ends[way == kThere ? 1 : 0];
    std::string& bytes = line.under_way[way];
    bool any = false;
    char buffer[64 << 10];
    if (from >= 0 && bytes.size() < kMostUnderWay) {
      const ssize_t got = recv(from, buffer, sizeof buffer, MSG_DONTWAIT);
      if (got > 0) {
        bytes.append(buffer, static_cast<size_t>(got));
        any = true;
      } else if (got == 0 || errno != EAGAIN) {
        ended(line, way);
        return true;
      }
    }
    if (line.held[way] || bytes.empty() || to < 0) return any;
    const size_t most = std::min(bytes.size(), line.left[way]);
    const ssize_t put = send(to, bytes.data(), most, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (put > 0) {
      bytes.erase(0, static_cast<size_t>(put));
      passed_[way] += static_cast<size_t>(put);
      line.left[way] -= line.left[way] == SIZE_MAX ? 0 : static_cast<size_t>(put);
    }
    if (line.left[way] == 0) {
      if (!silent_) cut(line);
      line.held[way] = true;
      return true;
    }
    if (put < 0 && errno != EAGAIN) cut(line);
    return any || put > 0;
  }

  // One side has closed: the other one gets what is still under way, and the end.
  void ended(Line& line, Direction way) {
    std::string& bytes = line.under_way[way];
    if (!line.held[way] && !bytes.empty()) {
      [[maybe_unused]] const ssize_t put = send(line.ends[way == kThere ? 1 : 0], bytes.data(),
                                                bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    for (int& end : line.ends) {
      if (end >= 0) ::close(end);
      end = -1;
    }
  }

  Address address_;
  net::Endpoint far_;
  int listener_;
  std::optional<HeldPort> nobody_;
  std::array<bool, 2> hold_new_{};
  std::array<size_t, 2> limit_new_{SIZE_MAX, SIZE_MAX};
  bool silent_ = false;
  std::array<size_t, 2> passed_{};
  std::vector<Line> lines_;
};

// Two workers of one thread, of which `a` has called `b` through such a network. The kernel moves
// bytes in its own time; the workers' clock is the test's.
class FaultyPair {
 protected:
  void call() {
    network_ = std::make_unique<FaultyNetwork>(b_.worker->address());
    a_.peer = a_.worker->connect(network_->address()).value();
  }
  bool step(bool with_b = true) {
    bool any = a_.worker->progress();
    if (with_b && b_.worker != nullptr) any |= b_.worker->progress();
    any |= network_->step();
    for (TcpSide* side : {&a_, &b_}) {
      if (side->worker == nullptr) continue;
      while (auto event = side->worker->next_peer_event()) side->peer = event->peer;
    }
    if (!any && time_moves_) clock_.advance(std::chrono::milliseconds(1));
    return any;
  }
  template <typename Ready>
  void until(const Ready& ready, bool with_b = true, CallSite from = CallSite::here()) {
    const auto state = [&] { return a_.worker ? state_of(*a_.worker, a_.peer, "a") : ""; };
    baton::until(
        ready, [&] { step(with_b); }, state, from);
  }
  // Until nothing has moved for a while.
  void run_out() {
    for (int quiet = 0; quiet < 200; ++quiet) {
      if (step()) quiet = 0;
    }
  }
  bool ended_at_a(TransferId id) { return ended(*a_.worker->state(id)); }

  ManualClock clock_;
  bool time_moves_ = false;  // when nothing else does
  TcpSide a_, b_;
  std::unique_ptr<FaultyNetwork> network_;
};

}  // namespace baton::tcp
