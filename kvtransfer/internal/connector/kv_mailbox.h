// Messages about loads, over a worker's notifications: cut into parts, kept while the worker has no
// free slot, put together again per peer.
//
// Probes are answered here, and no caller else hears of them: they ask whether this process runs,
// not what it is doing. Takes every notification of its worker. One thread at a time calls
// everything but collect(), which any thread may call meanwhile.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "kvtransfer/internal/connector/kv_messages.h"
#include "kvtransfer/internal/connector/kv_waiting.h"
#include "transport/transfer.h"
#include "transport/worker.h"

namespace baton::kvtransfer {

// A peer as a key: its index and generation in one number.
inline uint64_t peer_key(PeerId peer) { return uint64_t{peer.index} << 32 | peer.generation; }

struct KvMessage {
  PeerId peer;
  KvMessageKind kind = KvMessageKind::kCancel;
  uint16_t version = 0;
  uint64_t load = 0;
  absl::Status status;  // not OK: a bad message, of which only the above is known (load 0: nothing)
  std::string body;
};

class KvMailbox {
 public:
  explicit KvMailbox(Worker& worker) : worker_(worker) {}

  // Sends a message, now or from flush(). One to a peer that is gone is dropped: that the peer went
  // down says all.
  void send(PeerId peer, KvMessageKind kind, uint64_t load, std::string_view body = {}) {
    send(peer, kind, load, body, kv_version_of(kind));
  }
  void send(PeerId peer, KvMessageKind kind, uint64_t load, std::string_view body,
            uint16_t version);
  // The next message that is whole (or bad); false when there is none. Reuses the memory of `out`.
  bool receive(KvMessage& out);
  // Takes what has come, answers probes, and keeps the rest for receive().
  void collect();
  // Sends what had to wait; true if anything went.
  bool flush();
  // Nothing more comes from or goes to this peer.
  void forget(PeerId peer);

 private:
  // The same, from the worker. With `mutex_`.
  bool take(KvMessage& out);
  // False when the worker has no slot, or none for this peer.
  bool post(PeerId peer, const std::string& notification);

  struct Waiting {
    PeerId peer;
    std::string notification;
  };
  Worker& worker_;
  KvWaiting<Waiting> outbox_;                              // by peer_key()
  std::mutex mutex_;                                       // of what follows, but for scratch_
  std::deque<KvMessage> inbox_;                            // collected
  absl::flat_hash_map<uint64_t, KvAssembler> assemblers_;  // by peer_key()
  std::string answer_;
  Notification notification_;
  std::string scratch_;
};

}  // namespace baton::kvtransfer
