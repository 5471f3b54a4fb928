// A cable between two network namespaces, and what may happen on it: packets are lost, late, out of
// order, twice there, changed, too large, too many, or forgotten by a firewall. It needs nothing of
// the kernel but TUN devices, and what it does to a packet follows from a seed.
#pragma once

#include <queue>

#include "tests/std.h"
#include "transport/base/unique_fd.h"
#include "transport/clock.h"

namespace baton {

// What happens to what one side sends.
struct WireFaults {
  double loss = 0, duplicate = 0, flip = 0;  // of packets; flip: one bit of them is turned
  Time delay{0}, jitter{0};                  // jitter puts them out of order
  uint64_t bytes_per_s = 0;                  // 0: no limit
  bool cut = false;                          // nothing goes through, and nobody is told
  int unreachable = -1;       // nothing goes through, and ICMP says so, with this code; -1: it goes
  size_t largest = SIZE_MAX;  // longer ones vanish, and nobody is told
};

struct WireCount {
  uint64_t packets = 0, bytes = 0;  // that came out at the other end
  uint64_t lost = 0;                // on purpose
};

class Wire {
 public:
  // Each end is a TUN device without a header of its own: one read is one IP packet.
  Wire(base::UniqueFd end_0, base::UniqueFd end_1, uint64_t seed);

  WireFaults& faults(size_t sender) { return faults_[sender]; }
  void heal() { faults_ = {}; }
  // Something happens to what both send.
  void both(const std::function<void(WireFaults&)>& what) { what(faults_[0]), what(faults_[1]); }
  void cut(bool lost) { faults_[0].cut = faults_[1].cut = lost; }
  void refuse(int code) { faults_[0].unreachable = faults_[1].unreachable = code; }
  // What a firewall does that has lost its state: packets of TCP connections that are there vanish,
  // or are answered by a reset. New connections work.
  void forget_connections(bool reset);
  const WireCount& count(size_t sender) const { return counts_[sender]; }

  int fd(size_t end) const { return ends_[end].get(); }
  void take(size_t sender, Time now);  // what it has sent
  void deliver(Time now);              // what is due
  Time next() const;                   // when something is due; kNever: never

 private:
  using Packet = std::vector<uint8_t>;
  struct Late {
    Time at;
    uint64_t order;
    size_t sender;
    Packet packet;
    bool operator>(const Late& other) const {
      return at != other.at ? at > other.at : order > other.order;
    }
  };

  bool chance(double part) {
    return part > 0 && std::uniform_real_distribution<>()(random_) < part;
  }
  void send(size_t sender, const Packet& packet, Time now);
  bool forgotten(size_t sender, const Packet& packet);
  void reset(size_t sender, const Packet& packet);
  void refuse(size_t sender, const Packet& packet, int code);

  std::array<base::UniqueFd, 2> ends_;
  std::array<WireFaults, 2> faults_;
  std::array<WireCount, 2> counts_;
  std::array<Time, 2> busy_until_{};
  std::priority_queue<Late, std::vector<Late>, std::greater<>> late_;
  std::set<std::string> known_, forgotten_;  // connections, by addresses and ports
  bool resets_ = false;
  uint64_t order_ = 0;
  std::mt19937_64 random_;
  Packet buffer_;
};

}  // namespace baton
