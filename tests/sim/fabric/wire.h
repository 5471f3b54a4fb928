// Wires: one direction of a simulated link. Sends one packet after the other at the link's rate and
// mistreats them on the way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "tests/sim/fabric/fabric.h"
#include "transport/base/ring.h"

namespace baton::sim {

class SimNetwork;

// What travels. It names its message; the bytes are looked up at the sender when it arrives.
struct SimPacket {
  enum class Kind : uint8_t { kWrite, kAdd, kReadRequest, kReadResponse, kAck, kNak };
  Kind kind = Kind::kWrite;
  uint32_t from = 0;  // queue pairs
  uint32_t to = 0;
  uint32_t epoch = 0;    // of the connection between them
  uint64_t message = 0;  // number of the message in the requester's queue pair
  uint32_t index = 0;    // of the packet in the message
};

struct SimLinkState;

class SimWire {
 public:
  SimWire(SimNetwork& network, SimLinkState& link) : network_(network), link_(link) {}

  // The queue pair has something to send, as requester or as responder. Say it once: the wire comes
  // back to the queue pair, in turn with others, until that has nothing left.
  void offer(uint32_t queue_pair, bool responder);
  // Sends a packet that takes no bandwidth.
  void send_control(const SimPacket& packet) { propagate(packet); }
  // The packet's last byte has left.
  void transmitted(const SimPacket& packet);

 private:
  struct Stream {
    uint32_t queue_pair = 0;
    bool responder = false;
  };
  void start(double from);
  void propagate(const SimPacket& packet);

  SimNetwork& network_;
  SimLinkState& link_;
  base::Ring<Stream> waiting_;
  Stream sending_;
  bool busy_ = false;
  double free_at_ = 0;  // nanoseconds, not rounded: rounding would add up over many packets
};

// A link: what it is like now, and its two directions.
struct SimLinkState {
  SimLinkState(SimNetwork& network, const SimLink& link)
      : spec(link), wires{SimWire(network, *this), SimWire(network, *this)} {}
  SimLinkState(const SimLinkState&) = delete;
  SimLinkState& operator=(const SimLinkState&) = delete;

  bool up() const { return faults == 0; }
  SimLink spec;
  int faults = 0;  // flaps under way
  SimWire wires[2];
};

}  // namespace baton::sim
