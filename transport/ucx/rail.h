// One UCX endpoint to one peer, seen as a rail: cuts slices into messages and lands what comes in.
//
// A message is an envelope, which names the rail it is for, and one frame
// (transport/framed/frame.h) under its tags (transport/net/seal.h). Nothing is taken for granted
// about the order in which messages arrive: a target counts the bytes of a slice.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "transport/base/copies/fault_guard.h"
#include "transport/base/small_first.h"
#include "transport/framed/rail.h"
#include "transport/net/message_stream.h"
#include "transport/net/seal.h"
#include "transport/provider.h"
#include "transport/ucx/engine.h"
#include "transport/ucx/message.h"

namespace baton::ucx {

class UcxRail;

// The state that a provider and its rails share. Rails may outlive their provider.
struct UcxShared {
  explicit UcxShared(const ProviderContext& provider_context) : context(provider_context) {}
  ~UcxShared() { Engine::end(std::move(engine)); }
  ProviderContext context;
  std::unique_ptr<net::Poller> poller;
  std::unique_ptr<Engine> engine;  // made when the first peer is met
  std::vector<UcxRail*> rails;     // null: free. A message names its rail by the index.
  uint32_t live = 0;               // of them
  std::vector<UcxRail*> active;    // with something to do; null where one went away
  size_t slice_bytes = 1 << 20;
  Time stall = std::chrono::seconds(10);
  std::string transports;  // for people: "tcp", "whatever UCX finds best"
};

class UcxRail final : public framed::FramedRail {
 public:
  static constexpr uint32_t kDepth = 32;
  static constexpr uint32_t kMaxPieces = 256;               // per frame
  static constexpr size_t kPayload = 60 << 10;              // per frame, notification included
  static constexpr size_t kRequest = 256 << 10;             // bytes that one READ frame asks for
  static constexpr uint32_t kMaxReads = 32;                 // READ frames without their READ_END
  static constexpr uint32_t kWindow = 16;                   // data packets that UCX may hold
  static constexpr uint32_t kMaxControl = 1024;             // packets of any kind
  static constexpr net::MessageStream::Options kChannel{};  // beside UCX: the introduction

  // `keys`: those of the connection that `channel` is.
  UcxRail(std::shared_ptr<UcxShared> shared, std::unique_ptr<net::MessageStream> channel,
          const net::LinkKeys& keys, HelloInfo peer);
  ~UcxRail() override;

  // Coming up: what the peer needs to send to this rail, and what it told us of itself.
  std::string introduction() const;
  absl::Status introduced(std::string_view words);
  net::MessageStream& channel() { return *channel_; }
  const HelloInfo& peer() const { return peer_info_; }

  // Set by the provider when the worker knows of the rail; after these calls it may be gone.
  bool announced = false;
  bool check_channel(EventSink& sink);
  bool advance(EventSink& sink);
  // What came in an envelope of that number: the two parts of the frame within, until the next
  // call. False: the peer has not sent it, or it was here before.
  bool open(uint64_t number, std::string_view sealed, std::string_view& head,
            std::string_view& payload);
  void receive(std::string_view head, std::string_view payload, EventSink& sink);
  bool runnable() const;

  // The provider looks at a rail only while it is on the list of those that are active: from the
  // moment that it is announced, and whenever there is something for it to do.
  void activate();
  void deactivate() { active_ = false; }
  bool idle() const { return !failing_ && channel_->ready == 0 && !waiting(); }

 private:
  using Slot = framed::OpenSlice;
  // A peer's write that is landing.
  struct Incoming {
    bool live = false;
    bool ending = false;  // its last frame is here
    framed::Frame last;
    TransferId transfer;
    uint32_t slice = 0;
    uint64_t landed = 0;
    absl::Status error;
    std::string notify;
  };
  // A peer's read that is being answered.
  struct Job {
    bool live = false;
    framed::Frame frame;
    uint64_t order = 0;
    uint32_t answered = 0;  // bytes of it
    uint32_t piece = 0;     // the next, and what of it has been sent
    uint32_t piece_sent = 0;
    std::vector<framed::WirePiece> pieces;
  };

  // rail.cc
  void taken(Slot&) override { activate(); }
  void take_back(Slot& slot) override;
  void leave() override;
  void say_goodbye(std::string_view why) override;
  void on_words(std::string_view words);
  bool waiting() const override;
  uint64_t moved() const override;
  void stalled() override { endpoint_->silent = true; }
  using FramedRail::hostile;
  void hostile(std::string_view why);

  // copy() reads or writes memory of a region of ours. False: some of it is gone.
  template <typename Copy>
  bool guarded(uint32_t region, const Copy& copy) const {
    if (!context_.regions.stays(region)) return base::guarded(copy);
    copy();
    return true;
  }

  // rail_send.cc
  bool compose();
  // Whether there is something to send, or to ask for.
  static bool unsaid(const Slot& slot) { return slot.live && slot.op == Op::kWrite && !slot.said; }
  static bool unasked(const Slot& slot) {
    return slot.live && slot.op == Op::kRead && slot.error.ok() && slot.framed < slot.bytes();
  }
  Slot* next_slot(bool (*wanted)(const Slot&), base::SmallFirst& turns);
  void send_frame(const framed::Frame& frame, Packet* packet);
  static framed::Frame abandoned(const Slot& slot);
  void send_write(Slot& slot);
  void send_read(Slot& slot);
  bool send_answer();
  void end_answer(Job& job, const absl::Status& status);
  void send_control(const framed::Frame& frame, std::string_view message) override;

  // rail_receive.cc
  void on_write(const framed::Frame& frame, std::string_view meta, const char* payload,
                EventSink& sink);
  bool land(std::byte* base, const char* payload, uint32_t region) const;
  void on_read(const framed::Frame& frame, std::string_view meta);
  void on_read_data(const framed::Frame& frame, const char* payload, EventSink& sink);
  void on_read_end(const framed::Frame& frame, std::string_view message, EventSink& sink);
  void on_cancel_read(const framed::Frame& frame);
  void end_read(Slot& slot, EventSink& sink);

  std::shared_ptr<UcxShared> shared_;
  std::unique_ptr<net::MessageStream> channel_;
  HelloInfo peer_info_;
  uint32_t here_ = 0;   // Envelope::rail of what the peer sends
  uint32_t there_ = 0;  // and of what we send
  net::Sealer sealer_;
  net::Opener opener_;
  net::ReplayWindow window_;
  std::string opened_head_;
  std::string opened_payload_;
  Endpoint* endpoint_ = nullptr;

  bool active_ = false;
  uint64_t order_ = 0;  // of the peer's reads
  std::array<Incoming, kDepth> incoming_;
  std::array<Job, kMaxReads> jobs_;
  uint32_t jobs_live_ = 0;
  std::vector<framed::WirePiece> pieces_;
  base::SmallFirst read_turns_;   // of small slices and large ones that ask,
  base::SmallFirst write_turns_;  // and of those that send
  bool answers_first_ = false;
  uint64_t received_ = 0;  // messages
};

}  // namespace baton::ucx
