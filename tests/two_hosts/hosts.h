// Two hosts on one machine: network namespaces that are joined by wires which the test moves. They
// end with the test and what it started, however that ends.
#pragma once

#include "absl/status/statusor.h"
#include "tests/std.h"
#include "tests/two_hosts/wire.h"

struct in6_ifreq;

namespace baton {

class Hosts {
 public:
  // Host h has 10.77.w.(h + 1) on wire w. Unavailable, with the reason, where namespaces or devices
  // may not be made: what to skip for.
  static absl::StatusOr<std::unique_ptr<Hosts>> create(size_t wires, uint64_t seed);

  // Puts the calling thread there, for good. Threads that it starts are there too.
  void enter(size_t host) const;
  // The same for a process that was just forked: it sees the host's /sys too, as UCX must.
  void become(size_t host) const;

  size_t wires() const { return wires_.size(); }
  Wire& wire(size_t number) { return *wires_[number]; }
  static std::string address(size_t host, size_t wire = 0, size_t last = 0);
  // fd77:0:0:(w + 1)::(h + 1), which is not there before it is added.
  static std::string address_v6(size_t host, size_t wire = 0, size_t last = 0);

  // As `ip link` and `ip addr` do.
  void set_link(size_t host, size_t wire, bool up);
  void set_mtu(size_t host, size_t wire, int bytes);
  void set_address(size_t host, size_t wire, const std::string& address);
  void remove_address(size_t host, size_t wire);  // that of IPv4
  // False: there is no IPv6 here. Gone again when the link goes down.
  bool add_address_v6(size_t host, size_t wire, const std::string& address);
  void remove_address_v6(size_t host, size_t wire, const std::string& address);
  // To the network behind a wire, by IPv4. It is there from the start.
  void set_route(size_t host, size_t wire, bool there);

  // Moves packets for so long.
  void move(Time span);

 private:
  struct Host {
    base::UniqueFd space;    // its network namespace
    base::UniqueFd control;  // a socket in it, for questions about its devices
    base::UniqueFd control_v6;
  };
  Hosts() = default;
  absl::Status make_host(size_t host, size_t wires,
                         std::vector<std::array<base::UniqueFd, 2>>& ends);
  void ask(size_t host, unsigned long request, void* argument) const;
  in6_ifreq request_v6(size_t host, size_t wire, const std::string& address) const;

  std::array<Host, 2> hosts_;
  std::vector<std::unique_ptr<Wire>> wires_;
};

// Two hosts whose network runs by itself, for tests that hold both sides in one process.

class MovingHosts {
 public:
  explicit MovingHosts(std::unique_ptr<Hosts> hosts)
      : hosts_(std::move(hosts)), thread_([this] { move(); }) {}
  ~MovingHosts() {
    over_ = true;
    thread_.join();
  }

  // Whatever opens a socket must be called there.
  void on(size_t host, const std::function<void()>& what) const {
    std::thread([&] {
      hosts_->enter(host);
      what();
    }).join();
  }
  // Something happens to the network.
  void change(const std::function<void(Hosts&)>& what) {
    const std::lock_guard lock(mutex_);
    what(*hosts_);
  }

 private:
  void move() {
    while (!over_) {
      {
        const std::lock_guard lock(mutex_);
        hosts_->move(std::chrono::milliseconds(1));
      }
      std::this_thread::yield();  // whoever waits for the lock may have it
    }
  }

  const std::unique_ptr<Hosts> hosts_;
  std::mutex mutex_;
  std::atomic<bool> over_{false};
  std::thread thread_;
};

}  // namespace baton
