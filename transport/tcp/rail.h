// One socket to one peer, seen as a rail: takes slices, frames them, lands what comes in.
//
// As initiator a rail keeps a slot per slice it took; as target it keeps one write that is landing
// (frames of a slice follow each other) and a short list of reads it still has to answer.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "transport/base/ring.h"
#include "transport/base/small_first.h"
#include "transport/framed/rail.h"
#include "transport/net/endpoint.h"
#include "transport/net/seal.h"
#include "transport/provider.h"
#include "transport/tcp/ack_hold.h"
#include "transport/tcp/redial.h"
#include "transport/tcp/rx_stream.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/tx_batch.h"

namespace baton::tcp {

class TcpRail;

// The buffers that a rail needs only while something is under way.
struct RailMemory {
  // Null where there is no memory for it.
  static std::unique_ptr<RailMemory> make(FileBuffers& buffers);
  explicit RailMemory(FileBuffers& buffers) : rx(buffers) { control.reserve(kControlBytes); }
  // Room for an acknowledgement of each slice that may be under way.
  static constexpr size_t kControlBytes = 64 * (framed::kHeaderBytes + net::kSealBytes);
  TxBatch::Memory tx;
  RxStream::Memory rx;
  std::string control;
};

// The state that a provider and its rails share. Rails may outlive their provider.
struct TcpShared {
  explicit TcpShared(const ProviderContext& provider_context) : context(provider_context) {
    spares.reserve(kSpares);  // rails become idle at any time, without an allocation
  }
  ProviderContext context;
  net::SocketOptions socket_options;
  std::unique_ptr<net::Poller> poller;
  std::vector<TcpRail*> active;  // with something to do; null where one went away
  std::vector<TcpRail*> rails;   // all, in no order
  uint32_t round = 0;            // of progress, and when it began
  Time now{};
  std::unique_ptr<char[]> nowhere{new char[RxStream::kNowhereBytes]};
  std::unique_ptr<FileBuffers> buffers;
  std::unique_ptr<FileBuffers> sealing;  // where a rail's payload has tags
  static constexpr size_t kSpares = 64;
  std::vector<std::unique_ptr<RailMemory>> spares;
  Redials redials;
  // The frame that is being received.
  std::vector<framed::WirePiece> wire_pieces{framed::kMaxPieces};
  std::vector<iovec> mapped{framed::kMaxPieces};
  size_t slice_bytes = 1 << 20;
  Time ack_hold = AckHold::kLongest;
  Time stall = std::chrono::seconds(10);
};

// Numbers of slots or jobs, each of them once.
using IndexQueue = base::FixedQueue<uint8_t, framed::OpenSlices::kMostSlots>;

class TcpRail final : public framed::FramedRail {
 public:
  static constexpr uint32_t kDepth = framed::OpenSlices::kMostSlots;
  // A socket over which so many small messages came, the last of them so recently, is read
  // directly.
  static constexpr uint32_t kHotFrom = 8;
  static constexpr Time kHotFor = std::chrono::microseconds(50);
  // What a hole in the memory of a slice costs. More often each short count would cost a call.
  static constexpr Time kLookAgain = std::chrono::milliseconds(1);
  static constexpr uint32_t kMaxReads = 32;  // READ frames without their READ_END
  // Payload of one frame when it is tagged: sealed bytes are sent while still in the caches.
  static constexpr size_t kSealedPayload = 128 << 10;
  // Once a batch holds this much payload it goes out: acknowledgements must not wait long.
  static constexpr size_t kBatchPayload = 256 << 10;
  static constexpr size_t kSealedBatch =
      kBatchPayload + framed::kMaxPayload + TxBatch::kVectors * net::kSealTag;

  // Takes over `link`. `sockets`: how many the session has, in words.
  static absl::StatusOr<std::unique_ptr<TcpRail>> create(std::shared_ptr<TcpShared> shared,
                                                         const net::Link& link,
                                                         const HelloInfo& peer,
                                                         const std::string& sockets);
  ~TcpRail() override;

  // The time at which a delayed acknowledgement is sent alone; kNever: none is delayed.
  Time ack_due() const { return closed_ || at_once_ ? kNever : hold_.due(); }
  // When the socket is looked at though the poller has told nothing.
  Time look_again() const { return closed_ ? kNever : socket_.look_again(); }
  // Called by the provider. Moves what the socket takes and has, once each way; true if anything
  // moved. The rail may be gone afterwards.
  bool advance(EventSink& sink);
  // Whether advance() would do something right now, so that no thread should sleep.
  bool runnable() const;
  // Whether nothing is under way: until it is activated there is nothing to do, and no timer.
  bool idle() const { return !runnable() && !waiting() && !hot(); }
  // Small messages have just come one after the other, and the socket was empty in the last round.
  bool hot() const;
  bool let_go(TransferId transfer) const override;
  void read_directly() { socket_.read_directly(); }
  void looked_at() { looked_ = shared_->round; }
  // The provider looks at a rail only while it is on the list of those that are active. One that
  // finds no memory for what it does then is lost.
  void activate();
  void deactivate();
  void remove_region(const RegionEntry& region);
  // It was called, as number `number` of `sockets`, and answered at `at`, large packets or not. It
  // is called again when it is lost.
  void called(std::shared_ptr<CalledSockets> sockets, uint16_t number, const net::Endpoint& at,
              bool narrow);
  // Another socket has its place: it ends, and what was open on it goes on over the others.
  void give_way(EventSink& sink);

 private:
  using Slot = framed::OpenSlice;
  // A read that was aborted while the target may still send data of it, which then is dropped.
  struct AbortedRead {
    TransferId id;
    uint32_t slice = 0;
    uint32_t reads_open = 0;  // 0: free
  };
  // A peer's write under way.
  struct Incoming {
    bool active = false;
    framed::Frame frame;  // of the latest frame
    size_t landed = 0;
    absl::Status error;
    std::string notify;
  };
  // A peer's read to be answered.
  struct Job {
    bool live = false;
    framed::Frame frame;
    std::vector<iovec> pieces;
  };
  struct BatchedWrite {
    uint8_t slot = 0;
    size_t begin = 0;  // vectors of the batch
    size_t end = 0;
    bool copied = false;  // they are of a copy
  };
  struct BatchedJob {
    uint8_t job = 0;
    size_t begin = 0;  // vectors of the batch
    size_t end = 0;
    char* trailer = nullptr;  // its READ_END, sealed under this number
    uint64_t number = 0;
  };

  TcpRail(std::shared_ptr<TcpShared> shared, const net::Link& link, const HelloInfo& peer,
          Properties properties);

  // rail.cc
  void taken(Slot& slot) override;
  void take_back(Slot& slot) override;
  void release_memory(Slot& slot) override;
  void leave() override;
  void stalled() override;
  void say_goodbye(std::string_view why) override;
  bool waiting() const override;
  bool may_be_read_to_the_end() const;
  uint64_t moved() const override;
  Time look_again(bool memory_may_be_gone) const {
    return memory_may_be_gone ? shared_->now + kLookAgain : kNever;
  }
  bool something_to_send() const;
  bool data_to_send() const;
  bool listening() const;
  IndexQueue& writes_of(const Slot& slot) { return slot.urgent() ? urgent_ : writes_; }

  // rail_send.cc
  bool send();
  bool acks_wait();
  void source_gone();
  void take_back_answer(const BatchedJob& batched, absl::StatusCode why);
  void compose();
  bool add_control();
  bool add_read();
  bool add_write();
  IndexQueue* next_writes();
  bool add_answer();
  void add_end(const framed::Frame& frame);
  void start_payload();
  void forget_payload(const TxBatch::Mark& mark);
  bool add_payload(std::byte* data, size_t bytes, size_t header, bool stays);
  void end_payload(size_t bytes);
  size_t most_payload() const { return sealer_.payload() ? kSealedPayload : framed::kMaxPayload; }
  void send_control(const framed::Frame& frame, std::string_view text) override;

  // rail_receive.cc
  bool receive(EventSink& sink);
  void note_size(size_t received);
  void landing_failed();
  void report_broken(EventSink& sink);
  bool payload_proved();
  void expect_payload(const framed::Frame& frame);
  void parse(EventSink& sink);
  void handle(const framed::Frame& frame, std::string_view meta, EventSink& sink);
  void on_write(const framed::Frame& frame, std::string_view meta, EventSink& sink);
  void on_write_landed(EventSink& sink);
  void on_read(const framed::Frame& frame, std::string_view meta);
  void on_read_data(const framed::Frame& frame);
  void on_read_data_landed();
  void on_read_end(const framed::Frame& frame, std::string_view text, EventSink& sink);
  void on_cancel_read(const framed::Frame& frame);
  absl::Status map_pieces(const framed::Frame& frame, Access want, absl::Span<iovec> out) const;
  AbortedRead* find_aborted_read(const framed::Frame& frame);

  std::shared_ptr<TcpShared> shared_;
  const WorkerUid uid_;  // the peer's
  size_t at_ = 0;        // in TcpShared::rails
  Socket socket_;
  std::shared_ptr<CalledSockets> called_;  // null: the peer called
  uint16_t number_ = 0;                    // of them
  bool stalled_ = false;                   // that is why it ends
  bool active_ = false;
  std::unique_ptr<RailMemory> memory_;  // while it is active

  IndexQueue writes_;       // slots with frames to send
  IndexQueue urgent_;       // the same, small ones: they overtake
  base::SmallFirst turns_;  // of the two
  IndexQueue reads_;        // slots with bytes to ask for
  std::array<AbortedRead, kMaxReads> aborted_reads_;

  net::Sealer sealer_;
  TxBatch batch_;
  FileBuffers::Buffer sealed_;  // payload of the batch and its tags, where payload has tags
  size_t sealed_bytes_ = 0;
  size_t sealed_from_ = 0;    // where that of the next frame begins
  bool batch_fades_ = false;  // some of the batch's memory may be gone
  std::string control_;       // sealed frames that go before any bulk
  bool at_once_ = false;      // there is more in it than acknowledgements that may wait
  AckHold hold_;
  // For hot(): how many small messages came one after the other, when the last did, and in which
  // round of progress a caller last asked how the socket stands.
  uint32_t small_ = 0;
  Time small_at_{};
  uint32_t looked_ = 0;
  std::vector<BatchedWrite> batched_writes_;
  std::vector<BatchedJob> batched_;
  int broken_slot_ = -1;  // a write whose source is gone: the connection ends with it
  bool answers_first_ = false;

  net::Opener opener_;
  RxStream rx_;
  bool in_payload_ = false;
  framed::Frame payload_frame_;
  int landing_slot_ = -1;  // of READ_DATA
  Incoming incoming_;
  std::vector<Job> jobs_;  // kDepth of them from the first on
  IndexQueue answers_;     // jobs to send
};

}  // namespace baton::tcp
