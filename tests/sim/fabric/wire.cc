// One direction of a simulated link: sends at its rate; loses, repeats and reorders packets.
#include "tests/sim/fabric/wire.h"

#include <cmath>

#include "tests/sim/fabric/network.h"
#include "tests/sim/fabric/queue_pair.h"

namespace baton::sim {

void SimWire::offer(uint32_t queue_pair, bool responder) {
  waiting_.push_back({queue_pair, responder});
  if (!busy_) start(static_cast<double>(network_.now().count()));
}

void SimWire::start(double from) {
  while (!waiting_.empty()) {
    const Stream stream = waiting_.front();
    waiting_.pop_front();
    QueuePair* sender = network_.find(stream.queue_pair);
    SimPacket packet;
    size_t bytes = 0;
    if (sender == nullptr || !sender->next_packet(stream.responder, packet, bytes)) continue;
    const double rate = link_.spec.bytes_per_second;
    free_at_ = from + (rate > 0 ? static_cast<double>(bytes) / rate * 1e9 : 0);
    sending_ = stream;
    busy_ = true;
    network_.at_transmitted(Time(std::llround(free_at_)), *this, packet);
    return;
  }
  busy_ = false;
}

void SimWire::transmitted(const SimPacket& packet) {
  propagate(packet);
  if (QueuePair* sender = network_.find(sending_.queue_pair)) sender->transmitted();
  waiting_.push_back(sending_);
  start(free_at_);
}

void SimWire::propagate(const SimPacket& packet) {
  SimStats& stats = network_.stats();
  ++stats.packets;
  if (!link_.up() || network_.chance(link_.spec.loss)) {
    ++stats.lost;
    return;
  }
  const int copies = network_.chance(link_.spec.duplicate) ? 2 : 1;
  stats.duplicated += static_cast<uint64_t>(copies - 1);
  for (int i = 0; i < copies; ++i) {
    Time arrival = network_.now() + link_.spec.latency;
    if (network_.chance(link_.spec.reorder)) {
      ++stats.reordered;
      arrival += network_.uniform(link_.spec.reorder_delay);
    }
    network_.at_arrival(arrival, packet);
  }
}

}  // namespace baton::sim
