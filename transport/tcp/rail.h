// One socket to one peer, seen as a rail: takes slices, frames them, lands what comes in.
//
// As initiator a rail keeps a slot per slice it took; as target it keeps one write that is landing
// (frames of a slice follow each other) and a short list of reads it still has to answer.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "transport/provider.h"
#include "transport/tcp/endpoint.h"
#include "transport/tcp/io_engine.h"
#include "transport/tcp/open_slices.h"
#include "transport/tcp/rx_stream.h"
#include "transport/tcp/tx_batch.h"

namespace baton::tcp {

class TcpRail;

// What a provider and its rails share. Rails may outlive their provider.
struct TcpShared {
  explicit TcpShared(const ProviderContext& provider_context) : context(provider_context) {}
  ProviderContext context;
  SocketOptions socket_options;
  std::unique_ptr<Poller> poller;
  std::unique_ptr<IoEngine> engine;
  std::vector<TcpRail*> rails;  // null where one went away; compacted by progress()
  std::unique_ptr<char[]> nowhere{new char[RxStream::kNowhereBytes]};
  size_t slice_bytes = 1 << 20;
  Time stall = std::chrono::seconds(10);
};

// Small numbers in first-in first-out order, without allocation.
class IndexQueue {
 public:
  static constexpr size_t kCapacity = 64;
  bool empty() const { return count_ == 0; }
  uint8_t front() const { return items_[head_]; }
  void push(uint8_t item) { items_[(head_ + count_++) % kCapacity] = item; }
  void pop() {
    head_ = (head_ + 1) % kCapacity;
    --count_;
  }
  void remove(uint8_t item);

 private:
  std::array<uint8_t, kCapacity> items_{};
  size_t head_ = 0;
  size_t count_ = 0;
};

class TcpRail final : public Rail {
 public:
  static constexpr uint32_t kDepth = IndexQueue::kCapacity;
  static constexpr uint32_t kMaxReads = 32;  // READ frames without their READ_END
  static constexpr Time kAbortGrace = std::chrono::seconds(1);

  // Takes over `fd`. `sockets`: how many the session has.
  static absl::StatusOr<std::unique_ptr<TcpRail>> create(std::shared_ptr<TcpShared> shared, int fd,
                                                         const HelloInfo& peer, int sockets);
  ~TcpRail() override;

  const Properties& properties() const override { return properties_; }
  absl::Status reaches(const RemoteRegion&) const override { return absl::OkStatus(); }
  bool post(const Slice& slice, EventSink& sink) override;
  void abort(TransferId transfer, EventSink& sink) override;
  void close(absl::Status why, EventSink& sink) override;

  // Called by the provider. After advance() or check_timers() the rail may be gone.
  bool advance(EventSink& sink);
  void check_timers(Time now, EventSink& sink);
  Time next_timer() const { return next_check_; }
  bool runnable() const;
  void remove_region(const RegionEntry& region);

 private:
  using Slot = OpenSlice;
  // A read that was aborted while the target may still send data of it.
  struct Zombie {
    TransferId id;
    uint32_t slice = 0;
    uint32_t reads_open = 0;  // 0: free
  };
  // A peer's write under way.
  struct Incoming {
    bool active = false;
    Frame frame;  // of the latest frame
    size_t landed = 0;
    absl::Status error;
    std::string notify;
  };
  // A peer's read to be answered.
  struct Job {
    bool live = false;
    Frame frame;
    std::vector<iovec> pieces;
  };
  struct BatchedJob {
    uint8_t job = 0;
    size_t begin = 0;  // vectors of the batch
    size_t end = 0;
    char* trailer = nullptr;  // its READ_END
  };

  TcpRail(std::shared_ptr<TcpShared> shared, int fd, const HelloInfo& peer);

  // rail.cc
  void fail(absl::Status why);
  absl::Status lost(std::string_view why) const;
  void finish(EventSink& sink);
  void report(Slot& slot, absl::Status status, EventSink& sink) {
    slots_.report(*this, slot, std::move(status), sink);
  }
  void release_socket();
  bool waiting() const;
  IndexQueue& writes_of(const Slot& slot) { return slot.urgent() ? urgent_ : writes_; }

  // rail_send.cc
  void compose();
  bool add_control();
  bool add_read();
  bool add_write();
  IndexQueue* next_writes();
  bool add_answer();
  void on_sent(ssize_t result);
  void put_control(const Frame& frame, std::string_view text = {});
  void answer(FrameType type, const Frame& to, uint64_t offset, const absl::Status& status);

  // rail_receive.cc
  void on_received(ssize_t result, EventSink& sink);
  void parse(EventSink& sink);
  void handle(const Frame& frame, std::string_view meta, EventSink& sink);
  void on_write(const Frame& frame, std::string_view meta, EventSink& sink);
  void on_write_landed(EventSink& sink);
  void on_write_ack(const Frame& frame, std::string_view text, EventSink& sink);
  void on_read(const Frame& frame, std::string_view meta);
  void on_read_data(const Frame& frame);
  void on_read_data_landed();
  void on_read_end(const Frame& frame, std::string_view text, EventSink& sink);
  void on_cancel_read(const Frame& frame);
  absl::Status map_pieces(const Frame& frame, Access want, absl::Span<iovec> out);
  Slot* find_slot(const Frame& frame, Op op) {
    return slots_.find(frame.transfer, frame.slice, op);
  }
  Zombie* find_zombie(const Frame& frame);

  std::shared_ptr<TcpShared> shared_;
  IoSocket io_;
  Properties properties_;
  std::string peer_;  // "decode-0 (10.0.0.1:4000)"

  absl::Status failure_;
  bool failing_ = false;
  bool closed_ = false;
  bool inside_ = false;  // advance() is on the stack

  OpenSlices<Slot, kDepth> slots_;
  IndexQueue writes_;  // slots with frames to send
  IndexQueue urgent_;  // the same, small ones: they overtake
  IndexQueue reads_;   // slots with bytes to ask for
  uint32_t reads_open_ = 0;
  std::array<Zombie, kMaxReads> zombies_;

  TxBatch batch_;
  std::string control_;  // encoded frames that go before any bulk
  std::vector<BatchedJob> batched_;
  bool answers_first_ = false;

  RxStream rx_;
  bool in_payload_ = false;
  Frame payload_frame_;
  int landing_slot_ = -1;  // of READ_DATA
  Incoming incoming_;
  std::vector<WirePiece> wire_pieces_;
  std::vector<iovec> mapped_;
  std::array<Job, kDepth> jobs_;
  IndexQueue answers_;  // jobs to send

  Time next_check_ = kNever;
  Time last_moved_{};
  uint64_t moved_ = 0;
};

}  // namespace baton::tcp
