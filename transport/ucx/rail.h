// One UCX endpoint to one peer, seen as a rail: cuts slices into messages and lands what comes in.
//
// A message is an envelope, which names the rail it is for and proves that it comes from its peer,
// and one frame of the tcp provider (transport/tcp/frame.h). Nothing is taken for granted about the
// order in which messages arrive: a target counts the bytes of a slice.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "transport/provider.h"
#include "transport/tcp/frame.h"
#include "transport/tcp/message_stream.h"
#include "transport/tcp/open_slices.h"
#include "transport/ucx/engine.h"
#include "transport/ucx/message.h"

namespace baton::ucx {

class UcxRail;

// What a provider and its rails share. Rails may outlive their provider.
struct UcxShared {
  explicit UcxShared(const ProviderContext& provider_context) : context(provider_context) {}
  ~UcxShared() { Engine::end(std::move(engine)); }
  ProviderContext context;
  std::unique_ptr<tcp::Poller> poller;
  std::unique_ptr<Engine> engine;  // made when the first peer is met
  std::vector<UcxRail*> rails;     // null: free. A message names its rail by the index.
  size_t slice_bytes = 1 << 20;
  Time stall = std::chrono::seconds(10);
  std::string transports;  // for people: "tcp", "whatever UCX finds best"
};

class UcxRail final : public Rail {
 public:
  static constexpr uint32_t kDepth = 32;
  static constexpr uint32_t kMaxPieces = 256;    // per frame
  static constexpr size_t kPayload = 60 << 10;   // per frame, notification included
  static constexpr size_t kRequest = 256 << 10;  // bytes that one READ frame asks for
  static constexpr uint32_t kMaxReads = 32;      // READ frames without their READ_END
  static constexpr uint32_t kWindow = 16;        // data packets that UCX may hold
  static constexpr uint32_t kMaxControl = 1024;  // packets of any kind
  static constexpr Time kAbortGrace = std::chrono::seconds(1);
  static constexpr tcp::MessageStream::Options kChannel{};  // beside UCX: the introduction

  UcxRail(std::shared_ptr<UcxShared> shared, std::unique_ptr<tcp::MessageStream> channel,
          HelloInfo peer);
  ~UcxRail() override;

  const Properties& properties() const override { return properties_; }
  absl::Status reaches(const RemoteRegion&) const override { return absl::OkStatus(); }
  bool post(const Slice& slice, EventSink& sink) override;
  void abort(TransferId transfer, EventSink& sink) override;
  void close(absl::Status why, EventSink& sink) override;

  // Coming up: what the peer needs to send to this rail, and what it told us of itself.
  std::string introduction() const;
  absl::Status introduced(std::string_view words);
  tcp::MessageStream& channel() { return *channel_; }
  const HelloInfo& peer() const { return peer_info_; }

  // Set by the provider when the worker knows of the rail; after these calls it may be gone.
  bool announced = false;
  bool check_channel(EventSink& sink);
  bool advance(EventSink& sink);
  void check_timers(Time now, EventSink& sink);
  void receive(std::string_view frame, EventSink& sink);
  uint64_t token() const { return inbound_.token; }
  Time next_timer() const { return next_check_; }
  bool runnable() const;

 private:
  // A slice of ours.
  struct Slot : tcp::OpenSlice {
    bool said = false;  // writes: the last message of it has left
    uint64_t order = 0;
    bool unsaid() const { return live && op == Op::kWrite && !said; }
    bool unasked() const { return live && op == Op::kRead && error.ok() && framed < bytes(); }
  };
  // A peer's write that is landing.
  struct Incoming {
    bool live = false;
    bool ending = false;  // its last frame is here
    tcp::Frame last;
    TransferId transfer;
    uint32_t slice = 0;
    uint64_t landed = 0;
    absl::Status error;
    std::string notify;
  };
  // A peer's read that is being answered.
  struct Job {
    bool live = false;
    tcp::Frame frame;
    uint64_t order = 0;
    uint32_t answered = 0;  // bytes of it
    uint32_t piece = 0;     // the next, and what of it has been sent
    uint32_t piece_sent = 0;
    std::vector<tcp::WirePiece> pieces;
  };

  // rail.cc
  void fail(absl::Status why);
  absl::Status lost(std::string_view why) const;
  absl::Status hostile(std::string_view why) const;
  void finish(EventSink& sink);
  void report(Slot& slot, absl::Status status, EventSink& sink) {
    slots_.report(*this, slot, std::move(status), sink);
  }
  void leave();
  bool waiting() const;

  // rail_send.cc
  bool compose();
  Slot* next_slot(bool (Slot::*wanted)() const);
  void send_write(Slot& slot);
  void send_read(Slot& slot);
  bool send_answer();
  void send_control(const tcp::Frame& frame, std::string_view message = {});
  void answer(tcp::FrameType type, const tcp::Frame& to, const absl::Status& status);

  // rail_receive.cc
  void on_write(const tcp::Frame& frame, std::string_view meta, const char* payload,
                EventSink& sink);
  void on_write_ack(const tcp::Frame& frame, std::string_view message, EventSink& sink);
  void on_read(const tcp::Frame& frame, std::string_view meta);
  void on_read_data(const tcp::Frame& frame, const char* payload, EventSink& sink);
  void on_read_end(const tcp::Frame& frame, std::string_view message, EventSink& sink);
  void on_cancel_read(const tcp::Frame& frame);
  void end_read(Slot& slot, EventSink& sink);
  absl::StatusOr<std::byte*> resolve(const tcp::Frame& frame, Access want,
                                     const std::vector<tcp::WirePiece>& pieces);
  Slot* find_slot(const tcp::Frame& frame, Op op) {
    return slots_.find(frame.transfer, frame.slice, op);
  }

  std::shared_ptr<UcxShared> shared_;
  std::unique_ptr<tcp::MessageStream> channel_;
  HelloInfo peer_info_;
  std::string peer_;  // "decode-0 (10.0.0.1:4000)"
  Properties properties_;
  Envelope inbound_;   // of what the peer sends
  Envelope outbound_;  // of what we send
  Endpoint* endpoint_ = nullptr;

  absl::Status failure_;
  bool failing_ = false;
  bool closed_ = false;

  tcp::OpenSlices<Slot, kDepth> slots_;
  uint64_t order_ = 0;
  uint32_t reads_open_ = 0;
  std::array<Incoming, kDepth> incoming_;
  std::array<Job, kMaxReads> jobs_;
  uint32_t jobs_live_ = 0;
  std::vector<tcp::WirePiece> pieces_;
  bool answers_first_ = false;

  Time next_check_ = kNever;
  Time last_moved_{};
  uint64_t moved_ = 0;  // messages received
  uint64_t seen_moved_ = 0;
};

}  // namespace baton::ucx
