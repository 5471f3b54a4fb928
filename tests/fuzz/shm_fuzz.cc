// Fuzzes what an shm peer can write: the packets on its socket, and the ring in the memory that
// both sides share, where a hostile sender may put any bytes under any header.

#include "tests/fuzz/expect.h"
#include "transport/shm/memory_file.h"
#include "transport/shm/notify_ring.h"
#include "transport/shm/packet_socket.h"
#include "transport/transfer.h"

namespace {

void read_message(std::string_view packet) {
  const auto message = round_trip<baton::shm::Message>(packet);
  expect(!message.ok() || message->expected_fds(true) <= baton::shm::kMaxMessageFds);
}

// The input becomes the ring's memory; its first bytes say how much the sender claims to have
// written.
void read_ring(std::string_view bytes) {
  static const auto kLane = std::make_unique<baton::shm::Lane>();
  uint32_t claimed = 0;
  if (bytes.size() < sizeof claimed) return;
  std::memcpy(&claimed, bytes.data(), sizeof claimed);
  bytes.remove_prefix(sizeof claimed);
  std::memset(kLane->ring, 0, sizeof kLane->ring);
  std::memcpy(kLane->ring, bytes.data(), std::min(bytes.size(), sizeof kLane->ring));
  kLane->head = 0;
  kLane->tail = claimed;

  baton::shm::RingReader reader(*kLane);
  baton::Arrival arrival;
  for (size_t records = 0;; ++records) {
    const auto more = reader.next(arrival);
    if (!more.ok() || !*more) return;
    if (arrival.notify.size() > baton::kMaxNotification) std::abort();
    // A record takes at least its header.
    if (records > baton::shm::Lane::kRingBytes / 8) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  read_message(bytes);
  read_ring(bytes);
  return 0;
}
