// Sends and receives: matched at the receiver by source and tag, then moved.
//
// A send first tells its receiver all that it is matched by. A small one takes its bytes along. Of
// a large one nothing else moves until a receive has taken it; then, over a link that reads, the
// receiver copies from where the sender has shown them, in one pass. Where the sender's memory
// cannot be shown, and over a link that writes, the receiver grants pieces, up to kPieces at a time
// from one peer: the sender copies each into memory that can be shown, or writes it to the place
// that the grant names, which is the receiver's own output if that can be reached; where neither
// side needs a copy, pieces are long. At the end the
// receiver tells the sender that it has taken the message, and both calls are over.
//
// So a receive from any rank, and tags, cost nothing where they are not used, and an early send
// costs its receiver a packet.
//
// Not thread-safe, as the executor. No allocation in the steady state, but for early packets and
// for packets of more than kInlineNotification bytes.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "collectives/executor/flight_recorder.h"
#include "collectives/executor/link.h"
#include "collectives/executor/memory.h"
#include "transport/clock.h"

namespace baton::collectives::executor {

struct Blocked;
struct Call;

class PointToPoint {
 public:
  static constexpr uint32_t kPieces = 8;
  // The most bytes of a piece that is copied nowhere; of others, as many as a block holds.
  static constexpr size_t kLongPiece = 8 << 20;
  // The other rank of a receive from any, until it is matched.
  static constexpr uint32_t kAnyPeer = UINT32_MAX;

  // As the executor's. `memory` may be null where every send is shown or goes with its packet.
  PointToPoint(uint32_t rank, const std::vector<Link*>& links, Memory* memory,
               FlightRecorder* recorder);
  ~PointToPoint();

  // Starts a send or a receive; sends of one rank to another are matched in this order.
  void start(Call& call);
  // Advances all of them as far as it goes. `on_done` of those that are over is called.
  absl::StatusOr<bool> advance(Time now);
  bool idle() const { return spare_.size() == flows_.size(); }

  // The send or receive that has stalled, or that the last error was about; `call` is null if there
  // is none.
  Blocked blocked() const;
  bool wrong() const { return wrong_ != nullptr; }  // there was an error, about that one
  // Whether anything was told to a peer since the last question.
  bool take_told() { return std::exchange(told_, false); }
  uint64_t messages() const { return messages_; }
  uint64_t bytes_sent() const { return bytes_sent_; }

 private:
  struct Piece {
    size_t first = 0;  // byte of the message
    size_t bytes = 0;
    bool granted = false;  // at the sender: to be sent; at the receiver: not finished
    bool ready = false;    // at the sender: `block` holds its bytes; at the receiver: it is here
    uint32_t write = 0;    // at the sender, over a link that writes: under way; 0: none
    Block block;           // what it is copied through; data null: nothing
    Link::Place place;     // where it is shown or granted
  };
  // A call under way.
  struct Flow {
    enum class State : uint8_t {
      kNew,       // a send that its receiver does not know of, or a receive that is not matched
      kUntaken,   // a send
      kReading,   // a receive: copying from where the sender has shown
      kGranting,  // a receive: pieces come when granted
      kTelling,   // a receive that has everything
    };
    Call* call = nullptr;
    State state = State::kNew;
    bool taken = false;  // by the receiver
    uint32_t peer = 0;
    uint64_t number = 0;  // of the send
    uint64_t order = 0;   // of a receive among all of them
    size_t bytes = 0;
    size_t each = 0;      // bytes of a piece
    size_t granted = 0;   // of a receive: bytes read or granted
    size_t finished = 0;  // bytes that need nothing more
    Link::Place shown;
    Block staged;  // what a send of one piece is shown in; data null: it lies as it is
    std::array<Piece, kPieces> pieces;
  };
  // A send that has come before its receive.
  struct Early {
    Packet packet;
    std::string behind;
    uint64_t arrival = 0;  // among those from all peers
    absl::Span<const std::byte> bytes() const {
      return {reinterpret_cast<const std::byte*>(behind.data()), behind.size()};
    }
  };
  struct Peer {
    std::vector<Flow*> sends;      // in order
    std::vector<Flow*> posted;     // receives from it that are not matched, in order
    std::vector<Flow*> matched;    // receives under way, in the order in which they were matched
    std::vector<Early> early;      // in order
    std::vector<Early> overtaken;  // came before one that was sent earlier
    uint64_t sent = 0;             // sends begun
    uint64_t arrived = 0;          // sends known, without a gap
    uint32_t granted = 0;          // pieces that are not finished
  };
  // Blocks to copy through: as many as are in use at a time, kMostBlocks at most.
  struct Blocks {
    std::vector<Block> spare;
    size_t made = 0;
  };
  static constexpr size_t kMostBlocks = 64;

  static size_t block_bytes(const Call& call);
  absl::Status match_early(Flow& flow);
  absl::Status on_packet(uint32_t peer, const Packet& packet, absl::Span<const std::byte> behind);
  absl::Status on_send(uint32_t peer, const Packet& packet, absl::Span<const std::byte> behind);
  absl::Status match(Flow& flow, uint32_t peer, const Packet& packet,
                     absl::Span<const std::byte> behind);
  absl::StatusOr<bool> advance_peer(uint32_t peer);
  absl::StatusOr<bool> advance_send(Flow& flow);
  absl::StatusOr<bool> announce(Flow& flow);
  static Packet packet_of(Packet::Kind kind, const Flow& flow, const Piece& piece);
  absl::StatusOr<bool> send_piece(Flow& flow, Piece& piece);
  absl::StatusOr<bool> advance_receive(Flow& flow);
  absl::StatusOr<bool> read(Flow& flow);
  absl::StatusOr<bool> grant(Flow& flow, bool& any);
  absl::StatusOr<bool> finish_piece(Flow& flow, Piece& piece);
  bool over(Flow& flow);
  void end(Flow& flow);
  // Data null: all are in use.
  absl::StatusOr<Block> take(Blocks& blocks, size_t bytes);
  void give_back(Blocks& blocks, Block& block);
  bool tell(uint32_t peer, const Packet& packet, absl::Span<const std::byte> behind);
  void record(FlightEvent::Kind kind, const Flow& flow);

  const uint32_t rank_;
  const std::vector<Link*>& links_;
  Memory* const memory_;
  FlightRecorder* const recorder_;
  std::vector<Peer> peers_;
  std::vector<Flow*> fresh_;       // receives that no early send was looked for
  std::vector<Flow*> posted_any_;  // as Peer::posted, from any rank
  std::vector<std::unique_ptr<Flow>> flows_;
  std::vector<Flow*> spare_;
  // Apart: what a receive is granted waits for its sender, which may wait for a block.
  Blocks send_blocks_, receive_blocks_;
  uint64_t next_order_ = 0, next_arrival_ = 0;
  const Call* wrong_ = nullptr;  // what an error was about
  Time now_{};
  bool told_ = false;
  uint64_t messages_ = 0, bytes_sent_ = 0;
};

}  // namespace baton::collectives::executor
